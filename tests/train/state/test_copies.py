"""Which rank orders which copies, how long a vote waits for them, and when a job says that it is protected."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import MemoryConfig
from ft_hsdp.core.commit import AttemptId, Vote
from ft_hsdp.core.grant import Grant, Member, Role, ranges
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.messages import MAX_COPIES, CopyFailure, KeepCopy, KeptCopies, OweCopies
from ft_hsdp.train.state import copies
from ft_hsdp.train.state.copies import CopyCost, CopyKeeper
from ft_hsdp.train.state.copy_plan import CopiedShard, CopyPlanner, checked_room

LAYOUT = "ab" * 16
SHARDS = [CopiedShard(LAYOUT, 1000)] * 4
DEADLINE_S = 20.0


def state(step: int, epoch: int = 1) -> StateId:
    return StateId(epoch, step, f"{step:032x}")


class Agent:
    """The state agent of a host, as far as it keeps copies for others; it has every own snapshot."""

    def __init__(self) -> None:
        self.orders: list[Any] = []  # step, rank and source
        self.owed: list[tuple[tuple[int, int], ...]] = []
        self.answers: list[KeptCopies | None] = []  # the last one stays
        self.own = True
        self.refuses = ""
        self.asked = threading.Event()

    def keep(self, order: KeepCopy, step: int, refused: Callable[[str], None]) -> None:
        self.orders.append((step, order.about.rank, *order.addresses))
        if self.refuses:
            refused(self.refuses)

    def order(self, order: OweCopies) -> None:
        self.owed.append(order.shards)

    def copied(self, of: StateId, wait_s: float) -> KeptCopies | None:
        self.asked.set()
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if found is not None and len(found.complete) < 2 and not found.failed:
            threading.Event().wait(wait_s + 0.001)  # still being fetched
        return found

    def keeps(self, of: StateId | None) -> bool:
        return self.own


def kept(*shards: tuple[int, int]) -> KeptCopies:
    return KeptCopies(shards, ())


UNDER_WAY = kept()


def grant(
    epoch: int, step: int, members: Mapping[int, tuple[str, ...]], behind: Iterable[int] = (), standby: int = -1
) -> Grant:
    """An epoch whose members have ranks on these hosts."""

    def role(replica: int) -> Role:
        return "standby" if replica == standby else "behind" if replica in behind else "contribute"

    made = tuple(
        Member(
            replica,
            f"{replica}-x-0",
            role(replica),
            state=tuple(f"127.0.0.1:{1000 * replica + rank + 1}" for rank in range(len(hosts))),
            hosts=ranges(hosts),
        )
        for replica, hosts in members.items()
    )
    return Grant(1, epoch, state(step), made, len(made), "why")


class Rank:
    def __init__(
        self, folder: Path, replica: int, rank: int, replicas: int = 1, agent: Agent | None = None, **config: Any
    ) -> None:
        self.agent = agent or Agent()
        self.errors: list[ConfigError] = []
        self.file = folder / f"{replica}-{rank}.jsonl"
        self.journal = Journal(self.file)
        copied, first_life = config.pop("copied", True), config.pop("first_life", True)
        planner = CopyPlanner(replica, rank, MemoryConfig(**config), SHARDS, 60.0, copied)
        agent_: Any = self.agent
        self.keeper = CopyKeeper(planner, replicas, agent_, self.journal, self.errors.append, first_life)

    def vote(self, step: int) -> Vote:
        votes: list[Vote] = []
        came = threading.Event()

        def send(vote: Vote) -> None:
            votes.append(vote)
            came.set()

        self.send = send
        self.keeper.vote(Vote(0, AttemptId(1, step, 0), "", 0.0, ()), state(step - 1), send)
        assert came.wait(DEADLINE_S)
        (vote,) = votes
        return vote

    def rows(self) -> list[dict[str, Any]]:
        self.journal.flush(DEADLINE_S)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [json.loads(line) for line in lines]

    def told(self) -> list[tuple[str, str]]:
        """All events but those that say who keeps what."""
        return [(row["event"], row["reason"]) for row in self.rows() if row["event"] != "CopiesPlanned"]

    def paced(self) -> list[dict[str, Any]]:
        """What it says of states that are not copied."""
        return [row for row in self.rows() if row["event"] == "CopiesSlowed"]

    def keepers(self) -> list[tuple[int, dict[str, str]]]:
        return [(row["hosts"], row["keeps"]) for row in self.rows() if row["event"] == "CopiesPlanned"]


TWO_HOSTS = {0: ("r0h0", "r0h0", "r0h1", "r0h1")}


def test_the_first_rank_of_each_host_orders_what_its_host_keeps(tmp_path: Path) -> None:
    ordered: dict[int, list[Any]] = {}
    for rank in range(4):
        one = Rank(tmp_path, 0, rank)
        one.keeper.mark_current(state(3))
        one.keeper.configure(grant(1, 3, TWO_HOSTS))
        one.keeper.mark_current(state(4))
        ordered[rank] = [source for step, *source in one.agent.orders if step == 4]
        assert [step for step, *_ in one.agent.orders] == ([3, 3, 4, 4] if rank in (0, 2) else [])
    assert ordered == {
        0: [[2, "127.0.0.1:3"], [3, "127.0.0.1:4"]],
        1: [],
        2: [[0, "127.0.0.1:1"], [1, "127.0.0.1:2"]],
        3: [],
    }


def test_three_healthy_replicas_on_hosts_of_their_own_order_nothing_and_start_no_thread(tmp_path: Path) -> None:
    members = {replica: (f"h{replica}",) * 4 for replica in range(3)}
    before = {thread.name for thread in threading.enumerate()}
    for replica in range(3):
        for rank in range(4):
            one = Rank(tmp_path, replica, rank, 3)
            one.keeper.mark_current(state(0))
            one.keeper.configure(grant(1, 0, members))
            for step in (1, 2, 3):
                vote = one.vote(step)
                assert vote.kept
                assert (vote.copied, vote.waited_s) == (0, 0.0)
                one.keeper.settled(state(step - 1), True, CopyCost())
                one.keeper.mark_current(state(step))
            assert (one.agent.orders, one.agent.owed) == ([], [()]), "what was ordered in an earlier life may go"
            first = (replica, rank) == (0, 0)
            assert [name for name, _ in one.told()] == (["Protected"] if first else [])
    started = {thread.name for thread in threading.enumerate()} - before
    assert not any(name.startswith("copies") for name in started)


def test_a_vote_waits_for_the_copies_and_says_what_they_cost(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0)
    one.keeper.configure(grant(1, 0, TWO_HOSTS))
    one.keeper.mark_current(state(0))
    one.agent.answers = [UNDER_WAY, UNDER_WAY, kept((0, 2)), UNDER_WAY, kept((0, 2), (0, 3))]
    vote = one.vote(1)
    assert vote.kept
    assert vote.copied == 2000
    assert vote.waited_s > 0
    assert one.vote(1).copied == 0, "the bytes of a state count once"
    assert one.told() == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (KeptCopies(((0, 2),), (CopyFailure(0, 3, "it has a newer state", state(0)),)), "it has a newer state"),
        (None, "there is no state agent"),
        (UNDER_WAY, "not here within"),
    ],
)
def test_a_copy_that_does_not_come_is_missing_from_the_vote(tmp_path, answer, why) -> None:
    one = Rank(tmp_path, 0, 0, wait_s=0.15)
    one.keeper.configure(grant(1, 0, TWO_HOSTS))
    one.agent.answers = [answer]
    vote = one.vote(1)
    assert (vote.kept, vote.late) == (False, answer is UNDER_WAY)
    assert not one.vote(2).kept
    ((name, reason),) = one.told()
    assert name == "CopyMissing"
    assert reason.startswith(why)
    one.agent.answers = [kept((0, 2), (0, 3))]
    assert one.vote(3).kept


class Clock(Agent):
    """An agent that fetches for ever, or until it dies; time passes only while it is waited for."""

    def __init__(self, dies_at: float) -> None:
        super().__init__()
        self.now, self._dies_at = 100.0, 100.0 + dies_at

    def monotonic(self) -> float:
        return self.now

    def copied(self, of: StateId, wait_s: float) -> KeptCopies | None:
        self.now = min(self.now + wait_s + 1e-9, self._dies_at)  # an agent that waits does so for a little longer
        return None if self.now == self._dies_at else UNDER_WAY


@pytest.mark.parametrize(
    ("wait_s", "dies_at", "waits"),
    [
        (0.25, 1e9, 0.25),  # not a whole number of looks
        (0.0, 1e9, 0.0),
        (None, 1e9, 2 + 2000 / 1e9),  # 2 s, and the time of its bytes
        (70.0, 1e9, 70.0),
        (70.0, 0.35, 0.35),  # the holder dies: nobody waits for it any longer
    ],
)
def test_no_vote_waits_longer_than_it_may(tmp_path, monkeypatch, wait_s, dies_at, waits) -> None:
    """W52: whatever becomes of the holder, a vote waits `memory.wait_s` at most, by a clock of this test."""
    clock = Clock(dies_at)
    one = Rank(tmp_path, 0, 0, agent=clock, wait_s=wait_s)
    monkeypatch.setattr(copies, "time", clock)
    one.keeper.configure(grant(1, 0, TWO_HOSTS))
    vote = one.vote(1)
    assert not vote.kept
    assert vote.waited_s == pytest.approx(waits, abs=1e-6)
    assert vote.waited_s == clock.now - 100.0


THREE_HOSTS = {0: ("r0h0", "r0h1", "r0h2", "r0h2")}


def test_a_copy_that_its_holder_refuses_is_ordered_at_the_next_host_by_all_ranks_alike(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0, rank, wait_s=30.0) for rank in range(4)]
    for one in ranks:
        one.keeper.configure(grant(1, 0, THREE_HOSTS))
    holder = ranks[1]
    assert holder.agent.owed == [((0, 0),)]
    holder.agent.refuses = "no memory"
    for one in ranks:
        one.keeper.mark_current(state(0))
    vote = holder.vote(1)
    assert (vote.kept, vote.refused) == (False, (0,))
    for one in ranks:
        one.keeper.settled(state(0), False, CopyCost(), ((0, 1),))
        one.keeper.mark_current(state(1))
    assert holder.agent.owed == [((0, 0),), ()]
    assert (0, 0) in ranks[2].agent.owed[-1]
    assert (1, 0, "127.0.0.1:1") in ranks[2].agent.orders
    assert [step for step, *_ in holder.agent.orders if step == 1] == []
    assert [one.told()[-1][0] for one in ranks[:1]] == ["Unprotected"]
    assert [name for name, _ in ranks[0].told()].count("CopyMoved") == 1
    first = {"r0h0": "2-3", "r0h1": "0", "r0h2": "1"}
    assert ranks[0].keepers() == [(3, first), (2, {"r0h0": "2-3", "r0h2": "0-1"})]
    assert [one.keepers() for one in ranks[1:]] == [[], [], []]
    before = len(ranks[2].agent.owed)
    for one in ranks:
        one.keeper.settled(state(1), False, CopyCost(), ((0, 1),))  # a vote from before the move
        one.keeper.configure(grant(2, 1, THREE_HOSTS))
    assert len(ranks[2].agent.owed) == before, "a new epoch does not ask who has refused"


def test_two_copies_of_one_shard_that_are_refused_at_once_both_move(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0, copies=3)
    one.keeper.configure(grant(1, 0, {0: tuple(f"r0h{i}" for i in range(6))}))
    one.keeper.settled(state(0), False, CopyCost(), ((0, 1), (0, 2)))
    moved = [reason for name, reason in one.told() if name == "CopyMoved"]
    assert sorted(moved) == ["host r0h1 does not keep it", "host r0h2 does not keep it"]


def test_a_holder_refuses_after_three_failed_fetches_in_a_row_and_not_because_it_is_late(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0, wait_s=0.05)
    one.keeper.configure(grant(1, 0, TWO_HOSTS))

    def refused(step: int, answer: KeptCopies | None) -> tuple[int, ...]:
        one.agent.answers = [answer]
        return one.vote(step).refused

    failed = [KeptCopies(((0, 2),), (CopyFailure(0, 3, "reset", state(step)),)) for step in range(20)]
    assert [refused(step, failed[step - 1]) for step in (1, 2, 2)] == [(), (), ()], "a state counts once"
    assert refused(3, kept((0, 2), (0, 3))) == ()
    assert [refused(step, failed[step - 1]) for step in (4, 5, 6, 7)] == [(), (), (3,), (3,)]
    assert [refused(step, UNDER_WAY) for step in (8, 9, 10, 11)] == [()] * 4
    assert [refused(step, None) for step in (12, 13, 14, 15)] == [()] * 4


def test_no_vote_waits_for_a_copy_of_a_shard_that_was_left_out(tmp_path: Path) -> None:
    owner, holder = Rank(tmp_path, 0, 2), Rank(tmp_path, 0, 0, wait_s=30.0)
    for one in (owner, holder):
        one.keeper.configure(grant(1, 0, TWO_HOSTS))
    owner.agent.own = False
    vote = owner.vote(1)
    assert (vote.kept, vote.left_out) == (False, True)
    holder.agent.answers = [UNDER_WAY]
    holder.keeper.give_up(AttemptId(1, 1, 0))
    assert not holder.vote(1).kept


def test_a_new_epoch_ends_the_wait_under_the_old_plan(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0, wait_s=30.0)
    one.keeper.configure(grant(1, 0, TWO_HOSTS))
    one.agent.answers = [UNDER_WAY]
    later = threading.Thread(
        target=lambda: one.agent.asked.wait(DEADLINE_S) and one.keeper.configure(grant(2, 0, TWO_HOSTS))
    )
    later.start()
    assert not one.vote(1).kept
    later.join()


def test_only_every_third_state_is_copied_waited_for_and_settled(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0, every=3)
    one.keeper.configure(grant(1, 1, TWO_HOSTS))
    one.agent.answers = [kept((0, 2), (0, 3))]
    counts = {}
    for step in range(1, 8):
        one.keeper.mark_current(state(step))
        vote = one.vote(step + 1)
        counts[step] = vote.kept, one.keeper.settled(state(step), vote.kept, CopyCost())
    assert {step for step, *_ in one.agent.orders} == {1, 3, 6}
    assert counts == {s: (s in (1, 3, 6),) * 2 for s in range(1, 8)}
    assert [name for name, _ in one.told()] == ["Protected"]


def test_a_job_that_falls_to_one_replica_says_so_and_is_protected_again(tmp_path: Path) -> None:
    both = {0: ("r0h0", "r0h0", "r0h1", "r0h1"), 1: ("r1h0", "r1h0", "r1h1", "r1h1")}
    one = Rank(tmp_path, 1, 0, 2)
    one.keeper.configure(grant(1, 0, both))
    assert one.agent.owed == [()]
    one.keeper.settled(state(0), True, CopyCost())
    assert one.told() == [], "replica 0 says it for both"
    one.keeper.mark_current(state(1))
    one.keeper.configure(grant(2, 1, {1: both[1]}))
    assert one.agent.owed[1:] == [((1, 2), (1, 3))]
    one.agent.answers = [kept((1, 2), (1, 3))]
    assert one.vote(2).kept
    one.keeper.settled(state(1), True, CopyCost())
    one.keeper.settled(state(2), True, CopyCost())
    assert [name for name, _ in one.told()] == ["Unprotected", "Protected"]
    one.keeper.configure(grant(3, 2, both, behind=[0]))
    assert len(one.agent.owed) == 2, "a replica that is behind is no copy"
    one.keeper.configure(grant(4, 3, both))
    assert one.agent.owed[2:] == [()]
    one.keeper.settled(state(3), True, CopyCost())
    one.keeper.settled(state(4), False, CopyCost())
    one.keeper.settled(state(5), False, CopyCost())
    assert [name for name, _ in one.told()] == ["Unprotected", "Protected", "Unprotected"]
    assert one.keepers() == [(2, {"r1h0": "2-3", "r1h1": "0-1"}), (0, {})]


def test_a_replica_on_standby_is_a_copy_and_says_so(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0, 2)
    one.keeper.configure(grant(1, 0, {0: ("g",) * 4, 1: ("h",) * 4}, standby=0))
    one.keeper.settled(state(0), True, CopyCost())
    assert (one.agent.owed, [name for name, _ in one.told()]) == ([()], ["Protected"])


@pytest.mark.parametrize(
    ("config", "members", "reason"),
    [
        ({}, {0: ("h",) * 4, 1: ("h",) * 4}, "2 copies on different hosts are wanted; hosts that can keep one: 1"),
        ({"copied": False}, {0: ("h",) * 4, 1: ("g",) * 4}, "state.snapshot is on_demand"),
        ({"copies": 1}, {0: ("h",) * 4}, "each shard is wanted on 1 host alone"),
        ({"apart": "rack"}, {0: ("a/h",) * 4, 1: ("a/g",) * 4}, "2 copies on different racks are wanted"),
    ],
)
def test_what_cannot_be_protected_by_default_is_said_once(tmp_path, config, members, reason) -> None:
    told = []
    for replica in members:
        one = Rank(tmp_path, replica, 0, len(members), **config)
        one.keeper.configure(grant(1, 0, members))
        for step in range(3):
            one.keeper.settled(state(step), True, CopyCost())
        assert one.errors == []
        assert one.agent.orders == []
        told += one.told()
    ((name, why),) = told
    assert name == "Unprotected"
    assert why.startswith(reason)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"copies": 3}, True),
        ({"copies": 2}, False),
        ({"copies": 2, "apart": "zone"}, True),
        ({"copies": None, "apart": "zone"}, False),
        ({"copies": 2, "budget_gb": 2e-6}, True),  # room for one shard of the two that a host has to keep
        ({"copies": 2, "budget_gb": 4e-6}, False),
    ],
)
def test_an_explicit_number_that_the_hosts_cannot_hold_is_an_error_once_all_are_there(
    tmp_path: Path, config: dict[str, Any], refused: bool
) -> None:
    members = {0: ("a/b/r0h0",) * 2 + ("a/c/r0h1",) * 2}
    one = Rank(tmp_path, 0, 3, **config)
    one.keeper.configure(grant(1, 0, members))
    one.keeper.configure(grant(2, 0, members))
    assert len(one.errors) == refused
    if refused:
        assert str(one.errors[0]).startswith(f"memory.copies: got {config['copies']}; allowed: at most ")
        assert "\n" not in str(one.errors[0])
        assert one.errors[0].exit_code == 64
    early = Rank(tmp_path, 0, 2, 2, **config)
    early.keeper.configure(grant(1, 0, members))
    assert early.errors == [], "the other replica may still bring its hosts"


@pytest.mark.parametrize(
    ("first_life", "members"),
    [
        (False, {0: ("r0h0",) * 4}),  # it came back on one host, on Ray for example
        (False, {0: ("r0h0",) * 4, 1: ("r1h0",) * 2}),  # the other one shrank
        (True, {0: ("r0h0",) * 4, 1: ("r0h0",) * 2}),  # the other one shrank before both have trained together
    ],
)
def test_an_explicit_number_that_hosts_that_are_left_cannot_hold_ends_nothing(
    tmp_path: Path, first_life: bool, members: dict[int, tuple[str, ...]]
) -> None:
    one = Rank(tmp_path, 0, 0, len(members), copies=3, first_life=first_life)
    one.keeper.configure(grant(3, 5, members))
    for step in (5, 6):
        one.keeper.settled(state(step), True, CopyCost())
    assert one.errors == []
    ((name, why),) = one.told()
    assert (name, why.startswith("3 copies on different hosts are wanted")) == ("Unprotected", True)


def test_a_budget_without_room_for_one_shard_is_refused() -> None:
    assert checked_room(None, SHARDS) == checked_room(1.0, SHARDS) == MAX_COPIES, "an agent takes no more"
    assert checked_room(6e-6, SHARDS) == 3
    with pytest.raises(ConfigError, match=r"memory.budget_gb: got 1e-06; allowed: at least 2e-06 \(2 copies"):
        checked_room(1e-6, SHARDS)


def test_hosts_that_are_not_known_hold_no_copies(tmp_path: Path) -> None:
    one = Rank(tmp_path, 0, 0)
    unknown = grant(1, 0, TWO_HOSTS)
    one.keeper.configure(replace(unknown, members=tuple(replace(m, hosts=()) for m in unknown.members)))
    assert one.vote(1).kept
    one.keeper.settled(state(0), True, CopyCost())
    assert one.told() == [("Unprotected", "the hosts of the ranks are not known")]


def test_copies_that_hold_up_the_steps_become_fewer_on_all_ranks_alike(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0, rank) for rank in range(4)]
    for one in ranks:
        assert not one.keeper.sources
        one.keeper.configure(grant(1, 0, TWO_HOSTS))
        assert one.keeper.sources
    slow = CopyCost(waited_s=2.0, step_s=10.0)
    for step in range(1, 4):
        assert all(one.keeper.settled(state(step), True, slow) for one in ranks)
    for one in ranks:
        ordered = len(one.agent.orders)
        one.keeper.mark_current(state(5))
        assert len(one.agent.orders) == ordered, "a state that is not copied"
        assert not one.keeper.settled(state(5), False, CopyCost(step_s=10.0)), "it settles nothing"
        one.keeper.mark_current(state(6))
        assert len(one.agent.orders) == ordered + 2 * (one is ranks[0] or one is ranks[2])
    slowed = [[row["reason"] for row in one.paced() if not row["over"]] for one in ranks]
    assert slowed == [["a step of 10 s waited 2 s for the copies of a state"], [], [], []]
    for step in range(6, 300, 2):
        assert all(one.keeper.settled(state(step), True, CopyCost(step_s=10.0)) for one in ranks)
    assert any(row["over"] for row in ranks[0].paced())
    ranks[0].keeper.configure(grant(2, 300, {0: TWO_HOSTS[0], 1: ("r1h0", "r1h0", "r1h1", "r1h1")}))
    assert not ranks[0].keeper.sources, "the other replica is a copy"


RACKS = {0: ("a/r0h0",) * 4, 1: ("a/r1h0", "a/r1h0", "b/r1h1", "b/r1h1")}  # r1h1 keeps shards 0 and 1 of replica 0


def test_replicas_that_keep_copies_for_each_other_copy_the_same_states(tmp_path: Path) -> None:
    owner, holder = (Rank(tmp_path, replica, rank, 2, apart="rack") for replica, rank in ((0, 0), (1, 2)))
    for one in (owner, holder):
        one.keeper.configure(grant(1, 0, RACKS))
        for step in range(1, 10):
            assert one.keeper.settled(state(step), True, CopyCost(waited_s=1.0, step_s=10.0, late=True))
            one.keeper.mark_current(state(step))
    assert [step for step, rank, _ in holder.agent.orders if rank == 0] == list(range(1, 10))
    assert owner.told() == [("Protected", "all shards of step 1 that replica 0 has to keep are in memory")]


def test_copies_that_were_fewer_are_of_each_state_when_another_replica_keeps_some(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0, rank, 2, apart="rack") for rank in (0, 2)]
    for one in ranks:
        one.keeper.configure(grant(1, 0, {0: ("a/h0", "a/h0", "b/h1", "b/h1")}))
        for step in range(1, 4):
            one.keeper.settled(state(step), True, CopyCost(waited_s=1.0, step_s=10.0, late=True))
        assert not one.keeper.settled(state(5), False, CopyCost()), "fewer states are copied"
        one.keeper.configure(grant(2, 5, RACKS))
        assert one.keeper.settled(state(7), True, CopyCost())
    assert [sum(row["over"] for row in one.paced()) for one in ranks] == [1, 0]


@pytest.mark.parametrize(
    ("wait_s", "waited_s", "step_s"), [(0, 0.0, 0.1), (0.05, 0.05, 0.1), (0.25, 0.25, 0.1), (None, 2.0, 150.0)]
)
def test_copies_that_are_never_complete_become_fewer(tmp_path, wait_s, waited_s, step_s) -> None:
    """The copies of the next state end them: copies of each state would never protect the job."""
    ranks = [Rank(tmp_path, 0, rank, wait_s=wait_s) for rank in range(2)]
    cost = CopyCost(waited_s, step_s=step_s, late=True)
    for one in ranks:
        one.keeper.configure(grant(1, 0, TWO_HOSTS))
        for step in range(1, 4):
            assert one.keeper.settled(state(step), False, cost)
        assert not one.keeper.settled(state(5), False, cost), "it is not copied"
    slowed = [[row["reason"] for row in one.paced() if not row["over"]] for one in ranks]
    why = f"a step of {step_s:g} s waited {waited_s:g} s for the copies of a state, which were not complete then"
    assert slowed == [[why], []]


def test_no_host_is_asked_for_more_copies_than_its_agent_takes(tmp_path: Path) -> None:
    count = 2 * (MAX_COPIES + 1)
    errors: list[ConfigError] = []
    agent: Any = Agent()
    journal = Journal(tmp_path / "events.jsonl")
    shards = [CopiedShard(LAYOUT, 1000)] * count
    planner = CopyPlanner(0, 0, MemoryConfig(), shards, 60.0)
    keeper = CopyKeeper(planner, 1, agent, journal, errors.append)
    keeper.configure(grant(1, 0, {0: tuple(f"h{2 * rank // count}" for rank in range(count))}))
    keeper.mark_current(state(0))
    assert len(agent.owed[0]) == len(agent.orders) == MAX_COPIES
    keeper.settled(state(0), True, CopyCost())
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert ([row["event"] for row in told], errors) == (["CopiesPlanned", "Unprotected"], [])


def test_without_a_thread_to_wait_for_copies_a_rank_votes_at_once(tmp_path, monkeypatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = Rank(tmp_path, 0, 0)
    one.keeper.configure(grant(1, 0, TWO_HOSTS))
    one.keeper.settled(state(0), True, CopyCost())
    one.agent.answers = [kept((0, 2), (0, 3))]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert not one.vote(1).kept
    assert one.vote(1).kept
