"""Fewer than quorum.min_replicas hold the newest state, and others live that are behind: these fetch it first."""

from __future__ import annotations

import random

import pytest

from ft_hsdp.core.grant import CatchUp, Continue, Refused
from lighthouse.quorum.rules import EPOCHS, Epoch, merged, uncovered
from lighthouse.quorum.state import ProcessesReported
from lighthouse.quorum.transition import outlived, run_of
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


@pytest.fixture
def job() -> Script:
    return Script(total=2)


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


# What is remembered of the dead: enough for every decision, and never more for a longer job.


def test_an_incarnation_is_named_after_its_run_and_its_restarts() -> None:
    assert run_of("0-ab-cd-12") == ("ab-cd", 12)
    assert run_of("0-abc") == ("abc", 0)
    assert run_of("0-run-²") == ("0-run-²", 0)


def test_a_later_life_of_the_same_run_says_that_this_one_is_over() -> None:
    assert outlived((0, "0-a-2"), [(0, "0-a-3")])
    assert outlived((0, "0-a-9"), [(0, "0-a-10")])
    assert not outlived((0, "0-a-3"), [(0, "0-a-3"), (0, "0-a-2"), (0, "0-b-4"), (1, "0-a-4")])


def test_a_crash_loop_leaves_one_exit(job: Script) -> None:
    job.first(0)
    for life in range(500):
        out = job.runs({1: life + 1}, [(1, life)])
        assert "ExitReported" in out.notes
        assert len(job.s.exited) <= 1
    assert job.s.exited == {(1, name(1, 499))}


def test_exits_that_are_named_again_are_no_news(job: Script) -> None:
    job.first(0)
    job.runs({1: 2}, [(1, 0), (1, 1)])
    before = job.s
    assert not job.runs({1: 2}, [(1, 0), (1, 1)]).notes, "a rank names all lives before its own"
    assert not job.runs({1: 2}, [(1, 1)]).notes
    assert job.s == before, "patience with those who may come back starts with news only"


def test_exits_of_members_are_kept_while_their_epoch_is_remembered(job: Script) -> None:
    job.first(0, 1)
    job.runs({1: 5}, [(1, 4)])
    assert (1, name(1, 0)) in job.s.exited, "a later life has exited, so the member has"
    for step in (1, 2, 3, 4):
        job.ask(0, at(job.s.epoch, step), epoch=job.s.epoch)
    assert all((1, name(1, 0)) not in e.members for e in job.s.epochs)
    job.runs({1: 6}, [(1, 5)])
    assert job.s.exited == {(1, name(1, 5))}


def test_the_exits_of_a_run_that_nobody_names_are_forgotten() -> None:
    job = Script(total=1)
    for run in range(100):
        job.feed(ProcessesReported({0: f"0-r{run}-0"}, frozenset(), frozenset(), 0.0))
        job.feed(ProcessesReported({0: None}, frozenset({(0, f"0-r{run}-0")}), frozenset(), 0.0))
        assert len(job.s.exited) == 1


def test_a_supervisor_says_nothing_about_the_replicas_of_another_one(job: Script) -> None:
    job.runs({0: None}, [(0, 3)])
    job.runs({1: None}, [(1, 0)])
    assert job.s.exited == {(0, name(0, 3)), (1, name(1, 0))}


def test_a_forgotten_incarnation_that_asks_is_refused(job: Script) -> None:
    job.first(0)
    for life in range(5):
        job.runs({1: life + 1}, [(1, life)])
    assert (1, name(1, 2)) not in job.s.exited
    assert isinstance(job.ask(1, START, life=2).answers[1], Refused)
    assert job.s.views[1].incarnation == name(1, 5)
    job.s = Script(total=2).s
    job.runs({1: 5})
    assert isinstance(job.ask(1, START, life=2).answers[1], Refused), "nothing but what runs is known"
    job.s = Script(total=2).s
    job.runs({1: None}, [(1, 5)])
    assert isinstance(job.ask(1, START, life=2).answers[1], Refused), "nothing but the newest exit is known"


def test_one_of_a_forgotten_run_can_bring_nothing_back(job: Script) -> None:
    """It was admitted before the incarnation of the new run, so it is refused, and changes nothing."""
    job.first(0, 1)
    stale = record(START, 1)
    job.runs({1: None}, [(1, 0)])
    for step in (1, 2, 3, 4):
        job.ask(0, at(job.s.epoch, step), epoch=job.s.epoch)
    job.feed(ProcessesReported({1: "1-new-0"}, frozenset(), frozenset(), 0.0))
    assert (1, name(1, 0)) not in job.s.exited
    before = job.s
    assert isinstance(job.ask(1, START, prepared=stale).answers[1], Refused)
    assert job.s == before
    assert isinstance(job.ask(0, at(job.s.epoch, 5), epoch=job.s.epoch).answers[0], Continue)
    job.feed(ProcessesReported({1: "1-new-0"}, frozenset(), frozenset(), 0.0))
    assert job.s.views[1].incarnation == "1-new-0"


# Epochs.


def test_epochs_without_a_commit_do_not_pile_up() -> None:
    """A member crashes as soon as it is in the ring, for ever."""
    job = Script(total=3)
    job.first(0, 1, 2)
    for life in range(1, 2000):
        job.runs({2: life}, [(2, life - 1)])
        job.ask(2, life=life)
        job.ask(0, epoch=job.s.epoch, after=job.s.epoch)
        assert job.ask(1, epoch=job.s.epoch, after=job.s.epoch).grant(2).ring == (0, 1, 2)
        assert len(job.s.epochs) <= EPOCHS + 1
        assert len(job.s.exited) <= EPOCHS + 1
    assert job.s.epoch == 2000


def test_a_bad_link_makes_no_table_grow(job: Script) -> None:
    job.first(0, 1)
    for _ in range(500):
        for r in (0, 1):
            job.ask(r, epoch=job.s.epoch, after=job.s.epoch)
        job.wait(5.0)
    assert job.s.epoch == 501
    assert len(job.s.epochs) <= EPOCHS + 1


def test_what_is_merged_blocks_whom_it_blocked_before() -> None:
    """For any memberships and exits, now and after more exits: nobody gets past the epochs that are left out."""
    dice = random.Random(7)
    for _ in range(300):
        lives = [(r, f"{r}-a-{n}") for r in range(4) for n in range(3)]
        epochs = [
            Epoch(
                n,
                tuple(
                    sorted((r, f"{r}-a-{dice.randrange(3)}") for r in dice.sample(range(4), dice.randint(1, 4)))
                ),
            )
            for n in range(EPOCHS + 20)
        ]
        exited = frozenset(dice.sample(lives, dice.randint(0, 10)))
        kept = merged(epochs, exited)
        assert len(kept) < len(epochs)
        assert epochs[-1] in kept
        assert [e.number for e in kept] == sorted(e.number for e in kept)
        for _ in range(5):
            exited |= frozenset(dice.sample(lives, 2))
            living = [i for i in lives if i not in exited]
            present = frozenset(dice.sample(living, dice.randint(0, len(living))))
            returning = dice.randrange(4)
            for gone in (exited, frozenset(m for m in exited if m[0] != returning)):
                assert (uncovered(kept, gone, present) is None) == (uncovered(epochs, gone, present) is None)


def test_few_epochs_are_all_remembered() -> None:
    epochs = tuple(Epoch(n, ((0, "0-a-0"),)) for n in range(EPOCHS))
    assert merged(epochs, frozenset()) == epochs
