import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import psutil
import pytest

from ft_hsdp.config import parse
from ft_hsdp.core import restart
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir, alive, read_json
from ft_hsdp.launch.supervisor import ReplicaSupervisor
from tests.support.launch.launch_helpers import Plan
from tests.support.launch.launch_rows import fold
from tests.support.launch.local_backend import LocalBackend
from tests.support.waiting import async_until

SHORT_START = {"start_s": 0.5, "ranks_s": 0.5, "connect_s": 0.5}
SHORT_END = {"final_wait_s": 3.0, "return_wait_s": 3.0, "load_s": 15.0}  # and half of it for a last checkpoint


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs no budget is tried again soon."""
    monkeypatch.setattr(restart, "UNREACHED_S", 0.01)
    monkeypatch.setattr(restart, "SHORTAGE_S", (0.02, 0.05))


class Book:
    """Stands for the lighthouse: writes down what it is told, and which pids were alive then."""

    def __init__(self) -> None:
        self.owner = "aaaa"
        self.told: list[tuple[Any, ...]] = []
        self.watched: list[int] = []
        self.alive_at_exit: list[int] = []
        self.resting: list[int] = []
        self.leased: list[int] = []
        self.other = ""  # another supervisor that has the lease

    def started(self, replica: int, incarnation: str) -> None:
        self.told.append(("started", replica, incarnation))

    def rests(self, replica: int) -> None:
        self.resting.append(replica)

    def exited(self, replica: int, incarnation: str) -> None:
        self.told.append(("exited", replica, incarnation))
        self.alive_at_exit += [pid for pid in self.watched if alive({"pid": pid})]

    def lost(self, replica: int) -> None:
        self.told.append(("lost", replica))

    def ended(self, replica: int) -> None:
        self.told.append(("ended", replica))

    def claims(self, replica: int) -> None:
        self.leased.append(replica)

    def releases(self, replica: int) -> None:
        self.leased.remove(replica)

    def holds(self, replica: int) -> bool:
        return replica in self.leased and not self.other

    def rival(self, replica: int) -> str:
        return self.other

    @property
    def names(self) -> list[str]:
        return [entry[0] for entry in self.told]


class World:
    """A supervisor of replica 1 over stand-in ranks."""

    def __init__(
        self,
        run: RunDir,
        replicas: int = 3,
        timeouts: dict[str, float] | None = None,
        entry: str | None = None,
        **restart: Any,
    ) -> None:
        self.run = run
        self.book = Book()
        self.events: list[Row] = []
        self.progress = Progress()
        self.backend = LocalBackend(run, entry="tests.support.launch.standin:main", preload=())
        self.survivors = False
        self.proven = False
        self.supervisor = ReplicaSupervisor(
            1,
            parse(
                {
                    "restart": restart,
                    "timeouts": timeouts or {},
                    "entry": entry,
                    "replicas": replicas,
                    "max_replicas": 3,
                    "ranks_per_replica": 2,
                }
            ),
            run,
            backend=self.backend,
            link=self.book,  # type: ignore[arg-type]
            progress=self.progress,
            emit=self.events.append,
            survivors=lambda: self.survivors,
            proven=lambda: self.proven,
        )

    def named(self, name: str) -> list[Row]:
        return [e for e in self.events if e["event"] == name]

    async def waiting(self, restart: int) -> list[int]:
        """Pids of the ranks of a restart, once they are all up."""
        files = [self.run.path / f"waiting-1-{restart}-{rank}" for rank in (0, 1)]
        await async_until(lambda: all(file.exists() for file in files), f"the ranks of restart {restart}")
        # A rank may be up before the supervisor has heard that all are.
        await async_until(lambda: len(self.named("ReplicaStarted")) > restart, f"the event of restart {restart}")
        assert self.supervisor.current is not None
        return [rank.pid for rank in self.supervisor.current.ranks.values()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """The supervisor runs; with the end of the block it ends, and nothing is left running."""
        self.task = asyncio.create_task(self.supervisor.run())
        try:
            yield self
        finally:
            self.task.cancel()
            await self.backend.close()
            await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.parametrize("victim", [0, 1])
async def test_sigkill_of_one_rank_kills_the_stopped_other_one_and_restarts_both(run_dir, victim) -> None:
    async with World(run_dir).running() as world:
        pids = world.book.watched = await world.waiting(0)
        os.kill(pids[1 - victim], signal.SIGSTOP)
        await async_until(lambda: psutil.Process(pids[1 - victim]).status() == psutil.STATUS_STOPPED, "the stop")
        os.kill(pids[victim], signal.SIGKILL)
        again = await world.waiting(1)
        listed = json.loads(run_dir.processes(1).read_text())
        assert (listed["replica"], listed["restarts"]) == (1, 1)
        same = {"host": socket.gethostname(), "machine": socket.gethostname(), "state": "running"}
        assert listed["ranks"] == [{"rank": n, "pid": pid, **same} for n, pid in enumerate(again)]
        assert not set(pids) & set(again)
        assert world.book.names == ["started", "exited", "started"]
        assert world.book.alive_at_exit == []
        first, second = world.book.told[0][2], world.book.told[2][2]
        assert (first[:-1], first[-2:], second[-2:]) == (second[:-1], "-0", "-1")
        (seen,), (exited,) = world.named("ProcessExited"), world.named("ReplicaExited")
        assert (seen["rank"], seen["kind"], seen["incarnation"]) == (victim, "SIGKILL", first)
        assert (exited["rank"], exited["kind"]) == (victim, "SIGKILL")
        assert all("t" in e and e["reason"] for e in world.events)


async def test_all_ranks_ending_with_zero_is_done_even_if_they_do_not_end_together(run_dir, plan) -> None:
    plan({"1": {"0": {"0": ["final", False], "1": ["exit-when", "go", 0]}}})
    async with World(run_dir).running() as world:
        current = world.supervisor
        await async_until(lambda: current.current and current.current.first, "the first exit")
        (run_dir.path / "go").touch()
        assert (await world.task).kind == "done"
        assert world.book.names == ["started", "exited", "ended"]
        assert [r["state"] for r in read_json(run_dir.processes(1))["ranks"]] == ["exited", "exited"]


async def test_a_replica_that_leaves_because_one_rank_was_told_to_end_may_do_so_in_peace(run_dir, plan) -> None:
    plan({"1": {"0": {"0": ["exit-when", "go", 0], "1": ["exit", 143]}}})
    async with World(run_dir).running() as world:
        await async_until(lambda: world.supervisor.current and world.supervisor.current.first, "the first exit")
        (run_dir.path / "go").touch()
        await world.waiting(1)
        (exited,) = world.named("ReplicaExited")
        assert (exited["kind"], exited["codes"]) == ("left", {"0": 0, "1": 143})


@pytest.mark.parametrize("heard", [False, True])
async def test_a_replica_beyond_those_that_the_job_begins_with_rests_until_it_is_wanted(run_dir, heard) -> None:
    async with World(run_dir, replicas=1).running() as world:
        await async_until(lambda: world.supervisor.resting, "the rest")
        if heard:
            drain(world, 1)
            await asyncio.sleep(0)
        assert world.supervisor.resting
        assert world.book.resting == [1]
        assert world.book.names == []
        drain(world)
        await world.waiting(0)
        assert [e["reason"] for e in world.named("ReplicaStarted")] == ["it is wanted"]


@pytest.mark.parametrize(("code", "kind"), [(2, "config"), (64, "config"), (76, "lost")])
@pytest.mark.parametrize("step", [0, 5])
async def test_what_a_restart_cannot_mend_is_not_restarted(run_dir, plan, code, kind, step) -> None:
    """Not even where it joins a job that has trained."""
    plan({"1": {"0": {"1": ["exit", code]}}})
    world = World(run_dir)
    world.progress.saw(step, 1)
    async with world.running():
        outcome = await world.task
        assert outcome.kind == kind
        assert f"exit {code}" in outcome.reason
        assert world.book.names == ["started", "exited"] + ["lost"] * (kind == "lost")


async def test_a_configuration_that_has_trained_is_not_to_blame(run_dir: RunDir, plan: Plan) -> None:
    """The machine is, to which a replica has moved, and the others train on."""
    plan({"1": {"0": {"1": ["exit", 64]}}})
    world = World(run_dir)
    world.proven = True
    async with world.running():
        await world.waiting(1)
        (scheduled,) = world.named("RestartScheduled")
        assert "exit 64" in scheduled["reason"]
        await world.supervisor.stop(5)
        assert (await world.task).kind == "stopped"


async def test_a_replica_that_is_refused_again_while_others_train_is_given_up(run_dir: RunDir, plan: Plan) -> None:
    """Its data or its script are wrong, and no other host is there to try: its budget says nothing about that."""
    plan({"1": {str(n): {"0": ["bad-config"]} for n in range(3)}})
    world = World(run_dir, budget=9)
    world.proven = True
    async with world.running():
        outcome = await world.task
        assert (outcome.kind, len(world.named("ReplicaStarted"))) == ("lost", 2)
        assert "model.dim: got 3" in outcome.reason


@pytest.mark.usefixtures("_soon")
async def test_lives_that_find_no_lighthouse_cost_nothing_of_the_budget(run_dir: RunDir, plan: Plan) -> None:
    plan({"1": {str(n): {"0": ["exit", 69], "1": ["exit", 69]} for n in range(4)}})
    async with World(run_dir, budget=1).running() as world:
        await world.waiting(4)
        assert not world.task.done()
        told = world.named("RestartScheduled")
        assert len(told) == 4, "the first life looks for its lighthouse, and counts; its budget is 1"


async def test_an_eviction_kills_a_replica_that_is_stopped(run_dir: RunDir) -> None:
    async with World(run_dir).running() as world:
        pids = world.book.watched = await world.waiting(0)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        name = world.book.told[0][2]
        world.supervisor.evict("1-00000000-0", "an incarnation of the past")
        world.supervisor.evict(name, "silent for 10 s")
        world.supervisor.evict(name, "silent for 10 s")
        await world.waiting(1)
        assert world.book.alive_at_exit == []
        assert [e["reason"] for e in world.named("EvictionOrdered")] == ["silent for 10 s"]
        (exited,) = world.named("ReplicaExited")
        assert (exited["kind"], exited["reason"]) == ("evicted", "silent for 10 s")


async def test_a_restart_waits_for_the_survivors_next_commit_and_for_the_steps_it_stays_away(run_dir) -> None:
    world = World(run_dir, timeouts={"stop_s": 300})
    world.survivors = True
    async with world.running():
        pids = await world.waiting(0)
        world.progress.saw(step=5)
        world.supervisor.stay_away(until_step=8)
        os.kill(pids[0], signal.SIGKILL)
        await async_until(lambda: world.named("RestartScheduled"), "the decision")
        for step in (6, 7):
            world.progress.saw(step=step)
            await asyncio.sleep(0)
            assert len(world.book.told) == 2
        world.progress.saw(step=8)
        await world.waiting(1)


async def test_stop_ends_ranks_that_are_deaf_or_stopped(run_dir: RunDir, plan: Plan) -> None:
    plan({"1": {"0": {"0": ["deaf"]}}})
    async with World(run_dir).running() as world:
        pids = await world.waiting(0)
        os.kill(pids[1], signal.SIGSTOP)
        await world.supervisor.stop(grace_s=0.3)
        assert (await world.task).kind == "stopped"
        assert not any(alive({"pid": pid}) for pid in pids)


def drain(world: World, *replicas: int) -> None:
    world.progress.saw(0, drained=frozenset(replicas))


async def test_a_drained_replica_that_has_left_stays_away_until_it_is_undrained_and_its_budget_is_whole(
    run_dir: RunDir, plan: Plan
) -> None:
    leaves = {"0": ["exit-when", "go-0", 0], "1": ["exit-when", "go-0", 0]}
    again = {"0": ["exit-when", "go-1", 0], "1": ["exit-when", "go-1", 0]}
    plan({"1": {"0": leaves, "1": again}})
    async with World(run_dir, budget=0).running() as world:
        for life in (0, 1):
            await async_until(lambda: len(world.named("ReplicaStarted")) == life + 1, "a start")  # noqa: B023
            drain(world, 1)
            await asyncio.sleep(0)
            assert not world.supervisor.resting
            (run_dir.path / f"go-{life}").touch()
            await async_until(lambda: world.supervisor.resting, "the rest")
            assert world.named("ReplicaExited")[-1]["kind"] == "stopped"
            for _ in range(50):
                await asyncio.sleep(0)
            assert world.book.names == ["started", "exited"] * (life + 1)
            drain(world, 0)
        await world.waiting(2)
        assert len(world.named("ReplicaStarted")) == 3
        assert world.named("RestartScheduled") == []


@pytest.mark.parametrize("of_job", [False, True])
@pytest.mark.parametrize("how", ["drain", "stop"])
async def test_a_script_that_leaves_for_good_because_it_was_sent_away_is_not_done(
    run_dir: RunDir, plan: Plan, how: str, of_job: bool
) -> None:
    """It answers SIGTERM with job.leave; only the end of the whole job counts then."""
    rank = ["final", of_job, "go"]
    plan({"1": {"0": {"0": rank, "1": rank}, "1": {"0": ["exit", 0], "1": ["exit", 0]}}})
    async with World(run_dir, budget=0).running() as world:
        ready = [run_dir.path / f"go-awaited-{n}" for n in (0, 1)]
        await async_until(lambda: all(file.exists() for file in ready), "the start")
        stopping = asyncio.create_task(world.supervisor.stop(grace_s=9) if how == "stop" else asyncio.sleep(0))
        if how == "drain":
            drain(world, 1)
        await asyncio.sleep(0)
        (run_dir.path / "go").touch()
        if how == "stop" or of_job:
            assert (await world.task).kind == ("done" if of_job else "stopped")
            assert ("ended" in world.book.names) is of_job
            await stopping
            return
        await async_until(lambda: world.supervisor.resting, "the rest")
        assert world.named("ReplicaExited")[-1]["kind"] == "stopped"
        drain(world, 0)
        await async_until(lambda: len(world.named("ReplicaExited")) == 2, "the next life")
        assert world.named("ReplicaExited")[-1]["kind"].startswith("exit 0"), "the file is of the first"


async def test_a_replica_may_hear_of_its_drain_before_its_supervisor_does(run_dir: RunDir, plan: Plan) -> None:
    plan({"1": {"0": {"0": ["exit", 0], "1": ["exit", 0]}}})
    async with World(run_dir, budget=0).running() as world:
        await async_until(lambda: "exited" in world.book.names, "the exit")
        drain(world, 1)
        await async_until(lambda: world.supervisor.resting, "the rest")
        assert world.named("ReplicaExited")[0]["kind"] == "stopped"


async def test_a_replica_that_is_drained_while_it_waits_for_its_restart_does_not_start(run_dir: RunDir) -> None:
    world = World(run_dir, timeouts={"stop_s": 300})
    world.survivors = True
    async with world.running():
        pids = await world.waiting(0)
        os.kill(pids[0], signal.SIGKILL)
        await async_until(lambda: world.named("RestartScheduled"), "the decision")
        drain(world, 1)
        world.progress.saw(step=5)
        await async_until(lambda: world.supervisor.resting, "the rest")
        assert world.book.names == ["started", "exited"]


@pytest.mark.parametrize(
    ("how", "kind"),
    [("stop", "drained"), ("finished", "drained"), ("halted", "lost")],
)
async def test_a_drained_replica_ends_with_its_job(run_dir: RunDir, how: str, kind: str) -> None:
    async with World(run_dir).running() as world:
        pids = await world.waiting(0)
        drain(world, 1)
        os.kill(pids[0], signal.SIGKILL)
        await async_until(lambda: world.supervisor.resting, "the rest")
        if how == "stop":
            await world.supervisor.stop(grace_s=1)
        else:
            world.progress.saw(9, finished=how == "finished", halted="no copy is left" if how == "halted" else "")
        assert (await world.task).kind == kind


async def test_of_two_supervisors_one_stands_by_and_takes_over(run_dir: RunDir) -> None:
    """It starts nothing without the lease, ends what it runs when it has lost it, and neither uses its budget."""
    world = World(run_dir, budget=0)
    world.book.other = "bbbb"

    def leased(other: str) -> None:
        world.book.other = other
        world.progress.wake()

    async with world.running():
        await async_until(lambda: world.named("SupervisorStandsBy"), "the first word")
        assert world.book.names == []
        (said,) = world.named("SupervisorStandsBy")
        assert "bbbb" in said["reason"]
        leased("")
        await world.waiting(0)
        first = world.book.told[0][2]
        leased("cccc")
        world.supervisor.evict(first, "supervisor cccc has taken replica 1 over")
        await async_until(lambda: len(world.named("SupervisorStandsBy")) == 2, "the second word")
        assert world.book.names == ["started", "exited"]
        leased("")
        await world.waiting(1)
        assert not world.named("RestartScheduled")
        leased("cccc")
        world.supervisor.evict(world.book.told[-1][2], "supervisor cccc has taken replica 1 over")
        await async_until(lambda: len(world.named("SupervisorStandsBy")) == 3, "the third word")
        world.progress.saw(9, finished=True)
        assert (await world.task).kind == "drained"
        assert world.book.leased == [], "who ends gives its lease back"


async def test_without_a_lighthouse_that_renews_its_lease_a_supervisor_starts_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_hsdp.launch.supervisor.ANSWER_S", 0.01)
    world = World(run_dir)
    world.book.holds = lambda replica: False  # type: ignore[method-assign]
    async with world.running():
        await async_until(lambda: world.named("SupervisorStandsBy"), "the word")
        await world.supervisor.stop(1.0)
        assert (await world.task).kind == "stopped"
        assert world.book.names == []


@pytest.mark.parametrize("hang", ["before check-in", "stopped"])
async def test_a_hang_that_no_rank_can_see_is_found_by_the_supervisor(run_dir: RunDir, hang: str) -> None:
    waits = {"evict_s": 0.75, "silence_s": 0.25} if hang == "stopped" else SHORT_START
    async with World(run_dir, timeouts=waits).running() as world:
        if hang == "stopped":
            os.kill((await world.waiting(0))[1], signal.SIGSTOP)
        await async_until(lambda: world.named("ReplicaExited"), "the end of the incarnation")
        exited = world.named("ReplicaExited")[0]
        assert exited["kind"] == "evicted"
        assert ("checked in" if hang == "before check-in" else "rank 1") in exited["reason"]


@pytest.mark.usefixtures("_soon")
async def test_a_start_that_a_shortage_prevents_costs_no_budget_and_is_told_once(run_dir, plan) -> None:
    """Ranks have no descriptor left, then no memory, and then the fork server has no descriptor."""
    full = {"0": ["raise", "os", 24, "Too many open files"]}
    plan({"1": {str(n): full for n in range(500)}})
    async with World(run_dir, budget=0).running() as world:
        await async_until(
            lambda: len(world.named("RestartScheduled")) >= 2, "restarts after ranks without descriptors"
        )
        plan({"1": {str(n): {"0": ["raise", "memory"]} for n in range(500)}})
        server = psutil.Process(world.backend.server_pid)
        limits = server.rlimit(psutil.RLIMIT_NOFILE)
        server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds(), limits[1]))
        await async_until(
            lambda: [e for e in world.named("ReplicaExited") if e["kind"] == "not started"], "no fork"
        )
        plan({})
        server.rlimit(psutil.RLIMIT_NOFILE, limits)
        await async_until(lambda: world.supervisor.running, "a start")
        assert len(world.named("StartPrevented")) == 1, "it has not checked in"
        who = {"event": "CheckedIn", "incarnation": world.supervisor.current.name}  # type: ignore[union-attr]
        with run_dir.replica_events(1).open("a") as log:
            log.write(json.dumps(who) + "\n")
        await async_until(lambda: len(world.named("StartPrevented")) > 1, "the end of the shortage")
        told, over = world.named("StartPrevented")
        assert over["over"]
        assert (told["cause"], "Too many open" in told["reason"]) == ("shortage", True)
        assert fold(3, world.events, []).losses() == [], "what had not begun was not lost"


@pytest.mark.usefixtures("_soon")
async def test_a_shortage_that_lasts_too_long_ends_the_replica_with_its_key(run_dir: RunDir, plan: Plan) -> None:
    plan({"1": {str(n): {"0": ["raise", "memory"]} for n in range(500)}})
    async with World(run_dir, budget=0, shortage_s=0.2).running() as world:
        outcome = await world.task
        assert (outcome.kind, "restart.shortage_s" in outcome.reason) == ("lost", True)
        assert "MemoryError" in outcome.reason


async def test_a_script_that_never_joins_is_named(run_dir: RunDir) -> None:
    async with World(run_dir, timeouts=SHORT_START, entry="mine/train.py").running() as world:
        await async_until(lambda: world.named("ReplicaExited"), "the end of the incarnation")
        said = world.named("ReplicaExited")[0]["reason"]
        assert said.startswith("train.py")
        assert "timeouts.start_s" in said


async def test_a_replica_that_does_not_hear_of_the_end_of_the_job_is_ended(run_dir: RunDir) -> None:
    async with World(run_dir, timeouts={"stop_s": 1.0, **SHORT_END}).running() as world:
        pids = await world.waiting(0)
        world.progress.saw(9, finished=True)
        told = time.monotonic()
        outcome = await asyncio.wait_for(world.task, 20.0)
        assert time.monotonic() - told >= 2.5, "it may still have written its last checkpoint"
        assert outcome.kind == "done"
        assert "timeouts.final_wait_s" in outcome.reason
        assert not any(alive({"pid": pid}) for pid in pids)
        assert not world.named("RestartScheduled")
