from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from ft_hsdp.bench import goals
from ft_hsdp.bench.command import WIDTH, width_options
from ft_hsdp.bench.memory.lost import Loss
from ft_hsdp.bench.recovery.analysis import Kill
from ft_hsdp.bench.results import MIB, ProgressLog, spread
from ft_hsdp.bench.width import allreduce, blocks, lone, losses, pair, reshape
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.transfer import fetch, served_parts
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.reshape import sources
from tests.support.bench.tables import shown

EMPTY: dict[str, Any] = {name: [] for name in (*WIDTH, "loads")}


def test_all_measures_unless_one_is_named() -> None:
    options = width_options(Namespace(measure=None, rounds=None, sizes=None, kills=None))
    assert (options.measures, options.kills) == (WIDTH, 20)
    assert (options.sizes, options.gradients) == ((256 * MIB,), (64 * MIB,))
    with pytest.raises(ConfigError, match="reshape"):
        width_options(Namespace(measure="narrower", rounds=None, sizes=None, kills=None))


def test_another_number_of_ranks_beside_the_goals() -> None:
    took = {"ft_hsdp": spread([0.1, 0.2, 0.1]), "dcp": spread([0.3, 0.3, 0.4])}
    row: dict[str, Any] = {"bytes": 256 * MIB, "from": 4, "to": 3, "rounds": 3, "contenders": took}
    row |= {"times_as_fast": 3.0, "read_bytes": 1010, "least_bytes": 1000, "times_least": 1.01}
    assert [v.met for v in goals.width({**EMPTY, "reshape": [row]})] == [True, True]
    assert "1010 bytes read, 1.0100 times the least possible (1000)" in shown("width", {**EMPTY, "reshape": [row]})
    worse = {**row, "times_as_fast": 1.9, "times_least": 1.06}
    assert [v.met for v in goals.width({**EMPTY, "reshape": [worse]})] == [False, False]


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="what fits 5 times into"):
        reshape.reshape(1 << 60, 1, ProgressLog(io.StringIO()))


def test_the_state_is_as_large_as_asked_for_and_the_same_in_both_widths() -> None:
    found: dict[int, list[bytes]] = {}
    for width in reshape.WIDTHS:
        places = [reshape.layout(4 * MIB, width, rank) for rank in range(width)]
        assert sum(t.nbytes for place in places for t in place.tensors) == pytest.approx(4 * MIB, rel=0.05)
        cut = [reshape.tensors_of(place, width, rank) for rank, place in enumerate(places)]
        whole = [np.concatenate([each[number] for each in cut]) for number in range(reshape.TENSORS)]
        found[width] = [each.tobytes() for each in whole]
    assert found[4] == found[3]


def test_each_round_seals_the_parts_that_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor keeps what it has sealed, so a state that was fetched before would cost less than a real one."""
    nbytes, sealed, servers = MIB, list[str](), list[StateServer]()

    def counted(served: Any, *target: int) -> Any:
        sealed.append(served.digest)
        return seal(served, *target)

    def serve(*arguments: Any) -> StateServer:
        servers.append(StateServer(*arguments))
        return servers[-1]

    seal = served_parts._sealed
    monkeypatch.setattr(served_parts, "_sealed", counted)
    monkeypatch.setattr(reshape, "StateServer", serve)
    monkeypatch.setattr(fetch, "DonorConnection", fetch.DonorConnection)  # which a taker replaces
    try:
        donors = [reshape._donor(nbytes, 4, rank) for rank in range(4)]
        _, take = reshape._taker(nbytes, 3, 1, json.dumps([answer["address"] for answer, _ in donors]))
        for step in (1, 2, 3):
            for _, commit in donors:
                commit({"do": "commit", "step": step})
            take({"do": "take", "step": step})
            take({"do": "check"})
    finally:
        for server in servers:
            server.close()
    of_round = len(sources(reshape.layout(nbytes, 3, 1), 4, 1, 3))  # donors
    assert len(sealed) == len(set(sealed)) == 3 * of_round


def test_loads_of_blocks_beside_the_goal() -> None:
    row = blocks.planned(8, blocks.PER_HOST)
    assert [v.met for v in goals.width({**EMPTY, "blocks": [row]})] == [True], (
        "8 hosts: no plan has too many senders"
    )
    wide = blocks.planned(16, blocks.PER_HOST)
    found = wide["scattered"]
    assert (found["senders_formula"], found["senders_most"]) == (5, 6)
    assert found["times_printed"] == pytest.approx(found["times"] * 4 / 3, abs=0.01)
    assert [v.met for v in goals.width({**EMPTY, "blocks": [wide]})] == [True, True]
    worse = {**wide, "scattered": {**found, "times": 1.16, "senders": 7}}
    assert [v.met for v in goals.width({**EMPTY, "blocks": [worse]})] == [False, False]
    loads = [blocks.loaded(4, MIB, 1), blocks.loaded(4, MIB // 4, 1, 8e6)]
    assert [list(each["loads"]) for each in loads] == [list(blocks.WAYS)] * 2
    text = shown("width", {**EMPTY, "blocks": [row, wide], "loads": loads})
    assert f"{found['times']:.2f} ({found['times_printed']:.2f})" in text
    assert f"The busiest link of single carries {loads[1]['expected']:.2f} times the bytes" in text
    assert (loads[0]["expected"], loads[1]["expected"] > 1) == (None, True)
    assert "from 4 servers on this machine, over loopback" in text
    assert "links of 8 MB/s" in text


def test_slow_links_carry_what_was_planned_and_no_faster() -> None:
    (row,) = (blocks.loaded(8, MIB // 2, 1, 20e6),)
    for way, each in row["loads"].items():
        assert each["busiest_bytes"] <= each["carried_bytes"] < 1.2 * each["busiest_bytes"], way
        assert each["min_ms"] >= 0.99e3 * each["busiest_bytes"] / 20e6, "no link is faster than it is"
    scattered, single = (row["loads"][way] for way in ("scattered", "single"))
    assert single["busiest_bytes"] == single["formula_bytes"] > 3 * scattered["busiest_bytes"]
    assert row["expected"] == pytest.approx(single["carried_bytes"] / scattered["carried_bytes"], abs=0.001)
    row["expected"] = 6.0
    seen = {"ratio": 3.1, "low": 3.0, "high": 4.0}
    assert [v.met for v in goals.width({**EMPTY, "loads": [{**row, "times": seen}]})] == [True]
    slower = {**seen, "low": 2.9}
    assert [v.met for v in goals.width({**EMPTY, "loads": [{**row, "times": slower}]})] == [False]
    assert list(goals.width({**EMPTY, "loads": [{**row, "times": slower, "bytes_per_s": None}]})) == []


def test_unequal_replicas_beside_the_goal() -> None:
    took = {"4+4": spread([0.1, 0.1, 0.1]), "4+3": spread([0.12, 0.12, 0.12])}
    row: dict[str, Any] = {"bytes": 64 * MIB, "rounds": 3, "contenders": took, "lanes": 6, "times": 1.2}
    assert [v.met for v in goals.width({**EMPTY, "allreduce": [row]})] == [True]
    assert [v.met for v in goals.width({**EMPTY, "allreduce": [{**row, "times": 1.26}]})] == [False]
    assert "1.20 times as long in 6 lanes" in shown("width", {**EMPTY, "allreduce": [row]})


def commit(t: float, step: int, incarnation: str) -> dict[str, Any]:
    return {"t": t, "step": step, "incarnation": incarnation}


def test_a_replica_that_grows_repeats_no_step() -> None:
    rows = [commit(1.0, 7, "0-a-1"), commit(2.0, 8, "0-a-1")]
    assert lone.growth(rows) is None
    assert lone.growth(rows[:1]) is None
    assert lone.growth([*rows, commit(2.5, 9, "0-a-2")]) == lone.Growth(0.5, 0)
    assert lone.growth([*rows, commit(2.5, 8, "0-a-2")]) == lone.Growth(0.5, 1)
    assert lone.calm(rows, 2)
    assert not lone.calm(rows, 3)
    assert not lone.calm([*rows, commit(2.5, 9, "0-a-2")], 2)


def test_the_wait_for_a_host_is_a_phase_of_its_own() -> None:
    head = {"replica": 0, "incarnation": "0-a-1"}
    events: list[dict[str, Any]] = [
        {**head, "event": "ReplicaExited", "t": 10.1, "incarnation": "0-a-0", "kind": "SIGKILL"},
        {**head, "event": "Shrunk", "t": 10.3, "incarnation": "0-a-0"},
        {**head, "event": "ReplicaStarted", "t": 10.4},
        {**head, "event": "ReplicaWarmed", "t": 10.7},
        {**head, "event": "CheckedIn", "t": 10.8},
        {**head, "event": "GrantAdopted", "t": 10.9},
    ]
    found = lone.phases([Kill(10.0, 0, 3, "0-a-0")], ["0-a-1"], [Loss(10.0, 5, 1.2, 5)], events)
    wanted = {"exit": 100, "place": 200, "start": 100, "warm-up": 300, "check-in": 100, "grant": 100, "fetch": 0}
    assert found == pytest.approx({**wanted, "step": 300})


def test_a_lone_replica_that_shrinks_beside_the_goals() -> None:
    row: dict[str, Any] = {"replicas": 1, "ranks": 4, "hosts": 2, "left": 2, "kills": 2, "place_ms": 100.0}
    row |= {"step_ms": 110.0, "new": spread([1.0, 1.2]), "beyond": spread([0.9, 1.1])}
    row |= {"lost_steps": {"p50": 0.5, "max": 1}, "phases": {"exit": 60.0, "place": 100.0}}
    row["grow"] = {"pause": spread([1.5, 1.6]), "repeated": 0}
    assert [v.met for v in goals.width({**EMPTY, "lone": [row]})] == [True, True, True]
    text = shown("width", {**EMPTY, "lone": [row]})
    assert "exit 60, place 100" in text
    assert "steps again: 0.5 / 1 (p50 / max) to shrink, 0 to grow" in text
    worse = {**row, "beyond": spread([2.1]), "lost_steps": {"p50": 2, "max": 2}}
    worse["grow"] = {"pause": spread([1.5]), "repeated": 1}
    assert [v.met for v in goals.width({**EMPTY, "lone": [worse]})] == [False, False, False]


def joint(t: float, step: int, width: int | None, wait: float = 0.001) -> dict[str, Any]:
    """A commit of replica 0, to which replica 1 contributed with so many ranks; 0: all; None: it did not."""
    both: list[dict[str, int]] = [
        {"replica": 0, "width": 0, "units": 4},
        {"replica": 1, "width": width, "units": width or 4},
    ]
    mine = both if width is not None else both[:1]
    units = sum(each["units"] for each in mine)
    return {"t": t, "step": step, "contributions": mine, "units": units, "waits": {"ftar": wait}}


def test_what_the_other_replica_waits_for() -> None:
    rows = [
        joint(1, 1, 0),
        joint(2, 2, None, 0.5),
        joint(3, 3, None),
        joint(4, 4, None, 0.021),
        joint(5, 5, 3, 0.011),
    ]
    rows += [
        joint(6, 6, 3),
        joint(7, 7, None, 0.006),
        joint(8, 8, None),
        joint(9, 9, None, 0.9),
        joint(10, 10, 0, 0.002),
    ]
    events: list[dict[str, Any]] = [
        {"event": "CheckedIn", "replica": 1, "incarnation": "1-a-1", "t": 3.5},
        {"event": "CheckedIn", "replica": 1, "incarnation": "1-a-2", "t": 9.5},
        {"event": "StepRetried", "replica": 0, "t": 1.5},
    ]
    less, more = pair.WidthChange(1.2, "1-a-1", 3), pair.WidthChange(5.5, "1-a-2", 4)
    assert pair.waited_s(less, rows, events, 0.001) == pytest.approx(0.02 + 0.01), "from its check-in on"
    assert pair.waited_s(more, rows, events, 0.001) == pytest.approx(0.005 + 0.001), "its leave, and its check-in"
    assert pair.retried(more, rows, events) == 0
    assert pair.retried(more, rows, [*events, {"event": "StepRetried", "replica": 0, "t": 6.5}]) == 1
    assert pair.units_per_s(rows[4:6]) == 7.0


def test_one_of_two_replicas_shrinks_beside_the_goals() -> None:
    head: dict[str, Any] = {"replicas": 2, "ranks": 4, "left": 3}
    rate = {**head, "steps": 60, "units_per_s": {"before": 38.0, "fewer": 33.1, "after": 38.1}}
    rate |= {"share": 0.875, "of_share": 0.994}
    shrink = {**head, "losses": 5, "step_ms": 210.0, "repeated": 0, "steps": {"shrink": 0.05, "grow": 0.06}}
    shrink["waits"] = {"shrink": spread([0.01]), "grow": spread([0.012])}
    result = {**EMPTY, "rate": [rate], "shrink": [shrink]}
    assert [v.met for v in goals.width(result)] == [True] * 3
    text = shown("width", result)
    assert "0.994 of 0.875 of the rate" in text
    assert "0 steps were repeated to grow" in text
    worse = {**shrink, "repeated": 1, "steps": {"shrink": 0.11, "grow": 0.11}}
    result = {**EMPTY, "rate": [{**rate, "of_share": 0.96}], "shrink": [worse]}
    assert not any(v.met for v in goals.width(result))


def test_random_losses_beside_the_goal() -> None:
    row: dict[str, Any] = {"job": "one, adapt", "replicas": 1, "ranks": 4, "losses": 50, "shrunk": 30, "grown": 20}
    row |= {"steps": 1500, "narrow_steps": 200, "trained": 5000, "twice": 0, "skipped": 0}
    row |= {"replayed": True, "breaches": [], "asked": 50}
    assert [v.met for v in goals.width({**EMPTY, "losses": [row]})] == [True] * 4
    assert "one, adapt" in shown("width", {**EMPTY, "losses": [row]})
    for worse in ({"twice": 1}, {"skipped": 1}, {"replayed": False}, {"breaches": ["a line"]}):
        assert [v.met for v in goals.width({**EMPTY, "losses": [{**row, **worse}]})] == [False, True, True, True]
    short = {**row, "losses": 49, "shrunk": 0, "grown": 0}
    assert [v.met for v in goals.width({**EMPTY, "losses": [short]})] == [True, False, False, False]


@pytest.mark.soak
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", losses.JOBS)
def test_50_random_losses_with_shrink_and_grow(name: str) -> None:
    (row,) = losses.losses(50, ProgressLog(sys.stdout), [name])
    assert (row["losses"], row["twice"], row["skipped"], row["breaches"]) == (50, 0, 0, [])
    assert row["replayed"]
    assert row["shrunk"] >= 10
    assert row["grown"] >= 5
    assert row["narrow_steps"] >= 20


@pytest.mark.soak
@pytest.mark.usefixtures("_nothing_left")
def test_one_of_two_replicas_loses_a_host_and_gets_it_back() -> None:
    (row,) = pair.shrink(1, ProgressLog(io.StringIO()))
    assert row["repeated"] == 0
    assert row["waits"]["shrink"]["count"] == row["waits"]["grow"]["count"] == 1
    (row,) = pair.rate(ProgressLog(io.StringIO()))
    assert set(row["units_per_s"]) == {"before", "fewer", "after"}


@pytest.mark.proof
@pytest.mark.usefixtures("_nothing_left")
def test_a_lone_replica_loses_a_host_and_gets_it_back() -> None:
    (row,) = lone.lone(1, ProgressLog(io.StringIO()))
    assert row["lost_steps"]["max"] <= 1
    assert row["grow"]["repeated"] == 0
    assert row["beyond"]["p50_ms"] + row["step_ms"] == pytest.approx(row["new"]["p50_ms"])
    assert sum(row["phases"].values()) == pytest.approx(row["new"]["p50_ms"], rel=0.01)


@pytest.mark.multiproc
def test_processes_of_replicas_of_4_and_3_ranks_get_the_same_bits() -> None:
    """`DataCorruption` if the owners of a lane hold other sums."""
    row = allreduce.allreduce(2 * MIB, 1, ProgressLog(io.StringIO()))
    assert row["lanes"] == 6
    assert set(row["contenders"]) == {"4+4", "4+3"}


@pytest.mark.multiproc
def test_both_ways_carry_a_small_state() -> None:
    row = reshape.reshape(2 * MIB, 1, ProgressLog(io.StringIO()))
    assert set(row["contenders"]) == {"ft_hsdp", "dcp"}
    assert 1.0 <= row["times_least"] < 1.05 + 200_000 / row["least_bytes"], "the manifests of parts are small"
