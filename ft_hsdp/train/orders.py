"""The leader's orders on one rank: carried out on the control loop, or passed on to the main thread.

Each order is an effect of the core (`core.effects`), `Settled` or `ShardLeftOut`. All ranks of a replica get the
same orders in the same order. `OrderHandler` does at once what concerns the ring, the reducer, snapshots, copies
and fetches. What changes the model, or runs it, goes into the `Mailbox`, from which the main thread takes it; the
order is kept there too, so that the collectives of the ranks match. Three effects need data that only this rank
has, and become orders of their own: `Commit` becomes `ApplyOrder` with the reduced shards, `BufferUpdate` becomes
`KeepOrder` with them, and `InstallSnapshot` becomes `LoadOrder` with the fetched shard.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ft_hsdp.core import effects
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.ftar.group import Group
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankFetched, RankFetchFailed, RankStopped, Settled, ShardLeftOut
from ft_hsdp.state.agent.messages import FreeCopies, Settle
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import fetch
from ft_hsdp.state.transfer.fetch import Donor
from ft_hsdp.state.transfer.reshape import Assembled, WantedShard, fetch_shard
from ft_hsdp.state.transfer.shard_manifest import Layout, ShardManifest
from ft_hsdp.train.gradients import Reducer
from ft_hsdp.train.state.copies import CopyCost, CopyKeeper, SpanWatch
from ft_hsdp.train.state.known_shards import donors_of
from ft_hsdp.train.state.snapshots import SnapshotWriter

AGAIN_S = 0.5  # from the start of a fetch to the report that it failed, at least


@dataclass(frozen=True, slots=True)
class ApplyOrder:
    """Apply a committed step; the reduced shards go back to the reducer afterwards."""

    record: CommitRecord
    reduced: list[torch.Tensor] | None  # a flat fp32 shard for each bucket; None: those of a `KeepOrder`


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """Keep the reduced shards of a committed step whose base is not here yet, in host memory."""

    state: StateId  # that the step led to
    reduced: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    manifest: ShardManifest
    packed: Bytes  # uint8


Order = (
    effects.RunBatch
    | effects.Reduce
    | effects.DropGradient
    | effects.WriteCheckpoint
    | effects.Exit
    | ApplyOrder
    | KeepOrder
    | LoadOrder
)
"""What the main thread may have to do."""


class Mailbox:
    """A queue of orders from the control loop to the main thread."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._arrived = threading.Condition()
        self.waited_for = False  # whether the main thread waits for an order: then it has nothing else to do

    def put(self, order: Order) -> None:
        with self._arrived:
            self._orders.append(order)
            self._arrived.notify()

    def put_back(self, order: Order) -> None:
        with self._arrived:
            self._orders.appendleft(order)

    def get(self) -> Order:
        """Return the next order; blocks until there is one.

        The leader bounds the wait: if the leader is lost, the process ends.
        """
        with self._arrived:
            self.waited_for = True
            while not self._orders:
                self._arrived.wait()
            self.waited_for = False
            return self._orders.popleft()


@dataclass(frozen=True, slots=True)
class Fetching:
    ranks: int  # of a replica
    layout: Layout  # of the shard
    token: str  # of the job
    deadline_s: float  # for a whole fetch


@dataclass(eq=False)
class OrderHandler:
    """Carries out the leader's orders on one rank. Made and used on the control loop."""

    _replica: int
    _rank: int  # of the replica
    _fetching: Fetching
    _group: Group
    _reducer: Reducer
    _snapshots: SnapshotWriter
    _copies: CopyKeeper  # has copies made of the shards of other hosts
    _spans: SpanWatch  # watches when the network is idle, while copies of its replica's shards are made
    _mailbox: Mailbox
    _journal: Journal
    _report: Callable[[object], None]  # gives the leader a message; called on the control loop
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _fetched_shard: LoadOrder | None = None  # until the leader has it installed
    _kept: set[StateId] = field(default_factory=set)  # states that commits led to, whose base is not here yet
    _cancel: threading.Event = field(default_factory=threading.Event)  # set: the newest fetch is cancelled
    _fetch_thread: threading.Thread | None = None

    def handle(self, order: object) -> None:
        match order:
            case effects.Configure(grant):
                self._configure(grant)
            case effects.StopRing(epoch, reason):
                self._reducer.cancel()
                self._group.stop(epoch, reason)
                self._report(RankStopped(self._rank, epoch))
            case effects.Reduce():
                self._reducer.begin(order)
                if order.role == "contribute":
                    self._mailbox.put(order)  # it may ask for more than is trained
            case Settled(state, everywhere, waited_s, copied, step_s, refused, late):
                cost = CopyCost(waited_s, copied, step_s, late)
                counts = self._copies.settled(state, everywhere, cost, refused)
                self._snapshots.order(Settle(state, everywhere if counts else None))
            case ShardLeftOut(fence):
                self._copies.give_up(fence)
            case effects.Commit(record):
                reduced = None if record.state_id in self._kept else self._reducer.take()
                self._kept.discard(record.state_id)
                self._mailbox.put(ApplyOrder(record, reduced))
            case effects.BufferUpdate(record):
                self._kept.add(record.state_id)
                self._mailbox.put(KeepOrder(record.state_id, self._reducer.take()))
            case effects.DropGradient():
                self._cancel.set()  # what is fetched builds on what is dropped
                self._fetched_shard = None
                self._kept.clear()
                self._mailbox.put(order)
            case effects.RunBatch() | effects.WriteCheckpoint():
                self._mailbox.put(order)
            case effects.Fetch(base, donors):
                self._fetch(base, donors)
            case effects.Keep(state):
                self._snapshots.request(state, self._fetching.deadline_s)
            case effects.InstallSnapshot():
                assert self._fetched_shard is not None
                self._mailbox.put(self._fetched_shard)
                self._fetched_shard = None
            case effects.DropSnapshots():
                self._snapshots.forget()
            case effects.DropCopies(replicas):
                self._snapshots.order(FreeCopies(tuple(replicas)))
            case effects.Exit():
                self._cancel.set()
                self._mailbox.put(order)

    def _configure(self, grant: Grant) -> None:
        """Form the ring of ``grant``; if this rank may be a donor, have the base ready for those behind."""
        mine = next(m for m in grant.members if m.replica == self._replica)
        if mine.holds_base and any(m.role == "behind" for m in grant.members):
            self._snapshots.request(grant.base, self._fetching.deadline_s)
        else:
            self._snapshots.release()
        self._copies.configure(grant)
        self._spans.want(self._copies.sources)
        self._reducer.configure(grant)
        self._group.configure(grant)

    def _fetch(self, base: StateId, donors: Sequence[Member]) -> None:
        self._cancel.set()
        self._cancel = threading.Event()
        self._fetched_shard = None
        chosen = [m for m in donors if m.replica != self._replica]
        sources = [m.replica for m in chosen]
        self._journal.event("FetchStarted", f"left behind {base}", step=base.step, donors=sources)
        arguments = (base, chosen, self._cancel, self._fetch_thread)
        self._fetch_thread = threading.Thread(target=self._run_fetch, args=arguments, name="fetch", daemon=True)
        self._fetch_thread.start()

    def _run_fetch(
        self, base: StateId, donors: Sequence[Member], cancel: threading.Event, before: threading.Thread | None
    ) -> None:
        """Fetch, on a thread of its own, and report how it ended: every way out reports, unless cancelled."""
        f, began = self._fetching, time.monotonic()
        shard = WantedShard(base, self._rank, f.ranks, f.layout)
        try:
            if before is not None:
                before.join()  # it was cancelled, and the memory it wrote into is given out again
            slot = self._snapshots.allocate(base)
            packed = np.empty(f.layout.nbytes, dtype=np.uint8) if slot is None else slot
            width, of_rank = donors_of(donors, shard)
            got = fetch_shard(shard, width, of_rank, packed.data, f.token, f.deadline_s, cancel, self._rejected)
            if slot is not None:
                self._snapshots.complete(got.manifest)
        except fetch.Cancelled:
            return
        except Exception as error:  # of any kind, no memory included: the leader waits for a report without an end
            why = str(error) if isinstance(error, FtHsdpError | OSError | fetch.NotFetched) else repr(error)
            cancel.wait(began + AGAIN_S - time.monotonic())  # or failing and asking again would take all the time
            failed = RankFetchFailed(self._rank, base, why or type(error).__name__)
            self._on_loop(cancel, partial(self._report, failed))
            return
        self._on_loop(cancel, partial(self._fetched, base, got, packed))

    def _on_loop(self, cancel: threading.Event, then: Callable[[], None]) -> None:
        """Call ``then`` on the control loop, unless the fetch is cancelled by then."""
        self._loop.call_soon_threadsafe(lambda: None if cancel.is_set() else then())

    def _fetched(self, base: StateId, got: Assembled, packed: Bytes) -> None:
        self._fetched_shard = LoadOrder(got.manifest, packed)
        given: dict[int, int] = {}
        for (_, replica), nbytes in got.given.items():
            given[replica] = given.get(replica, 0) + nbytes
        facts = {"seconds": got.seconds, "bytes": sum(given.values()), "step": base.step, "given": given}
        most = max(given, key=lambda replica: given[replica], default=None)
        self._journal.event("FetchCompleted", "verified", donor=most, **facts)
        self._report(RankFetched(self._rank, base, self._snapshots.keeps(base)))

    def _rejected(self, _: int, donor: Donor, why: str) -> None:
        self._journal.event("FetchRejected", why, donor=donor.replica)
