"""The copies of other hosts' shards that a state agent keeps (GEMINI §4).

A rank of this host orders them (`CopyFetcher.keep`), because it computes from its grant which copies its host has
to hold. The agent fetches each from the owner's state server, verifies it, and keeps it in slots of its own. The
manifest stays as it was received, so whoever reads the copy finds a bit that has flipped since.

A fetch has a thread of its own, of low priority: training needs the processor more. The owner sends while its
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
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ft_hsdp.core import state_id
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.messages import MAX_REASON, CopyFailure, KeepCopy, KeptCopies, OweCopies, ShardIndex
from ft_hsdp.state.agent.shard import MAX_DAMAGED, Owner
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.pacing import lower_priority
from ft_hsdp.state.transfer import fetch
from ft_hsdp.state.transfer.fetch import Donor, FetchRequest
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard

CLOSE_S = 10.0  # to wait for the fetches at the end: one that still connects takes 5 s

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Pull:
    """One order, until its fetch has ended."""

    order: KeepCopy
    until: float  # on the monotonic clock
    cancel: threading.Event = field(default_factory=threading.Event)
    ended: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        """Make it impossible to cancel ``ended``: only the fetch sets it."""
        self.ended.set_running_or_notify_cancel()


@dataclass(eq=False, slots=True)
class _Course:
    running: _Pull | None = None
    waiting: _Pull | None = None  # the order that has superseded it
    failure: CopyFailure | None = None  # of the last one


class CopyFetcher:
    """Fetches and keeps copies of other hosts' shards. Thread-safe; no method but `close` blocks."""

    def __init__(self, store: SnapshotStore, token: str) -> None:
        self._store = store
        self._token = token
        self._lock = threading.Lock()
        self._courses: dict[ShardIndex, _Course] = {}
        self._owed: dict[int, OweCopies] = {}  # by keeper: the plan that is not settled yet
        self._inherited: dict[int, set[ShardIndex]] = {}  # by keeper: not ordered since it has connected
        self._closed = False

    def connected(self, keeper: int) -> None:
        """Note that a keeper has connected, maybe a new process.

        One that owes nothing sends no orders. So what was ordered before goes with the first settled state that
        it does not have.
        """
        with self._lock:
            self._inherited[keeper] = set(self._store.copies(keeper))

    def keep(self, keeper: int, order: KeepCopy) -> None:
        """Fetch a copy, instead of what is being fetched of the same shard. Returns before it is there.

        Args:
            keeper: The rank of this host that orders it.
            order: Which shard, and from where.

        Raises:
            ValueError: There is no room for it, or it cannot be of another host. One line.
        """
        key = order.replica, order.rank
        if order.rank >= order.ranks:
            raise ValueError(f"there is no rank {order.rank} of {order.ranks}")
        with self._lock:
            if self._closed:
                raise ValueError("the agent ends")
            owner = Owner(order.rank, order.ranks, order.nbytes)
            self._store.admit_copy(order.replica, owner, keeper, order.budget)
            self._inherited.get(keeper, set()).discard(key)
            course = self._courses.setdefault(key, _Course())
            newest = course.waiting or course.running
            if newest is not None and not newest.cancel.is_set() and _same(newest.order, order):
                return
            self._supersede(course)
            course.failure = None
            if not self._store.keeps(key, order.state):
                self._start(key, course, _Pull(order, time.monotonic() + order.deadline_s))

    def owes(self, keeper: int, order: OweCopies) -> None:
        """Note which copies a keeper owes from now on. The others go when the new plan is settled."""
        with self._lock:
            self._inherited.pop(keeper, None)
            self._owed[keeper] = order

    def drop(self, keeper: int, replicas: Collection[int]) -> None:
        with self._lock:
            self._free(keeper, [key for key in self._store.copies(keeper) if key[0] not in replicas])

    def settle(self, keeper: int, state: StateId, everywhere: bool) -> None:
        with self._lock:
            for key in self._store.copies(keeper):
                self._store.mark_settled(key, state, everywhere)
            order = self._owed.get(keeper)
            if order is not None and everywhere and not state_id.newer(order.since, state):
                del self._owed[keeper]
                self._free(keeper, order.shards)
            inherited = self._inherited.get(keeper, set())
            stale = {key for key in inherited if everywhere and not self._store.keeps(key, state)}
            if stale:
                inherited -= stale
                self._free(keeper, set(self._store.copies(keeper)) - stale)

    def forget(self, keeper: int) -> None:
        with self._lock:
            self._owed.pop(keeper, None)
            self._free(keeper, ())

    def pending(self, keeper: int, state: StateId) -> list[Future[None]]:
        """Return the fetches of ``state`` for this keeper. Each is done when its fetch has ended."""
        with self._lock:
            courses = [self._courses[key] for key in self._store.copies(keeper) if key in self._courses]
            pulls = [pull for each in courses for pull in (each.running, each.waiting) if pull is not None]
            return [pull.ended for pull in pulls if pull.order.state == state and not pull.cancel.is_set()]

    def kept(self, keeper: int, state: StateId) -> KeptCopies:
        """Return which copies of ``state`` this keeper has, and which have failed."""
        with self._lock:
            keys = self._store.copies(keeper)
            damaged = tuple(failure for key in keys for failure in self._damaged(key))[-MAX_DAMAGED:]
            complete = tuple(key for key in keys if self._store.keeps(key, state))
            courses = [self._courses[key] for key in keys if key not in complete and key in self._courses]
            failed = (each.failure for each in courses if each.failure is not None)
            return KeptCopies(complete, tuple(each for each in failed if each.state == state), damaged)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for course in self._courses.values():
                self._supersede(course)
            running = [each.running.ended for each in self._courses.values() if each.running is not None]
        concurrent.futures.wait(running, CLOSE_S)

    def _damaged(self, key: ShardIndex) -> list[CopyFailure]:
        found = [_failure(key, each.state, f"damaged: {each.reason}") for each in self._store.damaged(key)]
        course = self._courses.get(key)
        if course is not None and found:
            course.failure = found[-1]
        return found

    def _free(self, keeper: int, but: Collection[ShardIndex]) -> None:
        for key in self._store.copies(keeper):
            if key not in but:
                if key in self._courses:
                    self._supersede(self._courses[key])
                self._store.drop_copies(key)

    def _supersede(self, course: _Course) -> None:
        if course.waiting is not None:
            course.waiting.ended.set_result(None)
            course.waiting = None
        if course.running is not None:
            course.running.cancel.set()

    def _start(self, key: ShardIndex, course: _Course, pull: _Pull) -> None:
        if course.running is not None:
            course.waiting = pull
            return
        course.running = pull
        thread = threading.Thread(target=self._run, args=(key, course), name="state-copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            course.running = None
            pull.ended.set_result(None)
            raise ValueError("no thread is left for it") from None

    # On the thread of a shard.

    def _run(self, key: ShardIndex, course: _Course) -> None:
        lower_priority()
        pull = course.running
        while pull is not None:
            why = "it ended early"
            try:
                why = self._pull(key, pull)
            except Exception as error:  # whatever it is: votes wait for this fetch, and later orders, too
                why = str(error) or type(error).__name__
            finally:
                pull = self._ended(key, course, pull, why)

    def _ended(self, key: ShardIndex, course: _Course, done: _Pull, why: str) -> _Pull | None:
        """Note that a fetch has ended, and why there is no copy ("": there is one); return the one that waits."""
        with self._lock:
            if why and not done.cancel.is_set():
                _log.warning("rank %d of replica %d: no copy of %s: %s", key[1], key[0], done.order.state, why)
                course.failure = _failure(key, done.order.state, why)
            course.running, course.waiting = course.waiting, None
            pull = course.running
        done.ended.set_result(None)
        return pull

    def _pull(self, key: ShardIndex, pull: _Pull) -> str:
        """Fetch one copy, and return why there is none; "" if there is. Blocks until the deadline at most.

        Raises:
            Exception: There is none for another reason. The slot is free again.
        """
        order, store = pull.order, self._store
        store.prepare(key)
        number = store.stage(key, order.state, copy=True)
        if number is None and store.grow(key):
            number = store.stage(key, order.state, copy=True)
        if number is None:
            return store.busy_reason(key)
        try:
            encoded = self._fetch(key, number, pull)
            store.staged(key, order.state, encoded, number)
        except BaseException:
            store.abandon(key, number)
            raise
        return ""

    def _fetch(self, key: ShardIndex, number: int, pull: _Pull) -> bytes:
        """Fetch and verify a shard into a slot, and return its encoded manifest as it was received."""
        order, donor = pull.order, Donor(pull.order.replica, pull.order.address)
        expected = ExpectedShard(order.state, order.rank, order.ranks, order.layout, order.nbytes)
        request = FetchRequest.exactly(expected, self._store.writable(key, number).data, copy=True)
        left_s = round(pull.until - time.monotonic(), 2)
        got = fetch.fetch([donor], request, self._token, left_s, pull.cancel, lambda *_: None)
        return got.encoded


def _same(one: KeepCopy, other: KeepCopy) -> bool:
    return replace(one, deadline_s=other.deadline_s, budget=other.budget) == other


def _failure(key: ShardIndex, state: StateId, why: str) -> CopyFailure:
    line = " ".join(why.encode("ascii", "replace").decode().split())
    return CopyFailure(*key, line[:MAX_REASON], state)
