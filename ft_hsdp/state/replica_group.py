"""What the ranks of one replica tell each other beside training, on a gloo group of its own. Nothing is pickled.

The collectives of training run at the same time. On a shared group the two would receive each other's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from ft_hsdp.errors import one_line

TIMEOUT_S = 600.0  # the longest wait of a rank for another, whose disk may be slow

SHOWN = 500  # characters of an error message that are passed on


class Failed(Exception):
    """Some rank failed. The message says which and why, alike on all of them."""


class ReplicaGroup:
    """The ranks of one replica. All of them make it at the same point: it is a collective of the default group.

    Args:
        timeout_s: The longest wait of a rank for another.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        mesh: The ranks as a one-dimensional CPU mesh.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.mesh = DeviceMesh.from_group(group, "cpu")

    def wait_for(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        _set_pg_timeout(timedelta(seconds=timeout_s), self.group)

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes that each rank passed, in rank order, on all ranks. Blocks. A collective.

        Raises:
            RuntimeError: A rank is gone or too late. The group cannot be used any more.
        """
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest + 1)), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [text.numpy().tobytes()[: int(size)] for text, size in zip(texts, sizes, strict=True)]

    def broadcast(self, mine: bytes = b"") -> bytes:
        """Return the bytes that rank 0 passed, on all ranks. Blocks. A collective.

        Raises:
            RuntimeError: A rank is gone or too late. The group cannot be used any more.
        """
        size = torch.tensor([len(mine)])
        dist.broadcast(size, group=self.group, group_src=0)
        text = bytearray(mine if self.rank == 0 else bytes(int(size))) + b" "
        padded = torch.frombuffer(text, dtype=torch.uint8)
        dist.broadcast(padded, group=self.group, group_src=0)
        return padded.numpy().tobytes()[: int(size)]

    def on_all(self, work: Callable[[], Any]) -> list[Any]:
        """Return what ``work`` returns on each rank, as JSON, in rank order, on all ranks. Blocks. A collective.

        Raises:
            Failed: It failed on one of them. Raised on all.
            RuntimeError: As `gather` does.
        """
        told = [json.loads(each) for each in self.gather(_attempt(work))]
        errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
        if errors:
            raise Failed("; ".join(errors))
        return [each["done"] for each in told]

    def on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns on rank 0, as JSON, on all ranks. Blocks. A collective.

        Raises:
            Failed: It failed. Raised on all ranks.
            RuntimeError: As `broadcast` does.
        """
        told = json.loads(self.broadcast(_attempt(work) if self.rank == 0 else b""))
        if "error" in told:
            raise Failed(f"rank 0: {told['error']}")
        return told["done"]


def _attempt(work: Callable[[], Any]) -> bytes:
    try:
        return json.dumps({"done": work()}).encode()
    except Exception as error:  # the other ranks must learn of it
        return json.dumps({"error": in_short(error)}).encode()


def in_short(error: Exception) -> str:
    """Return the message of ``error``, or else its type, on one line of at most `SHOWN` characters."""
    return one_line(str(error) or type(error).__name__)[:SHOWN]
