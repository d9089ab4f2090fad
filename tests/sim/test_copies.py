"""Copies in host memory in every order of snapshots, pulls, votes and lost hosts; and with broken rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.memory import recovery
from ft_hsdp.memory.copies import MemberHosts, Plan, missing_copies
from ft_hsdp.memory.hosts import Level
from ft_hsdp.memory.recovery import Holding, Recoverable
from ft_hsdp.sim import copies
from ft_hsdp.sim.copies import CopyBounds, CopySpace
from ft_hsdp.sim.explore import Exploration, search
from ft_hsdp.state.agent.slots import SlotPhase, SnapshotSlots


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
    ],
)
def test_no_violation_in_large_spaces(bounds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = explored(240, **bounds)
    with capsys.disabled():
        print(f"\n{bounds}: {result}")
    assert not result.violation, str(result)
    assert result.states > 300_000


def test_every_move_is_told_in_a_sentence() -> None:
    space = CopySpace(CopyBounds(replicas=2, hosts=2, losses=1, skips=1, hurries=1))
    seen, todo = set(), [space.initial()]
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
    assert len(told) > 8


Break = Callable[[pytest.MonkeyPatch], None]


def no_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank votes as soon as it has its own snapshot."""
    monkeypatch.setattr(Plan, "kept_by", lambda plan, host: ())


def behind_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has just returned counts as a copy of what it does not have yet."""

    def planned(members: Sequence[MemberHosts], count: int, level: Level) -> Plan:
        return missing_copies([replace(member, healthy=True) for member in members], count, level)

    monkeypatch.setattr(copies, "missing_copies", planned)


def racks_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are on different hosts of one rack."""
    monkeypatch.setattr(
        copies, "missing_copies", lambda members, count, level: missing_copies(members, count, "host")
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

    monkeypatch.setattr(copies, "newest", newest)


def oldest_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job comes back with a state that is older than it has to be."""

    def oldest(rows: Iterable[Holding], replica: int, layouts: Sequence[str], hosts: Sequence[str]) -> Any:
        rows = list(rows)
        first = min((row.state.step for row in rows), default=0)
        return recovery.newest([row for row in rows if row.state.step == first], replica, layouts, hosts)

    monkeypatch.setattr(copies, "newest", oldest)


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
    ],
)
def test_a_broken_rule_is_found(
    broken: Break, bounds: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cached in (copies._stage, copies._settle):
        cached.cache_clear()
    broken(monkeypatch)
    result = search(CopySpace(CopyBounds(**bounds)), 40, liveness=False)
    for cached in (copies._stage, copies._settle):
        cached.cache_clear()
    assert result.violation.startswith(found), str(result)
