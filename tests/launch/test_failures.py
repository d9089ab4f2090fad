"""What is done about a failure, from what its supervisor knows: DeadPool's Table II on stand-in ranks."""

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import pytest

from ft_hsdp import fault_injection
from ft_hsdp.config import parse
from ft_hsdp.launch.backend.base import EVICTED, LEFT, ReplicaProcess, ReplicaSpec, exit_in_words
from ft_hsdp.launch.failures import IncarnationEnd, JobFailures, Outcome, ReplicaFailures, end_of
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir, write_json
from ft_hsdp.launch.supervisor import ReplicaSupervisor
from ft_hsdp.memory.replacement import Action
from tests.support.launch.emulated_hosts import EmulatedHosts
from tests.support.launch.launch_helpers import Plan
from tests.support.launch.local_backend import LocalBackend
from tests.support.waiting import async_until


def end(code: int | None = 75, step: int | None = 7, host: str = "r0h0", committed: int = 0) -> IncarnationEnd:
    return IncarnationEnd("exit", code, host, step, committed)


def test_a_step_that_ends_all_replicas_three_times_halts_the_job() -> None:
    job = JobFailures(lambda: [0, 1])
    zero, one = ReplicaFailures(0, job), ReplicaFailures(1, job)
    for _ in range(2):
        assert zero.judge(end(), (), False).action is Action.SAME_HOST
        assert one.judge(end(), (), False).action is Action.SAME_HOST
    assert zero.judge(end(), (), False).action is Action.SAME_HOST
    decision = one.judge(end(), (), False)
    assert decision.action is Action.HALT


def test_units_are_not_blamed_for_a_step_that_ends_each_replica() -> None:
    """Each has other units in it; a unit that ends one replica while the other one trains is blamed."""
    job = JobFailures(lambda: [0, 1])
    zero, one = ReplicaFailures(0, job), ReplicaFailures(1, job)
    for _ in range(2):
        for replica, failures in enumerate((zero, one)):
            assert not failures.blame((replica, 6, 1), 7, True)
            failures.judge(end(step=7), (), False)
    assert not zero.blame((0, 9, 1), 10, True)
    assert zero.blame((0, 9, 1), 14, False)
    assert zero.blamed == one.blamed == ((0, 9, 1),)


@pytest.mark.parametrize(
    "innocent",
    [
        end(step=8),  # another step
        end(step=None),  # it had not joined
        end(code=-signal.SIGKILL),  # somebody killed it
        end(code=69),  # no lighthouse
        IncarnationEnd(EVICTED, None, "", 7, 0),
        IncarnationEnd(LEFT, 0, "", 7, 0),
    ],
)
def test_what_says_nothing_about_the_step_does_not_count(innocent: IncarnationEnd) -> None:
    alone = ReplicaFailures(0, JobFailures(lambda: [0]))
    for each in (end(), innocent, end()):
        assert alone.judge(each, (), False).action is not Action.HALT


def test_a_lost_host_does_not_count_either_and_its_ranks_move() -> None:
    alone = ReplicaFailures(0, JobFailures(lambda: [0]))
    for _ in range(4):
        decision = alone.judge(end(), ("r0h0",), True)
        assert (decision.action, decision.cordoned) == (Action.OTHER_HOST, False)


def test_a_replica_that_trains_on_keeps_the_job_alive() -> None:
    """Replica 1 takes part, and the step has not ended it."""
    job = JobFailures(lambda: [0, 1])
    assert [ReplicaFailures(0, job).judge(end(), (), True).action for _ in range(5)] == [Action.SAME_HOST] * 5


def test_the_third_failure_on_one_host_moves_its_ranks_while_others_train() -> None:
    failures = ReplicaFailures(0)
    assert not failures.judge(end(), (), True).cordoned
    assert not failures.judge(end(host="r0h1"), (), True).cordoned
    assert not failures.judge(end(), (), True).cordoned
    assert not failures.judge(end(), (), False).cordoned, "nobody trains: it may be the job"
    assert failures.judge(end(), (), True).cordoned
    assert failures.judge(end(committed=9), (), True).cordoned, "it ends its ranks every few steps"
    assert not failures.judge(end(committed=10), (), True).cordoned, "it was healthy: this is the first failure"
    for innocent in (-signal.SIGKILL, 69):
        assert not any(failures.judge(end(innocent), (), True).cordoned for _ in range(3))
    assert failures.judge(end(76), (), False).cordoned, "a rank knows that its host is broken"


class Somewhere:
    """A rank's process on a host."""

    pid, machine = 1, "m"

    def __init__(self, host: str) -> None:
        self.host = host

    def signal(self, number: int) -> None: ...


@pytest.mark.parametrize("code", [76, 64, 1, 69, -signal.SIGSEGV, -signal.SIGKILL])
def test_who_failed_does_not_depend_on_the_order_in_which_exits_are_reported(run_dir: RunDir, code: int) -> None:
    """Rank 1 failed, and the others lost it. The supervisor kills what it thinks still runs."""
    for order, reported in itertools.product(itertools.permutations(range(3)), range(1, 4)):
        if code == -signal.SIGKILL and 1 in order[reported:]:
            continue  # nothing tells this one from that of the supervisor
        gang = ReplicaProcess(ReplicaSpec(0, 3, "a", 0, run_dir.config), run_dir)
        processes, codes = [Somewhere(f"h{rank}") for rank in range(3)], [75, code, 75]
        for rank, process in enumerate(processes):
            gang.started(rank, process)
        for number, rank in enumerate(order):
            if number == reported:
                gang.kill()
            gang.exited(rank, processes[rank], codes[rank])
        shown = end_of(gang, 5, 0)
        assert (shown.code, shown.host, gang.verdict()[0]) == (code, "h1", exit_in_words(code)), (order, reported)


def test_a_rank_that_the_supervisor_killed_shows_nothing(run_dir: RunDir) -> None:
    gang = ReplicaProcess(ReplicaSpec(0, 2, "a", 0, run_dir.config), run_dir)
    processes = [Somewhere("h0"), Somewhere("h1")]
    for rank, process in enumerate(processes):
        gang.started(rank, process)
    gang.exited(1, processes[1], 75)
    gang.kill()
    gang.exited(0, processes[0], -signal.SIGKILL)
    assert (end_of(gang, 5, 0).code, end_of(gang, 5, 0).host) == (75, "h1")


class World:
    """The supervisor of replica 0, with two stand-in ranks on two emulated hosts and a spare one."""

    def __init__(self, run: RunDir, spare: int = 1, shrink_to: int | None = None, place_s: float = 60.0) -> None:
        self.run = run
        self.others_train = False
        self.events: list[Row] = []
        self.progress = Progress()
        self.hosts = EmulatedHosts(2, 2, spare)
        self.backend = LocalBackend(
            run,
            entry="tests.support.launch.standin:main",
            preload=(),
            emit=self.events.append,
            hosts=self.hosts,
            shrink_to=shrink_to,
        )
        link = LighthouseLink(("http://nowhere",), "secret", self.progress, lambda *_: None)
        link.holds = lambda _: True  # type: ignore[method-assign]
        self.job = JobFailures(lambda: [0])
        self.supervisor = ReplicaSupervisor(
            0,
            parse({"ranks_per_replica": 2, "hosts": {"per_replica": 2}, "timeouts": {"place_s": place_s}}),
            run,
            backend=self.backend,
            link=link,
            progress=self.progress,
            emit=self.events.append,
            survivors=lambda: True,
            proven=lambda: self.others_train,
            failures=self.job,
        )

    async def life(self, number: int) -> str:
        """Wait for a life of the replica; its incarnation."""
        await async_until(lambda: len(self.named("ReplicaStarted")) > number, f"life {number}")
        assert self.supervisor.current is not None
        return self.supervisor.current.name

    async def end(self, number: int) -> None:
        """End a life, and let the others commit, for which the next one waits."""
        (self.run.path / f"end-{number}").touch()
        await async_until(lambda: len(self.named("ReplicaExited")) > number, f"the end of life {number}")
        self.progress.saw(self.progress.step + 1)

    def named(self, name: str) -> list[Row]:
        return [e for e in self.events if e["event"] == name]


def lose(world: World, host: str) -> None:
    order = world.run.path / fault_injection.FOLDER / "order.json"
    order.parent.mkdir(parents=True, exist_ok=True)
    write_json(order, asdict(fault_injection.FaultOrder("host", 0, host=host)))


def back(world: World) -> None:
    (world.run.path / fault_injection.FOLDER / "order.json").unlink()


@asynccontextmanager
async def play(world: World) -> AsyncIterator[asyncio.Task[Outcome]]:
    task = asyncio.create_task(world.supervisor.run())
    try:
        yield task
    finally:
        task.cancel()
        await world.backend.close()


def fails(lives: int) -> dict[str, Any]:
    """Rank 0 of replica 0 ends in each of its first lives once the test has made the file end-LIFE."""
    return {"0": {str(life): {"0": ["exit-when", f"end-{life}", 75]} for life in range(lives)}}


async def test_without_a_spare_host_a_broken_one_ends_the_replica_which_leaves_its_hosts(run_dir, plan) -> None:
    plan({"0": {"0": {"1": ["exit", 76]}}})
    world = World(run_dir, spare=0)
    async with play(world) as task:
        assert (await task).kind == "lost"
        assert world.named("HostCordoned") == []
        assert world.hosts.free([]) == ["r0h0", "r0h1"]


async def test_a_broken_host_is_cordoned_while_others_train_and_the_replica_waits_for_another(
    run_dir: RunDir, plan: Plan
) -> None:
    """The spare host is down at that moment."""
    plan({"0": {"0": {"1": ["exit-when", "end-0", 76]}}})
    world = World(run_dir, place_s=0.05)
    world.others_train = True
    lose(world, "s0")
    async with play(world):
        await world.life(0)
        await world.end(0)
        await async_until(lambda: world.named("ReplicaUnplaced"), "the wait")
        (cordoned,) = world.named("HostCordoned")
        assert (cordoned["host"], "exit code 76" in cordoned["reason"]) == ("r0h1", True)
        assert "r0h1 is cordoned" in world.named("ReplicaUnplaced")[0]["reason"]
        back(world)
        await world.life(1)
        (swap,) = world.named("HostReplaced")
        assert (swap["before"], swap["host"], swap["ranks"]) == ("r0h1", "s0", [1])
        assert world.named("ReplicaLost") == []


async def test_a_broken_host_counts_as_lost_for_a_replica_that_may_go_on_with_fewer_ranks(run_dir, plan) -> None:
    plan({"0": {"0": {"1": ["exit-when", "end-0", 76]}}})
    world = World(run_dir, spare=0, shrink_to=1, place_s=0.05)
    world.others_train = True
    async with play(world):
        await world.life(0)
        await world.end(0)
        await world.life(1)
        assert [(e["from"], e["to"]) for e in world.named("Shrunk")] == [(2, 1)]
        assert [e["host"] for e in world.named("HostCordoned")] == ["r0h1"]


@pytest.mark.parametrize("broken", ["r0h0", "r0h1"])
async def test_a_host_that_is_broken_is_cordoned_although_one_is_lost_at_once(run_dir, plan, broken) -> None:
    plan({"0": {"0": {broken[-1]: ["exit-when", "end-0", 76]}}})
    world = World(run_dir, spare=2)
    async with play(world):
        await world.life(0)
        lose(world, "r0h1")
        await world.end(0)
        await world.life(1)
        assert [e["host"] for e in world.named("HostCordoned")] == [broken]
        back(world)
        assert broken not in world.hosts.free([])
        replaced = {(e["before"], e["host"]) for e in world.named("HostReplaced")}
        assert replaced == ({("r0h1", "s0")} if broken == "r0h1" else {("r0h0", "s0"), ("r0h1", "s1")})


async def test_a_broken_host_that_is_lost_is_waited_for_if_there_is_no_other(run_dir: RunDir, plan: Plan) -> None:
    plan({"0": {"0": {"1": ["exit-when", "end-0", 76]}}})
    world = World(run_dir, spare=0)
    async with play(world) as task:
        await world.life(0)
        lose(world, "r0h1")
        await world.end(0)
        back(world)
        await world.life(1)
        assert not task.done()


async def test_the_third_failure_moves_a_rank_while_others_commit(run_dir: RunDir, plan: Plan) -> None:
    plan(fails(3))
    world = World(run_dir)
    async with play(world):
        for number in range(3):
            await world.life(number)
            world.progress.saw(world.progress.step + 1)
            await world.end(number)
        await world.life(3)
        assert [e["host"] for e in world.named("HostCordoned")] == ["r0h0"]
        assert [(e["before"], e["host"]) for e in world.named("HostReplaced")] == [("r0h0", "s0")]


@pytest.mark.parametrize("others", [[1], []])
async def test_a_host_that_ends_its_rank_every_few_steps_is_left(run_dir, plan, others) -> None:
    plan(fails(3))
    world = World(run_dir)
    run_dir.commits(0).parent.mkdir(parents=True, exist_ok=True)
    async with play(world):
        for number in range(3):
            row = {"incarnation": await world.life(number), "role": "contribute", "contributors": [0, *others]}
            with run_dir.commits(0).open("a") as file:
                for step in range(3):
                    file.write(json.dumps({**row, "step": number * 3 + step + 1}) + "\n")
            await world.end(number)
        await world.life(3)
        assert [e["host"] for e in world.named("HostCordoned")] == ["r0h0"] * len(others)


async def test_the_job_is_given_up_at_a_step_that_ends_it_three_times(run_dir: RunDir, plan: Plan) -> None:
    plan(fails(3))
    world = World(run_dir)
    log = run_dir.replica_events(0)
    log.parent.mkdir(parents=True, exist_ok=True)
    async with play(world) as task:
        for number in range(3):
            name = await world.life(number)
            with log.open("a") as file:
                for row in ({"event": "StateRestored", "step": 4}, {"event": "CheckedIn"}):
                    file.write(json.dumps({**row, "t": 0.0, "incarnation": name}) + "\n")
            await world.end(number)
        outcome = await task
        (given_up,) = world.named("JobGivenUp")
        assert (outcome.kind, given_up["step"]) == ("lost", 5)
        assert world.job.halted.startswith("step 5: ")


async def test_a_host_that_is_back_before_the_replica_is_has_lost_its_rank_all_the_same(run_dir, plan) -> None:
    plan(fails(1))
    world = World(run_dir)
    async with play(world):
        await world.life(0)
        lose(world, "r0h0")
        (run_dir.path / "end-0").touch()
        await async_until(lambda: world.named("RestartScheduled"), "the end of life 0")
        back(world)
        world.progress.saw(1)
        await world.life(1)
        assert [(e["before"], e["host"], e["ranks"]) for e in world.named("HostReplaced")] == [("r0h0", "s0", [0])]
        assert world.named("HostCordoned") == []
