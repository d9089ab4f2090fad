"""Settings of the model from JSON and from a run; a run beside the model; published rates of failures."""

import json
from pathlib import Path

import pytest

from ft_hsdp.analysis import prediction
from ft_hsdp.analysis.failures import Failures
from ft_hsdp.analysis.goodput import Goodput
from ft_hsdp.analysis.job_model import SCOPES, System, Tier
from ft_hsdp.analysis.prediction import of_run, rates, restart_parts, samples, settings, system_of

SYSTEMS = json.loads(Path(prediction.__file__).with_name("systems.json").read_text())
STEP_S = 1.0
LIVES = ("ReplicaStarted", "ReplicaBooted", "ReplicaWarmed", "CheckedIn")


def test_samples_of_numbers_lists_and_a_lognormal_distribution():
    assert samples(3) == (3.0,)
    assert samples([1, 2]) == (1.0, 2.0)
    lognormal = samples({"median": 4.0, "mean": 5.0})
    assert sorted(lognormal)[len(lognormal) // 2] == pytest.approx(4.0)
    assert sum(lognormal) / len(lognormal) == pytest.approx(5.0, rel=0.02)


def test_a_system_from_its_row():
    row = {
        "replicas": 3,
        "stall": {"detect": 2},
        "step_s": 20,
        "kept": ["host"],
        "disk": {"every": 7},
        "from": "x",
    }
    assert system_of(row) == System(
        replicas=3,
        stall={"detect": (2.0,)},
        restart={"detect": (2.0,)},
        step_s=(20.0,),
        kept=frozenset({"host"}),
        disk=Tier(7),
    )


def run(kills, steps=100, replicas=3):
    """A job that loses replica 1 now and then: the others stand still for 0.5 s, it is away for 6 s.

    It starts from a spare every other time; each rejoin costs 0.25 s. The steps beside are exact.
    """
    rows, t, lives = [(0.0, {"event": "ReplicaStarted", "replica": 1, "incarnation": "1-a-0"})], 0.0, 0
    away_until = None
    for step in range(1, steps + 1):
        t += STEP_S
        who = [0, 1, 2]
        if step in kills:
            name = {"replica": 1, "incarnation": f"1-a-{lives}"}
            rows += [(t - 0.5, {"event": "FailureInjected", "kind": "SIGKILL", **name})]
            rows += [(t - 0.4, {"event": "ProcessExited", "kind": "SIGKILL", **name})]
            rows += [(t - 0.4, {"event": "ReplicaExited", "kind": "SIGKILL", **name})]
            rows += [(t - 0.1, {"event": "EpochGranted", "epoch": 2 * lives + 2, "members": [0, 2]})]
            lives += 1
            for n, life in enumerate(LIVES):
                how = {"how": "spare" if lives % 2 else "cold"}
                row = {"event": life, "replica": 1, "incarnation": f"1-a-{lives}", **how}
                rows.append((t - 0.5 + 1.0 + n, row))
            away_until, t = t - 0.5 + 6.0, t + 0.5
        if away_until is not None and t < away_until:
            who = [0, 2]
        elif away_until is not None:
            rows += [(t - 0.1, {"event": "EpochGranted", "epoch": 2 * lives + 1, "members": who})]
            away_until, t = None, t + 0.25
        commit = {"step": step, "step_s": STEP_S, "contributors": who, "total": 3, "waits": {}, "epoch": 1}
        rows.append((t, commit))
    goodput, failures = Goodput(), Failures(replicas)
    for seq, (at, row) in enumerate(sorted(rows, key=lambda each: each[0]), 1):
        if "event" in row:
            goodput.event({"t": at, "reason": "", **row})
            failures.event(seq, row["event"], {"t": at, "reason": "", **row})
        else:
            goodput.commit({"t": at, **row})
            failures.commit(at, row["epoch"], row["contributors"])
    return goodput, failures


def test_settings_of_a_run():
    found = settings(*run(kills=(20, 40, 60, 80)))
    assert found["step_s"] == {"median": STEP_S, "mean": pytest.approx(STEP_S)}
    assert [sum(each) for each in zip(*found["stall"].values(), strict=True)] == pytest.approx([0.5] * 4)
    assert found["stall"]["detect"] == pytest.approx([0.1] * 4)
    assert sum(found["join"].values()) == pytest.approx(0.25)
    for way in ("back", "swap"):
        assert found[way]["down"] == pytest.approx([1.0] * 2)
        assert found[way]["boot"] == found[way]["warm"] == pytest.approx([1.0] * 2)
        (first, second) = (sum(each) for each in zip(*found[way].values(), strict=True))
        assert first == second == pytest.approx(6.0, abs=0.8), "until the commit to which it contributes"


def test_the_model_makes_of_a_run_what_was_measured():
    goodput, failures = run(kills=(20, 40, 60, 80))
    measured, row = goodput.effective(), settings(goodput, failures)
    found = of_run(goodput, failures, {"replicas": 3, "spares": 0}, {**row, "swap": row["back"]})
    assert found.wall_s == pytest.approx(measured["wall_s"])
    assert found.useful_s == pytest.approx(measured["useful_s"], rel=0.005)
    for cause in ("detect", "quorum", "missing"):
        assert found.lost_s[cause] == pytest.approx(measured["lost_s"][cause], abs=1.0), cause
    slow = of_run(goodput, failures, {"replicas": 3}, {**row, "back": {"start": 18.0}})
    assert slow.lost_s["missing"] == pytest.approx(3 * found.lost_s["missing"], rel=0.2)


def test_a_job_whose_only_replica_comes_back_from_the_checkpoint():
    """It loses host and memory in step 58 of which each tenth is a checkpoint: 7 whole steps, and 3 s to start."""
    rows = [(float(step), {"step": step}) for step in range(1, 58)]
    rows += [(57.9, {"event": "ReplicaExited", "replica": 0, "incarnation": "0-a-0", "kind": "evicted"})]
    rows += [(59.0, {"event": "ReplicaStarted", "replica": 0, "incarnation": "0-a-1", "how": "cold"})]
    rows += [(60.0, {"event": "StateRestored", "replica": 0, "incarnation": "0-a-1", "rung": "checkpoint"})]
    rows += [(60.5, {"event": "EpochGranted", "epoch": 2, "members": [0]})]
    rows += [(61.0 + n, {"step": 51 + n}) for n in range(50)]
    goodput, failures = Goodput(), Failures(1)
    for seq, (t, row) in enumerate(rows, 1):
        if "event" in row:
            goodput.event({"t": t, "reason": "", **row})
            failures.event(seq, row["event"], {"t": t, "reason": "", **row})
        else:
            who = {"contributors": [0], "total": 1, "epoch": 1, "step_s": 1.0, "waits": {}}
            goodput.commit({"t": t, **row, **who})
            failures.commit(t, 1, [0])
    row = settings(goodput, failures)
    assert row["restart"] == {"restart": [pytest.approx(3.0)]}
    found = of_run(goodput, failures, {"replicas": 1, "disk": {"every": 10}}, row)
    assert found.fallbacks == 1
    assert found.lost_s["replay"] == pytest.approx(goodput.effective()["lost_s"]["replay"], abs=1.0)
    assert found.useful_s == pytest.approx(goodput.effective()["useful_s"], abs=1.5)


def test_published_rates():
    found = {row["name"]: row for row in rates(SYSTEMS)}
    assert sum(count for _, count, _ in SYSTEMS["mix"]) == 678  # FT-HSDP, Table 1
    assert {scope for *_, scope in SYSTEMS["mix"]} == set(SCOPES)
    assert found["Llama 3"]["every_s"] == pytest.approx(54 * 86_400 / 419, abs=0.1)
    for row in found.values():
        ratio = {name: each["useful_s"] / each["wall_s"] for name, each in row["systems"].items()}
        assert ratio["ft_hsdp"] > ratio["torchft 0.2.0, tuned"] > ratio["torchft 0.2.0"]
        changes = {each["input"]: (each["less"], each["more"]) for each in row["sensitivity"]}
        assert changes["every_s"][0] < 0 < changes["every_s"][1]
        assert all(less >= -1e-3 and more <= 1e-3 for name, (less, more) in changes.items() if "." in name)
    (join,) = (each for each in row["sensitivity"] if each["input"] == "join.first step")
    assert join["less"] == pytest.approx(-join["more"], rel=0.2) == pytest.approx(50 / row["every_s"], rel=0.2)
    repairs = found["FT-HSDP, repairs"]["systems"]["ft_hsdp"]
    closed = (
        1 - (100 + 500 / 12) / 1080
    )  # all stand still when a replica joins; it is away for as long as a repair
    assert repairs["useful_s"] / repairs["wall_s"] == pytest.approx(closed, abs=0.025)


def test_parts_of_a_restart():
    parts = restart_parts(SYSTEMS)
    ours = SYSTEMS["systems"]["ft_hsdp"]
    named = [name.split(".") for part in parts for name in part["of"]]
    assert sum(part["paper_s"] for part in parts) == 600
    assert all(part["ours_s"] > 0 for part in parts)
    assert {way for way, _ in named} <= set(ours)
