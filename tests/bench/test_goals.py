from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import rings
from ft_hsdp.bench import allreduce as ftar
from ft_hsdp.bench.results import KIB, MIB, WARM_UP, interleave
from tests.support.bench.tables import shown


def bandwidth(members: int, size: int, **ms: float) -> dict[str, Any]:
    return {
        "members": members,
        "bytes": size,
        "rounds": 20,
        "contenders": {name: {"p50_ms": value} for name, value in ms.items()},
    }


TIMES = {"p50_ms": 20.0, "min_ms": 1.0, "max_ms": 151.0, "count": 20}
RESULT: dict[str, Any] = {
    "contenders": {"tcp": "FTAR over TCP"},
    "notes": ["torchft is left out of bandwidth: [not] installed"],
    "bandwidth": [
        bandwidth(n, size, tcp=22.4, shm=10.0, c10d=61.0, gloo=50.0, torchft=40.0)
        for n in (2, 4)
        for size in (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    ],
}
RINGS: dict[str, Any] = {
    "kill": [
        {
            "contender": "shm",
            "members": members,
            "bytes": 64 * MIB,
            "kills": 20,
            "raise": TIMES,
            "next": TIMES,
            "next_less_one": TIMES,
        }
        for members in (8, 4)
    ],
    "reconfigure": [
        {"contender": who, "members": 4, "change": "same", **TIMES, "p50_ms": 9.0} for who in ("tcp", "torchft")
    ],
}


def test_every_goal_is_set_beside_its_figure() -> None:
    found = [*ftar.goals(RESULT), *rings.goals(RINGS)]
    seen = {(v.text, v.members, v.bytes): (v.seen, v.met) for v in found}
    expected = {
        ("tcp vs gloo, times as fast", 2, 64 * MIB): (2.232, True),
        ("tcp vs torchft, times as fast", 2, 256 * MIB): (1.786, False),
        ("tcp vs torchft, times as fast", 4, 256 * MIB): (1.786, True),
        ("shm vs gloo, times as fast", 2, 64 * MIB): (5.0, True),
        ("c10d vs gloo, times as fast", 4, 64 * MIB): (0.82, False),
        ("c10d vs gloo, times the latency", 4, 64 * KIB): (1.22, True),
        ("shm: kill to raise, p50 ms", 8, 64 * MIB): (20.0, True),
        ("shm: kill to raise, max ms", 8, 64 * MIB): (151.0, False),
        ("shm: kill to next sum - 1, max ms", 4, 64 * MIB): (151.0, False),
        ("tcp reconfigures, same order, ms", 4, None): (9.0, True),
    }
    assert expected.items() <= seen.items()
    assert len(seen) == 2 * (2 * 4 + 2 * 3) + 3 + 1
    assert not any(v.bytes == MIB for v in found)


def test_tables_fit_80_columns_and_show_misses_and_notes() -> None:
    text = shown(RESULT, ftar.goals(RESULT))
    lines, found = text.partition("Goals")[2].splitlines(), list(ftar.goals(RESULT))
    assert len([line for line in lines if line.rstrip().endswith(("met", "missed"))]) == len(found)
    assert len(lines) == len(found) + 6  # no line is broken
    assert "[not] installed" in text
    assert text.count("\nbandwidth:\n") == 2 * 6
    assert "next_less_one" in shown(RINGS, rings.goals(RINGS))


def test_rounds_are_interleaved_and_begin_in_turn() -> None:
    calls: list[str] = []

    def sample(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = interleave({name: partial(sample, name) for name in "abc"}, 2)
    rounds = ["".join(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert len(rounds) == WARM_UP + 2
    assert {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert {r[0] for r in rounds} == {"a", "b", "c"}
    first = 3 * WARM_UP + 1
    assert sorted(v for both in values.values() for v in both) == [float(n) for n in range(first, first + 6)]
