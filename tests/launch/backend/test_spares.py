"""Spares of one machine, with ranks that only pretend: who gets them, and what becomes of those that end."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Self

import pytest

from ft_hsdp import fault_injection
from ft_hsdp.config import parse
from ft_hsdp.launch.backend import gpus, spares
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ReplicaSpec, WorkerProcess
from ft_hsdp.launch.backend.gpus import visible
from ft_hsdp.launch.backend.hosts import EmulatedHosts
from ft_hsdp.launch.backend.local import LocalBackend
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir, alive, read_json, write_json
from ft_hsdp.launch.supervisor import ReplicaSupervisor
from tests.support.launch.launch_helpers import Plan
from tests.support.waiting import async_until


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost spares are made again soon."""
    monkeypatch.setattr(spares, "PAUSE_S", 0.02)


class Watched:
    """A spec that was started: who runs, who is gone."""

    def __init__(self) -> None:
        self.running: dict[int, WorkerProcess] = {}
        self.gone: dict[int, int] = {}

    def started(self, rank: int, process: WorkerProcess) -> None:
        assert rank not in self.running
        self.running[rank] = process

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        assert rank not in self.gone
        self.gone[rank] = code

    @property
    def pids(self) -> list[int]:
        return [process.pid for _, process in sorted(self.running.items())]


class World:
    """An backend with one or more spares of two ranks."""

    def __init__(self, run: RunDir, spares: int = 1, hosts: int | None = None, gpus: Sequence[str] = ()) -> None:
        self.run = run
        self.events: list[Row] = []
        self.backend = LocalBackend(
            run,
            entry="tests.support.launch.standin:main",
            preload=(),
            spares=spares,
            emit=self.events.append,
            hosts=EmulatedHosts(hosts, ranks=2),
            gpus=gpus,
        )

    def spec(self, replica: int, restarts: int = 0) -> ReplicaSpec:
        return ReplicaSpec(replica, 2, "a", restarts, self.run.config)

    async def start(self, replica: int, restarts: int = 0) -> tuple[str, Watched]:
        """Start a spec, wait until its ranks run what is theirs, and let the backend know."""
        watched, spec = Watched(), self.spec(replica, restarts)
        how = await self.backend.start(spec, watched)
        waiting = [self.run.path / f"waiting-{replica}-{restarts}-{rank}" for rank in (0, 1)]
        await async_until(lambda: all(map(os.path.exists, waiting)), f"the ranks of {spec.name}")
        self.backend.settled(spec)
        return how, watched

    def named(self, name: str) -> list[Row]:
        return [e for e in self.events if e["event"] == name]

    @property
    def spares(self) -> list[list[int]]:
        listed = read_json(self.run.spares / "spares.json") or {"spares": []}
        return [[rank["pid"] for rank in spare["ranks"]] for spare in listed["spares"]]

    @property
    def made(self) -> list[int]:
        """Pids of all ranks of spares that ever ran."""
        file = self.run.path / "spares-made"
        return [int(word) for word in file.read_text().split()] if file.exists() else []

    async def ready(self) -> list[int]:
        await async_until(lambda: self.backend.warm, "a spare")
        return self.spares[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """With the end of the block the backend is closed, and nothing is left running."""
        try:
            yield self
        finally:
            await self.backend.close()
        await async_until(lambda: not any(alive({"pid": pid}) for pid in self.made), "the spares to be gone")


async def test_a_spare_becomes_the_incarnation_it_is_called_and_another_takes_its_place(run_dir: RunDir) -> None:
    async with World(run_dir).running() as world:
        assert (await world.start(0))[0] == COLD
        pids = await world.ready()
        assert not run_dir.rank_log(1, 0).exists()
        how, promoted = await world.start(1, restarts=3)
        assert (how, promoted.pids) == (WARM, pids)
        assert "rank 0 of 3" in run_dir.rank_log(1, 0).read_text()
        assert await world.ready() != pids
        promoted.running[0].signal(signal.SIGKILL)
        await async_until(lambda: promoted.gone, "the exit")
        assert promoted.gone == {0: -signal.SIGKILL}
        assert [e["spare"] for e in world.named("SpareWarmed")] == [1, 2]
        assert not world.named("SpareLost")


async def test_no_spare_is_called_twice(run_dir: RunDir) -> None:
    async with World(run_dir, spares=2).running() as world:
        await world.start(0)
        await async_until(lambda: len(world.named("SpareWarmed")) == 2, "two spares")
        found = await asyncio.gather(*(world.start(replica) for replica in (1, 2, 3)))
        assert sorted(how for how, _ in found) == sorted([WARM, WARM, COLD])
        pids = [pid for _, watched in found for pid in watched.pids]
        assert len(set(pids)) == 6


async def test_none_is_made_while_a_gang_does_not_train_yet(run_dir: RunDir) -> None:
    async with World(run_dir).running() as world:
        await world.backend.start(world.spec(0), Watched())
        assert (await world.start(1))[0] == (await world.start(2))[0] == COLD
        assert not world.spares
        assert not world.made
        world.backend.settled(world.spec(0))
        await world.ready()


async def test_one_that_is_not_warm_yet_is_called_rather_than_a_cold_start(run_dir: RunDir, plan: Plan) -> None:
    plan({"spare": {"1": ["until", "go"]}})
    async with World(run_dir).running() as world:
        await world.start(0)
        await async_until(lambda: len(world.made) == 2, "a spare that gets warm")
        await async_until(lambda: [len(pids) for pids in world.spares] == [2], "both of its ranks")
        assert not world.backend.warm
        (run_dir.path / "go").touch()
        how, promoted = await world.start(1)
        assert how in (WARMING, WARM)
        assert sorted(promoted.pids) == sorted(world.made[:2])


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_spare_that_is_killed_is_replaced_as_a_whole(run_dir: RunDir, victim: int) -> None:
    async with World(run_dir).running() as world:
        _, first = await world.start(0)
        pids = await world.ready()
        os.kill(pids[victim], signal.SIGKILL)
        await async_until(lambda: world.named("SpareLost"), "its loss")
        assert not world.backend.warm
        assert await world.ready() != pids
        await async_until(lambda: not any(alive({"pid": pid}) for pid in pids), "the end of both ranks")
        assert "ended with SIGKILL" in world.named("SpareLost")[0]["reason"]
        assert not first.gone


@pytest.mark.usefixtures("_soon")
async def test_one_that_cannot_get_warm_is_not_made_again_and_again_without_a_pause(run_dir, plan) -> None:
    plan({"spare": {"1": ["exit", 75]}})
    async with World(run_dir).running() as world:
        await world.start(0)
        await async_until(lambda: len(world.named("SpareLost")) >= 4, "four attempts")
        pauses = [e["delay_s"] for e in world.named("SpareLost")[:4]]
        assert pauses == [0.02, 0.04, 0.08, 0.16]
        assert "exit 75" in world.named("SpareLost")[0]["reason"]
        assert not world.backend.warm
        assert (await world.start(1))[0] in (COLD, WARMING)


async def test_the_end_of_the_job_is_the_end_of_spares_that_get_warm(run_dir: RunDir, plan: Plan) -> None:
    plan({"spare": {"0": ["hang"], "1": ["hang"]}})
    async with World(run_dir).running() as world:
        await world.start(0)
        await async_until(lambda: len(world.made) == 2, "a spare that gets warm")
    assert world.spares == []


async def test_when_the_fork_server_dies_its_spares_stay_and_can_be_called(run_dir: RunDir) -> None:
    async with World(run_dir).running() as world:
        await world.start(0)
        pids = await world.ready()
        server = world.backend.server_pid
        assert server is not None
        os.kill(server, signal.SIGKILL)
        await async_until(lambda: world.named("ForkServerLost"), "the event")
        await async_until(lambda: world.backend.server_pid not in (None, server), "another server")
        assert not world.named("SpareLost")
        assert await world.ready() == pids
        how, promoted = await world.start(1)
        assert (how, promoted.pids) == (WARM, pids)


async def test_a_lost_replica_gets_the_spare_at_once_whatever_the_survivors_do(run_dir: RunDir) -> None:
    world = World(run_dir)
    config = parse({"timeouts": {"stop_s": 300}, "ranks_per_replica": 2, "spares": 2})

    class Deaf:
        owner = "aaaa"

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *_: name == "holds"

    supervisor = ReplicaSupervisor(
        1,
        config,
        run_dir,
        backend=world.backend,
        link=Deaf(),  # type: ignore[arg-type]
        progress=Progress(),
        emit=world.events.append,
        survivors=lambda: True,
    )
    async with world.running():
        task = asyncio.create_task(supervisor.run())
        await async_until((run_dir.path / "waiting-1-0-1").exists, "the first life")
        assert supervisor.current is not None
        first = supervisor.current
        with run_dir.commits(1).open("a") as file:
            file.write(f'{{"step": 1, "role": "contribute", "incarnation": "{first.name}"}}\n')
        pids = await world.ready()
        os.kill(next(iter(first.ranks.values())).pid, signal.SIGKILL)
        await async_until((run_dir.path / "waiting-1-1-1").exists, "the second life")
        await async_until(lambda: len(world.named("ReplicaStarted")) == 2, "its event")
        started = world.named("ReplicaStarted")
        assert [e["how"] for e in started] == [COLD, WARM]
        assert started[1]["pids"] == pids
        listed = read_json(run_dir.processes(1))
        assert [rank["pid"] for rank in listed["ranks"]] == pids
        await supervisor.stop(1.0)
        assert (await task).kind == "stopped"


# A machine that stands for several hosts.


def said(run: RunDir, replica: int, rank: int) -> list[str]:
    """What a rank knows of its host: its name, and its own number there."""
    return (run.path / f"host-{replica}-{rank}").read_text().split()


async def test_each_rank_learns_its_host_forked_for_a_replica_or_taken_from_a_spare(run_dir: RunDir) -> None:
    async with World(run_dir, hosts=2).running() as world:
        how, first = await world.start(0)
        await world.ready()
        how_again, second = await world.start(1)
        assert (how, how_again) == (COLD, WARM)
        assert [said(run_dir, replica, rank) for replica in (0, 1) for rank in (0, 1)] == [
            *(["r0h0", "0"], ["r0h1", "0"]),
            *(["r1h0", "0"], ["r1h1", "0"]),
        ]
        hosts = [[p.host for _, p in sorted(each.running.items())] for each in (first, second)]
        assert hosts == [["r0h0", "r0h1"], ["r1h0", "r1h1"]]
        assert {p.machine for each in (first, second) for p in each.running.values()} == {socket.gethostname()}


async def test_a_machine_that_stands_for_itself_tells_its_ranks_nothing(run_dir: RunDir) -> None:
    async with World(run_dir, spares=0).running() as world:
        _, watched = await world.start(0)
        assert said(run_dir, 0, 1) == []
        assert {p.host for p in watched.running.values()} == {socket.gethostname()}


async def test_a_replica_has_no_place_while_a_host_of_it_is_down(run_dir: RunDir) -> None:
    world = World(run_dir, hosts=2)
    order = run_dir.path / fault_injection.FOLDER / "order.json"
    assert world.backend.vacancy(0) == ""
    write_json(order, asdict(fault_injection.FaultOrder("host", 0, host="r0h1")))
    assert "r0h1 is down" in world.backend.vacancy(0)
    await asyncio.wait_for(world.backend.place(1), 30)
    placing = asyncio.create_task(world.backend.place(0))
    done, _ = await asyncio.wait([placing], timeout=4 * fault_injection.LOOK_S)
    assert not done
    order.unlink()
    await asyncio.wait_for(placing, 30)


def gpus_of(run: RunDir, replica: int) -> list[str]:
    """What each rank of the newest incarnation has told of its GPU."""
    logs = [run.rank_log(replica, rank).read_text() for rank in (0, 1)]
    return [[line for line in log.splitlines() if line.startswith("on GPU")][-1] for log in logs]


async def test_replicas_have_gpus_of_their_own_while_they_suffice(run_dir, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with World(run_dir, spares=0, gpus=tuple("01234567")).running() as world:
        started = [(await world.start(replica))[1] for replica in range(4)]
        wanted = [[f"on GPU {rank} of {a},{a + 1}" for rank in (0, 1)] for a in (0, 2, 4, 6)]
        assert [gpus_of(run_dir, replica) for replica in range(4)] == wanted
        for process in started[2].running.values():
            process.signal(signal.SIGKILL)
        await async_until(lambda: len(started[2].gone) == 2, "the exits")
        await world.start(2, restarts=1)
        assert gpus_of(run_dir, 2) == wanted[2]
        await world.start(4)
        assert gpus_of(run_dir, 4) == wanted[0]  # there are no more: it shares those of the first


async def test_a_spare_has_gpus_before_it_is_assigned(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with World(run_dir, gpus=("3", "GPU-5a", "MIG-7")).running() as world:
        await world.start(0)
        await world.ready()
        how, _ = await world.start(1)
        assert how == WARM
        assert {line.split()[-1] for line in gpus_of(run_dir, 0)} == {"3,GPU-5a"}
        assert {line.split()[-1] for line in gpus_of(run_dir, 1)} == {"3,MIG-7"}


@pytest.mark.parametrize(
    ("count", "named", "wanted"),
    [(2, None, ("0", "1")), (2, " 4, GPU-1", ("4", "GPU-1")), (1, "4,9", ("4",)), (0, "", ())],
)
def test_gpus_have_the_names_that_cuda_takes(count: int, named: str | None, wanted: tuple[str, ...]) -> None:
    """CUDA ends the list at the first name that it does not know; the driver's count is of those before it."""
    assert visible(count, {} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == wanted


@pytest.mark.parametrize(
    ("given", "ordered"),
    [({}, True), ({"CUDA_VISIBLE_DEVICES": "0,1"}, False), ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, False)],
)
def test_names_of_gpus_keep_the_meaning_that_the_user_gave_them(monkeypatch, given, ordered) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = gpus.environment(["1"])
    assert made["CUDA_VISIBLE_DEVICES"] == "1"
    assert ("CUDA_DEVICE_ORDER" in made) == ordered
    assert gpus.environment([]) == {}
