from typing import Any

import pytest

from ft_hsdp.core.grant import Continue, Finish, Grant, Refused
from lighthouse.quorum.commands import CULPRIT_S, CommandPlan, Culprit, Impossible, plan, plan_culprit
from lighthouse.quorum.events import Action, Commanded
from lighthouse.quorum.rules import replace
from lighthouse.status import describe
from tests.support.lighthouse.lighthouse_helpers import Out, Script, at, hosted, name, record, refusal


def order(job: Script, action: Action, replica: int = 0) -> Out:
    return job.feed(Commanded(action, replica, "test", job.now))


def wanted(job: Script, action: Action, replica: int = 0, **more: Any) -> CommandPlan | Impossible:
    return plan(job.s, Commanded(action, replica, "test", job.now), **more)


def possible(job: Script, action: Action, replica: int = 0, **more: Any) -> CommandPlan:
    found = wanted(job, action, replica, **more)
    assert isinstance(found, CommandPlan), found
    return found


def refused(job: Script, action: Action, replica: int = 0, **more: Any) -> Impossible:
    found = wanted(job, action, replica, **more)
    assert isinstance(found, Impossible), found
    return found


def working(**policy: Any) -> Script:
    """Three members that have committed one step of epoch 1, and ask for the second."""
    job = Script(**policy)
    job.s = hosted(job.s)
    job.first(0, 1, 2)
    for r in (0, 1, 2):
        job.ask(r, at(1, 1), epoch=1)
    return job


def step(job: Script, number: int, *replicas: int, epoch: int = 1, **fields: Any) -> dict[int, Any]:
    """The answers to these replicas, which hold step ``number``."""
    answers: dict[int, Any] = {}
    for r in replicas:
        answers |= job.ask(r, at(epoch, number), epoch=job.s.epoch if r not in answers else 0, **fields).answers
    return answers


@pytest.fixture
def job() -> Script:
    return working()


def test_an_eviction_is_an_order_to_the_supervisor_of_the_incarnation_that_runs(job: Script) -> None:
    assert possible(job, "evict", 1).due
    assert order(job, "evict", 1).evicted == [name(1)]
    assert job.s.grant is not None
    assert job.s.grant.ring == (0, 1, 2), "nothing changes before its exit is reported"
    job.runs({1: None}, [(1, 0)])
    assert isinstance(step(job, 2, 0)[0], Grant)


@pytest.mark.parametrize(
    ("replica", "agent", "status", "words"),
    [
        (3, None, 404, "there is no replica 3; possible: 0 to 2"),
        (-1, None, 404, "there is no replica -1"),
        (2, None, 409, "replica 2 does not run"),
        (1, 0, 409, "no host agent reports of replica 1"),
    ],
)
def test_what_cannot_be_evicted(job: Script, replica: int, agent: int | None, status: int, words: str) -> None:
    job.runs({2: None}, [(2, 0)])
    job.s = hosted(job.s, agent)
    found = refused(job, "evict", replica)
    assert (found.status, found.detail[: len(words)]) == (status, words)


# A culprit that a diagnosis names.


FOUND = Culprit(1, "absent", 2, 1, "it has not joined")


def test_a_culprit_is_evicted_as_by_an_operator(job: Script) -> None:
    assert plan_culprit(job.s, FOUND, 0.0, CULPRIT_S) == wanted(job, "evict", 1)
    again = plan_culprit(job.s, FOUND, 0.0, CULPRIT_S, {(1, name(1))})
    assert isinstance(again, CommandPlan)
    assert not again.due


@pytest.mark.parametrize(
    "change", [{"kind": "link"}, {"kind": "deadlock"}, {"kind": "slow link"}, {"witnesses": 1}, {"epoch": 2}]
)
def test_only_a_confirmed_finding_on_one_replica_of_this_epoch_counts(job: Script, change: Any) -> None:
    assert isinstance(plan_culprit(job.s, FOUND._replace(**change), 0.0, CULPRIT_S), Impossible)


@pytest.mark.parametrize(
    "change", [{"broken": True}, {"since": 1.0}, {"drained": frozenset({1})}, {"grant": None}, {"halted": "why"}]
)
def test_no_culprit_is_evicted_while_the_membership_changes(job: Script, change: Any) -> None:
    assert isinstance(plan_culprit(replace(job.s, **change), FOUND, 0.0, CULPRIT_S), Impossible)


def test_a_culprit_is_evicted_at_most_once_in_some_time_and_if_enough_others_live(job: Script) -> None:
    assert isinstance(plan_culprit(job.s, FOUND, 0.0, CULPRIT_S - 1), Impossible)
    for least, possible in ((2, CommandPlan), (3, Impossible)):
        policy = replace(job.s.policy, min_replicas=least)
        assert isinstance(plan_culprit(replace(job.s, policy=policy), FOUND, 0.0, CULPRIT_S), possible)


def test_a_replica_that_its_supervisor_has_given_up_can_be_kept_away(job: Script) -> None:
    """Another supervisor, or the next start of that one, would start it again."""
    job.runs({1: None}, [(1, 0)], lost=[1])
    assert possible(job, "drain", 1).due
    order(job, "drain", 1)
    job.ask(1, at(1, 1), life=1)
    answer = refusal(job.ask(0, at(1, 2), epoch=1).answers[1])
    assert "is drained" in answer.reason


def test_a_drained_member_is_told_to_leave_and_the_others_go_on_without_it_at_a_step_boundary(job: Script) -> None:
    assert possible(job, "drain", 1).due
    order(job, "drain", 1)
    assert step(job, 2, 0, 1, 2) == {r: Continue(1, 3, leave=r == 1) for r in (0, 1, 2)}
    out = job.ask(0, at(1, 3), epoch=1, leaving=(1,), equal=(0, 1, 2))
    assert out.grant(0).ring == (0, 2)
    assert out.grant(0).reason.startswith("gone: replica 1")
    job.runs({1: None}, [(1, 0)])
    assert step(job, 4, 0, 2, epoch=2) == {0: Continue(2, 5), 2: Continue(2, 5)}
    assert job.s.epoch == 2
    assert describe(job.s, 1, {}, "") == ("drained", "an operator drained it")


def test_a_job_has_ended_if_all_have_but_a_drained_member_that_left_before(job: Script) -> None:
    order(job, "drain", 1)
    step(job, 2, 0, 1, 2)
    assert not job.runs({0: None, 2: None}, [(0, 0), (2, 0)], ended=(0, 2)).notes.get("JobFinished"), "1 runs"
    assert job.runs({1: None}, [(1, 0)], ended=(0, 2)).notes["JobFinished"]


def test_a_drained_replica_that_asks_to_join_is_refused_and_disturbs_nobody(job: Script) -> None:
    job.runs({2: None}, [(2, 0)])
    assert step(job, 2, 0)[0].ring == (0, 1)
    order(job, "drain", 2)
    job.runs({2: 1})
    assert not job.ask(2, at(1, 1), life=1).answers
    answers = step(job, 3, 0, epoch=2)
    assert answers[0] == Continue(2, 4)
    assert answers[2] == Refused("replica 2 is drained", 0)


def test_a_drained_replica_that_may_know_more_is_heard_in_a_round_and_leaves_later(job: Script) -> None:
    order(job, "drain", 2)
    prepared = record(at(1, 1), 1)
    for r in (0, 1):
        job.ask(r, at(1, 1), epoch=1, after=1, doubt=prepared.state_id)
    out = job.ask(2, at(1, 1), epoch=1, after=1, prepared=prepared)
    assert out.grant(2).base == prepared.state_id
    assert out.grant(2).ring == (0, 1, 2)
    assert job.ask(2, at(2, 3), epoch=2).answers == {2: Continue(2, 4, leave=True)}


def test_a_drain_that_leaves_too_few_needs_force() -> None:
    job = working(min_replicas=2)
    assert possible(job, "drain", 0).due
    order(job, "drain", 0)
    found = refused(job, "drain", 1)
    assert found.status == 409
    assert "quorum.min_replicas is 2" in found.detail
    assert possible(job, "drain", 1, force=True).due


def test_a_dead_replica_that_would_come_back_counts_as_one_of_those_that_are_needed() -> None:
    """Two of three are needed. Without force, neither order may leave the job to wait for ever."""
    job = working(min_replicas=2)
    job.runs({1: None, 2: None}, [(1, 0), (2, 0)])
    order(job, "drain", 2)
    found = refused(job, "drain", 1)
    assert "quorum.min_replicas is 2" in found.detail
    assert possible(job, "drain", 1, force=True).due
    order(job, "drain", 1)
    assert "Waiting" in job.ask(0, at(1, 1), epoch=1, after=1).notes
    order(job, "undrain", 1)
    job.runs({1: 1})
    assert job.ask(1, at(1, 1), life=1).grant(0).ring == (0, 1)


def test_one_that_was_given_up_is_not_counted_so_its_drain_leaves_no_fewer() -> None:
    job = working(min_replicas=2)
    job.runs({1: None, 2: None}, [(1, 0), (2, 0)], lost=[1, 2])
    assert possible(job, "drain", 1).due


def test_the_dead_one_that_alone_may_bring_the_newest_state_back_is_not_drained() -> None:
    job = Script()
    job.first(0)
    job.runs({0: None}, [(0, 0)])
    assert refused(job, "drain", 0, force=True).status == 409
    assert possible(job, "drain", 1).due


def test_one_that_is_behind_may_be_drained_whoever_is_left() -> None:
    job = Script(min_replicas=2)
    job.first(0, 1)
    job.runs({2: 0})
    job.ask(2)
    assert job.ask(0, at(1, 1), epoch=1).grant(0).member(2, name(2)).role == "behind"  # type: ignore[union-attr]
    assert refused(job, "drain", 0).status == 409
    assert possible(job, "drain", 2).due


def test_drained_twice_and_undrained_twice_is_once(job: Script) -> None:
    order(job, "drain", 1)
    before = job.s
    assert possible(job, "drain", 1) == CommandPlan("replica 1 is drained already", due=False)
    order(job, "drain", 1)
    assert job.s == before
    order(job, "undrain", 1)
    assert possible(job, "undrain", 1) == CommandPlan("replica 1 is not drained", due=False)
    assert step(job, 2, 1)[1] == Continue(1, 3), "it had not been told yet"


@pytest.mark.parametrize("exited", [False, True], ids=["nothing is known of it", "it has lived"])
def test_a_drained_replica_is_not_waited_for_at_the_start(exited: bool) -> None:
    job = Script()
    job.runs({0: 0, 1: 0, **({2: None} if exited else {})}, [(2, 0)] if exited else ())
    job.ask(0)
    assert not job.ask(1).answers
    out = order(job, "drain", 2)
    assert out.grant(0).ring == (0, 1)


def test_a_drained_replica_holds_up_the_end_while_it_is_a_member() -> None:
    job = working(steps=3)
    order(job, "drain", 2)
    step(job, 2, 0, 1, 2)
    job.ask(0, at(1, 3), epoch=1)
    assert not job.ask(1, at(1, 3), epoch=1).answers
    job.ask(0, at(1, 3), epoch=1, leaving=(2,))
    assert job.runs({2: None}, [(2, 0)]).answers == {0: Finish(), 1: Finish()}


def test_a_checkpoint_is_demanded_until_somebody_has_heard_that_it_was_written(job: Script) -> None:
    assert possible(job, "checkpoint").due
    order(job, "checkpoint")
    assert step(job, 1, 0, 1) == {r: Continue(1, 2, checkpoint=2) for r in (0, 1)}
    assert step(job, 2, 0) == {0: Continue(1, 3, checkpoint=2)}, "it went on without the answer"
    assert step(job, 3, 0, 1, saved=3) == {r: Continue(1, 4) for r in (0, 1)}
    assert job.s.checkpoint == 0


def test_two_orders_before_the_next_commit_are_one(job: Script) -> None:
    order(job, "checkpoint")
    found = possible(job, "checkpoint")
    assert not found.due
    assert "ordered already" in found.detail
    job.ask(0, at(1, 2), epoch=1)
    assert possible(job, "checkpoint").due, "the next state is another one"


def test_an_order_that_the_job_was_rolled_back_under_is_about_the_next_state() -> None:
    job = Script(total=2, return_wait_s=0.0, on_lost_head="rollback")
    job.first(0, 1)
    for n in (1, 2, 3):
        job.ask(0, at(1, n), epoch=1)
    order(job, "checkpoint")
    assert job.s.checkpoint == 4
    job.runs({0: 1, 1: 1}, [(0, 0), (1, 0)])
    job.ask(0, life=1)
    assert "HeadRolledBack" in job.ask(1, life=1).notes
    assert job.s.checkpoint == 1


@pytest.mark.parametrize("words", ["nothing has been granted yet", "training is over", "the job has ended"])
def test_when_there_is_nothing_to_write(words: str) -> None:
    job = Script(steps=2)
    if not words.startswith("nothing"):
        job.first(0, 1, 2)
        job.ask(0, at(1, 2), epoch=1)
    if words.endswith("ended"):
        for r in (1, 2):
            job.ask(r, at(1, 2), epoch=1)
    found = refused(job, "checkpoint")
    assert (found.status, found.detail[: len(words)]) == (409, words)


def test_nothing_can_be_ordered_of_a_job_that_was_halted(job: Script) -> None:
    for r in (0, 1):
        job.ask(r, at(1, 1), epoch=1, after=1, diverged=(0, 1))
    for action in ("evict", "drain", "undrain", "checkpoint"):
        assert refused(job, action, 1).detail == job.s.halted
