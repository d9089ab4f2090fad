"""When an incarnation on several machines, which no supervisor watches, has exited (`rules.Spread`)."""

from ft_hsdp.core.grant import Hosts, Refused
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.protocol import ProcessReport
from lighthouse.quorum.commands import Impossible, plan
from lighthouse.quorum.events import Asked, Commanded, OpenRequest, ProcessesReported
from tests.support.lighthouse.lighthouse_helpers import START, Out, Script, at, make_service, name, report

SILENCE_S = 10.0  # Policy.evict_s
HOSTS: Hosts = (("zone/rack/a", 1), ("zone/rack/b", 1), ("zone/rack/c", 1))


def said(job: Script, *machines: str, gone: bool = False, done: str = "") -> Out:
    told = tuple(MachineRanks(name(0), machine, 3, gone, done=done == machine) for machine in machines)
    return job.feed(ProcessesReported({}, frozenset(), frozenset(), job.now, machines=told))


def alone(hosts: Hosts = HOSTS) -> Script:
    job = Script(total=1, return_wait_s=0.0)
    for step in range(2):
        ask = OpenRequest(report(0, at(1, step) if step else START, epoch=step), step, hosts=hosts)
        job.feed(Asked(ask, job.now))
    return job


def goes_on(job: Script) -> bool:
    return 0 in job.ask(0, at(1, 1), life=1).answers


def test_it_has_exited_when_all_its_machines_say_so_and_not_by_silence_alone() -> None:
    job = alone()
    said(job, "a", "b", "c")
    assert not job.wait(100 * SILENCE_S).notes
    said(job, "c")
    assert not said(job, "a", "b", gone=True).notes
    assert not goes_on(job), "c has a living rank"
    assert "ExitReported" in said(job, "c", gone=True).notes
    assert (job.s.exited, job.s.spread) == ({(0, name(0))}, ())


def test_its_script_is_done_if_one_of_its_machines_says_so_whichever_is_heard_last() -> None:
    job = alone()
    assert "JobFinished" not in said(job, "a", "b", gone=True, done="a").notes, "c has a living rank"
    assert "JobFinished" in said(job, "c", gone=True).notes


def test_a_machine_that_is_silent_counts_as_lost_but_only_after_a_while() -> None:
    job = alone()
    said(job, "a", "b", "c")
    job.now += SILENCE_S - 1.0
    said(job, "b")
    said(job, "a", gone=True)
    assert not job.wait(1.5).notes, "b was heard, and has a living rank"
    assert "ExitReported" in said(job, "b", gone=True).notes, "c was not heard for long"


def test_after_a_restart_of_the_lighthouse_each_machine_has_time_to_be_heard() -> None:
    job = alone()
    job.restart()
    assert not said(job, "a", gone=True).notes
    assert not job.wait(SILENCE_S - 1.0).notes
    assert "ExitReported" in job.wait(1.0).notes


def test_a_lone_replica_that_lost_a_machine_goes_on() -> None:
    job = alone()
    said(job, "a", "b", "c")
    job.now += SILENCE_S
    said(job, "a", "b", gone=True)
    assert goes_on(job)
    assert isinstance(job.ask(0, at(1, 1)).answers[0], Refused), "the lost machine was only cut off"


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


def test_an_order_that_says_yes_is_carried_out_and_others_are_refused() -> None:
    job = alone()
    assert [refused(job, host) for host in ("d", "rack", "a")] == [404, 404, 0]
    said(job, "b", "c", gone=True)
    assert refused(job, "a") == 0
    assert "ExitReported" in job.feed(lost(job, "a")).notes


def refused(job: Script, host: str) -> int:
    found = plan(job.s, lost(job, host))
    return found.status if isinstance(found, Impossible) else 0


def test_a_host_that_is_lost_is_one_of_as_many_as_its_watches_have_said() -> None:
    job = alone(hosts=())
    said(job, "a")
    assert not job.feed(lost(job, "a")).notes


def test_a_watch_of_which_nobody_waits_to_hear_is_told_so() -> None:
    ranks = (MachineRanks("0-x-0", "a", 2, gone) for gone in (False, True))
    service, _ = make_service()
    assert [service.processes(ProcessReport(machine=each)).exited for each in ranks] == [False, True]


def test_machines_beyond_those_that_there_are_take_no_memory() -> None:
    job = alone()
    said(job, *(f"m{n}" for n in range(100)))
    assert len(job.s.spread[0].heard) == 3
