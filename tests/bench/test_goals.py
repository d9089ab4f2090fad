from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import allreduce as ftar
from benchmarks.results import KIB, MIB, WARM_UP, interleave


def bandwidth(members: int, size: int, **ms: float) -> dict[str, Any]:
    return {
        "members": members,
        "bytes": size,
        "rounds": 20,
        "contenders": {name: {"p50_ms": value} for name, value in ms.items()},
    }


RESULT: dict[str, Any] = {
    "contenders": {"tcp": "FTAR over TCP"},
    "notes": ["torchft is left out of bandwidth: [not] installed"],
    "bandwidth": [
        bandwidth(n, size, tcp=22.4, shm=10.0, c10d=61.0, gloo=50.0, torchft=40.0)
        for n in (2, 4)
        for size in (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    ],
}


def test_every_goal_is_set_beside_its_figure() -> None:
    found = [*ftar.goals(RESULT)]
    seen = {(v.text, v.members, v.bytes): (v.seen, v.met) for v in found}
    expected = {
        ("tcp vs gloo, times as fast", 2, 64 * MIB): (2.232, True),
        ("tcp vs torchft, times as fast", 2, 256 * MIB): (1.786, False),
        ("tcp vs torchft, times as fast", 4, 256 * MIB): (1.786, True),
        ("shm vs gloo, times as fast", 2, 64 * MIB): (5.0, True),
        ("c10d vs gloo, times as fast", 4, 64 * MIB): (0.82, False),
        ("c10d vs gloo, times the latency", 4, 64 * KIB): (1.22, True),
    }
    assert expected.items() <= seen.items()
    assert len(seen) == 2 * (2 * 4 + 2 * 3)
    assert not any(v.bytes == MIB for v in found)


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
