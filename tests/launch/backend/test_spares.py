"""Spares of one machine, with ranks that only pretend: who gets them, and what becomes of those that end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from socket import gethostname
from typing import Self

import pytest

from ft_hsdp.config import parse
from ft_hsdp.core.host_report import AssignedRanks
from ft_hsdp.launch.backend import gpus, spares
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ReplicaSpec, WorkerProcess
from ft_hsdp.launch.backend.forkserver import ForkServer
from ft_hsdp.launch.backend.gpus import free_gpus, visible
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.launch.backend.ranks import HeldRanks, LocalRanks
from ft_hsdp.launch.run.directory import Row, RunDir, alive, read_json
from tests.support.launch.launch_helpers import Plan
from tests.support.waiting import async_until


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost spares are made again soon."""
    monkeypatch.setattr(spares, "PAUSE_S", 0.02)


class Watched:
    """An incarnation that was started: who runs, who is gone, on all of its hosts."""

    def __init__(self, held: list[HeldRanks]) -> None:
        self.held = held

    @property
    def running(self) -> dict[int, WorkerProcess]:
        return {rank.rank: rank.process for each in self.held for rank in each.ranks.values()}

    @property
    def gone(self) -> dict[int, int]:
        ranks = [rank for each in self.held for rank in each.ranks.values()]
        return {rank.rank: rank.code for rank in ranks if rank.code is not None}

    @property
    def pids(self) -> list[int]:
        return [process.pid for _, process in sorted(self.running.items())]


class World:
    """A machine with one or more spares of two ranks, which stands for one host of a replica, or for several."""

    def __init__(self, run: RunDir, spares: int = 1, hosts: int = 1, gpus: Sequence[str] = ()) -> None:
        self.run, self.hosts = run, hosts
        self.events: list[Row] = []
        self.forks = ForkServer(run.path, entry="tests.support.launch.standin:main", preload=(), lost=self._lost)
        job = {"ranks_per_replica": 2, "spares": 2 * spares, "hosts": {"per_replica": hosts}}
        config = parse({**job, "timeouts": {"stop_s": 0.1}})
        self.ranks = LocalRanks(config, run, self.forks, gpus=gpus, emit=self.events.append)

    def _lost(self, pid: int, why: str) -> None:
        self.events.append({"event": "ForkServerLost", "pid": pid, "reason": why})

    def held(self, replica: int, restarts: int = 0) -> Watched:
        """What the hosts have of an incarnation, before it is started."""
        names, each = [f"r{replica}h{n}" for n in range(self.hosts)], 2 // self.hosts
        where = tuple(name for name in names for _ in range(each))
        self.ranks.pool.began(ReplicaSpec(replica, 2, "a", restarts, self.run.config))
        ranks = [tuple(range(n * each, (n + 1) * each)) for n in range(self.hosts)]
        master = f"127.0.0.1:{free_port()}"
        assigned = [AssignedRanks(f"{replica}-a-{restarts}", mine, where, master) for mine in ranks]
        return Watched([HeldRanks(one, self.run.config, self.run) for one in assigned])

    async def start(self, replica: int, restarts: int = 0) -> tuple[str, Watched]:
        """Start an incarnation, wait until its ranks run what is theirs, and let the spares know."""
        watched = self.held(replica, restarts)
        for n, held in enumerate(watched.held):
            await self.ranks.start(held, f"r{replica}h{n}", self.hosts > 1)
            held.write()
        waiting = [self.run.path / f"waiting-{replica}-{restarts}-{rank}" for rank in (0, 1)]
        await async_until(lambda: all(map(os.path.exists, waiting)), f"the ranks of {replica}")
        self.ranks.pool.settled(watched.held[0].spec)
        assert {held.how for held in watched.held} == {watched.held[0].how}
        return watched.held[0].how, watched

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
        await async_until(lambda: self.ranks.pool.ready, "a spare")
        return self.spares[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """With the end of the block the machine's ranks are ended, and nothing is left running."""
        try:
            yield self
        finally:
            await self.ranks.close()
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
        assert promoted.gone[0] == -signal.SIGKILL
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
        first = world.held(0)
        assert (await world.start(1))[0] == (await world.start(2))[0] == COLD
        assert not world.spares
        assert not world.made
        world.ranks.pool.settled(first.held[0].spec)
        await world.ready()


async def test_one_that_is_not_warm_yet_is_called_rather_than_a_cold_start(run_dir: RunDir, plan: Plan) -> None:
    plan({"spare": {"1": ["until", "go"]}})
    async with World(run_dir).running() as world:
        await world.start(0)
        await async_until(lambda: len(world.made) == 2, "a spare that gets warm")
        await async_until(lambda: [len(pids) for pids in world.spares] == [2], "both of its ranks")
        assert not world.ranks.pool.ready
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
        assert not world.ranks.pool.ready
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
        assert not world.ranks.pool.ready
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
        server = world.forks.pid
        assert server is not None
        os.kill(server, signal.SIGKILL)
        await async_until(lambda: world.named("ForkServerLost"), "the event")
        await async_until(lambda: world.forks.pid not in (None, server), "another server")
        assert not world.named("SpareLost")
        assert await world.ready() == pids
        how, promoted = await world.start(1)
        assert (how, promoted.pids) == (WARM, pids)


# A machine that stands for several hosts.


def said(run: RunDir, replica: int, rank: int) -> list[str]:
    """What a rank knows of its host: its name."""
    return (run.path / f"host-{replica}-{rank}").read_text().split()


async def test_each_rank_learns_its_host_forked_for_a_replica_or_taken_from_a_spare(run_dir: RunDir) -> None:
    async with World(run_dir, hosts=2).running() as world:
        how, first = await world.start(0)
        await world.ready()
        how_again, second = await world.start(1)
        assert (how, how_again) == (COLD, WARM)
        assert [said(run_dir, replica, rank) for replica in (0, 1) for rank in (0, 1)] == [
            *(["r0h0"], ["r0h1"]),
            *(["r1h0"], ["r1h1"]),
        ]
        hosts = [[p.host for _, p in sorted(each.running.items())] for each in (first, second)]
        listed = [[rank["host"] for rank in read_json(run_dir.processes(n))["ranks"]] for n in (0, 1)]
        assert hosts == listed == [["r0h0", "r0h1"], ["r1h0", "r1h1"]]
        assert {p.machine for each in (first, second) for p in each.running.values()} == {gethostname()}


async def test_a_machine_that_stands_for_itself_tells_its_ranks_nothing(run_dir: RunDir) -> None:
    async with World(run_dir, spares=0).running() as world:
        await world.start(0)
        assert said(run_dir, 0, 1) == []


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


async def test_agents_of_one_machine_do_not_take_each_others_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    names = set[str]()

    async def other(name: str) -> bool:  # as `take_name` of another process
        return name not in names and names.add(name) is None

    found = [await free_gpus("01234567", ranks, other, print) for ranks in (2, 4, 3)]
    assert found == [["0", "1"], ["2", "3", "4", "5"], "01234567"]
    assert "2 of 8" in capsys.readouterr().out
    assert await free_gpus((), 2, other, print) == []
