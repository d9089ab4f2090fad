"""A job that is scaled: who is wanted, what contributors are a share of, whom nobody waits for; what is pure."""

from typing import Any

import pytest

from ft_hsdp.core.grant import Continue, Refused
from lighthouse.overview.replicas import Lanes
from lighthouse.quorum.commands import CommandPlan, Impossible, plan
from lighthouse.quorum.events import Action, Commanded
from lighthouse.status import describe
from tests.support.lighthouse.lighthouse_helpers import Out, Script, at, refusal


def order(job: Script, action: Action, number: int) -> Out:
    scales = action == "scale"
    return job.feed(Commanded(action, 0 if scales else number, "test", job.now, number if scales else 0))


def scale(job: Script, target: int, **more: Any) -> CommandPlan | Impossible:
    return plan(job.s, Commanded("scale", 0, "test", job.now, target), **more)


def planned(job: Script, target: int, **more: Any) -> CommandPlan:
    found = scale(job, target, **more)
    assert isinstance(found, CommandPlan), found
    return found


def working(replicas: int = 2, **policy: Any) -> Script:
    """Up to four; as many as wanted are members and have committed one step of epoch 1."""
    job = Script(total=4, replicas=replicas, **policy)
    job.first(*range(replicas))
    for r in range(replicas):
        job.ask(r, at(1, 1), epoch=1)
    return job


def test_a_job_begins_with_its_replicas_and_waits_for_no_other() -> None:
    job = Script(total=4, replicas=2)
    job.ask(0)
    grant = job.ask(1).grant(0)
    assert (grant.ring, grant.total) == ((0, 1), 2)
    assert [describe(job.s, r, {}, "")[0] for r in (2, 3)] == ["drained", "drained"]


def test_scaled_up_the_others_are_a_smaller_share_from_the_next_step_on_and_newcomers_join() -> None:
    job = working()
    assert planned(job, 3).due
    order(job, "scale", 3)
    grant = job.ask(0, at(1, 2), epoch=1).grant(0)
    assert (grant.ring, grant.total) == ((0, 1), 3)
    assert "3 replicas are wanted" in grant.reason
    job.runs({2: 0})
    job.ask(2)
    grant = job.ask(0, at(2, 3), epoch=2).grant(2)
    assert ([m.role for m in grant.members], grant.total) == (["contribute", "contribute", "behind"], 3)


def test_scaled_down_those_beyond_leave_at_a_step_boundary_and_the_rest_is_the_whole() -> None:
    job = working(4)
    assert planned(job, 2).due
    order(job, "scale", 2)
    answers: dict[int, Any] = {}
    for r in range(4):
        answers |= job.ask(r, at(1, 2), epoch=1).answers
    assert answers == {r: Continue(1, 3, leave=r >= 2) for r in range(4)}
    grant = job.ask(0, at(1, 3), epoch=1, leaving=(2, 3), equal=(0, 1, 2, 3)).grant(0)
    assert (grant.ring, grant.total) == ((0, 1), 2)


def test_one_that_is_gone_already_is_no_part_of_the_whole_from_the_next_step_on() -> None:
    job = working(3)
    job.runs({2: None}, [(2, 0)])
    assert job.ask(0, at(1, 2), epoch=1).grant(0).total == 3
    order(job, "scale", 2)
    grant = job.ask(0, at(2, 3), epoch=2).grant(0)
    assert (grant.ring, grant.total, grant.reason.partition(";")[0]) == ((0, 1), 2, "2 replicas are wanted")


def test_as_long_as_one_beyond_is_a_member_it_counts() -> None:
    job = working(3)
    order(job, "scale", 1)
    for r in (0, 1):
        job.ask(r, at(1, 1), epoch=1, after=1)
    grant = job.ask(2, at(1, 1), epoch=1, after=1).grant(2)
    assert (grant.ring, grant.total) == ((0, 1, 2), 3)


def test_one_beyond_that_asks_to_join_is_refused() -> None:
    job = working()
    job.runs({3: 0})
    assert not job.ask(3).answers
    assert refusal(job.ask(0, at(1, 2), epoch=1).answers[3]).exit_code == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (0, "the job cannot have 0 replicas"),
        (5, "the job cannot have 5 replicas; max_replicas allows 1 to 4"),
        (1, "that would leave 1 replicas, quorum.min_replicas is 2"),
    ],
)
def test_what_it_cannot_be_scaled_to(target: int, words: str) -> None:
    found = scale(working(3, min_replicas=2), target)
    assert isinstance(found, Impossible)
    assert (found.status, found.detail[: len(words)]) == (409, words)


def test_too_few_are_left_only_by_force_and_the_last_holder_never_leaves() -> None:
    job = working(3, min_replicas=2)
    assert planned(job, 1, force=True).due
    job = working(3)
    job.runs({0: None}, [(0, 0)])
    job.ask(1, at(1, 2), epoch=1)
    found = scale(job, 1, force=True)
    assert isinstance(found, Impossible)
    assert "cannot be spared" in found.detail


def test_twice_is_once_and_growing_needs_nobody() -> None:
    job = working(min_replicas=2)
    assert not planned(job, 2).due
    job.runs({1: None}, [(1, 0)])
    assert planned(job, 4).due


def test_nobody_waits_for_what_those_never_wanted_may_hold() -> None:
    """They were no members of any epoch, and without supervisors nobody ever reports them."""
    job = Script(total=4, replicas=2, on_lost_head="rollback")
    job.ask(0)
    job.ask(1)
    job.ask(0, at(1, 1), epoch=1)
    job.runs({0: 1, 1: 1}, [(0, 0), (1, 0)])
    job.ask(0, life=1)
    assert "HeadRolledBack" in job.ask(1, life=1).notes


def test_who_was_a_member_of_a_store_that_is_lost_is_waited_for_although_it_is_beyond() -> None:
    job = Script(total=4, replicas=2)
    job.ask(0, at(1, 1), epoch=4, max_term=7)
    out = job.ask(1, at(1, 1), epoch=4, max_term=7)
    assert out.notes == {"Waiting": "waiting for replica 2,3"}
    job.runs({3: None})
    assert job.ask(2, at(1, 1), epoch=4, max_term=7).grant(2).ring == (0, 1, 2)


def test_who_leaves_before_it_joins_is_let_go_at_once() -> None:
    job = Script(total=2)
    job.runs({0: 0, 1: 0})
    assert job.ask(1, departs=True).answers == {1: Refused("replica 1 leaves on request", 0)}
    job = working()
    job.runs({1: 1}, [(1, 0)])
    assert job.ask(1, life=1, departs=True).answers[1] == Refused("replica 1 leaves on request", 0)


def test_a_member_that_leaves_goes_by_the_token() -> None:
    job = working()
    assert job.ask(1, at(1, 2), epoch=1, departs=True).answers == {1: Continue(1, 3)}


def test_who_alone_holds_the_newest_state_is_heard_although_it_leaves() -> None:
    job = working()
    job.runs({0: 1, 1: 1}, [(0, 0), (1, 0)])
    assert Refused not in {type(a) for a in job.ask(1, at(1, 1), life=1, departs=True).answers.values()}
    assert job.ask(0, life=1, departs=True).answers == {0: Refused("replica 0 leaves on request", 0)}


def test_the_lanes_of_those_beyond_are_drained_and_only_those_that_lived_are_shown() -> None:
    lanes = Lanes(4, 1, 2)
    started = {"t": 1.0, "replica": 2, "incarnation": "2-a-0", "reason": "first start"}
    assert [lane.replica for lane in lanes.shown()] == [0, 1]
    lanes.scale(3, 1.0, "an operator")
    lanes.event("ReplicaStarted", started)
    lanes.commit(2.0, 5, [0, 1, 2])
    lanes.scale(2, 3.0, "an operator")
    lanes.event("ReplicaExited", {**started, "t": 4.0, "kind": "stopped", "reason": "left on request"})
    assert [(lane.replica, lane.state) for lane in lanes.shown()][2:] == [(2, "drained")]
    lanes.scale(4, 5.0, "an operator")
    assert [(lane.replica, lane.state) for lane in lanes.shown()][2:] == [(2, "down"), (3, "down")]
    assert lanes.all[2].segments[-1][2] == "drained"
