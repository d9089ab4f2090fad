"""Mailbox: what the control loop has decided and the main thread has to do, in one order on all ranks.

All ranks of a replica get the same letters in the same order, so that the collectives that follow match.

RankAgent: carries out the leader's orders on one rank, on the control loop.

Joins what does not know each other: the ring (ftar), the states (state) and the main thread (mailbox).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ft_hsdp.core import effects
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.ftar.group import Group
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankBroken, RankFetched, RankFetchFailed, RankShown, RankStopped, RingAbort, Settled
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import fetch
from ft_hsdp.state.transfer.fetch import Donor, FetchedShard, FetchRequest
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, ShardManifest
from ft_hsdp.train.gradients import Reducer
from ft_hsdp.train.snapshots import SnapshotWriter


@dataclass(frozen=True, slots=True)
class RunBatchOrder:
    """Run forward and backward of the next batch, for ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyOrder:
    """Apply a committed step from its reduced shards, one flat fp32 tensor for each bucket."""

    record: CommitRecord
    reduced: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class DropOrder:
    """The local gradient is of no use: this replica was left behind."""

    reason: str


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Swap a fetched and verified shard in: its manifest, and the packed bytes, uint8."""

    manifest: ShardManifest
    packed: Bytes


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Have ``state``, which was just reached, written to durable storage."""

    state: StateId


@dataclass(frozen=True, slots=True)
class EndOrder:
    """Leave the job with ``code``."""

    code: int
    reason: str


Letter = RunBatchOrder | ApplyOrder | DropOrder | LoadOrder | SaveOrder | EndOrder


class Mailbox:
    """A queue from the control loop to the main thread."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._arrived = threading.Condition()
        self.waited_for = False  # whether the main thread waits for a letter: then it has nothing else to do

    def put(self, letter: Letter) -> None:
        """Leave a letter."""
        with self._arrived:
            self._letters.append(letter)
            self._arrived.notify()

    def get(self) -> Letter:
        """Wait for the next letter. The wait is bounded by the leader: if it is lost, the process ends."""
        with self._arrived:
            self.waited_for = True
            while not self._letters:
                self._arrived.wait()
            self.waited_for = False
            return self._letters.popleft()


AGAIN_S = 0.5  # from the start of a fetch to the report that it failed, at least


@dataclass(frozen=True, slots=True)
class Fetching:
    """What a fetch needs besides the base and the donors."""

    ranks: int
    layout: str
    nbytes: int
    token: str
    deadline_s: float


class RankAgent:
    """One rank of a replica. ``report`` tells the leader something, ``end`` ends this process and says why."""

    def __init__(
        self,
        replica: int,
        rank: int,
        fetching: Fetching,
        mailbox: Mailbox,
        journal: Journal,
        report: Callable[[object], None],
        keeper: SnapshotWriter,
        end: Callable[[str], None],
    ) -> None:
        self._replica = replica
        self._rank = rank
        self._fetching = fetching
        self._mailbox = mailbox
        self._journal = journal
        self._report = report
        self._keeper = keeper
        self._end = end
        self._staged: LoadOrder | None = None
        self._logged: dict[int, list[torch.Tensor]] = {}
        self._cancel = threading.Event()
        self._fetcher: threading.Thread | None = None
        self.loop = asyncio.get_running_loop()
        self.group: Group
        self.reducer: Reducer

    def order(self, order: object) -> None:
        """Carry out one of the leader's orders."""
        match order:
            case effects.Configure(grant):
                self._configure(grant)
            case effects.StopRing(epoch, reason):
                self.reducer.cancel()
                self.group.stop(epoch, reason)
                self._report(RankStopped(self._rank, epoch))
            case effects.Reduce():
                self.reducer.begin(order)
            case Settled(state, everywhere):
                self._keeper.mark_settled(state, everywhere)
            case effects.Commit(record):
                reduced = self._logged.pop(record.step, None) or self.reducer.take()
                self._mailbox.put(ApplyOrder(record, reduced))
            case effects.BufferUpdate(record):
                self._logged[record.step] = self.reducer.take()
            case effects.DropGradient(reason):
                self._logged.clear()
                self._mailbox.put(DropOrder(reason))
            case effects.RunBatch(step):
                self._mailbox.put(RunBatchOrder(step))
            case effects.Fetch(base, donors):
                self._fetch(base, donors)
            case effects.Keep(state):
                self._keeper.request(state, self._fetching.deadline_s)
            case effects.InstallSnapshot():
                assert self._staged is not None
                self._mailbox.put(self._staged)
                self._staged = None
            case effects.WriteCheckpoint(state):
                self._mailbox.put(SaveOrder(state))
            case effects.DropSnapshots():
                self._keeper.forget()
            case effects.Exit(code, reason):
                self._cancel.set()
                self._mailbox.put(EndOrder(code, reason))

    # What the ring reports.

    def connected(self, epoch: int) -> None:
        """The ring of ``epoch`` is formed."""
        self._journal.event("RingConnected", "both neighbours are in this epoch", epoch=epoch)

    def broken(self, abort: RingAbort) -> None:
        """The ring is over. If others have waited for this rank's trainer in vain, only a new process helps."""
        if abort.stuck and abort.suspect == self._replica:
            self._end(f"the trainer hangs: {abort.cause}")
            return
        self._report(RankBroken(self._rank, abort.epoch, abort.cause, abort.suspect, abort.planned, abort.accuser))

    def shown(self, grant: Grant) -> None:
        """A neighbour showed a newer grant."""
        self._report(RankShown(self._rank, grant))

    def _configure(self, grant: Grant) -> None:
        """Form the ring; make the base fetchable for those who are behind."""
        mine = next(m for m in grant.members if m.replica == self._replica)
        if mine.role == "contribute" and any(m.role == "behind" for m in grant.members):
            self._keeper.request(grant.base, self._fetching.deadline_s)
        else:
            self._keeper.release()
        self.group.configure(grant)

    # Fetching, on a thread of its own.

    def _fetch(self, base: StateId, donors: Sequence[Member]) -> None:
        self._cancel.set()
        self._cancel = threading.Event()
        self._staged = None
        chosen = [Donor(m.replica, m.state[self._rank]) for m in donors if m.replica != self._replica]
        sources = [d.replica for d in chosen]
        self._journal.event("FetchStarted", f"left behind {base}", step=base.step, donors=sources)
        arguments = (base, chosen, self._cancel, self._fetcher)
        self._fetcher = threading.Thread(target=self._fetching_thread, args=arguments, name="fetch", daemon=True)
        self._fetcher.start()

    def _fetching_thread(
        self, base: StateId, donors: Sequence[Donor], cancel: threading.Event, before: threading.Thread | None
    ) -> None:
        f, began = self._fetching, time.monotonic()
        expected = ExpectedShard(base, self._rank, f.ranks, f.layout, f.nbytes)
        try:
            if before is not None:
                before.join()  # it was cancelled, and the memory it wrote into is given out again
            kept = self._keeper.allocate(base)
            packed = np.empty(f.nbytes, dtype=np.uint8) if kept is None else kept
            request = FetchRequest.exactly(expected, packed.data)
            got = fetch.fetch(donors, request, f.token, f.deadline_s, cancel, self._rejected)
            if kept is not None:
                self._keeper.complete(got.manifest)
        except fetch.Cancelled:
            return
        except Exception as error:  # also no memory: a fetch that ends without a word is waited for without an end
            why = str(error) if isinstance(error, FtHsdpError | OSError | fetch.NotFetched) else repr(error)
            cancel.wait(began + AGAIN_S - time.monotonic())  # who is asked again at once would do nothing else
            failed = RankFetchFailed(self._rank, base, why or type(error).__name__)
            self._call(cancel, lambda: self._report(failed))
            return
        self._call(cancel, lambda: self._fetched(base, got, packed))

    def _call(self, cancel: threading.Event, then: Callable[[], None]) -> None:
        """Go on on the control loop, unless the fetch is of no more use."""
        self.loop.call_soon_threadsafe(lambda: None if cancel.is_set() else then())

    def _fetched(self, base: StateId, got: FetchedShard, packed: Bytes) -> None:
        self._staged = LoadOrder(got.manifest, packed)
        facts = {"seconds": got.seconds, "bytes": self._fetching.nbytes, "step": base.step, "given": got.given}
        most = max(got.given, key=lambda replica: got.given[replica], default=None)
        self._journal.event("FetchCompleted", "verified", donor=most, **facts)
        self._report(RankFetched(self._rank, base, self._keeper.keeps(base)))

    def _rejected(self, donor: Donor, why: str) -> None:
        self._journal.event("FetchRejected", why, donor=donor.replica)
