"""Transcripts: one test per rule of who may go on, with whom, from which state."""

from dataclasses import replace

import pytest

from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.grant import CatchUp, Continue, Finish, Refused
from lighthouse.quorum.state import View
from tests.support.lighthouse.lighthouse_helpers import START, MemoryStore, Script, at, name, record, refusal

HOUR = 3600.0


def roles(grant):
    return {m.replica: m.role for m in grant.members}


@pytest.fixture
def job() -> Script:
    return Script()


def test_the_first_epoch_waits_for_every_replica_not_known_to_be_down(job: Script):
    assert not job.ask(0).answers
    assert job.ask(1).notes == {"Waiting": "waiting for replica 2"}
    assert not job.wait(HOUR).answers
    out = job.ask(2)
    assert roles(out.grant(0)) == {0: "contribute", 1: "contribute", 2: "contribute"}
    assert out.grant(0) == out.grant(1) == out.grant(2)
    assert (out.grant(0).epoch, out.grant(0).base) == (1, START)


def test_a_replica_known_to_be_down_or_lost_is_not_waited_for(job: Script):
    job.ask(0)
    assert not job.runs({1: None}).answers
    assert job.runs({2: None}, lost=[2]).grant(0).ring == (0,)


def test_start_wait_s_bounds_the_first_wait():
    job = Script(start_wait_s=5.0)
    job.ask(0)
    assert not job.wait(4.9).answers
    out = job.wait(0.2)
    assert out.grant(0).ring == (0,)
    assert "ReplicaExcluded" in out.notes


def test_an_ask_that_was_withdrawn_does_not_count():
    job = Script(total=2)
    job.ask(0)
    job.withdraw(0)
    assert not job.ask(1).answers
    assert set(job.ask(0).answers) == {0, 1}


def test_a_joiner_waits_for_the_next_step_and_enters_behind(job: Script):
    job.first(0, 1)
    assert isinstance(job.ask(0, at(1, 1), epoch=1).answers[0], Continue)
    assert not job.ask(2).answers
    assert isinstance(job.ask(1, at(1, 1), epoch=1).answers[1], Continue), "the step was settled already"
    out = job.ask(0, at(1, 2), epoch=1)
    assert roles(out.grant(0)) == {0: "contribute", 1: "contribute", 2: "behind"}
    assert out.grant(2) == out.grant(0)
    assert out.grant(0).base == at(1, 2)
    assert job.ask(1, at(1, 2), epoch=1).grant(1) == out.grant(0)


def test_a_replica_that_caught_up_contributes_from_the_next_step(job: Script):
    job.first(0, 1)
    job.ask(2)
    assert roles(job.ask(0, at(1, 1), epoch=1).grant(0))[2] == "behind"
    job.ask(1, at(1, 1), epoch=1)
    out = job.ask(0, at(2, 2), epoch=2, equal=(0, 1, 2))
    assert roles(out.grant(0)) == {0: "contribute", 1: "contribute", 2: "contribute"}
    assert out.notes["EpochGranted"].startswith("caught up: replica 2")


def test_who_needs_a_newer_base_gets_one_at_the_next_step_without_a_break(job: Script):
    job.first(0, 1)
    job.ask(2)
    job.ask(0, at(1, 1), epoch=1)
    job.ask(1, at(1, 1), epoch=1)
    assert isinstance(job.ask(0, at(2, 2), epoch=2).answers[0], Continue)
    assert isinstance(job.ask(1, at(2, 2), epoch=2).answers[1], Continue)
    job.ask(2, START, epoch=2, step=3, lagging=(2,), doubt=at(2, 2))
    out = job.ask(1, at(2, 3), epoch=2, lagging=(2,))
    assert out.grant(1).base == at(2, 3)
    assert roles(out.grant(1)) == {0: "contribute", 1: "contribute", 2: "behind"}
    assert "newer base: replica 2" in out.notes["EpochGranted"]
    assert job.ask(2, START, epoch=2, step=4, lagging=(2,), doubt=at(2, 3)).grant(2) == out.grant(1)


def test_two_states_under_one_name_and_no_majority_halt_the_job_for_all(job: Script):
    job.first(0, 1)
    assert not job.ask(1, at(1, 3), epoch=1, after=1, diverged=(0, 1)).answers, "one alone halts nothing"
    out = job.ask(0, at(1, 3), epoch=1, after=1, diverged=(0, 1))
    assert "JobHalted" in out.notes
    for r in (0, 1):
        answer = refusal(out.answers[r])
        assert answer.exit_code == 75
        assert answer.reason.startswith("replicas 0,1 hold")
    assert job.s.halted == answer.reason
    job.runs({0: 1, 1: None}, exited=[(0, 0), (1, 0)])
    out = job.ask(0, at(1, 3), life=1)
    assert isinstance(out.answers[0], Refused), "a restart changes nothing"
    assert not out.notes
    assert isinstance(job.ask(2).answers[2], Refused)
    assert not job.wait(HOUR).answers


def test_states_that_differ_can_be_given_up_for_the_newest_checkpoint():
    job = Script(total=2, on_divergence="checkpoint", return_wait_s=30.0)
    job.first(0, 1)
    term = job.s.term
    job.ask(1, at(1, 8), epoch=1, after=1, diverged=(0, 1))
    out = job.ask(0, at(1, 8), epoch=1, after=1, diverged=(0, 1))
    assert "no majority" in out.notes["RewindOrdered"]
    answers = [out.answers[r] for r in (0, 1)]
    assert all(isinstance(a, Refused) and (a.exit_code, a.forget) == (75, True) for a in answers)
    assert job.s.term > term
    late = refusal(job.ask(1, at(1, 8), epoch=1, after=1).answers[1])
    assert late.forget, "it may not bring its copy back"
    job.runs({0: 1, 1: None}, exited=[(0, 0)])
    assert not job.ask(0, at(1, 5), life=1).answers, "the other one has not ended"
    job.runs({0: 1, 1: 1}, exited=[(1, 0)])
    out = job.ask(1, at(1, 5), life=1)
    assert out.grant(0) == out.grant(1)
    assert out.grant(0).base == at(1, 5)
    assert "HeadRolledBack" in out.notes
    assert (job.s.halted, job.s.rewinding) == ("", False)
    again = job.ask(1, at(1, 8), epoch=1, after=1).answers[1]
    assert isinstance(again, Refused), "a life from before is let in"


def test_without_a_checkpoint_states_that_differ_halt_the_job():
    job = Script(total=2, on_divergence="checkpoint", return_wait_s=0.0)
    job.first(0, 1)
    for r in (1, 0):
        job.ask(r, at(1, 8), epoch=1, after=1, diverged=(0, 1))
    job.runs({0: 1, 1: 1}, exited=[(0, 0), (1, 0)])
    job.ask(0, life=1)
    out = job.ask(1, life=1)
    assert "there is no checkpoint" in out.notes["JobHalted"]
    assert all(isinstance(out.answers[r], Refused) for r in (0, 1))


def test_a_lost_answer_is_given_again(job: Script):
    grant = job.first(0, 1, 2)
    assert job.ask(1).grant(1) == grant
    job.ask(0, at(1, 1), epoch=1)
    assert job.ask(0, at(1, 1), epoch=1).answers == {0: Continue(1, 2)}


@pytest.mark.parametrize(("suspects", "grace_s"), [((), 1.0), ((2,), 0.2)])
def test_the_silent_are_left_out_after_their_grace_which_is_shorter_for_a_suspect(suspects, grace_s):
    job = Script(suspect_grace_s=0.2, silence_grace_s=1.0)
    job.first(0, 1, 2)
    job.ask(0, epoch=1, after=1, suspects=suspects)
    job.ask(1, epoch=1, after=1)
    assert not job.wait(grace_s - 0.01).answers
    out = job.wait(0.02)
    assert out.grant(0).ring == (0, 1)
    assert out.notes["ReplicaExcluded"] == "silent beyond its grace"


def test_a_suspect_that_asks_within_its_grace_loses_nothing():
    """A false suspicion costs a ring retry, never a fetch."""
    job = Script(suspect_grace_s=0.2)
    job.first(0, 1, 2)
    job.ask(0, epoch=1, after=1, suspects=(1, 2))
    job.ask(1, epoch=1, after=1, suspects=(2,))
    job.wait(0.15)
    out = job.ask(2, epoch=1, after=1)
    assert roles(out.grant(2)) == {0: "contribute", 1: "contribute", 2: "contribute"}
    assert "ReplicaExcluded" not in out.notes


def test_who_blocks_a_round_is_evicted():
    job = Script(evict_s=10.0)
    job.first(0, 1)
    job.ask(0, at(1, 1), epoch=1)
    job.ask(1, epoch=1, after=1)
    assert not job.wait(9.9).evicted
    assert job.wait(0.2).evicted == [name(0)]


def test_an_excluded_member_alone_never_splits_the_job(job: Script):
    job.first(0, 1, 2)
    job.ask(0, epoch=1, after=1)
    job.ask(1, epoch=1, after=1)
    assert job.wait(2.0).grant(0).ring == (0, 1)
    job.ask(2, epoch=1, after=1)
    assert not job.wait(HOUR).answers
    assert job.ask(0, at(2, 1), epoch=2).grant(2).ring == (0, 1, 2)


def test_min_replicas_bounds_a_membership_that_shrinks_between_two_steps():
    job = Script(min_replicas=2)
    job.first(0, 1)
    job.runs({1: None}, exited=[(1, 0)])
    assert job.ask(0, at(1, 1), epoch=1).answers == {0: Continue(1, 2)}


def test_a_void_attempt_is_no_base_and_the_grant_says_so():
    job = Script(total=2)
    job.first(0, 1)
    job.ask(0, epoch=1, after=1, prepared=record(START, 1))
    out = job.ask(1, epoch=1, after=1, void=AttemptId(1, 1, 0))
    assert out.grant(0).base == START
    assert out.grant(0).void == (AttemptId(1, 1, 0),)


def broken_with_head_at_0(**policy):
    """Replica 0 committed step 1 and reported it; then the ring broke for 1 and 2, who have not."""
    job = Script(**policy)
    job.first(0, 1, 2)
    job.ask(0, at(1, 1), epoch=1)
    job.ask(1, epoch=1, after=1)
    return job, job.ask(2, epoch=1, after=1)


def test_the_head_waits_for_its_holder_whatever_the_time():
    job, _ = broken_with_head_at_0()
    out = job.wait(HOUR)
    assert not out.answers
    assert out.notes == {"Waiting": f"head {at(1, 1)} is above {START}; replica 0 may hold it"}
    assert job.ask(0, at(1, 1), epoch=1, after=1).grant(0).base == at(1, 1)


def test_the_head_rolls_back_one_step_when_all_its_holders_have_exited():
    job, _ = broken_with_head_at_0()
    out = job.runs({0: None}, exited=[(0, 0)], lost=[0])
    assert "HeadRolledBack" in out.notes
    assert out.grant(1).base == START
    assert out.grant(1).ring == (1, 2)


def test_a_rollback_is_told_though_more_replicas_are_waited_for():
    job, _ = broken_with_head_at_0(min_replicas=3)
    out = job.runs({0: None}, exited=[(0, 0)], lost=[0])
    assert not out.answers
    assert out.notes["HeadRolledBack"].endswith(f"back by 1 to {START}")
    assert "min_replicas is 3" in out.notes["Waiting"]


def test_no_rollback_before_every_running_replica_has_reported():
    job, _ = broken_with_head_at_0()
    assert not job.runs({0: 1}, exited=[(0, 0)]).answers, "the new life of replica 0 may hold anything"
    assert not job.wait(HOUR).answers
    assert job.ask(0, life=1).grant(0).ring == (0, 1, 2)


@pytest.mark.parametrize("policy", ["halt", "wait", "rollback"])
def test_a_lost_head_of_more_than_one_step_follows_the_policy(policy):
    job = Script(on_lost_head=policy)
    job.first(0, 1)
    job.ask(0, at(1, 1), epoch=1)
    job.ask(1, at(1, 1), epoch=1)
    job.ask(0, at(1, 2), epoch=1)
    job.runs({0: None, 1: None}, exited=[(0, 0), (1, 0)], lost=[0, 1])
    out = job.ask(2)
    if policy == "halt":
        answer = refusal(out.answers[2])
        assert answer.exit_code == 75
        assert "no copy" in answer.reason
        assert "no copy" in job.s.halted
    elif policy == "wait":
        assert not out.answers
        assert "no copy" in out.notes["Waiting"]
    else:
        assert out.grant(2).base.step == 0
        assert "back by 2" in out.notes["HeadRolledBack"]
        assert job.s.head is None


def all_killed(**policy):
    """Step 5 was committed by 0 and 1 and reported by 0; then everybody was killed at once."""
    job = Script(**policy)
    job.first(0, 1, 2)
    job.ask(0, at(1, 5), epoch=1)
    out = job.runs(dict.fromkeys(range(3)), exited=[(r, 0) for r in range(3)])
    assert not out.answers
    return job


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_job_whose_replicas_find_their_states_again_goes_on_at_its_head(order):
    job = all_killed(on_lost_head="halt")
    held = {0: at(1, 5), 1: at(1, 5), 2: at(1, 4)}
    for n, r in enumerate(order):
        assert not job.runs({r: 1}).answers
        out = job.ask(r, held[r], life=1)
        assert not {"JobHalted", "HeadRolledBack"} & set(out.notes)
        if n < 2:
            assert not out.answers, "another one may come back with more"
            assert not job.wait(50.0).answers
    grant = out.grant(0)
    assert (grant.base, grant.ring) == (at(1, 5), (0, 1, 2))
    assert roles(grant) == {0: "contribute", 1: "contribute", 2: "behind"}


def test_the_head_is_not_given_up_while_its_last_holder_is_started_again():
    job = all_killed(on_lost_head="halt")
    job.runs({1: 1, 2: 1})
    job.ask(1, at(1, 3), life=1)
    out = job.ask(2, at(1, 3), life=1)
    assert list(out.notes) == ["Waiting"]
    assert "JobHalted" in job.runs({0: None}, lost=[0]).notes


def test_nobody_is_waited_for_longer_than_return_wait_s():
    job = all_killed(on_lost_head="halt", return_wait_s=30.0)
    job.wait(1000.0)
    job.runs({0: 1, 1: 1})
    job.ask(0, at(1, 5), life=1)
    job.ask(1, at(1, 5), life=1)
    assert not job.wait(29.0).answers
    assert job.wait(2.0).grant(0).ring == (0, 1)


def test_after_a_restart_nobody_that_has_exited_is_waited_for_longer_than_return_wait_s():
    job = all_killed(on_lost_head="rollback", return_wait_s=30.0)
    job.restart()
    job.runs({0: 1, 1: 1})
    job.ask(0, at(1, 3), life=1)
    job.ask(1, at(1, 3), life=1)
    assert not job.wait(29.0).answers, "replica 2 may come back with the head"
    assert job.wait(2.0).grant(0).ring == (0, 1)


def test_the_wait_for_a_return_begins_with_the_exit():
    job = all_killed(return_wait_s=30.0)
    job.runs({0: 1, 1: 1})
    job.ask(0, at(1, 5), life=1)
    job.wait(100.0)
    job.runs({0: 1, 1: None}, exited=[(1, 1)])
    job.s = MemoryStore().load(job.s.policy)  # and the store is lost
    job.runs({0: 1, 1: None, 2: None}, exited=[(2, 1)])
    assert not job.ask(0, at(1, 5), life=1).answers
    assert not job.wait(29.0).answers
    assert job.wait(2.0).grant(0).ring == (0,)


def test_what_is_known_never_to_be_committed_is_not_waited_for(job: Script):
    job.first(0, 1, 2)
    job.runs({2: None}, exited=[(2, 0)])
    job.ask(0, epoch=1, after=1, doubt=at(1, 1))
    assert job.ask(1, epoch=1, after=1, void=AttemptId(1, 1, 0)).grant(0).ring == (0, 1)
    job = Script()
    job.first(0, 1, 2)
    job.runs({2: None}, exited=[(2, 0)])
    job.ask(0, epoch=1, after=1, doubt=at(1, 1))
    assert "may come back" in job.ask(1, epoch=1, after=1, doubt=at(1, 1)).notes["Waiting"]


@pytest.mark.parametrize("epoch", [5, 0], ids=["of a later epoch", "started again"])
def test_a_joiner_that_holds_more_than_the_ring_breaks_it(job: Script, epoch):
    """Counter-example 6: who is ahead of a grant is never behind under it."""
    job.first(0, 1)
    job.ask(2, at(5, 3), epoch=epoch)
    assert not job.ask(0, at(1, 1), epoch=1).answers
    out = job.ask(1, at(1, 1), epoch=1)
    assert out.grant(2).base == at(5, 3)
    assert roles(out.grant(2)) == {0: "behind", 1: "behind", 2: "contribute"}
    assert out.grant(2).epoch > 5


def test_the_exit_of_a_replica_closes_its_ask(job: Script):
    job.ask(0)
    job.runs({0: None}, exited=[(0, 0)])
    assert job.s.views[0].ask is None


def test_the_end_waits_for_whoever_writes_the_final_state():
    job = Script(steps=1, final_wait_s=120.0)
    job.first(0, 1)
    job.runs({2: None}, lost=[2])
    job.ask(0, at(1, 1), epoch=1, writing=True)
    assert not job.ask(1, at(1, 1), epoch=1).answers
    assert job.ask(0, at(1, 1), epoch=1).answers == {0: Finish(), 1: Finish()}


def test_who_is_behind_at_the_end_gets_the_donors():
    job = Script(steps=1)
    job.first(0, 1)
    job.ask(0, at(1, 1), epoch=1)
    answer = job.ask(2).answers[2]
    assert isinstance(answer, CatchUp)
    assert answer.base == at(1, 1)
    assert [m.replica for m in answer.donors] == [0]
    job.ask(1, at(1, 1), epoch=1)
    assert set(job.ask(2, at(1, 1)).answers) == {0, 1, 2}


def test_the_end_waits_no_longer_than_its_deadline_and_not_for_the_lost():
    job = Script(steps=1, final_wait_s=120.0)
    job.first(0, 1)
    job.ask(0, at(1, 1), epoch=1)
    assert not job.wait(119.0).answers
    assert job.wait(2.0).answers == {0: Finish()}
    assert refusal(job.ask(2).answers[2]).exit_code == 0

    job = Script(total=2, steps=1)
    job.first(0)
    job.runs({1: None}, lost=[1])
    assert job.ask(0, at(1, 1), epoch=1).answers == {0: Finish()}


@pytest.mark.parametrize(("taken", "term"), [(50, 101), (100, 101), (900, 900)])
def test_epochs_and_terms_never_regress_over_a_wiped_store(taken, term):
    """Counter-example 7: a wiped store names everybody, in a new term, above every epoch that is known."""
    job = Script(term=taken)
    assert not job.ask(0, at(6, 8), epoch=7, max_term=100).answers
    assert not job.ask(1, at(6, 8), epoch=6, after=7, max_term=99).answers
    grant = job.ask(2).grant(0)
    assert (grant.term, grant.epoch) == (term, 8)
    assert roles(grant) == {0: "contribute", 1: "contribute", 2: "behind"}


def behind(**known):
    """A lighthouse that was restarted on a copy from epoch 1, whose three members are in epoch 5 of term 103."""
    job = Script(term=100)
    job.first(0, 1, 2)
    job.s = replace(job.s, term=101, views=tuple(View() for _ in job.s.views), settled=0)
    job.runs({0: 0, 1: 0, 2: 0})
    return job, {"epoch": 5, "max_term": 103, **known}


@pytest.mark.parametrize("known", [{}, {"max_term": 100}, {"epoch": 1}, {"epoch": 1, "after": 4}], ids=str)
def test_a_store_that_is_behind_its_members_names_everybody_in_a_new_term(known):
    job, seen = behind(**known)
    first = job.ask(0, at(4, 8), **seen)
    assert "epoch 1 of term 100" in first.notes["StoreBehind"]
    assert not first.answers, "others may know more"
    assert "StoreBehind" not in job.ask(1, at(4, 8), **seen).notes
    assert not job.wait(HOUR).answers
    grant = job.ask(2, at(3, 6), epoch=3, max_term=102).grant(2)
    assert grant.term > max(seen["max_term"], 102)
    assert grant.epoch > max(seen["epoch"], seen.get("after", 0), 4)
    assert roles(grant) == {0: "contribute", 1: "contribute", 2: "behind"}


def test_exits_in_a_store_that_is_behind_do_not_say_that_no_later_incarnation_runs():
    job = Script(term=100)
    job.first(0, 1, 2)
    job.runs({2: None}, exited=[(2, 0)])
    for _ in range(2):
        job.restart()
        for r in (0, 1):
            assert not job.ask(r, at(4, 8), epoch=5, max_term=103).answers
        assert not job.wait(HOUR).answers
    assert job.ask(2, at(4, 8), life=1, epoch=5, max_term=103, number=10**15).grant(2).ring == (0, 1, 2)


def test_a_store_that_is_behind_waits_only_for_who_may_live():
    job, seen = behind()
    job.ask(0, at(4, 8), **seen)
    job.ask(1, at(4, 8), **seen)
    job.runs({2: None}, exited=[(2, 0)], lost=[2])
    assert job.s.grant.ring == (0, 1)


def test_a_member_that_is_as_far_as_the_store_is_not_ahead_of_it():
    job, _ = behind()
    assert isinstance(job.ask(0, at(1, 1), epoch=1, max_term=100).answers[0], Continue)
