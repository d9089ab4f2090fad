"""The reduction of one rank's gradient: each attempt takes its buckets through FTAR, then it votes.

Three threads meet in `Reducer`, under one lock. The main thread brings local gradients as backward makes them
(`open`, `ready`); the control loop says which attempt is under way (`begin`, `cancel`); FTAR's thread ends each
all-reduce, and with the last one sends the vote. An attempt that broke is repeated with the same local gradients:
forward and backward are never repeated for it (FT-HSDP §4.1).

The way of a bucket: FSDP2's hook -> `Reducer.ready` -> `Group.all_reduce` -> `Vote` -> (the commit) ->
`Reducer.take` -> `LiveState.apply` -> `Reducer.give_back`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ft_hsdp import fault_injection
from ft_hsdp.core.commit import AttemptId, Contribution, Vote
from ft_hsdp.core.effects import Reduce
from ft_hsdp.core.grant import Grant
from ft_hsdp.core.units import Places, size
from ft_hsdp.ftar.allreduce import AllReduceResult
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.group import Group
from ft_hsdp.ftar.pieces import pieced
from ft_hsdp.state.pacing import SpanMeter
from ft_hsdp.train.device import Summarize, finish, on_host, written
from ft_hsdp.train.lanes import GradientLanes, LanePlan
from ft_hsdp.train.votes import Looked, lane_votes, look, square_of, squares

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Feeding:
    step: int
    # Takes what an order to reduce asks for, and returns how many units of that this rank's replica can train.
    trainable: Callable[[Places], int] = size


@dataclass(frozen=True, slots=True)
class Traffic:
    bytes_sent: int = 0
    seconds: float = 0.0  # from its first all-reduce to the end of its last one
    ended: float = 0.0  # when that was, on the monotonic clock
    held_up: float = 0.0  # seconds for which gradients of its step were here, and no order to reduce them


@dataclass(frozen=True, slots=True)
class Local:
    flat: torch.Tensor  # fp32 [numel]
    contributions: tuple[Contribution, ...]  # what is in it, with this rank's weights
    # Both are to be called when it is complete.
    loss: Callable[[], float]
    square: Callable[[], float]  # the sum of its squares; if it is not finite, the gradient does not count
    after: torch.cuda.Event | None  # when it is complete; None: it is

    def entry(self, replica: int) -> Entry:
        """Return what all members are told of it. The engine asks when the data plane has read some of it."""
        loss = self.loss()
        said = tuple(replace(each, loss=loss) for each in self.contributions)
        return Entry(replica, said, self.square())


@dataclass(eq=False)
class Reducer:
    """Reduces one rank's gradient over all replicas, bucket by bucket."""

    _group: Group
    _lanes: GradientLanes
    _replica: int
    _rank: int
    # Takes the vote when all buckets of an attempt are reduced; called on FTAR's thread.
    _voted: Callable[[Vote], None]
    _device: torch.device = CPU
    # Takes the lineage that an attempt builds on, and returns, for each lane, the digest of the slice of the
    # state that this rank compares with other replicas (`core.state_id`); () if the rank does not hold that
    # state; called on FTAR's thread.
    checked: Callable[[str, LanePlan], Sequence[str]] = lambda prev, plan: ()
    meter: SpanMeter = field(default_factory=SpanMeter)  # told when the ring is used
    _summarize: Summarize | None = None  # looks at sums on the device
    _wires: Sequence[torch.dtype | None] = ()  # of each bucket, from `train.lanes.wires`; (): all as they are
    _metered: bool = False  # the meter was told that the ring is used
    # By bucket: what is in it after each part of the step. An attempt takes the first one with the units that
    # it asks for, so all ranks take the same one.
    _locals: dict[int, list[Local]] = field(default_factory=dict)
    _feeding: Feeding | None = None
    _order: Reduce | None = None  # the attempt under way
    _submitted: int = 0  # buckets of it
    # Memory for rows of lanes that are copied, by bucket, place of the lane and group.
    _parts: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    # The attempt whose works may still use `_out` and `_parts`, also after `cancel`; None: all have ended.
    _using: AttemptId | None = None
    _missing: int = 0  # all-reduces of it that have not ended
    _results: list[tuple[Looked, AllReduceResult]] = field(default_factory=list)
    _out: list[torch.Tensor] | None = None  # the sums, one for each bucket
    _began: float = 0.0  # the first all-reduce of the attempt
    _idle_since: float | None = None  # the first bucket is here, the order is not
    _held_up: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # a work may be done before its callback is set
        self._sizes = self._lanes.sizes
        self._plan = self._lanes.plan(())  # the lanes of the membership
        self._spare = [self._new_sums()]  # memory for sums, made here or given back

    # The main thread.

    def open(self, feeding: Feeding | None) -> None:
        """Forget the local gradients of the last batch; ``feeding`` is the new one, None if there is none."""
        with self._lock:
            self._feeding = feeding
            self._locals.clear()
            self._idle_since, self._held_up = None, 0.0

    def ready(
        self,
        bucket: int,
        flat: torch.Tensor,
        contributions: tuple[Contribution, ...],
        loss: Callable[[], float],
    ) -> None:
        """Take the local gradient of a bucket, or more of it, which is added; does not block.

        Args:
            flat: The rank's shard of it, fp32 [numel]; not to be written from now on, until it is reduced.
            contributions: All that is in the bucket now, with this rank's weights.
            loss: Returns their mean loss when the gradient is complete. That of the last bucket goes into the
                commit record.

        Raises:
            ValueError: The shard has another size than planned.
        """
        if self._feeding is None:
            return
        if flat.numel() != self._sizes[bucket]:
            raise ValueError(f"bucket {bucket} has {flat.numel()} elements, planned {self._sizes[bucket]}")
        before = self._locals.get(bucket)
        if before is not None:
            flat = before[-1].flat + flat  # not in place: an attempt may read what was here
        square = square_of(flat)
        with self._lock:
            self._locals.setdefault(bucket, []).append(Local(flat, contributions, loss, square, written(flat)))
            self._time()
            self._pump()

    def give_back(self, out: list[torch.Tensor]) -> None:
        with self._lock:
            self._spare = [out]  # a replica that was behind has had more

    # The control loop.

    def configure(self, grant: Grant) -> None:
        """Take the lanes of a new membership, before its ring is formed; if they change, the attempt is over."""
        plan = self._lanes.plan(grant.widths)
        with self._lock:
            if plan is not self._plan:
                self._order, self._plan = None, plan
                self._parts.clear()
                self._time()
                self._note(used=False)

    def begin(self, order: Reduce) -> None:
        """Begin an attempt: reduce all buckets in order, from the first one.

        Does not block. With a gradient that is cut, an attempt after one that did not end here gets memory of its
        own: the gradient is gathered into it at once, and an engine may be in the middle of a chunk of the ring
        that broke. That costs an allocation of the size of the sums for each such attempt; the old memory is freed
        when the last work that uses it ends. With replicas of equal width the memory stays: nothing is gathered,
        and the engine writes a sum only when it has disposed of all older rings (`ftar.executor`).
        """
        with self._lock:
            if self._using is not None and self._plan.cut:
                self._out, self._parts = None, {}
            self._order = order
            self._missing = self._plan.works
            self._note(used=False)
            self._submitted = 0
            self._results = []
            self._time()
            self._pump()

    def cancel(self) -> None:
        """End the attempt: the ring is gone. The sums are kept until the next one: the step may be in doubt."""
        with self._lock:
            self._order = None
            self._time()
            self._note(used=False)

    def take(self) -> list[torch.Tensor]:
        """Return the sums of the newest attempt, fp32 [numel] each; the caller owns them until `give_back`."""
        with self._lock:
            assert self._out is not None
            out, self._out = self._out, None
            return out

    # Any of them, under the lock.

    def _time(self) -> None:
        """Measure how long the gradients of a step wait for an order."""
        feeding, order = self._feeding, self._order
        idle = feeding is not None and 0 in self._locals and (order is None or order.fence.step != feeding.step)
        if idle and self._idle_since is None:
            self._idle_since = time.monotonic()
        elif not idle and self._idle_since is not None:
            self._held_up += time.monotonic() - self._idle_since
            self._idle_since = None

    def _note(self, used: bool) -> None:
        """Tell the meter whether the ring is used: from the first bucket of an attempt to its last one.

        A replica alone has no ring.
        """
        used = used and bool(self._group.transports)
        if used and not self._metered:
            self.meter.begin()
        elif self._metered and not used:
            self.meter.end()
        self._metered = used

    def _pump(self) -> None:
        order = self._order
        while order is not None and self._submitted < len(self._sizes):
            bucket = self._submitted
            mine, local = self._mine(order, bucket)
            if mine is None:
                return
            if self._out is None:
                self._out = self._spare.pop() if self._spare else self._new_sums()
            if bucket == 0:
                self._using = order.fence
                self._began = time.monotonic()
                self._note(used=True)
                fault_injection.reach("reduce-begin", order.fence.step)
            key = Key(order.fence.epoch, order.fence.step, order.fence.attempt, bucket, order.prev)
            self._submitted += 1
            flat, after = (None, None) if local is None else (local.flat, local.after)
            if self._plan.cut and flat is not None and after is not None:
                after.synchronize()
                flat, after = on_host(flat), None
            for place, lane, part in self._plan.of(bucket):
                target = part.target(self._out[bucket], partial(self._lane_memory, bucket, place))
                given = None if flat is None else part.gather(flat, target)
                wire = self._wires[bucket] if self._wires else None
                work = self._group.all_reduce(key, given, target, mine, after, lane.ring.number, wire)
                work.add_done_callback(partial(self._done, order.fence, bucket, place))

    def _new_sums(self) -> list[torch.Tensor]:
        """Return memory for the sums of an attempt; blocks until the device has cleared it.

        FTAR's stream waits for the local gradient alone. A clearing that is queued could overwrite its sums.
        """
        sums = [self._empty(n).zero_() for n in self._sizes]
        finish(self._device)
        return sums

    def _empty(self, numel: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._group.arena.empty(numel)
        return torch.empty(numel, device=self._device)

    def _lane_memory(self, bucket: int, place: int, group: int, numel: int) -> torch.Tensor:
        """Return memory for rows of a lane, the same in each step, unless an attempt did not end (`begin`)."""
        key = bucket, place, group
        if key not in self._parts:
            self._parts[key] = self._group.arena.empty(numel)
        return self._parts[key]

    def _mine(self, order: Reduce, bucket: int) -> tuple[Entry | Callable[[], Entry] | None, Local | None]:
        """Return this rank's entry and local gradient for a bucket; None twice while the gradient is not whole."""
        if order.role != "contribute":
            return Entry(self._replica), None
        feeding = self._feeding
        if feeding is None or feeding.step != order.fence.step or bucket not in self._locals:
            return None, None
        due = feeding.trainable(order.places)
        local = next((x for x in self._locals[bucket] if sum(c.units for c in x.contributions) >= due), None)
        if local is None:
            return None, None
        return partial(local.entry, self._replica), local

    # FTAR's thread.

    def _done(self, fence: AttemptId, bucket: int, place: int, work: Future[AllReduceResult]) -> None:
        if work.exception() is not None:
            return  # the group reports that itself
        try:
            self._count(fence, bucket, place, work.result())
        except Exception as error:  # a future swallows what its callback raises
            self._group.crashed(f"the vote on step {fence.step} failed", error)

    def _count(self, fence: AttemptId, bucket: int, place: int, result: AllReduceResult) -> None:
        ended = time.monotonic()
        with self._lock:
            order, plan = self._order, self._plan
        if order is None or order.fence != fence:
            return
        numbers = look(plan.lanes[place].parts[bucket], pieced(result.out).pieces, self._summarize)
        with self._lock:
            if self._order is None or self._order.fence != fence:
                return
            self._results.append((Looked(bucket, place, result.entries, numbers), result))
            self._missing -= 1
            if self._missing:
                return
            out, results = self._out, list(self._results)
            self._note(used=False)
        assert out is not None
        plan.scatter([(each.bucket, each.lane, summed.out) for each, summed in results], out)
        sent = sum(summed.bytes_sent for _, summed in results)
        self.traffic = Traffic(sent, ended - self._began, ended, self._held_up)
        looked = [each for each, _ in results]
        poisoned = tuple(sorted({e.replica for each in looked for e in each.entries if e.poisoned}))
        sums = lane_votes(plan, looked, self.checked(order.prev, plan))
        vote = Vote.on(self._rank, fence, sums, poisoned, squares(plan, looked, poisoned))
        with self._lock:
            if self._using == fence:  # only now: this thread, too, has used the memory until here
                self._using = None
        self._voted(vote)
