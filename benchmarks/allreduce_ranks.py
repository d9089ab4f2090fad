"""A member of an all-reduce: FTAR with each of its transports, or gloo; torchft's is in `torchft`.

`python -m benchmarks.allreduce_ranks FD MODULE:CLASS SPEC` knows these commands:

    -> {"do": "join", "ring": [[0, ""]]}        <- {}
    -> {"do": "prepare", "bytes": 4096}         <- {}
    -> {"do": "check"}                          <- {"wrong": ""}
    -> {"do": "run", "times": 1, "at": 12.5}    <- {"t": 12.6}

Times are of CLOCK_MONOTONIC, which all processes of a machine share; `at` is when to start.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allreduce import WorkerSpec
from benchmarks.processes import LOOPBACK, Answer, Obey, run_worker
from ft_hsdp.ftar import Communicator, Settings

TIMEOUT_S = 60.0  # longest time of one operation of any contender
PERIOD = 251  # of the values in the input: a prime, so that a shifted shard is seen
FIRST_TO_GO = "800"  # where memory runs out the kernel takes a worker, not what else runs on the machine
BLOCK = 1 << 20  # elements that are filled or checked at a time


class AllReduceRank(ABC):
    """One member of a contender's ring. Its end is the end of its process."""

    in_place = False  # whether the sum replaces the input
    address = ""  # what the other members must be told, if anything

    @abstractmethod
    def join(self, ring: Sequence[tuple[int, str]]) -> None:
        """Form a ring with these (member, address), own entry included; returns when it is ready."""

    @abstractmethod
    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``source`` over the ring into ``sink``, which is ``source`` if `in_place`. Blocks."""

    def empty(self, elements: int) -> Tensor:
        """Return memory for fp32 ``elements``, of the kind that suits this contender best."""
        return torch.empty(elements)


class FTAR(AllReduceRank):
    """`Communicator.all_reduce` out of place, as the trainer uses it, between tensors in its own memory."""

    def __init__(self, spec: WorkerSpec) -> None:
        settings = Settings(transport=spec.options["transport"], timeout_s=TIMEOUT_S)
        job = f"bench-{spec.name}"
        self._ring = Communicator(spec.member, job=job, token=spec.token, host=LOOPBACK, settings=settings)
        self.address = self._ring.address
        self._registered = settings.transport == "shm"

    def join(self, ring: Sequence[tuple[int, str]]) -> None:
        self._ring.reconfigure(1, ring)

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``source`` into ``sink``, with ``source`` kept."""
        self._ring.all_reduce(source, out=sink).wait(TIMEOUT_S)

    def empty(self, elements: int) -> Tensor:
        """Return registered memory over shared memory, else any."""
        return self._ring.empty(elements) if self._registered else torch.empty(elements)


class StoreRank(AllReduceRank):
    """A member of a ring that meets at a TCPStore, which member 0 hosts at its address."""

    in_place = True

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        if spec.member == 0:
            self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            self.address = f"{LOOPBACK}:{self._store.port}"


class Gloo(StoreRank):
    """`torch.distributed.all_reduce` of the default group, which a process can make once."""

    def join(self, ring: Sequence[tuple[int, str]]) -> None:
        """Make the default group."""
        host, _, port = dict(ring)[0].rpartition(":")
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=self.spec.member, world_size=len(ring), timeout=timeout)

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``sink`` in place over the ranks."""
        dist.all_reduce(sink)


class Worker:
    """Carries out commands for one rank."""

    def __init__(self, rank: AllReduceRank, member: int) -> None:
        self.rank = rank
        self._member = member
        self._members = 1
        self._source = self._sink = torch.empty(0)

    def obey(self, command: Mapping[str, Any]) -> Answer:
        """Do one thing; return the answer."""
        match command["do"]:
            case "join":
                self.rank.join([(member, address) for member, address in command["ring"]])
                self._members = len(command["ring"])
            case "run":
                time.sleep(max(0.0, command["at"] - time.monotonic()))
                for _ in range(command["times"]):
                    self.rank.all_reduce(self._source, self._sink)
                return {"t": time.monotonic()}
            case "prepare":
                self._prepare(command["bytes"] // 4)
            case "check":
                return {"wrong": self._check()}
        return {}

    def _prepare(self, elements: int) -> None:
        self._source = self._sink = torch.empty(0)  # give the old memory back first
        self._source = self.rank.empty(elements)
        self._sink = self._source if self.rank.in_place else self.rank.empty(elements)
        self._source.zero_()  # touch every page now
        self._sink.zero_()

    def _check(self) -> str:
        """Sum known values once; return "" or what is wrong with the sum."""
        for part, pattern in _blocks(self._source):
            torch.add(pattern, self._member, out=part)
        self.rank.all_reduce(self._source, self._sink)
        wrong = ""
        for number, (part, pattern) in enumerate(_blocks(self._sink)):
            right = pattern * self._members + self._members * (self._members - 1) / 2
            if not torch.equal(part, right):
                first = int((part != right).nonzero()[0])
                got, wanted = float(part[first]), float(right[first])
                wrong = f"element {number * BLOCK + first} is {got:g}, not {wanted:g}"
                break
        if self.rank.in_place:
            self._source.zero_()  # sums of sums would grow beyond all bounds; zeros stay what they are
        return wrong


def _blocks(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensor in blocks of at most BLOCK elements, each with the values that member 0 puts there."""
    index = torch.arange(min(BLOCK, tensor.numel()))
    for number, part in enumerate(tensor.split(BLOCK)):
        yield part, ((index[: part.numel()] + number * BLOCK) % PERIOD).float()


def set_up() -> tuple[Answer, Obey]:
    """Become the rank that the command line names."""
    torch.set_num_threads(1)
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    module, _, name = sys.argv[2].partition(":")
    spec = WorkerSpec(**json.loads(sys.argv[3]))
    rank = getattr(importlib.import_module(module), name)(spec)
    return {"address": rank.address}, Worker(rank, spec.member).obey


if __name__ == "__main__":
    run_worker(set_up)
