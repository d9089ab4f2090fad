"""When people are told: once when it begins, once when it is over, and never of what another lighthouse told."""

import math
from typing import Any

import pytest

from lighthouse.overview import alarms as module
from lighthouse.overview.alarms import AGAIN_S, CALM, HELD_S, LOSSES, START_S, Alarms, Facts
from lighthouse.overview.overview import JobInfo, JournalEntry, Overview
from tests.support.lighthouse.lighthouse_helpers import NOW, commit_row

QUIET = Facts(NOW, True, False, 9, 9, 1.0, 3, (), "", ())
FAILED = tuple((seq, 1, "SIGKILL") for seq in (5, 6, 7))


class People:
    """Alarms of which a test reads what people are told, by rule."""

    def __init__(self) -> None:
        self.alarms, self.texts = Alarms(0.0), list[str]()

    def look(self, now: float, **changes: Any) -> list[tuple[str, str, bool]]:
        return self._told(self.alarms.look(QUIET._replace(**changes), now))

    def hear(self, event: str, now: float = 0.0, **facts: Any) -> list[tuple[str, str, bool]]:
        return self._told(self.alarms.take("event", {"t": NOW, "event": event, "reason": "why", **facts}, now))

    def lose(self, *losses: float | None) -> list[tuple[str, str, bool]]:
        rows = (commit_row(step, loss=loss) for step, loss in enumerate(losses, 1))
        return [told for row in rows for told in self._told(self.alarms.take("commit", row, 0.0))]

    def _told(self, found: list[module.Alarm]) -> list[tuple[str, str, bool]]:
        self.texts += [each.text for each in found]
        return [(each.rule, each.subject, each.raised) for each in found]


@pytest.fixture
def people() -> People:
    return People()


@pytest.mark.parametrize(("commits", "typical", "patience"), [(9, 1.0, 60.0), (9, 30.0, 300.0), (0, 0.0, START_S)])
def test_a_stall_is_told_once_and_ends_with_a_commit(
    people: People, commits: int, typical: float, patience: float
) -> None:
    usual: dict[str, Any] = {"commits": commits, "typical": typical}
    people.look(10.0, **usual)
    assert people.look(9.9 + patience, **usual) == []
    assert people.look(10.0 + patience, **usual) == [("stall", "job", True)]
    assert people.look(99.0 + patience, **usual) == []
    usual["commits"] += 1
    assert people.look(100.0 + patience, **usual) == [("stall", "job", False)]
    assert people.look(101.0 + patience, **usual) == []


@pytest.mark.parametrize("excuse", [{"paused": True}, {"trains": False}])
def test_a_job_that_need_not_train_does_not_stall(people: People, excuse: dict[str, Any]) -> None:
    assert [people.look(now, **excuse) for now in (0.0, 500.0)] == [[], []]
    assert people.look(559.0) == []
    assert people.look(560.0) == [("stall", "job", True)]


@pytest.mark.parametrize(
    ("rule", "trouble"), [("replicas", {"missing": (1,)}), ("protection", {"unprotected": "why"})]
)
def test_only_what_lasts_is_told(people: People, rule: str, trouble: dict[str, Any]) -> None:
    steps = iter(range(10, 99))

    def look(now: float, **changes: Any) -> list[tuple[str, str, bool]]:
        return people.look(now, commits=next(steps), **changes)

    assert [look(0.0, **trouble), look(59.0, **trouble), look(59.5), look(60.0, **trouble)] == [[]] * 4
    assert look(119.0, **trouble) == []
    assert look(120.0, **trouble) == [(rule, "job", True)]
    assert look(121.0) == [(rule, "job", False)]
    look(500.0, **trouble)
    assert look(600.0, **trouble) == [(rule, "job", True)]
    assert look(601.0, **trouble, trains=False) == [(rule, "job", False)]


def test_what_comes_and_goes_is_told_once_in_five_minutes_with_how_often(people: People) -> None:
    on, off = ("disk", "store", True), ("disk", "store", False)
    told = [people.hear("StoreFailed", now, over=over) for now in (0.0, 10.0, 20.0) for over in (False, True)]
    assert told == [[on], [off], [], [], [], []]
    assert people.hear("StoreFailed", 30.0) == people.look(AGAIN_S - 1) == []
    assert people.look(AGAIN_S, commits=10) == [on]
    assert "3 times" in people.texts[-1]
    assert people.hear("StoreFailed", AGAIN_S + 1, over=True) == [off]
    assert people.hear("StoreFailed", 3 * AGAIN_S) == [on]
    assert "times" not in people.texts[-1]


def test_a_replica_that_fails_again_and_again(people: People) -> None:
    people.look(0.0)
    assert people.look(1.0, commits=10, failures=FAILED[:2]) == []
    assert people.look(2.0, commits=11, failures=(*FAILED[:2], (9, 2, "SIGKILL"))) == []
    assert people.look(3.0, commits=12, failures=FAILED) == [("restarts", "replica 1", True)]
    assert "3 times" in people.texts[-1]
    assert people.look(600.0, commits=13, failures=FAILED) == []
    assert people.look(601.0, commits=14, failures=FAILED) == [("restarts", "replica 1", False)]


@pytest.mark.parametrize("odd", [3.0, math.nan])
def test_an_unusual_loss_is_over_after_some_that_are_usual(people: People, odd: float) -> None:
    usual = [2.0 + 0.01 * (step % 5) for step in range(LOSSES)]
    assert people.lose(9.0, *usual, 2.1, 0.5) == []  # the first ones are compared with nothing, and less is good
    wrong = None if math.isnan(odd) else odd  # the journal keeps no number that is not finite
    assert people.lose(wrong, *usual[: CALM - 1], wrong, *usual[: CALM - 1]) == [("loss", "job", True)]
    assert people.lose(2.0) == [("loss", "job", False)]


def test_losses_that_are_all_the_same_or_that_no_loop_tells_are_usual(people: People) -> None:
    assert people.lose(*([2.0] * LOSSES), 2.01) == []
    assert People().lose(*([None] * LOSSES)) == People().lose(2.0, 2.1, 9.0) == []


@pytest.mark.parametrize(
    ("event", "facts", "told"),
    [
        ("JobHalted", {}, ("halted", "job")),
        ("CulpritFound", {"replica": 2, "rank": 1}, ("culprit", "replica 2 rank 1")),
        ("StoreFailed", {}, ("disk", "store")),
        ("ClockOff", {"host": "h"}, ("clock", "host h")),
        ("CheckpointFailed", {"replica": 0, "step": 4}, ("disk", "checkpoint")),
        ("LogLinesLost", {"replica": 2, "file": "events.jsonl", "lines": 3}, ("disk", "logs of replica 2")),
        ("CheckpointFailed", {"replica": 0, "replicas": [1]}, None),
        ("RingBroken", {"replica": 0}, None),
    ],
)
def test_an_event_is_told_once(people: People, event: str, facts: Any, told: tuple[str, str] | None) -> None:
    raised = [(*told, True)] if told else []
    assert [people.hear(event, now, **facts) for now in (0.0, 1.0)] == [raised, []]


@pytest.mark.parametrize(
    ("event", "end", "facts"),
    [
        ("CulpritFound", "CulpritFound", {"replica": 2, "rank": 1}),
        ("CheckpointFailed", "CheckpointWritten", {"replica": 0, "step": 4}),
    ],
)
def test_the_end_of_an_event_is_told_if_its_begin_was(people: People, event: str, end: str, facts: Any) -> None:
    over = {**facts, "over": True}
    assert people.hear(end, **over) == []
    people.hear(event, **facts)
    assert [raised for _, _, raised in people.hear(end, **over)] == [False]
    assert people.hear(end, **over) == []


def test_an_event_without_an_end_is_over_by_itself(people: People) -> None:
    people.hear("LogLinesLost", 0.0)
    people.hear("LogLinesLost", 60.0)
    assert people.look(HELD_S + 59.0, trains=False) == []
    assert people.look(HELD_S + 60.0, trains=False) == [("disk", "logs of job", False)]


def test_a_lighthouse_that_begins_tells_nothing_old_and_once_what_still_holds() -> None:
    people = People()
    known = {"failures": FAILED, "missing": (1,)}
    assert people.look(0.0, **known) == []
    assert people.look(59.0, **known) == []
    assert people.look(60.0, commits=10, **known) == [("replicas", "job", True)]
    new = (*FAILED, (20, 1, "exit 1"), (21, 1, "exit 1"))
    assert people.look(61.0, commits=11, **known | {"failures": new}) == []
    assert people.look(62.0, commits=12, **known | {"failures": (*new, (22, 1, "exit 1"))}) == [
        ("restarts", "replica 1", True)
    ]


def test_facts_are_those_of_the_overview() -> None:
    overview = Overview(JobInfo("job", 5, 2, 100, replicas=4))

    def fold(kind: Any, row: Any) -> Facts:
        overview.add(JournalEntry(overview.seq + 1, kind, row))
        return Facts.of(overview, True, NOW)

    def ev(event: str, replica: int | None, **facts: Any) -> dict[str, Any]:
        life = {} if replica is None else {"replica": replica, "incarnation": f"{replica}-a-0"}
        return {"t": NOW, "event": event, "reason": "why", **life, **facts}

    begun = fold("event", ev("ReplicaStarted", 3))
    assert (begun.trains, begun.paused, begun.commits, begun.wanted, begun.missing) == (True, True, 0, 4, ())
    row = {**commit_row(7, who=(0, 1)), "units": None}
    assert fold("commit", row)[3:8] == (1, 7, row["step_s"], 4, (2, 3))
    assert fold("event", ev("OperatorOrdered", 2, order="drain"))[6:8] == (3, (3,))
    assert fold("event", ev("GrantAdopted", 3, role="standby", epoch=1)).missing == ()
    assert fold("event", ev("Unprotected", 0, reason="one host")).unprotected == "one host"
    fold("event", ev("ReplicaExcluded", 0))  # it may come back
    gone = fold("event", {**ev("ReplicaExited", 1, kind="SIGKILL"), "t": NOW + 9})
    assert gone.failures == ((overview.seq, 1, "SIGKILL"),)
    assert fold("event", ev("JobHalted", None)).trains is False
