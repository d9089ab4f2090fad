"""Fewer than quorum.min_replicas hold the newest state, and others live that are behind: these fetch it first."""

import random
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.core.grant import CatchUp, Continue, Grant, Member, Refused, Report
from ft_hsdp.core.state_id import StateId
from lighthouse.quorum import rules, transition
from lighthouse.quorum.events import Asked, OpenRequest, ProcessesReported
from lighthouse.quorum.rules import EPOCHS, AdmittedIncarnation, Base, Epoch, merged, uncovered
from lighthouse.quorum.state import LighthouseState, Policy
from lighthouse.quorum.transition import outlived
from tests.support.lighthouse.lighthouse_helpers import (
    START,
    MemoryStore,
    Script,
    ask,
    at,
    make_service,
    name,
    record,
    refusal,
)

HOUR = 3600.0


def short(**policy: Any) -> Script:
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
    assert "replica 1 fetches it" in out.notes["Waiting"]
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
    assert "replica 0 may come back" in out.notes["Waiting"]
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


def test_a_later_life_of_the_same_run_says_that_this_one_is_over() -> None:
    assert outlived((0, "0-a-2"), [(0, "0-a-3")])
    assert outlived((0, "0-a-9"), [(0, "0-a-10")])
    assert not outlived((0, "0-a-3"), [(0, "0-a-3"), (0, "0-a-2"), (0, "0-b-4"), (1, "0-a-4")])


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


# Which of two lives of one replica counts: the one that the lighthouse admitted later, for ever.


OLD, NEW = "1-aaaa-0", "1-bbbb-0"


class TwoLives(Script):
    """Replica 1 has an old life, whose supervisor the lighthouse has lost sight of, and a new one that trains."""

    def __init__(self, commits: int = 3) -> None:
        super().__init__(total=2)
        self.runs({0: 0})
        self.says(OLD)
        self.ask(0)
        assert self.asks(OLD).grant(1).ring == (0, 1)
        self.says(NEW)
        self.asks(NEW)
        for step in range(1, commits + 1):
            self.step(step)

    def step(self, step: int) -> Grant:
        """Both members ask for the step after ``step``; the grant that stands."""
        epoch = self.s.epoch
        state = at(epoch, step)
        self.ask(0, state, epoch=epoch, equal=(0, 1))
        self.asks(NEW, state, epoch=epoch, number=transition.number_of(self.s, (1, NEW)))
        assert self.s.grant is not None
        return self.s.grant

    def asks(self, incarnation: str, state: StateId = START, **fields: Any) -> Any:
        report = Report(1, incarnation, state, state.step + 1, **fields)
        return self.feed(Asked(OpenRequest(report, 1000 + len(incarnation)), self.now))

    def says(self, running: str | None, *exited: str) -> Any:
        """A supervisor of replica 1 reports."""
        gone = frozenset((1, name) for name in exited)
        return self.feed(ProcessesReported({1: running}, gone, frozenset(), self.now))


@pytest.mark.parametrize("commits", [1, 2, 3, 5], ids="after {} commits".format)
@pytest.mark.parametrize("told", [True, False], ids=["it was told its number", "it was not"])
def test_an_old_life_that_thaws_neither_joins_nor_fences_the_member(commits: int, told: bool) -> None:
    job = TwoLives(commits)
    number = transition.number_of(job.s, (1, OLD)) if told else 0
    before = job.s
    refused = refusal(job.asks(OLD, at(1, 0), epoch=1, after=1, max_term=100, number=number).answers[1])
    assert (refused.exit_code, refused.reason.startswith("fenced")) == (75, True)
    assert job.s == before, "nothing that it says counts"
    grant = job.step(commits + 1)
    assert [(m.replica, m.incarnation) for m in grant.members] == [(0, name(0)), (1, NEW)]
    assert (grant.total, job.s.views[1].incarnation) == (2, NEW)


def test_an_old_life_that_is_forgotten_and_was_told_no_number_is_refused_by_what_it_was_granted() -> None:
    job = TwoLives()
    job.s = replace(job.s, lives=tuple(life for life in job.s.lives if life.incarnation != OLD))
    before = job.s
    for seen in ({"epoch": 1, "after": 1}, {"max_term": job.s.term}):
        refused = refusal(job.asks(OLD, START, **seen).answers[1])
        assert (refused.exit_code, "was granted before" in refused.reason) == (75, True)
        assert job.s == before


def test_two_supervisors_that_report_in_turn_change_nothing() -> None:
    job = TwoLives()
    job.says(NEW)
    before = job.s
    for _ in range(3):
        job.says(OLD)
        assert job.s == before
        job.says(NEW)
        assert job.s == before


def test_the_exit_of_an_old_life_does_not_mean_that_nothing_runs() -> None:
    job = TwoLives()
    job.says(None, OLD)
    assert (job.s.views[1].incarnation, job.s.views[1].down) == (NEW, False)
    job.says(None, NEW)
    assert job.s.views[1].down is True


def test_the_order_of_lives_outlives_the_lighthouse() -> None:
    job = TwoLives()
    job.restart()
    assert isinstance(job.asks(OLD, at(1, 0), epoch=1, after=1).answers[1], Refused)
    job.says(OLD)
    assert job.s.views[1].incarnation is None
    epoch, state = job.s.epoch, at(job.s.epoch, 4)
    assert not isinstance(job.asks(NEW, state, epoch=epoch, number=2).answers.get(1), Refused)


@pytest.mark.parametrize("first", ["old", "new"])
def test_an_older_store_learns_the_order_from_what_the_lives_were_told(first: str) -> None:
    job = Script(total=2)
    copied = TwoLives(commits=0)
    copied.s = MemoryStore().load(copied.s.policy)  # of a time before any of them, or lost
    mine = {OLD: 7, NEW: 9}
    for who in (OLD, NEW) if first == "old" else (NEW, OLD):
        out = copied.asks(who, at(3, 2), epoch=3, max_term=100, number=mine[who])
        assert isinstance(out.answers.get(1), Refused) == (who == OLD and first == "new")
    assert copied.s.views[1].incarnation == NEW
    assert transition.number_of(copied.s, (1, NEW)) == 9
    copied.says("1-cccc-0")
    assert transition.number_of(copied.s, (1, "1-cccc-0")) > 9, "no number is given twice"
    assert job.s.lives == ()


def test_a_lighthouse_that_starts_again_gives_no_number_that_was_given() -> None:
    store = MemoryStore()
    s = store.load(Policy(2, 9))
    admitted = transition.admit(s, (1, OLD))
    assert isinstance(admitted, LighthouseState)
    lost = MemoryStore().load(Policy(2, 9))
    later = transition.admit(LighthouseState.empty(Policy(2, 9), 1), (1, NEW))
    assert isinstance(later, LighthouseState)
    assert lost.admissions >= s.admissions > 10**12
    assert transition.number_of(admitted, (1, OLD)) > s.admissions


def test_what_is_remembered_of_lives_is_bounded() -> None:
    s: LighthouseState | str = LighthouseState.empty(Policy(2, 9), 1)
    for run in range(100):
        for restarts in range(3):
            assert isinstance(s, LighthouseState)
            s = transition.admit(s, (1, f"1-run{run}-{restarts}"))
    assert isinstance(s, LighthouseState)
    assert len(s.lives) == transition.REMEMBERED
    assert transition.newest(s, 1) == AdmittedIncarnation(1, "1-run99-2", 300)
    assert "of the same run" in str(transition.admit(s, (1, "1-run99-1")))


async def test_a_member_is_told_its_number_and_reports_it() -> None:
    service, _ = make_service(total=1)
    grant = await service.ask(ask(0))
    assert isinstance(grant, Grant)
    number = grant.members[0].number
    assert number > service.state.admissions
    assert transition.number_of(service.state, (0, name(0))) == number


def test_a_grant_names_each_replica_once() -> None:
    twice = (Member(1, OLD, "contribute"), Member(1, NEW, "behind"))
    with pytest.raises(AssertionError, match=r"each replica once, not \[1, 1\]"):
        rules.grant(1, 1, Base(START, None, ()), twice, 2, "why")


# A lost head: one step is given up only in its own history.


@pytest.mark.parametrize("same_history", [True, False])
def test_one_step_of_another_history_is_not_given_up_as_one_step(same_history: bool) -> None:
    """Replica 0 holds (1, 4) alone; 1 and 2 went on from (1, 3) in epoch 2 to (2, 5), and are lost for good."""
    job = Script(total=3, on_lost_head="halt")
    job.first(0, 1, 2)
    job.ask(1, at(1, 3), epoch=1, after=1)
    job.ask(2, at(1, 3), epoch=1, after=1)
    job.wait(5.0)
    assert job.s.epoch == 2
    for step in (4, 5):
        for r in (1, 2):
            job.ask(r, at(2, step), epoch=2, equal=(1, 2))
    job.runs({1: None, 2: None}, [(1, 0), (2, 0)], lost=[1, 2])
    job.wait(200.0)
    out = job.ask(0, at(2, 4) if same_history else at(1, 4), epoch=1, after=1)
    assert ("HeadRolledBack" in out.notes, "JobHalted" in out.notes) == (same_history, not same_history)
