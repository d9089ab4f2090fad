"""The copies of other hosts' shards, and of slices of block stores, that a state agent fetches (GEMINI §4).

A rank of this host orders them (`CopyFetcher.keep`), because it computes from its grant which copies its host has
to hold. The agent fetches each from the state servers that have it, verifies it, and keeps it in slots of its own.
The manifest stays as it was received, so whoever reads the copy finds a bit that has flipped since. For a slice
its rank waits, which ends the fetch when it goes.

Each shard has a thread of its own, of low priority: training needs the processor more. The owner sends while its
network is idle (`pacing`). A fetch ends at its deadline, when a newer order for the shard supersedes it, or with
the agent. Without orders there is no thread.

What becomes of a copy is decided by the rank that ordered it, its keeper: it tells which state is settled, which
copies it no longer owes, and when they are wrong. Copies outlive the connection of their keeper.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ft_hsdp.core import state_id
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.messages import (
    MAX_REASON,
    CopyFailure,
    KeepCopy,
    KeptCopies,
    OweCopies,
    ShardIndex,
)
from ft_hsdp.state.agent.shard import MAX_DAMAGED, Owner
from ft_hsdp.state.agent.slots import Content
from ft_hsdp.state.agent.store import Key, ShardKey, SnapshotStore
from ft_hsdp.state.pacing import lower_priority
from ft_hsdp.state.transfer import blocks, fetch
from ft_hsdp.state.transfer.fetch import Donor, FetchRequest
from ft_hsdp.state.transfer.parts import Scattered
from ft_hsdp.state.transfer.shard_manifest import SliceName

CLOSE_S = 10.0  # to wait for the fetches at the end: one that still connects takes 5 s

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pull:
    """One order, with the state of its fetch."""

    order: KeepCopy
    content: Content
    until: float  # on the monotonic clock
    cancel: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Course:
    # One thread: the fetch before has ended, and writes no more, when the next one begins.
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "state-copy", initializer=lower_priority)
    )
    newest: _Pull | None = None
    failure: CopyFailure | None = None  # of the last one

    @property
    def pending(self) -> _Pull | None:
        pull = self.newest
        return None if pull is None or pull.cancel.is_set() or pull.ended.done() else pull

    def supersede(self) -> None:
        if self.newest is not None:
            self.newest.cancel.set()


class CopyFetcher:
    """Fetches and keeps what other hosts have. Thread-safe; only `close` blocks, and `keep` for a slice."""

    def __init__(self, store: SnapshotStore, token: str) -> None:
        self._store = store
        self._token = token
        self._lock = threading.Lock()
        self._courses: dict[ShardIndex, _Course] = {}
        self._owed: dict[int, OweCopies] = {}  # by keeper: the plan that is not settled yet
        self._closed = False

    def keep(self, keeper: int, order: KeepCopy, ended: threading.Event | None = None) -> None:
        """Fetch a copy of a shard, instead of what is being fetched of the same one; or of a slice.

        Returns before a shard is there. Blocks until a slice is, for ``order.deadline_s`` at most.

        Args:
            keeper: The rank of this host that orders it.
            order: What, and from where.
            ended: Set when who waits for a slice is gone.

        Raises:
            ValueError: There is no room for it, or it cannot be of another host; or no source has served the slice
                in time. One line.
        """
        about, until = order.about, time.monotonic() + order.deadline_s
        if isinstance(about, SliceName):
            pull = _Pull(order, about.store, until, ended or threading.Event())
            if why := self._fetch(self._store.admit_slice(about, order.budget), pull):
                raise ValueError(why)
            return
        if about.rank >= about.ranks:
            raise ValueError(f"there is no rank {about.rank} of {about.ranks}")
        with self._lock:
            if self._closed:
                raise ValueError("the agent ends")
            owner = Owner(about.rank, about.ranks, about.nbytes)
            where = self._store.admit_copy(order.replica, owner, keeper, order.budget)
            course = self._courses.setdefault((order.replica, about.rank), _Course())
            if course.pending is not None and _same(course.pending.order, order):
                return
            course.supersede()
            course.failure = None
            if not self._store.keeps(where, about.state):
                pull = _Pull(order, about.state, until)
                try:
                    pull.ended = course.thread.submit(self._run, where, course, pull, about.state)
                except RuntimeError:
                    pull.cancel.set()
                    raise ValueError("no thread is left for it") from None
                course.newest = pull

    def owes(self, keeper: int, order: OweCopies) -> None:
        """Note which copies a keeper owes from now on. The others go when the new plan is settled."""
        with self._lock:
            self._owed[keeper] = order

    def drop(self, keeper: int, replicas: Collection[int]) -> None:
        with self._lock:
            self._free(keeper, [key for key in self._store.copies(keeper) if key[0] not in replicas])

    def settle(self, keeper: int, state: StateId, everywhere: bool | None) -> None:
        with self._lock:
            for where in self._store.copies(keeper).values():
                self._store.mark_settled(where, state, everywhere)
            order = self._owed.get(keeper)
            if order is not None and everywhere and not state_id.newer(order.since, state):
                del self._owed[keeper]
                self._free(keeper, order.shards)

    def forget(self, keeper: int) -> None:
        with self._lock:
            self._owed.pop(keeper, None)
            self._free(keeper, ())

    def pending(self, keeper: int, state: StateId) -> list[Future[None]]:
        """Return the fetches of ``state`` for this keeper. Each is done when its fetch has ended."""
        with self._lock:
            courses = [self._courses[key] for key in self._store.copies(keeper) if key in self._courses]
            pulls = [each.pending for each in courses if each.pending is not None]
            return [pull.ended for pull in pulls if pull.content == state]

    def kept(self, keeper: int, state: StateId) -> KeptCopies:
        """Return which copies of ``state`` this keeper has, and which have failed."""
        with self._lock:
            keys = self._store.copies(keeper)
            damaged = [failure for key, where in keys.items() for failure in self._damaged(key, where)]
            complete = tuple(key for key, where in keys.items() if self._store.keeps(where, state))
            courses = [self._courses[key] for key in keys if key not in complete and key in self._courses]
            failed = (each.failure for each in courses if each.failure is not None)
            failures = tuple(each for each in failed if each.state == state)
            return KeptCopies(complete, failures, tuple(damaged[-MAX_DAMAGED:]))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            courses = list(self._courses.values())
        for course in courses:
            course.supersede()
        running = [each.newest.ended for each in courses if each.newest is not None]
        late = concurrent.futures.wait(running, CLOSE_S).not_done
        for course in courses:
            course.thread.shutdown(wait=not late)

    def _damaged(self, key: ShardIndex, where: ShardKey) -> list[CopyFailure]:
        found = [_failure(key, each.state, f"damaged: {each.reason}") for each in self._store.damaged(where)]
        course = self._courses.get(key)
        if course is not None and found:
            course.failure = found[-1]
        return found

    def _free(self, keeper: int, but: Collection[ShardIndex]) -> None:
        for key, where in self._store.copies(keeper).items():
            if key not in but:
                if key in self._courses:
                    self._courses[key].supersede()
                self._store.drop_copies(where)

    # On the thread of a shard.

    def _run(self, where: ShardKey, course: _Course, pull: _Pull, state: StateId) -> None:
        if pull.cancel.is_set():
            return
        why = self._fetch(where, pull)
        replica, rank, _ = where
        with self._lock:
            if why and not pull.cancel.is_set():
                _log.warning("rank %d of replica %d: no copy of %s: %s", rank, replica, state, why)
                course.failure = _failure((replica, rank), state, why)

    # On the thread of a shard, or of the rank that waits for a slice.

    def _fetch(self, key: Key, pull: _Pull) -> str:
        """Fetch and verify into a slot, and return why there is none or "". Blocks until the deadline at most."""
        store, order, number = self._store, pull.order, None
        about = order.about
        donors = [Donor(order.replica + at, address) for at, address in enumerate(order.addresses)]
        try:
            store.prepare(key)
            number = store.allocate(key, pull.content, copy=True)
            if number is None:
                return store.busy_reason(key)
            into = store.writable(key, number).data
            wanted: FetchRequest[Any] = (
                blocks.request(about, order.digest, Scattered(into), {})
                if isinstance(about, SliceName)
                else FetchRequest.exactly(about, into, copy=True)
            )
            left_s = round(pull.until - time.monotonic(), 2)
            # The manifest is kept as it was received.
            encoded = fetch.fetch(donors, wanted, self._token, left_s, pull.cancel, lambda *_: None).encoded
            store.staged(key, pull.content, encoded, number)
        except Exception as error:  # whatever it is: votes wait for this fetch, and later orders, too
            store.abandon(key, number)
            return str(error) or type(error).__name__
        return ""


def _same(one: KeepCopy, other: KeepCopy) -> bool:
    return replace(one, deadline_s=other.deadline_s, budget=other.budget) == other


def _failure(key: ShardIndex, state: StateId, why: str) -> CopyFailure:
    line = " ".join(why.encode("ascii", "replace").decode().split())
    return CopyFailure(*key, line[:MAX_REASON], state)
