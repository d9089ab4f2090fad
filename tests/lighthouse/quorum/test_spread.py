"""When an incarnation on several machines, which no supervisor watches, has exited (`rules.Spread`)."""

from typing import Any

import pytest

from ft_hsdp.core.grant import Refused
from lighthouse.quorum.commands import Impossible, Supervised, plan
from lighthouse.quorum.events import Asked, Commanded, MachineReported, OpenRequest, ProcessesReported
from tests.support.lighthouse.lighthouse_helpers import START, Out, Script, at, name, report

SILENCE_S = 10.0  # Policy.evict_s
HOSTS = (("zone/rack/a", 1), ("zone/rack/b", 1), ("zone/rack/c", 1))


def said(job: Script, *machines: str, gone: bool = False, life: int = 0) -> Out:
    """Machines of replica 0, which is on three, say whether its ranks there have ended."""
    told = tuple(MachineReported((0, name(0, life)), machine, 3, gone) for machine in machines)
    return job.feed(ProcessesReported({}, frozenset(), frozenset(), job.now, machines=told))


def alone() -> Script:
    job = Script(total=1, return_wait_s=0.0)
    for step in range(2):
        ask = OpenRequest(report(0, at(1, step) if step else START, epoch=step), step, hosts=HOSTS)
        job.feed(Asked(ask, job.now))
    return job


def goes_on(job: Script) -> bool:
    """Whether the next incarnation, which is started with another name, gets a grant."""
    return 0 in job.ask(0, at(1, 1), life=1).answers


def test_it_has_exited_when_all_its_machines_say_so() -> None:
    job = alone()
    assert not said(job, "a", "b", gone=True).notes
    assert "ExitReported" in said(job, "c", gone=True).notes
    assert (job.s.exited, job.s.spread) == ({(0, name(0))}, ())


def test_a_machine_that_is_silent_counts_as_lost_but_only_after_a_while() -> None:
    job = alone()
    said(job, "a", "b", "c")
    job.now += SILENCE_S - 1.0
    said(job, "b")
    said(job, "a", gone=True)
    assert not job.wait(1.5).notes, "b was heard, and has a living rank"
    assert "ExitReported" in said(job, "b", gone=True).notes, "c was not heard for long"


def test_the_silence_of_all_machines_alone_is_no_exit() -> None:
    job = alone()
    said(job, "a", "b", "c")
    assert not job.wait(100 * SILENCE_S).notes


def test_after_a_restart_of_the_lighthouse_each_machine_has_time_to_be_heard() -> None:
    job = alone()
    job.restart()
    assert not said(job, "a", gone=True).notes
    assert not job.wait(SILENCE_S - 1.0).notes
    assert "ExitReported" in job.wait(1.0).notes


def test_a_lone_replica_that_lost_a_machine_goes_on() -> None:
    """Before, it would wait: the earlier incarnation might hold more."""
    job = alone()
    said(job, "a", "b", "c")
    job.now += SILENCE_S
    said(job, "a", "b", gone=True)
    assert goes_on(job)
    assert isinstance(job.ask(0, at(1, 1)).answers[0], Refused), "the lost machine was only cut off"


def test_a_machine_with_living_ranks_keeps_the_next_incarnation_waiting() -> None:
    job = alone()
    said(job, "a", gone=True)
    said(job, "b", "c")
    assert not goes_on(job)


def test_a_replica_with_a_supervisor_that_reports_is_believed_to_that_one() -> None:
    job = alone()
    none = frozenset[Any]()
    job.feed(ProcessesReported({0: name(0)}, none, none, job.now, owner="run", claims=((0, 0),)))
    said(job, "a", "b", "c", gone=True)
    assert not job.s.exited


def lost(job: Script, host: str) -> Commanded:
    return Commanded("host-lost", 0, "it burns", job.now, host=host)


def test_an_operator_may_say_that_a_host_is_lost() -> None:
    job = alone()
    said(job, "b")
    job.feed(lost(job, "a"))
    assert not job.s.exited, "b has a living rank"
    said(job, "b", gone=True)
    assert not job.s.exited
    assert "ExitReported" in job.wait(SILENCE_S).notes
    assert goes_on(job)


@pytest.mark.parametrize(
    ("host", "supervised", "status"), [("d", (), 404), ("rack", (), 404), ("a", (0,), 409), ("a", (), 200)]
)
def test_a_host_of_nobody_and_one_with_a_supervisor_are_refused(host, supervised, status) -> None:
    found = plan(alone().s, lost(alone(), host), Supervised(supervised))
    assert (found.status if isinstance(found, Impossible) else 200) == status


def test_machines_beyond_those_that_there_are_take_no_memory() -> None:
    job = alone()
    said(job, *(f"m{n}" for n in range(100)))
    assert len(job.s.spread[0].heard) == 3
    said(job, "a", life=5)
    assert [each.incarnation for each in job.s.spread] == [name(0)], "it was never admitted"
