"""Fewer than quorum.min_replicas hold the newest state, and others live that are behind: these fetch it first."""

from __future__ import annotations

from ft_hsdp.core.grant import CatchUp
from tests.support.lighthouse.lighthouse_helpers import START, Script, at, name, record

HOUR = 3600.0


def short(**policy: int) -> Script:
    """Of two replicas, both needed, one was lost with its copies; the new life of it and the holder ask."""
    job = Script(total=2, min_replicas=2, **policy)
    job.first(0, 1)
    job.runs({1: 1}, exited=[(1, 0)])
    job.ask(1, life=1)
    return job


def told(answer: object) -> tuple[object, list[int]]:
    """What a replica is told to catch up with, and from whom."""
    assert isinstance(answer, CatchUp), answer
    return answer.base, [m.replica for m in answer.donors]


def test_whoever_is_behind_fetches_and_then_both_go_on():
    job = short()
    out = job.ask(0, at(1, 1), epoch=1, after=1)
    assert {r: told(a) for r, a in out.answers.items()} == {0: (at(1, 1), [0]), 1: (at(1, 1), [0])}
    assert out.notes["Waiting"] == f"1 replicas hold {at(1, 1)}, min_replicas is 2; replica 1 fetches it"
    assert not job.ask(0, at(1, 1), epoch=1, after=1).answers, "it holds the state, and has been told to keep it"
    assert not job.wait(HOUR).answers
    grant = job.ask(1, at(1, 1), life=1).grant(0)
    assert (grant.base, grant.ring) == (at(1, 1), (0, 1))
    assert {m.role for m in grant.members} == {"contribute"}


def test_after_a_fetch_that_failed_both_are_told_again():
    """The holder, too: the copy that it kept may be gone with its agent."""
    job = short()
    job.ask(0, at(1, 1), epoch=1, after=1)
    job.ask(0, at(1, 1), epoch=1, after=1)
    answers = job.ask(1, life=1, doubt=at(1, 1)).answers
    assert {r: told(a) for r, a in answers.items()} == {0: (at(1, 1), [0]), 1: (at(1, 1), [0])}


def test_whoever_holds_the_record_only_is_told_to_apply_it_and_that_is_remembered():
    job = short()
    prepared = record(START, 1)
    answers = job.ask(0, epoch=1, after=1, prepared=prepared).answers
    assert told(answers[0]) == told(answers[1]) == (prepared.state_id, [0])
    assert job.s.head == prepared.state_id


def test_nobody_goes_back_when_the_holder_is_lost_during_the_fetch():
    job = short()
    job.ask(0, at(1, 3), epoch=1, after=1)
    job.runs({0: None}, exited=[(0, 0)])
    out = job.ask(1, life=1, doubt=at(1, 3))
    assert not out.answers
    assert out.notes["Waiting"] == f"{at(1, 3)} may be committed; replica 0 may come back with it"
    job.runs({0: 1})
    answers = job.ask(0, at(1, 3), life=1).answers
    assert told(answers[1]) == (at(1, 3), [0])


def test_whoever_fetches_is_not_taken_for_silent():
    """It is a member of the broken epoch, which has no open ask while it fetches."""
    job = Script(min_replicas=2)
    job.first(0, 1)
    job.ask(2)
    assert job.ask(0, at(1, 1), epoch=1).grant(2).ring == (0, 1, 2)
    job.runs({1: None}, exited=[(1, 0)])
    job.ask(0, at(1, 1), epoch=2, after=2)
    answers = job.ask(2, epoch=2, after=2, doubt=at(1, 1)).answers
    assert told(answers[2]) == (at(1, 1), [0])
    job.ask(0, at(1, 1), epoch=2, after=2)
    out = job.wait(HOUR)
    assert not out.evicted
    assert out.notes["Waiting"] == f"1 replicas hold {at(1, 1)}, min_replicas is 2"
    job.runs({1: 1})
    answers = job.ask(1, life=1).answers
    assert told(answers[1]) == (at(1, 1), [0]), "one fetches, another one joins it"
    job.ask(0, at(1, 1), epoch=2, after=2)
    assert job.ask(1, at(1, 1), life=1).grant(0).ring == (0, 1), "enough: the other one joins when it has it"
    assert name(2) not in {m.incarnation for m in job.s.grant.members}


def test_replicas_that_start_with_different_states_catch_up_before_the_first_epoch():
    job = Script(total=2, min_replicas=2)
    assert not job.ask(0, at(3, 7)).answers
    answers = job.ask(1).answers
    assert told(answers[1]) == (at(3, 7), [0])
    job.ask(0, at(3, 7))
    assert job.ask(1, at(3, 7)).grant(0).ring == (0, 1)
