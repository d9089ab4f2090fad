"""Transcripts: whose word counts. No single report changes what all others do."""

from dataclasses import replace

import pytest

from ft_hsdp.core.grant import CatchUp, Continue, Finish
from ft_hsdp.core.state_id import StateId
from tests.support.lighthouse.lighthouse_helpers import START, Script, at, name, record, refusal

FAR = StateId(1, 9, "ab" * 16)
ONE = record(START, 1)  # the record of the first step
X = ONE.state_id


def script(*replicas: int, **policy: object) -> Script:
    job = Script(**{"total": 3, "steps": 100, "lone": True, **policy})  # type: ignore[arg-type]
    job.first(*(replicas or (0, 1, 2)))
    return job


@pytest.fixture
def job() -> Script:
    return script()


def commit(job: Script, state: StateId, *replicas: int) -> None:
    for r in replicas:
        assert job.ask(r, state, epoch=1).answers[r] == Continue(1, state.step + 1)


def test_a_state_counts_as_soon_as_two_name_it(job: Script):
    assert job.ask(0, X, epoch=1).answers == {0: Continue(1, 2)}, "the path of a step waits for nobody"
    assert job.s.head is None
    job.ask(1, X, epoch=1)
    assert job.s.head == X


@pytest.mark.parametrize("names", [{"doubt": X}, {"prepared": ONE}], ids=["doubt", "record"])
def test_one_that_has_voted_for_a_state_is_a_witness(job: Script, names):
    job.ask(0, X, epoch=1)
    job.ask(1, epoch=1, after=1, **names)
    assert job.s.head == X


def test_the_word_of_one_replica_is_kept_apart_and_goes_on(job: Script):
    commit(job, X, 0, 1)
    assert job.ask(2, FAR, epoch=1).answers == {2: Continue(1, 10)}
    assert (job.s.head, job.s.settled) == (X, 2), "the steps of the others are not settled by it"


def test_after_one_wrong_report_a_death_costs_nobody_else_anything(job: Script):
    """A false head would leave no copy of the head after the next death, and halt the job."""
    commit(job, X, 0, 1, 2)
    job.ask(2, FAR, epoch=1)
    job.ask(0, X, epoch=1, after=1)
    job.ask(2, FAR, epoch=1, after=1)
    out = job.runs({1: None}, exited=[(1, 0)])
    assert out.grant(0).ring == (0,)
    assert out.grant(0).base == X
    assert "not believed" in out.notes["ReportDoubted"]
    assert 2 not in out.answers


def test_a_doubted_replica_is_believed_when_it_reports_what_the_others_know(job: Script):
    test_after_one_wrong_report_a_death_costs_nobody_else_anything(job)
    assert not job.ask(2, X, epoch=1, after=1).answers, "it joins at the next step"
    two = record(X, 2)
    assert job.ask(0, two.state_id, epoch=2, committed=two).grant(2).ring == (0, 2)


def test_a_doubted_replica_that_repeats_it_begins_again_and_its_next_life_is_believed(job: Script):
    test_after_one_wrong_report_a_death_costs_nobody_else_anything(job)
    assert refusal(job.ask(2, FAR, epoch=1, after=1).answers[2]).exit_code == 75
    job.runs({2: 1}, exited=[(2, 0)])
    assert job.s.views[2].doubted is None
    job.ask(2, life=1)
    two = record(X, 2)
    assert job.ask(0, two.state_id, epoch=2, committed=two).grant(2).ring == (0, 2)


def test_a_wrong_claim_is_told_when_the_others_agree(job: Script):
    job.ask(2, FAR, epoch=1)
    job.ask(0, X, epoch=1)
    assert "only replica 2 reports" in job.ask(1, X, epoch=1).notes["ReportDoubted"]


def test_another_lineage_at_the_head_is_doubted(job: Script):
    commit(job, X, 0, 1)
    for r in (0, 1):
        job.ask(r, X, epoch=1, after=1)
    out = job.ask(2, replace(X, lineage="ab" * 16), epoch=1, after=1)
    assert (out.grant(0).base, out.grant(0).ring) == (X, (0, 1))


def test_of_two_names_of_the_first_state_the_more_frequent_one_is_the_base():
    job = Script(lone=True)
    job.ask(0, replace(START, lineage="ab" * 16))
    job.ask(1)
    assert job.ask(2).grant(1).base == START


# A change of the membership is settled by a state that two have named.


def test_a_change_waits_for_a_second_witness(job: Script):
    commit(job, X, 0, 1, 2)
    job.runs({2: 1}, exited=[(2, 0)])
    job.ask(2, life=1)
    two = record(X, 1).state_id
    assert not job.ask(0, two, epoch=1).answers
    out = job.ask(1, two, epoch=1)
    assert set(out.answers) == {0, 1, 2}
    assert out.grant(2).base == two


def test_members_that_one_alone_says_are_leaving_stay(job: Script):
    assert not job.ask(0, X, epoch=1, leaving=(1, 2)).answers
    assert job.ask(1, X, epoch=1).answers == {0: Continue(1, 2), 1: Continue(1, 2)}
    assert job.s.grant is not None
    assert job.s.grant.ring == (0, 1, 2)


def test_when_all_others_leave_the_record_of_the_step_is_enough():
    job = script(0, 1)
    assert not job.ask(0, X, epoch=1, leaving=(1,)).answers
    assert job.ask(0, X, epoch=1, leaving=(1,), committed=ONE).grant(0).ring == (0,)


def test_a_record_on_the_head_is_enough_while_the_others_are_silent(job: Script):
    assert not job.ask(0, X, epoch=1, after=1, committed=ONE, suspects=(1, 2)).answers
    assert job.wait(1.0).grant(0).base == X


@pytest.mark.parametrize(
    "said",
    [{}, {"committed": replace(ONE, digest="other")}, {"committed": record(at(1, 4), 1)}],
    ids=["no record", "of another state", "on another base"],
)
def test_without_it_the_silent_are_waited_for_and_evicted(job: Script, said):
    job.ask(0, X, epoch=1, after=1, **said)
    out = job.wait(1.0)
    assert not out.answers
    assert "only replica 0 reports" in out.notes["Waiting"]
    assert job.wait(9.0).evicted == [name(1), name(2)]


def test_the_last_one_left_is_believed_many_steps_after_the_head(job: Script):
    """The lighthouse was away while the members went on with their leases."""
    far = record(at(1, 70), 1)
    job.ask(0, far.state_id, epoch=1, after=1, committed=far)
    assert job.runs({1: None, 2: None}, exited=[(1, 0), (2, 0)], lost=[1, 2]).grant(0).base == far.state_id
    assert job.s.head == far.state_id


def test_others_that_are_silent_for_too_long_are_waited_for_no_longer(job: Script):
    """Their supervisor is cut off, too, so nobody will ever know that they have ended."""
    far = record(at(1, 70), 1)
    commit(job, X, 0, 1, 2)
    job.ask(0, far.state_id, epoch=1, after=1, committed=far)
    assert not job.wait(9.0).answers
    assert job.wait(2.0).grant(0).base == far.state_id


def test_members_that_agree_are_believed_at_once_after_the_lighthouse_was_away(job: Script):
    commit(job, X, 0, 1, 2)
    assert job.ask(0, at(1, 70), epoch=1).answers == {0: Continue(1, 71)}
    assert job.ask(1, at(1, 70), epoch=1).answers == {1: Continue(1, 71)}
    assert job.s.head == at(1, 70)


def test_a_replica_that_finds_its_state_counts_when_no_member_is_left(job: Script):
    commit(job, X, 0, 1, 2)
    job.runs({0: 1, 1: 1, 2: None}, exited=[(0, 0), (1, 0), (2, 0)], lost=[2])
    job.ask(1, life=1)
    assert job.ask(0, at(1, 70), life=1).grant(0).base == at(1, 70)


def test_a_record_that_a_member_of_its_ring_does_not_know_is_no_base(job: Script):
    job.ask(0, epoch=1, after=1)
    job.ask(1, epoch=1, after=1)
    out = job.ask(2, epoch=1, after=1, prepared=ONE)
    assert (out.grant(0).base, out.grant(0).ring) == (START, (0, 1, 2))


def test_a_record_on_the_head_that_two_never_voted_for_is_no_base(job: Script):
    job.ask(2, X, epoch=1, after=1, committed=ONE)
    job.ask(0, epoch=1, after=1, void=ONE.fence)
    out = job.wait(1.0)
    assert not out.answers, "one says so: the third is waited for"
    assert "only replica 2 reports" in out.notes["Waiting"]
    out = job.ask(1, epoch=1, after=1, void=ONE.fence)
    assert (out.grant(0).base, out.grant(0).ring) == (START, (0, 1))
    assert "not believed" in out.notes["ReportDoubted"]


def test_one_that_denies_its_vote_alone_takes_back_no_step():
    """Of two replicas one is wrong: the record, whose hash is the name of the state, counts more."""
    job = script(0, 1)
    job.ask(0, X, epoch=1, after=1, committed=ONE)
    assert job.ask(1, epoch=1, after=1, void=ONE.fence).grant(1).base == X


def test_one_that_asked_before_it_left_the_ring_contradicts_nothing():
    """Its request is older than the step: it goes on with its lease."""
    job = script(0, 1)
    job.ask(1, epoch=1, after=1)
    stale = Script(total=2, steps=100, lone=True)
    stale.first(0, 1)
    stale.ask(0, X, epoch=1, after=1, committed=ONE)
    assert not stale.ask(1, epoch=1).answers
    assert stale.ask(1, epoch=1, after=1, prepared=ONE).grant(0).base == X


def test_states_that_differ_halt_the_job_only_if_two_say_so(job: Script):
    job.ask(0, X, epoch=1, after=1, diverged=(0, 1))
    job.ask(1, X, epoch=1, after=1)
    assert set(job.ask(2, X, epoch=1, after=1).answers) == {0, 1, 2}
    assert not job.s.halted


def test_the_final_state_needs_a_second_one_too():
    job = script(0, 1, steps=1, total=2)
    assert not job.ask(0, X, epoch=1, committed=ONE).answers
    assert job.s.head is None
    assert job.ask(1, X, epoch=1, committed=ONE).answers == {0: Finish(), 1: Finish()}


def test_one_that_claims_the_final_state_ends_nothing(job: Script):
    commit(job, X, 0, 1, 2)
    job.ask(2, replace(FAR, step=100), epoch=1)
    for r in (0, 1):
        out = job.ask(r, record(X, 1).state_id, epoch=1, after=1)
    job.wait(1.0)
    assert not any(isinstance(a, CatchUp | Finish) for a in out.answers.values())
    assert job.s.head is not None
    assert job.s.head.step == 2
