"""Copies in host memory in every order of snapshots, pulls, votes and lost hosts; and with broken rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.memory import recovery, replacement
from ft_hsdp.memory.copies import MemberHosts, Plan, Refusal, missing_copies, move_refused
from ft_hsdp.memory.hosts import Host, Level
from ft_hsdp.memory.recovery import Holding, Recoverable
from ft_hsdp.memory.replacement import Assignment, RankClaim
from ft_hsdp.state.agent.slots import SlotPhase, SnapshotSlots
from tests.model import copy_model, copy_world
from tests.model.copies import LARGE, CopySpace
from tests.model.copy_world import CopyBounds, CopyWorld, Move, has
from tests.model.explore import Exploration, search


def explored(limit_s: float = 60, **bounds: Any) -> Exploration:
    return search(CopySpace(CopyBounds(**bounds)), limit_s)


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        ({"hosts": 2, "losses": 2}, 5_000),
        ({"hosts": 2, "losses": 1, "skips": 1, "hurries": 1, "steps": 2}, 5_000),
        ({"replicas": 2, "hosts": 1, "losses": 2, "steps": 2}, 300),
        ({"replicas": 2, "hosts": 2, "losses": 1, "steps": 1}, 3_000),
        ({"replicas": 2, "hosts": 2, "racks": 1, "level": "rack", "losses": 1, "steps": 1}, 400),
        ({"replicas": 2, "hosts": 2, "copies": 3, "losses": 1, "steps": 1}, 10_000),
        ({"hosts": 2, "spares": 1, "losses": 2, "steps": 2}, 4_000),
        ({"hosts": 2, "spares": 1, "losses": 1, "strays": 1, "steps": 2}, 1_000),
        ({"hosts": 2, "spares": 1, "partitions": 1, "losses": 1, "steps": 1}, 1_000),
        ({"replicas": 2, "hosts": 2, "spares": 1, "losses": 1, "steps": 1}, 5_000),
        ({"replicas": 2, "hosts": 1, "spares": 1, "losses": 2, "crashes": 1, "strays": 1, "steps": 2}, 20_000),
        ({"hosts": 2, "every": 2, "losses": 1, "crashes": 1}, 5_000),
        ({"hosts": 2, "every": 3, "losses": 1, "steps": 5}, 1_000),
        ({"hosts": 3, "losses": 0, "refusals": 1}, 9_000),
        ({"replicas": 2, "hosts": 2, "copies": 3, "losses": 0, "refusals": 2, "steps": 2}, 3_000),
    ],
)
def test_no_violation_in_small_spaces(bounds: dict[str, Any], least: int) -> None:
    result = explored(**bounds)
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states > least


@pytest.mark.soak
@pytest.mark.parametrize(
    "bounds",
    [
        {"hosts": 4, "losses": 2, "steps": 2},
        {"hosts": 4, "racks": 2, "level": "rack", "losses": 2, "steps": 2},
        {"hosts": 3, "losses": 2, "skips": 1},
        {"hosts": 3, "copies": 3, "losses": 2, "steps": 2},
        {"replicas": 2, "hosts": 2, "losses": 2, "steps": 2, "skips": 1},
        {"hosts": 3, "spares": 2, "losses": 2, "strays": 1, "steps": 2},
        {"hosts": 3, "spares": 1, "every": 2, "losses": 2, "crashes": 1},
        {"hosts": 3, "spares": 1, "losses": 1, "partitions": 1, "steps": 2},
        {"hosts": 3, "losses": 1, "refusals": 1, "steps": 2},
    ],
)
def test_no_violation_in_large_spaces(bounds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = explored(240, **bounds)
    with capsys.disabled():
        print(f"\n{bounds}: {result}")
    assert not result.violation, str(result)
    assert result.states > 300_000


@pytest.mark.soak
def test_no_violation_in_the_space_that_the_command_explores() -> None:
    result = search(CopySpace(LARGE), 240)
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states > 300_000


def test_every_move_is_told_in_a_sentence() -> None:
    space = CopySpace(
        CopyBounds(2, spares=1, losses=1, partitions=1, crashes=1, strays=1, skips=1, hurries=1, refusals=1)
    )
    seen: set[CopyWorld] = set()
    todo = [space.initial()]
    told = set()
    while todo and len(seen) < 3_000:
        world = todo.pop(0)
        for label, happen in space.successors(world):
            told.add(re.sub(r"\(\d, \d\)|r\dh\d|\d", "X", label))
            after = happen()
            if after not in seen:
                seen.add(after)
                todo.append(after)
    assert all(len(label.split()) >= 3 for label in told)
    assert len(told) > 12


Break = Callable[[pytest.MonkeyPatch], None]


def no_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank votes as soon as it has its own snapshot."""
    monkeypatch.setattr(Plan, "kept_by", lambda plan, host: ())


def behind_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has just returned counts as a copy of what it does not have yet."""

    def planned(members: Sequence[MemberHosts], count: int, level: Level) -> Plan:
        return missing_copies([replace(member, healthy=True) for member in members], count, level)

    monkeypatch.setattr(copy_model, "missing_copies", planned)


def racks_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are on different hosts of one rack."""
    monkeypatch.setattr(
        copy_model, "missing_copies", lambda members, count, level: missing_copies(members, count, "host")
    )


def newest_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is written over the newest complete one."""

    def usable(slots: SnapshotSlots, now: float) -> list[Any]:
        return [slot for slot in slots._slots.values() if slot.phase is SlotPhase.FREE] + slots._complete()

    monkeypatch.setattr(SnapshotSlots, "_usable", usable)


def settled_by_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank left out counts as settled on the others."""
    settle = SnapshotSlots.mark_settled
    monkeypatch.setattr(SnapshotSlots, "mark_settled", lambda slots, state, everywhere: settle(slots, state, True))


def states_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest shard of each rank is taken, whatever state it is of."""

    def newest(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
        rows = list(rows)
        best = [
            max((row for row in rows if row.rank == rank), key=lambda row: row.state.step, default=None)
            for rank in range(len(layouts))
        ]
        if None in best:
            return recovery.newest(rows, replica, layouts, hosts)
        newest_row = max((row for row in best if row is not None), key=lambda row: row.state.step)
        return Recoverable(newest_row.state, tuple((row,) for row in best if row is not None))

    monkeypatch.setattr(copy_model, "newest", newest)


def oldest_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job comes back with a state that is older than it has to be."""

    def oldest(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
        rows = list(rows)
        first = min((row.state.step for row in rows), default=0)
        return recovery.newest([row for row in rows if row.state.step == first], replica, layouts, hosts)

    monkeypatch.setattr(copy_model, "newest", oldest)


def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard has one slot, whatever is in it."""
    monkeypatch.setattr(SnapshotSlots, "_usable", lambda slots, now: list(slots._slots.values()))


def before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank copies its shard of a step before the step is committed."""
    of_rank = CopySpace._of_rank

    def hasty(space: CopySpace, w: CopyWorld, i: int, live: copy_world.Step, plan: Plan) -> Iterable[Move]:
        yield from of_rank(space, w, i, live, plan)
        following = (w.epoch, w.head[1] + 1)
        if live == w.head and w.votes[i] and not has(w, w.places[i], i, following):
            yield "a shard is copied too early", lambda: space.snapshot(w, i, following)

    monkeypatch.setattr(CopySpace, "_of_rank", hasty)


def each_relies_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both replicas take it that the other one makes the copies that they lack together."""

    def planned(members: Sequence[MemberHosts], count: int, level: Level) -> Plan:
        plan = missing_copies(members, count, level)
        return Plan((), plan.unprotected, "") if len(members) > 1 else plan

    monkeypatch.setattr(copy_model, "missing_copies", planned)


def steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two states with the highest step, that of the older epoch is restored."""

    def highest(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
        rows = sorted(rows, key=lambda row: (-row.state.step, row.state.commit_epoch))
        for state in dict.fromkeys(row.state for row in rows):
            found = recovery.newest([row for row in rows if row.state == state], replica, layouts, hosts)
            if found is not None:
                return found
        return None

    monkeypatch.setattr(copy_model, "newest", highest)


def lost_host_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost host keeps its place."""

    def kept(replicas: Any, lost: Any, spares: Any, level: Level) -> dict[int, Assignment]:
        return {r: Assignment(tuple(hosts), ()) for r, hosts in replicas.items()}

    monkeypatch.setattr(copy_model, "assign", kept)


def spare_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica gets the first spare host."""

    def given(replicas: Any, lost: Any, spares: Any, level: Level) -> dict[int, Assignment]:
        return {r: replacement.assign({r: hosts}, lost, spares, level)[r] for r, hosts in replicas.items()}

    monkeypatch.setattr(copy_model, "assign", given)


def lost_spare_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare host that is lost is given."""

    def given(replicas: Any, lost: Any, spares: Any, level: Level) -> dict[int, Assignment]:
        every = [*spares, Host("", "", "s0")]
        places = {name for name in lost if name[0] == "r"}
        return replacement.assign(replicas, places, list(dict.fromkeys(every)), level)

    monkeypatch.setattr(copy_model, "assign", given)


def copies_stay_with_the_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies do not follow a rank to its spare host: the plan names the hosts with which the job began."""
    planned = CopySpace._planned
    monkeypatch.setattr(
        CopySpace, "_planned", lambda space, well, alive, _, told: planned(space, well, alive, (0, 1), told)
    )


def older_starts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a rank of an earlier start is let in."""

    def alike(claims: Sequence[RankClaim]) -> str:
        return replacement.disagreement([replace(claim, incarnation="", hosts=()) for claim in claims])

    monkeypatch.setattr(copy_model, "disagreement", alike)


def any_seat_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a rank is let in a second time, in the place of another one."""

    def seated(claims: Sequence[RankClaim]) -> str:
        moved = [replace(claim, rank=seat, host=claim.hosts[seat]) for seat, claim in enumerate(claims)]
        return replacement.disagreement(moved)

    monkeypatch.setattr(copy_model, "disagreement", seated)


def not_copied_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is not copied counts as left out, so the next snapshot is written over it."""
    commit = CopySpace.commit

    def committed(space: CopySpace, w: CopyWorld, voting: list[int], plan: Plan) -> CopyWorld:
        after = commit(space, w, voting, plan)
        return after._replace(settled=tuple(bool(each) for each in after.settled))

    monkeypatch.setattr(CopySpace, "commit", committed)


def every_state_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit after a state that is not copied says that it is kept."""
    monkeypatch.setattr(CopySpace, "is_told", lambda space, w, plan, state: True)


def too_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many states are copied as are wanted."""
    copied = CopySpace.is_copied
    monkeypatch.setattr(
        CopySpace, "is_copied", lambda space, w, plan, state: copied(space, w, plan, state) and state[1] % 4 == 0
    )


def refused_copies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy stays with the host that refuses it, whatever a commit says."""
    monkeypatch.setattr(copy_model, "move_refused", lambda members, plan, level, refusals: plan)


def refused_is_owed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank does not wait for the copy that its host refuses, before a commit has moved it."""
    vote = CopySpace.vote

    def alone(space: CopySpace, w: CopyWorld, i: int, kept: bool, refused: Iterable[tuple[int, int]]) -> CopyWorld:
        return vote(space, w, i, kept or bool(refused), refused)

    monkeypatch.setattr(CopySpace, "vote", alone)


def moved_into_its_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused copy moves to any other host, also in the rack of its owner."""

    def moved(members: Sequence[MemberHosts], plan: Plan, level: Level, refusals: Sequence[Refusal]) -> Plan:
        return move_refused(members, plan, "host", refusals)

    monkeypatch.setattr(copy_model, "move_refused", moved)


def moved_copies_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that refuses a shard frees what it has of it, before the next host has a copy."""
    commit = CopySpace.commit

    def committed(space: CopySpace, w: CopyWorld, voting: list[int], plan: Plan) -> CopyWorld:
        after = commit(space, w, voting, plan)
        for owner, holder in after.refusing:
            after = space._free(after, holder, owner)
        return after

    monkeypatch.setattr(CopySpace, "commit", committed)


@pytest.mark.parametrize(
    ("broken", "bounds", "found"),
    [
        (no_wait_for_copies, {"hosts": 2, "losses": 1}, "not apart"),
        (behind_is_a_copy, {"replicas": 2, "hosts": 2, "losses": 1, "steps": 2}, "not apart"),
        (racks_unknown, {"hosts": 4, "racks": 2, "level": "rack", "losses": 0, "steps": 1}, "not apart"),
        (newest_overwritten, {"hosts": 2, "losses": 1}, "lost"),
        (settled_by_its_own_rank, {"hosts": 2, "losses": 1, "skips": 1}, "lost"),
        (states_mixed, {"hosts": 2, "losses": 1}, "mixed"),
        (oldest_restored, {"hosts": 2, "losses": 1}, "lost"),
        (one_slot, {"hosts": 2, "losses": 1}, "lost"),
        (before_the_commit, {"hosts": 2, "losses": 1}, "not apart"),
        (
            each_relies_on_the_other,
            {"replicas": 2, "hosts": 2, "copies": 3, "losses": 0, "steps": 1},
            "not apart",
        ),
        (
            steps_alone,
            {"hosts": 1, "copies": 1, "spares": 1, "losses": 0, "partitions": 1, "crashes": 1, "steps": 2},
            "lost",
        ),
        (lost_host_placed, {"hosts": 2, "spares": 1, "losses": 1}, "misplaced"),
        (lost_spare_given, {"hosts": 2, "spares": 1, "losses": 2}, "misplaced"),
        (spare_given_twice, {"replicas": 2, "hosts": 1, "spares": 1, "losses": 2, "steps": 1}, "misplaced"),
        (copies_stay_with_the_lost_host, {"hosts": 2, "spares": 1, "losses": 1}, "not apart"),
        (older_starts_pass, {"hosts": 2, "losses": 1, "strays": 1, "steps": 1}, "two gangs"),
        (any_seat_will_do, {"hosts": 2, "losses": 1, "strays": 1, "steps": 1}, "no gang"),
        (not_copied_is_left_out, {"hosts": 2, "every": 2, "losses": 0, "crashes": 1}, "thrown away"),
        (every_state_is_told, {"hosts": 2, "every": 2, "losses": 0}, "not apart"),
        (too_few_states, {"hosts": 2, "every": 2, "losses": 0, "steps": 7}, "too seldom"),
        (refused_copies_stay, {"hosts": 3, "losses": 0, "refusals": 1}, "not protected"),
        (refused_is_owed_no_more, {"hosts": 3, "losses": 0, "refusals": 1, "steps": 2}, "not apart"),
        (moved_into_its_rack, {"hosts": 3, "racks": 2, "level": "rack", "losses": 0, "refusals": 1}, "not apart"),
        (moved_copies_freed_at_once, {"hosts": 2, "losses": 1, "refusals": 1}, "lost"),
    ],
)
def test_a_broken_rule_is_found(
    broken: Break, bounds: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_world.forget_slots()
    broken(monkeypatch)
    result = search(CopySpace(CopyBounds(**bounds)), 40, liveness=False)
    copy_world.forget_slots()
    assert result.violation.startswith(found), str(result)
