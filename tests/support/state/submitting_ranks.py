"""The ranks of one replica submit blocks, and one is killed while it writes a slice; then all start again.

The agents of the hosts "a" and "b" run already. Two ranks are on each. Each rank prints a JSON line. torch is
imported once, before the ranks are forked.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from ft_hsdp.errors import Retryable
from tests.support.state.block_replica import DATA, Rank, store_of

RANKS, KILLED = 4, 2


def rank_of(rank: int, source: Callable[[int, int], Any], rendezvous: str) -> dict[str, Any]:
    """What a rank saw. It joins the others, submits, and loads its part."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    store = store_of(Rank(rank, RANKS, "ab"[rank // 2], None))
    try:
        done = store.submit(source)
    except Retryable as error:
        return {"error": str(error)}
    first, end = store.share()
    right = bool(np.array_equal(store.load([(first, end)]), DATA[first:end]))
    return {"copies": done.copies, "read": done.read, "copied": done.copied, "kept": done.kept, "right": right}


def life(folder: str, number: int) -> None:
    """Run all ranks once. In the first life one is killed when it has memory for a slice, and begins to read."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        read: list[tuple[int, int]] = []

        def source(first: int, end: int, rank: int = rank, read: list[tuple[int, int]] = read) -> np.ndarray:
            if number == 1 and rank == KILLED and read:
                os.kill(os.getpid(), signal.SIGKILL)
            read.append((first, end))
            return DATA[first:end]

        try:
            saw = rank_of(rank, source, f"{folder}/life-{number}")
            line = json.dumps({"life": number, "rank": rank, **saw, "source": sum(b - a for a, b in read)})
            os.write(1, line.encode() + b"\n")
        except BaseException as error:
            os.write(2, f"rank {rank}: {error!r}\n".encode())
        finally:
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    life(sys.argv[1], 1)
    life(sys.argv[1], 2)
