from typing import Any

import pytest

from ft_hsdp.analysis.incarnations import starts
from ft_hsdp.launch.run.summary import explain, start_table


def event(name: str, t: float, incarnation: str = "1-a-1", **facts: Any) -> dict[str, Any]:
    return {"t": 100.0 + t, "event": name, "replica": 1, "incarnation": incarnation, "reason": "", **facts}


RETURN = [
    event("ReplicaStarted", 1.0, how="cold"),
    event("ReplicaBooted", 1.1, rank=0),
    event("ReplicaWarmed", 3.1, rank=0),
    event("StateRestored", 3.2, rank=0),
    event("CheckedIn", 3.4, rank=0),
    event("GrantAdopted", 4.0, rank=0),
    event("FetchStarted", 4.1, rank=0),
    event("FetchStarted", 4.2, rank=1),
    event("FetchCompleted", 4.5, rank=0),
    event("FetchCompleted", 4.8, rank=1),
    event("FirstStepCommitted", 5.0, rank=0),
    event("GrantAdopted", 5.1, rank=0),
    event("Rejoined", 6.0, rank=0),
]
FAILURE = {"t": 100.5, "replica": 1, "incarnation": "1-a-0"}


def test_the_parts_of_a_return_are_told_apart():
    (found,) = starts(RETURN, [FAILURE])
    assert (found.replica, found.incarnation, found.how) == (1, "1-a-1", "cold")
    expected = {
        "boot": 0.1,
        "warm": 2.0,
        "check-in": 0.3,
        "grant": 0.6,
        "fetch": 0.7,
        "first step": 1.0,
        "contributes": 1.0,
    }
    assert found.parts == pytest.approx(expected)
    assert found.down == pytest.approx(0.5)
    assert found.back == pytest.approx(4.5)
    consecutive = ("boot", "warm", "check-in", "grant", "first step")
    assert found.down + sum(found.parts[name] for name in consecutive) == pytest.approx(found.back)


def test_a_first_start_has_no_failure_before_it_and_what_is_unknown_is_left_out():
    first = [event("ReplicaStarted", 0.0, "1-a-0", how="cold"), event("CheckedIn", 2.0, "1-a-0")]
    found = starts([*RETURN, *first])
    assert [each.incarnation for each in found] == ["1-a-0", "1-a-1"]
    assert (found[0].down, found[0].parts, found[0].back) == (None, {}, None)
    assert found[1].back == pytest.approx(4.0), "from its start, where nobody tells of a failure"


def test_under_torchrun_nobody_tells_of_the_start():
    (found,) = starts([e for e in RETURN if e["event"] != "ReplicaStarted"])
    assert found.how == ""
    assert "boot" not in found.parts
    assert found.back == pytest.approx(3.9)


def test_rows_that_come_out_of_order_cost_no_negative_time():
    (found,) = starts([event("ReplicaStarted", 1.0, how="from a spare"), event("ReplicaBooted", 0.99)])
    assert found.parts == {"boot": 0.0}


def test_explain_prints_a_line_for_each_start():
    lines = explain(RETURN, ())
    heading = next(n for n, line in enumerate(lines) if line.startswith("seconds of each start"))
    assert lines[heading].split()[4:] == [
        *("down", "boot", "warm", "check-in", "grant", "fetch", "first", "step", "contributes", "in", "all")
    ]
    assert lines[heading + 1].split() == [
        *("1-a-1", "cold", "-", "0.10", "2.00", "0.30", "0.60", "0.70", "1.00", "1.00", "4.00")
    ]
    assert {len(line) for line in start_table(starts(RETURN))} == {len(lines[heading])}


def test_explain_says_why_a_replica_was_given_up():
    lost = event("ReplicaLost", 5.0, replica=1, reason="exit 1")
    halted = event("JobGivenUp", 6.0, replica=0, step=5, reason="step 5")
    found = explain([lost, halted], (), [0, 1])[-2:]
    assert [(line.split()[1], line.rpartition(": ")[2]) for line in found] == [("0", "step 5"), ("1", "exit 1")]
