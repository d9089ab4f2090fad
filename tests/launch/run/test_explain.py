from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.launch.run.summary import failure_in_words
from ft_hsdp.launch.run.terminal import summary_lines
from tests.support.launch.launch_rows import commit, event, failures, summarize


def killed(t: float, *, replica: int = 1, n: int = 0, kind: str = "SIGKILL", **fields: Any) -> list[Row]:
    """Incarnation `n` of `replica` is gone at `t` + 10 ms; the next one starts a second later."""
    name = {"replica": replica, "incarnation": f"{replica}-a-{n}"}
    return [
        event("ProcessExited", t + 0.005, rank=1, kind=kind, **name),
        event("ReplicaExited", t + 0.010, rank=1, kind=kind, **name, **fields),
        event("ReplicaStarted", t + 1.0, replica=replica, incarnation=f"{replica}-a-{n + 1}"),
    ]


BEGUN = event("ReplicaStarted", 0.0, replica=1, incarnation="1-a-0")


def injected(t: float, kind: str = "SIGKILL", for_s: float = 0.0, n: int = 0) -> Row:
    name = {"replica": 1, "incarnation": f"1-a-{n}"}
    return event("FailureInjected", t, rank=1, kind=kind, pid=7, for_s=for_s, **name)


# Commits a second apart; replica 1 dies at 3.5, the step takes 0.4 s longer, it is back at step 7.
ROWS = [
    *(commit(n, t=float(n)) for n in (1, 2, 3)),
    *(commit(n, t=n + 0.4, who=[0, 2]) for n in (4, 5, 6)),
    *(commit(n, t=n + 0.4) for n in (7, 8)),
]


def test_an_injected_kill_from_its_injection_to_its_first_step() -> None:
    events = [
        injected(3.5),
        event("RingBroken", 3.503, replica=0, suspect=1, epoch=1),
        *killed(3.5),
        event("FetchCompleted", 5.0, replica=1, incarnation="1-a-1", donor=2),
    ]
    (failure,) = failures(ROWS, events, 1.0)
    assert failure == {
        "t": 3.5,
        "replica": 1,
        "rank": 1,
        "kind": "SIGKILL",
        "incarnation": "1-a-0",
        "detect_s": pytest.approx(0.003),
        "stall_s": pytest.approx(0.4),
        "rejoin_s": pytest.approx(3.9),
        "source": "2",
    }


def test_without_an_injection_the_first_evidence_counts() -> None:
    events = [BEGUN, event("RingBroken", 3.49, replica=2, suspect=1, epoch=1), *killed(3.5)]
    (failure,) = failures(ROWS, events, 1.0)
    assert (failure["t"], failure["detect_s"], failure["source"]) == (3.49, None, ""), (
        "it hung before it was ended"
    )


def test_the_time_to_a_notice_is_measured_from_the_end_of_the_process_or_not_known() -> None:
    noticed = event("RingBroken", 3.525, replica=2, suspect=1, epoch=1)
    (failure,) = failures(ROWS, [BEGUN, *killed(3.5), noticed], 1.0)
    assert (failure["t"], failure["detect_s"]) == (3.505, pytest.approx(0.02))
    (failure,) = failures(ROWS, killed(3.5), 1.0)
    assert failure["detect_s"] is None, "nobody has noticed before the supervisor said so"
    summary = {**summarize(parse({}), [], {}, {}, []), "failures": [failure]}
    assert "seen unknown" in dict(summary_lines(summary))["failure"]
    assert "an unknown time" in failure_in_words(failure, 0.0)


def test_complaints_about_others_and_old_ones_are_no_evidence() -> None:
    events = [
        event("RingBroken", 3.40, replica=0, suspect=2, epoch=1),
        event("RingBroken", 3.41, replica=1, suspect=1, epoch=1),
        event("ExitReported", 3.42, replica=1, incarnation="1-a-9"),
        *killed(3.5),
    ]
    assert failures(ROWS, events, 1.0)[0]["t"] == 3.505


def test_a_replica_that_never_contributes_again() -> None:
    (failure,) = failures(ROWS[:6], [injected(3.5), *killed(3.5)], 1.0)
    assert failure["rejoin_s"] is None
    told = summarize(parse({"replicas": 3}), ROWS[:6], {}, {}, [injected(3.5), *killed(3.5)])["failures"][0]
    assert (told["rejoin_s"], told["back"]) == (pytest.approx(ROWS[5]["t"] - 3.5), False), "up to the end"


def test_a_stop_that_ends_in_an_eviction_is_the_failure_and_one_that_healed_long_ago_is_not() -> None:
    evicted = killed(7.5, kind="evicted")
    (failure,) = failures(ROWS, [injected(3.5, "SIGSTOP"), *evicted], 1.0)
    assert (failure["kind"], failure["t"]) == ("SIGSTOP", 3.5)
    late = killed(30.0)
    lifted = {**injected(3.5, "SIGSTOP", for_s=0.5), "event": "FailureLifted", "t": 4.0}
    (failure,) = failures(ROWS, [injected(3.5, "SIGSTOP", for_s=0.5), lifted, *late], 1.0)
    assert (failure["kind"], failure["t"]) == ("SIGKILL", 30.005)


def test_a_failure_outside_the_commits_stalls_nobody() -> None:
    assert [f["stall_s"] for f in failures(ROWS, [*killed(0.5), *killed(50.0, n=1)], 1.0)] == [0.0, 0.0]
