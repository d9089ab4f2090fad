"""Copies in host memory in every order of snapshots, pulls, votes and lost hosts; and with broken rules."""

from collections.abc import Iterable, Sequence
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
from tests.model.mutants import Mutant, broken


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
        ({"hosts": 2, "every": 3, "losses": 1, "own_slots": 2, "steps": 7}, 2_000),
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


# Each rule is there because copies are lost without it.


def _behind_is_a_copy(members: Sequence[MemberHosts], count: int, level: Level) -> Plan:
    return missing_copies([replace(member, healthy=True) for member in members], count, level)


def _racks_unknown(members: Sequence[MemberHosts], count: int, level: Level) -> Plan:
    return missing_copies(members, count, "host")


def _each_relies_on_the_other(members: Sequence[MemberHosts], count: int, level: Level) -> Plan:
    plan = missing_copies(members, count, level)
    return Plan((), plan.unprotected, "") if len(members) > 1 else plan


def _newest_overwritten(self: SnapshotSlots, now: float, last: bool) -> list[Any]:
    return [slot for slot in self._slots.values() if slot.phase is SlotPhase.FREE] + self._complete()


def _one_slot(self: SnapshotSlots, now: float, last: bool) -> list[Any]:
    return list(self._slots.values())


def _states_mixed(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
    rows = list(rows)
    best = [
        max((row for row in rows if row.rank == rank), key=lambda row: row.state.step, default=None)
        for rank in range(len(layouts))
    ]
    if None in best:
        return recovery.newest(rows, replica, layouts, hosts)
    newest_row = max((row for row in best if row is not None), key=lambda row: row.state.step)
    return Recoverable(newest_row.state, tuple((row,) for row in best if row is not None))


def _oldest_restored(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
    rows = list(rows)
    first = min((row.state.step for row in rows), default=0)
    return recovery.newest([row for row in rows if row.state.step == first], replica, layouts, hosts)


def _steps_alone(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
    rows = sorted(rows, key=lambda row: (-row.state.step, row.state.commit_epoch))
    for state in dict.fromkeys(row.state for row in rows):
        found = recovery.newest([row for row in rows if row.state == state], replica, layouts, hosts)
        if found is not None:
            return found
    return None


def _before_the_commit(self: CopySpace, w: CopyWorld, i: int, live: copy_world.Step, plan: Plan) -> Iterable[Move]:
    yield from OF_RANK(self, w, i, live, plan)
    following = (w.epoch, w.head[1] + 1)
    if live == w.head and w.votes[i] and not has(w, w.places[i], i, following):
        yield "a shard is copied too early", lambda: self.snapshot(w, i, following)


def _lost_host_placed(replicas: Any, lost: Any, spares: Any, level: Level) -> dict[int, Assignment]:
    return {r: Assignment(tuple(hosts), ()) for r, hosts in replicas.items()}


def _spare_given_twice(replicas: Any, lost: Any, spares: Any, level: Level) -> dict[int, Assignment]:
    return {r: replacement.assign({r: hosts}, lost, spares, level)[r] for r, hosts in replicas.items()}


def _lost_spare_given(replicas: Any, lost: Any, spares: Any, level: Level) -> dict[int, Assignment]:
    every = [*spares, Host("", "", "s0")]
    places = {name for name in lost if name[0] == "r"}
    return replacement.assign(replicas, places, list(dict.fromkeys(every)), level)


def _older_starts_pass(claims: Sequence[RankClaim]) -> str:
    return replacement.disagreement([replace(claim, incarnation="", hosts=()) for claim in claims])


def _any_seat_will_do(claims: Sequence[RankClaim]) -> str:
    moved = [replace(claim, rank=seat, host=claim.hosts[seat]) for seat, claim in enumerate(claims)]
    return replacement.disagreement(moved)


def _not_copied_is_left_out(self: CopySpace, w: CopyWorld, voting: list[int], plan: Plan) -> CopyWorld:
    after = COMMIT(self, w, voting, plan)
    return after._replace(settled=tuple(bool(each) for each in after.settled))


def _moved_copies_freed_at_once(self: CopySpace, w: CopyWorld, voting: list[int], plan: Plan) -> CopyWorld:
    after = COMMIT(self, w, voting, plan)
    for owner, holder in after.refusing:
        after = self._free(after, holder, owner)
    return after


def _too_few_states(self: CopySpace, w: CopyWorld, plan: Plan, state: copy_world.Step) -> bool:
    return IS_COPIED(self, w, plan, state) and state[1] % 4 == 0


def _refused_is_owed_no_more(
    self: CopySpace, w: CopyWorld, i: int, kept: bool, refused: Iterable[tuple[int, int]]
) -> CopyWorld:
    return VOTE(self, w, i, kept or bool(refused), refused)


def _moved_into_its_rack(
    members: Sequence[MemberHosts], plan: Plan, level: Level, refusals: Sequence[Refusal]
) -> Plan:
    return move_refused(members, plan, "host", refusals)


OF_RANK, PLANNED, COMMIT, VOTE = CopySpace.of_rank, CopySpace.planned, CopySpace.commit, CopySpace.vote
IS_COPIED, SETTLE = CopySpace.is_copied, SnapshotSlots.mark_settled
MUTANTS: dict[str, Mutant] = {
    "a rank votes as soon as it has its own snapshot": Mutant.of(
        "not apart", {"hosts": 2, "losses": 1}, (Plan, "kept_by", lambda plan, host: ())
    ),
    "a replica that has just returned counts as a copy of what it does not have yet": Mutant.of(
        "not apart",
        {"replicas": 2, "hosts": 2, "losses": 1, "steps": 2},
        (copy_model, "missing_copies", _behind_is_a_copy),
    ),
    "copies are on different hosts of one rack": Mutant.of(
        "not apart",
        {"hosts": 4, "racks": 2, "level": "rack", "losses": 0, "steps": 1},
        (copy_model, "missing_copies", _racks_unknown),
    ),
    "a snapshot is written over the newest complete one": Mutant.of(
        "lost", {"hosts": 2, "losses": 1}, (SnapshotSlots, "_usable", _newest_overwritten)
    ),
    "what one rank left out counts as settled on the others": Mutant.of(
        "lost",
        {"hosts": 2, "losses": 1, "skips": 1},
        (SnapshotSlots, "mark_settled", lambda slots, state, everywhere: SETTLE(slots, state, True)),
    ),
    "the newest shard of each rank is taken, whatever state it is of": Mutant.of(
        "mixed", {"hosts": 2, "losses": 1}, (copy_model, "newest", _states_mixed)
    ),
    "a job comes back with a state that is older than it has to be": Mutant.of(
        "lost", {"hosts": 2, "losses": 1}, (copy_model, "newest", _oldest_restored)
    ),
    "a shard has one slot, whatever is in it": Mutant.of(
        "lost", {"hosts": 2, "losses": 1}, (SnapshotSlots, "_usable", _one_slot)
    ),
    "a rank copies its shard of a step before the step is committed": Mutant.of(
        "not apart", {"hosts": 2, "losses": 1}, (CopySpace, "of_rank", _before_the_commit)
    ),
    "both replicas take it that the other one makes the copies that they lack together": Mutant.of(
        "not apart",
        {"replicas": 2, "hosts": 2, "copies": 3, "losses": 0, "steps": 1},
        (copy_model, "missing_copies", _each_relies_on_the_other),
    ),
    "of two states with the highest step, that of the older epoch is restored": Mutant.of(
        "lost",
        {"hosts": 1, "copies": 1, "spares": 1, "losses": 0, "partitions": 1, "crashes": 1, "steps": 2},
        (copy_model, "newest", _steps_alone),
    ),
    "a lost host keeps its place": Mutant.of(
        "misplaced", {"hosts": 2, "spares": 1, "losses": 1}, (copy_model, "assign", _lost_host_placed)
    ),
    "a spare host that is lost is given": Mutant.of(
        "misplaced", {"hosts": 2, "spares": 1, "losses": 2}, (copy_model, "assign", _lost_spare_given)
    ),
    "each replica gets the first spare host": Mutant.of(
        "misplaced",
        {"replicas": 2, "hosts": 1, "spares": 1, "losses": 2, "steps": 1},
        (copy_model, "assign", _spare_given_twice),
    ),
    "the plan names the hosts with which the job began": Mutant.of(
        "not apart",
        {"hosts": 2, "spares": 1, "losses": 1},
        (CopySpace, "planned", lambda space, well, alive, _, told: PLANNED(space, well, alive, (0, 1), told)),
    ),
    "I1: a rank of an earlier start is let in": Mutant.of(
        "two gangs",
        {"hosts": 2, "losses": 1, "strays": 1, "steps": 1},
        (copy_model, "disagreement", _older_starts_pass),
    ),
    "I2: a rank is let in a second time, in the place of another one": Mutant.of(
        "no gang",
        {"hosts": 2, "losses": 1, "strays": 1, "steps": 1},
        (copy_model, "disagreement", _any_seat_will_do),
    ),
    "a state that is not copied counts as left out, so the next snapshot is written over it": Mutant.of(
        "thrown away",
        {"hosts": 2, "every": 2, "losses": 0, "crashes": 1},
        (CopySpace, "commit", _not_copied_is_left_out),
    ),
    "the commit after a state that is not copied says that it is kept": Mutant.of(
        "not apart",
        {"hosts": 2, "every": 2, "losses": 0},
        (CopySpace, "is_told", lambda space, w, plan, state: True),
    ),
    "half as many states are copied as are wanted": Mutant.of(
        "too seldom", {"hosts": 2, "every": 2, "losses": 0, "steps": 7}, (CopySpace, "is_copied", _too_few_states)
    ),
    "a copy stays with the host that refuses it, whatever a commit says": Mutant.of(
        "not protected",
        {"hosts": 3, "losses": 0, "refusals": 1},
        (copy_model, "move_refused", lambda members, plan, level, refusals: plan),
    ),
    "a rank does not wait for the copy that its host refuses, before a commit has moved it": Mutant.of(
        "not apart",
        {"hosts": 3, "losses": 0, "refusals": 1, "steps": 2},
        (CopySpace, "vote", _refused_is_owed_no_more),
    ),
    "a refused copy moves to any other host, also in the rack of its owner": Mutant.of(
        "not apart",
        {"hosts": 3, "racks": 2, "level": "rack", "losses": 0, "refusals": 1},
        (copy_model, "move_refused", _moved_into_its_rack),
    ),
    "the host that refuses a shard frees it before the next host has a copy": Mutant.of(
        "lost", {"hosts": 2, "losses": 1, "refusals": 1}, (CopySpace, "commit", _moved_copies_freed_at_once)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    copy_world.forget_slots()
    with broken(*mutant.patches):
        result = search(CopySpace(CopyBounds(**mutant.space)), 40, liveness=False)
    copy_world.forget_slots()
    assert result.violation.startswith(mutant.kind), str(result)
