"""Where a replica that recovers looks for the newest state, and when it need not look."""

from dataclasses import replace

from lighthouse.quorum.events import OpenRequest
from lighthouse.quorum.state import LighthouseState, holders
from tests.support.lighthouse.lighthouse_helpers import START, Script, at, report


def with_agents(s: LighthouseState) -> LighthouseState:
    """Give the members of the grant state agents, two each."""
    assert s.grant is not None
    members = tuple(
        replace(m, state=(f"h{m.replica}0:1", f"h{m.replica}1:1"), hosts=((f"rack{m.replica}/a", 2),))
        for m in s.grant.members
    )
    return replace(s, grant=replace(s.grant, members=members))


def test_before_the_first_grant_nobody_stands_and_nothing_is_held():
    found = holders(Script(total=2).s, 0)
    assert (found.stands, found.head, found.agents) == (False, None, {})


def test_the_job_stands_while_a_member_of_another_replica_may_live():
    job = Script(total=2)
    job.first(0, 1)
    job.ask(0, at(1, 4), epoch=1)
    assert holders(job.s, 0).stands
    assert holders(job.s, 0).head == at(1, 4)
    job.runs({0: 1}, exited=[(0, 0)])
    assert holders(job.s, 0).stands, "replica 1 may train"
    assert holders(job.s, 1).stands is False, "what ran of replica 1 has ended if it asks"
    job.runs({1: None}, exited=[(1, 0)])
    assert holders(job.s, 0).stands is False
    assert holders(job.s).stands is False


def test_the_job_stands_while_those_whose_ring_broke_form_the_next_epoch():
    job = Script(total=2)
    job.first(0, 1)
    job.ask(1, at(1, 4), epoch=1, after=1, suspects=(0,))
    assert job.s.broken
    assert holders(job.s, 0).stands
    assert holders(job.s, 1).stands, "nobody has reported the exit of replica 0"
    job.runs({}, exited=[(0, 0)])
    assert holders(job.s, 1).stands is False


def test_a_member_that_is_behind_does_not_hold_the_head():
    job = Script(total=2)
    job.first(0, 1)
    job.ask(0, at(1, 4), epoch=1)
    job.runs({0: 0, 1: 1}, exited=[(1, 0)])
    job.ask(1, life=1)
    joined = job.ask(0, at(1, 5), epoch=1).grant(0)
    assert {m.replica: m.role for m in joined.members} == {0: "contribute", 1: "behind"}
    assert holders(job.s, 1).stands, "replica 0 holds it"
    job.runs({1: 1}, exited=[(0, 0)])
    assert holders(job.s, 0).stands is False, "replica 1 lives, and has nothing"


def test_agents_are_those_of_the_grant_of_open_requests_and_those_that_were_heard_last():
    job = Script(total=3)
    job.first(0, 1)
    s = with_agents(job.s)
    assert holders(s, 0).agents == {0: ("h00:1", "h01:1"), 1: ("h10:1", "h11:1")}
    views = list(s.views)
    views[0] = replace(views[0], ask=OpenRequest(report(0, START, 1), 9, (), ("h01:1", "new:1"), (("b", 2),)))
    s = replace(s, views=tuple(views))
    heard = {2: (("old:1", "old:1"), ()), 1: (("h10:1",), ())}
    assert holders(s, 0, heard).agents == {0: ("h00:1", "h01:1", "new:1"), 1: ("h10:1", "h11:1"), 2: ("old:1",)}
    where = holders(s, 0, heard).hosts
    assert where == {"h00:1": "rack0/a", "h01:1": "b", "h10:1": "rack1/a", "h11:1": "rack1/a", "new:1": "b"}


def test_after_states_differed_no_copy_is_named():
    job = Script(total=2)
    job.first(0, 1)
    s = with_agents(job.s)
    assert holders(replace(s, rewinding=True), 0).agents == {}
    assert holders(replace(s, diverged=(0, 1)), 0, {1: (("h:1",), ())}).agents == {}
