"""Copies of other hosts' shards: agents as processes where a process dies, else in this one."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.recovery import Holding, newest
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.client import AgentGone, StateAgent
from ft_hsdp.state.agent.copies import CopyFetcher
from ft_hsdp.state.agent.messages import MAX_COPIES, Forget, FreeCopies, KeepCopy, KeptCopies, OweCopies, Settle
from ft_hsdp.state.agent.shard import Owner
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.pacing import NICE
from ft_hsdp.state.shared_memory import InMemorySnapshots, ServedSnapshot, SnapshotBuffer
from ft_hsdp.state.transfer import fetch, shard_manifest
from ft_hsdp.state.transfer.donor_connection import ask_held
from ft_hsdp.state.transfer.fetch import Donor, FetchRequest, NotFetched
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import (
    DEADLINE_S,
    LAYOUT,
    NBYTES,
    TOKEN,
    Running,
    connect,
    content,
    header,
    order,
    state,
    steps,
    write,
)
from tests.support.waiting import until

SMALL = 3000  # bytes of a shard in this process
KEEPER = 1  # the rank that orders, on the other host
SHARD = (0, 0)
KEY = (*SHARD, 2)


class Owners(InMemorySnapshots):
    def __init__(self) -> None:
        super().__init__()
        self._server = StateServer("127.0.0.1", 0, self, TOKEN)
        self.address = self._server.address
        self.hold: threading.Event | None = None  # set: what is sent may leave
        self.priorities: list[int] = []  # of the threads that answer
        self.verifies: list[bool] = []  # whether they compare what they send

    def has(self, step: int, rank: int = 0) -> None:
        room = SnapshotBuffer(SMALL)
        room.bytes[:] = content(step, rank, SMALL)
        self.put(shard_manifest.decode(header(step, rank, nbytes=SMALL)), room)

    def borrow(self, *arguments: Any, **more: Any) -> ServedSnapshot | None:
        self.priorities.append(os.getpriority(os.PRIO_PROCESS, 0))
        self.verifies.append(more["verify"])
        if self.hold is not None:
            self.hold.wait(DEADLINE_S)
        return super().borrow(*arguments, **more)

    def was_asked(self) -> None:
        """Wait until somebody asks for something."""
        until(lambda: self.priorities, "it was asked", DEADLINE_S)

    def close(self) -> None:
        self._server.close()


class Holder:
    """An agent that keeps copies, without its socket."""

    def __init__(self) -> None:
        self.store = SnapshotStore(0, "r0h1")
        self.copies = CopyFetcher(self.store, TOKEN)
        self.server = StateServer("127.0.0.1", 0, self.store, TOKEN)

    def keep(self, wanted: KeepCopy, keeper: int = KEEPER) -> KeptCopies:
        self.copies.keep(keeper, wanted)
        return self.wait(wanted.about.state, keeper)

    def wait(self, wanted: StateId, keeper: int = KEEPER) -> KeptCopies:
        for pull in self.copies.pending(keeper, wanted):
            pull.result(DEADLINE_S)
        return self.copies.kept(keeper, wanted)

    def steps(self, rank: int = 0) -> list[int]:
        return [held.state.step for held in self.store.held() if (held.replica, held.rank) == (0, rank)]

    def right(self, step: int, rank: int = 0) -> bool:
        """Whether it serves a shard, bit for bit."""
        served = self.store.borrow(state(step), rank)
        if served is None:
            return False
        try:
            same = bool(
                (shared_memory.attach(served.fd, SMALL, writable=False) == content(step, rank, SMALL)).all()
            )
            return same and served.manifest == header(step, rank, nbytes=SMALL)
        finally:
            self.store.give_back(served)

    def bytes(self) -> int:
        """What the copies take."""
        return sum(len(self.store.slots(key)) * SMALL for key in self.store.copies(KEEPER).values())

    def close(self) -> None:
        self.server.close()
        self.copies.drop(KEEPER, range(3))
        self.copies.close()
        self.store.close()


@pytest.fixture
def owners() -> Iterator[Owners]:
    made = Owners()
    yield made
    made.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


def small(step: int, owners: Owners, rank: int = 0, **more: Any) -> KeepCopy:
    return order(step, owners.address, rank, SMALL, **more)


@contextmanager
def two_hosts() -> Iterator[tuple[Running, Running, StateAgent, StateAgent]]:
    """The agents of the two hosts of a replica, and the lines of ranks 0 and 1, one on each."""
    with (
        agent_helpers.agent(0, "--name", "r0h0") as first,
        agent_helpers.agent(0, "--name", "r0h1") as second,
        closing(connect(0, 0, host="r0h0")) as owner,
        closing(connect(0, 1, host="r0h1")) as keeper,
    ):
        yield first, second, owner, keeper


def test_a_host_keeps_the_shard_of_another_and_serves_it_when_that_one_is_gone():
    with two_hosts() as (first, second, owner, keeper):
        for step in range(1, 6):
            write(owner, step)
            assert keeper.keep(order(step, owner.address)) == ""
            assert keeper.kept(state(step), DEADLINE_S) == KeptCopies((SHARD,), ())
            keeper.order(Settle(state(step), True))
        keeper.close()  # copies outlive it
        owner.close()
        first.process.kill()
        rows = ask_held([second.address], TOKEN, DEADLINE_S)[second.address]
        kept = [(row.state.step, row.replica, row.rank, row.ranks, row.settled, row.host) for row in rows]
        assert kept == [(step, 0, 0, 2, True, "r0h1") for step in (5, 4)]
        assert second.serves(5)
        assert not second.serves(3)
        found = newest(
            [Holding(r.state, r.replica, r.rank, 2, r.layout, r.host, "", True) for r in rows],
            0,
            [LAYOUT] * 2,
            ["a"] * 2,
        )
        assert found is None, "one rank's shard is no state"


def test_who_waits_for_copies_holds_up_no_other_order_and_can_be_interrupted():
    with two_hosts() as (first, _, _, keeper):
        keeper.keep(order(1, first.address))  # which is never there
        ended: list[Exception] = []

        def wait() -> None:
            try:
                keeper.kept(state(1), 1000.0)
            except AgentGone as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        for step in (1, 2, 3):
            write(keeper, step, 1)
        assert steps(keeper)[0] == 3
        keeper.close()
        waiting.join(DEADLINE_S)
        assert len(ended) == 1


def test_a_rank_that_comes_to_a_host_finds_its_shard_there():
    """Hosts are swapped: what was a copy is the rank's own snapshot now."""
    with two_hosts() as (first, second, owner, keeper):
        write(owner, 1)
        keeper.keep(order(1, owner.address))
        assert keeper.kept(state(1), DEADLINE_S).complete == (SHARD,)
        assert [held.state.step for held in keeper.list()] == [], "a copy is no snapshot of its keeper"
        assert keeper.acquire(state(1)) is None
        first.process.kill()
        owner.close()
        moved = connect(0, 0, host="r0h1")
        assert steps(moved) == [1]
        taken = moved.acquire(state(1))
        assert taken is not None
        assert (taken[0] == content(1)).all()
        assert "of this host" in keeper.keep(order(2, second.address))
        assert keeper.kept(state(1), 0.0) == KeptCopies((), ())
        write(moved, 2)
        assert steps(moved) == [2, 1]
        moved.close()


def test_copies_of_a_wrong_state_are_dropped():
    with two_hosts() as (_, second, owner, keeper):
        write(owner, 1)
        for drop in (Forget(), FreeCopies((1, 0))):
            keeper.keep(order(1, owner.address))
            assert keeper.kept(state(1), DEADLINE_S).complete == (SHARD,)
            keeper.order(FreeCopies((1,)))
            assert second.serves(1), "another replica is wrong"
            keeper.order(drop)
            assert not second.serves(1)


def test_an_agent_refuses_what_it_has_no_room_for():
    """W61."""
    with two_hosts() as (first, _, _, keeper):
        refused = keeper.keep(order(1, first.address, budget=2 * NBYTES - 1))
        assert "memory.budget_gb" in refused
        assert f"of {2 * NBYTES - 1} bytes" in refused
        refused = keeper.keep(order(1, first.address, nbytes=1 << 50))
        assert refused.startswith(f"{1 << 51} bytes")
        assert "no rank 2" in keeper.keep(order(1, first.address, rank=2))
        assert keeper.kept(state(1), 0.0) == KeptCopies((), ())


def test_nothing_runs_where_nothing_is_ordered(holder: Holder, owners: Owners):
    def threads() -> int:
        return sum(thread.name.startswith("state-copy") for thread in threading.enumerate())

    assert threads() == 0
    owners.has(1)
    assert holder.keep(small(1, owners)).complete == (SHARD,)
    assert holder.keep(small(1, owners)).complete == (SHARD,), "it is there already"
    holder.copies.close()
    assert threads() == 0


def test_a_newer_order_supersedes_an_older_fetch(holder: Holder, owners: Owners):
    holder.copies.keep(KEEPER, small(1, owners))  # the owner has left it out
    (older,) = holder.copies.pending(KEEPER, state(1))
    holder.copies.keep(KEEPER, small(2, owners))
    holder.copies.keep(KEEPER, small(3, owners))
    owners.has(3)
    assert holder.wait(state(3)).complete == (SHARD,)
    older.result(DEADLINE_S)
    assert holder.copies.pending(KEEPER, state(2)) == []
    assert holder.steps() == [3]
    assert holder.bytes() == 2 * SMALL


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"layout": "1" * 32}, f"replica 0: manifest is of layout {LAYOUT}, wanted {'1' * 32}"),
        ({"nbytes": SMALL + 1}, f"replica 0: manifest is of nbytes {SMALL}, wanted {SMALL + 1}"),
        ({"ranks": 3, "deadline_s": 0.2}, "no donor had it within "),
        ({"address": "127.0.0.1:1"}, "replica 0: [Errno 111] Connection refused"),
        ({"address": "nowhere"}, "replica 0: "),
        ({"step": 9, "deadline_s": 0.2}, "no donor had it within "),
    ],
)
def test_what_is_not_as_ordered_is_not_kept(holder: Holder, owners: Owners, wrong: dict[str, Any], reason: str):
    owners.has(1)
    (failed,) = holder.keep(order(**{"step": 1, "address": owners.address, "nbytes": SMALL, **wrong})).failed
    assert failed.reason.startswith(reason)
    assert holder.steps() == []
    assert holder.keep(small(1, owners)).complete == (SHARD,)


def test_the_budget_holds_for_all_copies_together(holder: Holder, owners: Owners):
    for step in range(1, 4):
        for rank in (0, 1):
            owners.has(step, rank)
    budget = 4 * SMALL
    assert holder.keep(small(1, owners, budget=budget)).complete == (SHARD,)
    assert holder.keep(small(1, owners, 1, budget=budget)).complete == ((0, 0), (0, 1))
    with pytest.raises(ValueError, match=rf"{2 * SMALL} bytes are needed; {budget} of {budget} bytes"):
        holder.copies.keep(KEEPER, small(1, owners, replica=1, budget=budget))
    holder.copies.settle(KEEPER, state(1), True)
    assert holder.keep(small(2, owners, budget=budget)).complete == (SHARD,)
    (failed,) = holder.keep(small(3, owners, budget=budget)).failed  # 2 is not settled yet
    assert failed.reason.startswith("no memory")
    assert holder.bytes() == budget
    holder.copies.settle(KEEPER, state(2), False)  # and is not going to be
    assert holder.keep(small(3, owners, budget=budget)).complete == (SHARD,)
    assert holder.right(1)


def test_not_more_shards_are_kept_than_a_message_can_name(holder: Holder):
    for rank in range(MAX_COPIES):
        holder.store.admit_copy(0, Owner(rank, 1000, SMALL), KEEPER, None)
    with pytest.raises(ValueError, match=f"copies of {MAX_COPIES} shards"):
        holder.store.admit_copy(0, Owner(MAX_COPIES, 1000, SMALL), KEEPER, None)


def test_a_holder_that_owes_a_copy_no_longer_keeps_it_until_the_new_plan_is_settled(holder, owners):
    """W62."""
    for step in (1, 2):
        owners.has(step)
        owners.has(step, 1)
    holder.keep(small(1, owners))
    holder.copies.settle(KEEPER, state(1), True)
    holder.copies.owes(KEEPER, OweCopies(((0, 1),), state(2)))
    assert holder.keep(small(2, owners, 1)).complete == ((0, 1),)
    holder.copies.settle(KEEPER, state(1), True)  # a commit of the old plan, heard late
    holder.copies.settle(KEEPER, state(2), False)
    assert holder.right(1), "the old copy is the only one that is settled"
    holder.copies.settle(KEEPER, state(2), True)
    assert holder.steps() == []
    assert holder.steps(1) == [2]


def test_copies_of_a_replica_that_is_wrong_are_freed_at_once_and_no_others(holder: Holder, owners: Owners):
    owners.has(1)
    wrong = small(1, owners, replica=2)
    holder.keep(small(1, owners))
    holder.keep(wrong)
    holder.copies.owes(KEEPER, OweCopies((SHARD,), state(1)))  # what it owed before waits for a settled state
    assert sorted(holder.store.copies(KEEPER)) == [SHARD, (2, 0)]
    owners.hold = threading.Event()
    holder.copies.keep(KEEPER, small(2, owners, replica=2))
    holder.copies.drop(KEEPER, (1, 2))
    owners.hold.set()
    holder.copies.close()
    assert [(held.replica, held.state.step) for held in holder.store.held()] == [(0, 1)]
    holder.copies.drop(KEEPER + 1, (0,))
    assert holder.right(1), "another rank's"


@pytest.mark.parametrize("place", ["fetch", "prepare"])
def test_an_error_of_any_kind_ends_one_fetch_and_no_later_one(holder, owners, monkeypatch, place) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError

    owners.has(1)
    owners.has(2)
    with monkeypatch.context() as patched:
        patched.setattr(*{"fetch": (fetch, "fetch"), "prepare": (holder.store, "prepare")}[place], broken)
        found = holder.keep(small(1, owners))
    assert [(each.reason, each.state) for each in found.failed] == [("MemoryError", state(1))]
    assert holder.keep(small(2, owners)).complete == (SHARD,)
    assert holder.bytes() <= 2 * SMALL, "the slot of the first one is used again"


@pytest.mark.parametrize("waits", [False, True])
def test_a_fetch_writes_into_no_snapshot_of_a_rank_that_comes_meanwhile(holder, owners, waits):
    """Neither the one that is under way nor the one that waits for its end."""
    for step in (1, 2):
        owners.has(step)
    owners.hold = threading.Event()
    holder.copies.keep(KEEPER, small(1, owners))
    pulls = holder.copies.pending(KEEPER, state(1))
    owners.was_asked()
    before = holder.store.slots(KEY).keys()
    if waits:
        holder.copies.keep(KEEPER, small(2, owners))
        pulls += holder.copies.pending(KEEPER, state(2))
    holder.store.admit(Owner(0, 2, SMALL))
    assert len(before - holder.store.slots(KEY).keys()) == 1, "the one that is written"
    number = holder.store.stage(KEY, state(1))
    owners.hold.set()
    for pull in pulls:
        pull.result(DEADLINE_S)
    assert number is not None
    assert not holder.store.list(KEY), "the rank has not completed it"
    holder.store.staged(KEY, state(1), header(1, nbytes=SMALL))
    assert [held.state.step for held in holder.store.list(KEY)] == [1]


def test_both_ends_of_a_fetch_have_low_priority(holder: Holder, owners: Owners):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    owners.has(1)
    owners.hold = threading.Event()
    holder.copies.keep(KEEPER, small(1, owners))
    owners.was_asked()
    fetching = [t.native_id or 0 for t in threading.enumerate() if t.name.startswith(("state-copy", "fetch-"))]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in fetching} == {max(NICE, before)}
    owners.hold.set()
    holder.wait(state(1))
    assert owners.priorities == [max(NICE, before)] * 2, "the manifest, and the bytes"
    assert owners.verifies == [False] * 2, "the reader compares the checksums"
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_damaged_copy_is_struck_out_and_its_keeper_is_told(holder: Holder, owners: Owners):
    for rank in (0, 1):
        owners.has(1, rank)
        holder.keep(small(1, owners, rank))
    flip(holder, KEY, 77)
    assert not holder.right(1)
    assert holder.right(1, 1), "the other shard is whole"
    told = holder.copies.kept(KEEPER, state(1))
    assert told.complete == ((0, 1),)
    assert [each.rank for each in told.failed] == [0]
    (damage,) = told.damaged
    assert damage.reason.startswith("damaged: chunk 0")
    assert holder.copies.kept(KEEPER, state(1)).damaged == ()
    assert holder.keep(small(1, owners)).complete == ((0, 0), (0, 1))
    assert holder.right(1)


def test_the_shards_of_two_replicas_are_one_shard_to_a_reader(holder: Holder, owners: Owners):
    """Damage strikes the right one, and the other one is served."""
    owners.has(1)
    for replica in (0, 1):
        holder.keep(small(1, owners, replica=replica))
    flip(holder, KEY, 5)
    flip(holder, (1, 0, 2), 6)
    repaired = holder.store.writable((1, 0, 2), 1)
    repaired[0] ^= 1 << 6
    assert holder.right(1)
    assert [(row.replica, row.rank) for row in holder.store.held()] == [(1, 0)]


# A bit that flips (W58).


def flip(holder: Holder, key: tuple[int, int, int], bit: int) -> None:
    """Flip a bit of the newest copy of a shard."""
    step = max(held.state.step for held in holder.store.held() if (held.replica, held.rank) == key[:2])
    right = content(step, key[1], SMALL).tobytes()
    (slot,) = [fd for fd in holder.store.slots(key).values() if os.pread(fd, SMALL, 0) == right]
    os.pwrite(slot, bytes([right[bit // 8] ^ 1 << bit % 8]), bit // 8)


def fetched(holder: Holder, step: int) -> bool:
    """Whether a reader gets a copy from the holder's server; what it gets is right."""
    into = SnapshotBuffer(SMALL)
    expected = ExpectedShard(state(step), 0, 2, LAYOUT, SMALL)
    request = FetchRequest.exactly(expected, into.memory, awaited=False)
    donor = Donor(0, holder.server.address)
    try:
        fetch.fetch([donor], request, TOKEN, DEADLINE_S, threading.Event(), lambda *_: None)
    except NotFetched:
        return False
    assert (into.bytes == content(step, 0, SMALL)).all()
    return True


@pytest.mark.parametrize("times", [60, pytest.param(5000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))])
def test_flipped_bits_are_found(holder: Holder, owners: Owners, times: int):
    """Of a copy at rest: every other one flips after a reader has had it. Those on the way are `test_fetch`'s."""
    random_ = random.Random(times)
    owners.has(1)
    owners.has(2)
    for number in range(times):
        assert holder.keep(small(1, owners)).complete == (SHARD,)
        holder.copies.settle(KEEPER, state(1), True)
        assert holder.keep(small(2, owners)).complete == (SHARD,)
        if number % 2:
            assert holder.right(2)
        flip(holder, KEY, random_.randrange(8 * SMALL))
        assert not fetched(holder, 2)
        assert holder.right(1), "the next rung"
        holder.copies.forget(KEEPER)
