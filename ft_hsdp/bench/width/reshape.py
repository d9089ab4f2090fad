"""A state goes from 4 ranks to 3: by parts from memory to memory, and by DCP through tmpfs.

Each rank is a process. With ft_hsdp the 3 ranks fetch what they need from the state servers of the 4, everything
verified. With torch.distributed.checkpoint (DCP) the 4 ranks save into /dev/shm, and the 3 load from there. They
take turns. The bytes that the receivers read from their sockets are counted, manifests included.

Each round has a state of its own, as a replica that comes back finds one that nobody has fetched: donors keep
parts that they have sealed, so a second fetch of the same state would cost less. What a donor does when it commits
a state, sealing its whole shard, does not count.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ft_hsdp.bench.results import GIB, ProgressLog, ResultRow, interleave, size_name, spread
from ft_hsdp.bench.scope import PREFIX, scratch
from ft_hsdp.bench.workers.link import Answer, WorkerLink, ask, greet, run_worker, spawn_worker
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, DataCorruption
from ft_hsdp.state.shared_memory import Bytes, InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import fetch, parts, shard_manifest
from ft_hsdp.state.transfer.donor_connection import DonorConnection
from ft_hsdp.state.transfer.fetch import Donor
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.reshape import WantedShard, fetch_shard, sources
from ft_hsdp.state.transfer.shard_manifest import Layout, PackedTensor, ShardManifest

WIDTHS = (4, 3)
COLUMNS = 1024
TENSORS = 48  # parameters and their averages: none has a number of rows that both widths divide
TOKEN = "bench"  # noqa: S105 - guards random numbers
HOST = "127.0.0.1"
FETCH_S = 120.0
TMPFS = Path("/dev/shm")  # noqa: S108 - what DCP is measured on
WORKER = "ft_hsdp.bench.width.reshape"
COPIES = 5  # of the state, at most, at the same time

Obey = Callable[[Mapping[str, Any]], Answer]


def reshape(nbytes: int, rounds: int, log: ProgressLog) -> ResultRow:
    """Return a row: how long a state of about ``nbytes`` takes from 4 ranks to 3, and the bytes that are read.

    Raises:
        ConfigError: The machine has no room for it.
        Retryable: A process fails.
    """
    room = min(psutil.virtual_memory().available, 2 * shutil.disk_usage(TMPFS).free)
    if COPIES * nbytes > room:
        raise ConfigError("--sizes", size_name(nbytes), f"what fits {COPIES} times into {room / GIB:.1f} GiB")
    source, target = WIDTHS
    log.say(f"{size_name(nbytes)} from {source} ranks to {target}: ft_hsdp, dcp")
    counted: list[int] = []
    with scratch() as (stack, folder), tempfile.TemporaryDirectory(prefix=PREFIX, dir=TMPFS) as shm:

        def start(role: str, width: int, *more: str) -> list[WorkerLink]:
            made = [
                spawn_worker(
                    stack,
                    f"{role} {rank}",
                    WORKER,
                    [role, str(nbytes), str(width), str(rank), *more],
                    folder / f"{role}-{rank}.log",
                )
                for rank in range(width)
            ]
            greet(made)
            return made

        donors = start("donor", source)
        takers = start("taker", target, json.dumps([each.address for each in donors]))
        savers = start("saver", source, str(folder / "savers"))
        loaders = start("loader", target, str(folder / "loaders"))
        steps = count(1)

        def by_parts() -> float:
            step = next(steps)
            ask(donors, {"do": "commit", "step": step})
            began = time.perf_counter()
            answers = ask(takers, {"do": "take", "step": step})
            took = time.perf_counter() - began
            counted.append(sum(each["bytes"] for each in answers))
            ask(takers, {"do": "check"})
            return took

        def by_dcp() -> float:
            path = Path(shm, f"state-{next(steps)}")
            began = time.perf_counter()
            ask(savers, {"do": str(path)})
            ask(loaders, {"do": str(path)})
            took = time.perf_counter() - began
            ask(loaders, {"do": "check"})
            shutil.rmtree(path)
            return took

        seconds = interleave({"ft_hsdp": by_parts, "dcp": by_dcp}, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    least = sum(each.nbytes for rank in range(target) for each in layout(nbytes, target, rank).tensors)
    row: ResultRow = {
        "bytes": nbytes,
        "from": source,
        "to": target,
        "rounds": rounds,
        "contenders": found,
        "times_as_fast": round(found["dcp"]["p50_ms"] / found["ft_hsdp"]["p50_ms"], 3),
        "read_bytes": max(counted),
        "least_bytes": least,
        "times_least": round(max(counted) / least, 5),
    }
    log.say(
        f"  {row['times_as_fast']:.2f} times as fast as DCP; {row['times_least']:.4f} of the least possible bytes"
    )
    return row


def layout(nbytes: int, width: int, rank: int) -> Layout:
    """Return the shard of a rank of a state with about ``nbytes`` bytes."""
    rows = max(1, nbytes // (TENSORS * COLUMNS * 4))
    shapes = [(rows + number % 5 - 2 if rows > 2 else rows, COLUMNS) for number in range(TENSORS)]
    whole = [PackedTensor(f"{n}", "param", "float32", each, each, 0, 0, "rows") for n, each in enumerate(shapes)]
    steps = [PackedTensor(f"{n}.step", "optim", "float32", (), (), 0, 0, "whole") for n in range(TENSORS)]
    return parts.layout_at([*whole, *steps], width, rank)


def tensors_of(place: Layout, width: int, rank: int) -> list[Bytes]:
    """Return the bytes of each tensor of a shard: each element of a whole tensor tells which one it is."""
    found = []
    for number, tensor in enumerate(place.tensors):
        chunk = -(-tensor.global_shape[0] // width) if tensor.global_shape else 0
        first = min(rank * chunk, tensor.global_shape[0]) * COLUMNS if tensor.global_shape else 0
        count = math.prod(tensor.shape)
        found.append(np.arange(first + number, first + number + count, dtype=np.uint32).view(np.uint8))
    return found


def content(place: Layout, width: int, rank: int) -> Bytes:
    """Return a packed shard."""
    packed = np.zeros(place.nbytes, dtype=np.uint8)
    for tensor, data in zip(place.tensors, tensors_of(place, width, rank), strict=True):
        packed[tensor.offset : tensor.offset + tensor.nbytes] = data
    return packed


def state_of(step: int) -> StateId:
    """Return the state that a step of the bench commits."""
    return StateId(0, step, "0" * 32)


# In the processes of the ranks.


def _donor(nbytes: int, width: int, rank: int) -> tuple[Answer, Obey]:
    place = layout(nbytes, width, rank)
    buffer, snapshots = SnapshotBuffer(place.nbytes), InMemorySnapshots()
    buffer.bytes[: place.nbytes] = content(place, width, rank)
    shard = ShardManifest(state_of(0), rank, width, place.fingerprint, place.nbytes, place.tensors, (1,), ())
    shard = shard_manifest.seal(shard, buffer.memory[: place.nbytes])
    server = StateServer(HOST, 0, snapshots, TOKEN)

    def obey(command: Mapping[str, Any]) -> Answer:
        nonlocal shard
        snapshots.drop(shard.state, rank)
        shard = replace(shard, state=state_of(command["step"]))
        snapshots.put(shard, buffer)
        return {}

    return {"address": server.address}, obey


class _Counting(DonorConnection):
    """Counts the bytes of all bodies that are read."""

    total = 0
    _counting = threading.Lock()

    def read_into(self, view: memoryview) -> None:
        super().read_into(view)
        with _Counting._counting:
            _Counting.total += len(view)


def _taker(nbytes: int, width: int, rank: int, addresses: str) -> tuple[Answer, Obey]:
    fetch.DonorConnection = _Counting  # type: ignore[misc]  # the same, and it counts
    place, listed = layout(nbytes, width, rank), json.loads(addresses)
    wanted = content(place, width, rank)
    buffer = SnapshotBuffer(place.nbytes)
    donors = {of: [Donor(0, listed[of])] for of in sources(place, len(listed), rank, width)}

    def obey(command: Mapping[str, Any]) -> Answer:
        if command["do"] == "check":
            if not np.array_equal(buffer.bytes[: place.nbytes], wanted):
                raise DataCorruption("what was received is not what was sent")
            buffer.bytes[:] = 255
            return {}
        before = _Counting.total
        into = buffer.memory[: place.nbytes]
        shard = WantedShard(state_of(command["step"]), rank, width, place)
        fetch_shard(shard, len(listed), donors, into, TOKEN, FETCH_S, threading.Event(), lambda *_: None)
        return {"bytes": _Counting.total - before}

    return {"address": ""}, obey


def _dcp(nbytes: int, width: int, rank: int, store: str, *, load: bool) -> tuple[Answer, Obey]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=width)
    mesh, place = init_device_mesh("cpu", (width,)), layout(nbytes, width, rank)
    wanted = tensors_of(place, width, rank)
    state: dict[str, torch.Tensor] = {}
    for tensor, data in zip(place.tensors, wanted, strict=True):
        local = torch.from_numpy(data.view(np.float32).copy()).reshape(tensor.shape)
        if tensor.global_shape:
            stride = (COLUMNS, 1)
            shape = torch.Size(tensor.global_shape)
            local = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        state[tensor.name] = local

    def here(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def obey(command: Mapping[str, Any]) -> Answer:
        if command["do"] == "check":
            for tensor, data in zip(state.values(), wanted, strict=True):
                if not np.array_equal(here(tensor).reshape(-1).numpy().view(np.uint8), data):
                    raise DataCorruption("what was loaded is not what was saved")
                here(tensor).fill_(-1.0)
        elif load:
            checkpoint.load(state, checkpoint_id=command["do"])
        else:
            checkpoint.save(state, checkpoint_id=command["do"])
        return {}

    return {"address": ""}, obey


def set_up() -> tuple[Answer, Obey]:
    """Become the rank that the command line names."""
    role, nbytes, width, rank, *more = sys.argv[2:]
    numbers = int(nbytes), int(width), int(rank)
    if role == "donor":
        return _donor(*numbers)
    if role == "taker":
        return _taker(*numbers, *more)
    return _dcp(*numbers, *more, load=role == "loader")


if __name__ == "__main__":
    run_worker(set_up)
