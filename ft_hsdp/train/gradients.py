"""Reducer: takes the buckets of one rank through FTAR, once for each attempt, and votes when all are reduced.

The main thread brings local gradients as backward makes them; the control loop says which attempt is under way. A
retry goes over the same local gradients: forward and backward are never repeated for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from ft_hsdp import fault_injection
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, Contribution, Vote
from ft_hsdp.core.effects import Reduce
from ft_hsdp.ftar.allreduce import AllReduceResult
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.group import Group
from ft_hsdp.train.device import on_host, written

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max
SURE_NORM = 1e18  # its square is far below LARGEST


@dataclass(frozen=True, slots=True)
class Feeding:
    """What the main thread is at: batch ``index`` of data shard ``shard``, for ``step``."""

    step: int
    shard: int
    index: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent and seconds spent for the newest attempt that ended well, and when its ring was done.

    ``held_up``: seconds for which gradients of its step were here, and no order to reduce them.
    """

    bytes_sent: int = 0
    seconds: float = 0.0
    ended: float = 0.0
    held_up: float = 0.0


@dataclass(frozen=True, slots=True)
class Local:
    """The local gradient of a bucket; complete once ``after`` is (None: it is)."""

    flat: torch.Tensor
    poisoned: bool
    after: torch.cuda.Event | None


class Reducer:
    """The exchange of one rank's gradient. ``voted`` is called, on FTAR's thread, when all buckets are done.

    Gradients and sums are on ``device``. ``checked``, called there too, takes the lineage that an attempt is on
    and gives the digest of the slice of this rank's state that is compared (core/divergence.py), "" if this rank
    does not hold that state.
    """

    def __init__(
        self,
        group: Group,
        sizes: Sequence[int],
        replica: int,
        rank: int,
        voted: Callable[[Vote], None],
        device: torch.device = CPU,
        checked: Callable[[str], str] = lambda prev: "",
    ) -> None:
        self._group = group
        self._sizes = tuple(sizes)
        self._replica = replica
        self._rank = rank
        self._voted = voted
        self._checked = checked
        self._lock = threading.RLock()  # a work may be done before its callback is set
        self._device = device
        self._locals: dict[int, Local] = {}
        self._feeding: Feeding | None = None
        self._loss = 0.0
        self._order: Reduce | None = None
        self._submitted = 0
        self._results: list[AllReduceResult] = []
        self._out: list[torch.Tensor] | None = None
        self._spare: list[list[torch.Tensor]] = []
        self._began = 0.0
        self._idle_since: float | None = None  # the first bucket is here, the order is not
        self._held_up = 0.0
        self.traffic = Traffic()

    # The main thread.

    def open(self, feeding: Feeding | None) -> None:
        """A new batch begins (or none): the local gradients of the last one are forgotten."""
        with self._lock:
            self._feeding = feeding
            self._locals.clear()
            self._idle_since, self._held_up = None, 0.0

    def ready(self, bucket: int, flat: torch.Tensor, loss: float) -> None:
        """The local gradient of a bucket is there: flat fp32 [numel], read only from now on."""
        if self._feeding is None:
            return
        if flat.numel() != self._sizes[bucket]:
            raise ValueError(f"bucket {bucket} has {flat.numel()} elements, planned {self._sizes[bucket]}")
        after = written(flat)
        poisoned = not usable(flat)
        with self._lock:
            self._locals[bucket] = Local(flat, poisoned, after)
            self._loss = loss
            self._time()
            self._pump()

    def give_back(self, out: list[torch.Tensor]) -> None:
        """Reduced shards that were applied can be written again."""
        with self._lock:
            self._spare.append(out)

    # The control loop.

    def begin(self, order: Reduce) -> None:
        """A new attempt: reduce all buckets in order, from the start."""
        with self._lock:
            self._order = order
            self._submitted = 0
            self._results = []
            self._time()
            self._pump()

    def cancel(self) -> None:
        """The ring is gone; what was reduced is kept until the next attempt, for it may be in doubt."""
        with self._lock:
            self._order = None
            self._time()

    def take(self) -> list[torch.Tensor]:
        """The reduced shards of the newest attempt; they are the caller's until given back."""
        with self._lock:
            assert self._out is not None
            out, self._out = self._out, None
            return out

    # Both, under the lock.

    def _time(self) -> None:
        """Measure for how long the gradients of a step wait for an order."""
        feeding, order = self._feeding, self._order
        idle = feeding is not None and 0 in self._locals and (order is None or order.fence.step != feeding.step)
        if idle and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif not idle and self._idle_since is not None:
            self._held_up += time.monotonic() - self._idle_since
            self._idle_since = None

    def _pump(self) -> None:
        """Submit what can go, in the order of the buckets."""
        order = self._order
        while order is not None and self._submitted < len(self._sizes):
            bucket = self._submitted
            mine, local = self._mine(order, bucket)
            if mine is None:
                return
            if self._out is None:
                self._out = self._spare.pop() if self._spare else [self._empty(n) for n in self._sizes]
            if bucket == 0:
                self._began = time.monotonic()
                fault_injection.reach("reduce-begin", order.fence.step)
            key = Key(order.fence.epoch, order.fence.step, order.fence.attempt, bucket, order.prev)
            flat, after = (None, None) if local is None else (local.flat, local.after)
            work = self._group.all_reduce(key, flat, self._out[bucket], mine, after)
            work.add_done_callback(partial(self._done, order.fence))
            self._submitted += 1

    def _empty(self, numel: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._group.arena.empty(numel)
        return torch.empty(numel, device=self._device)

    def _mine(self, order: Reduce, bucket: int) -> tuple[Entry | None, Local | None]:
        """This rank's entry and local gradient for a bucket; None while it is not there yet."""
        if order.role == "behind":
            return Entry(self._replica, 0, self._replica, 0, 0.0), None
        feeding = self._feeding
        if feeding is None or feeding.step != order.fence.step or bucket not in self._locals:
            return None, None
        local = self._locals[bucket]
        return Entry(self._replica, 1, feeding.shard, feeding.index, self._loss, local.poisoned), local

    # FTAR's thread.

    def _done(self, fence: AttemptId, work: Future[AllReduceResult]) -> None:
        if work.exception() is not None:
            return  # the group reports that itself
        try:
            self._count(fence, work.result())
        except Exception as error:  # a future swallows what its callback raises
            self._group.crashed(f"the vote on step {fence.step} failed", error)

    def _count(self, fence: AttemptId, result: AllReduceResult) -> None:
        with self._lock:
            if self._order is None or self._order.fence != fence:
                return
            self._results.append(result)
            if len(self._results) < len(self._sizes):
                return
            out, results, prev = self._out, list(self._results), self._order.prev
        assert out is not None
        now = time.monotonic()
        sent = sum(r.bytes_sent for r in results)
        self.traffic = Traffic(sent, now - self._began, now, self._held_up)
        self._voted(self._vote(fence, results, out, self._checked(prev)))

    def _vote(
        self, fence: AttemptId, results: list[AllReduceResult], out: list[torch.Tensor], state_digest: str
    ) -> Vote:
        sums = [on_host(t) for t in out]
        return Vote(
            rank=self._rank,
            fence=fence,
            digest=state_id.digest([checksum(t) for t in sums]),
            sumsq=sum_of_squares(sums),
            contributions=contributions(results),
            poisoned=tuple(sorted({e.replica for r in results for e in r.entries if e.poisoned})),
            state_digest=state_digest,
        )


def contributions(results: Sequence[AllReduceResult]) -> tuple[Contribution, ...]:
    """Who put what into the sum; no one if the buckets disagree, so that the vote cannot pass."""
    said = {
        tuple(
            (e.replica, e.weight, e.shard, e.index) for e in sorted(r.entries, key=lambda e: e.replica) if e.weight
        )
        for r in results
    }
    if len(said) != 1:
        return ()
    losses = {e.replica: e.loss for e in results[-1].entries}
    return tuple(Contribution(*entry, loss=losses[entry[0]]) for entry in said.pop())


def usable(flat: torch.Tensor) -> bool:
    """Whether a gradient is finite, and its squares, which an optimizer keeps, are in fp32.

    A norm in fp32 is enough far below the limit; near it, devices differ in when it overflows, and fp64 decides.
    """
    norm = float(torch.linalg.vector_norm(flat))
    if norm < SURE_NORM:
        return True
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 <= LARGEST


def checksum(tensor: torch.Tensor) -> str:
    """xxh3-128 of a CPU tensor's bytes."""
    array: Any = tensor.numpy()
    return xxhash.xxh3_128_hexdigest(memoryview(array).cast("B"))


def sum_of_squares(shards: Sequence[torch.Tensor]) -> float:
    """The sum of squares of a rank's shards in fp64, bucket by bucket in order."""
    return sum(float(torch.linalg.vector_norm(s, dtype=torch.float64)) ** 2 for s in shards)
