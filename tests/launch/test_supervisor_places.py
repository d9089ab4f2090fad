"""A replica whose backend has no place for it holds up nobody, and is started as soon as there is one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.backend.base import COLD, ProcessWatch, ReplicaSpec
from ft_hsdp.launch.failures import Outcome
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.supervisor import ReplicaSupervisor
from tests.support.launch.launch_helpers import until


class Rank:
    """A rank of an backend without processes; it ends when it is told to."""

    pid, machine, host = 1, "somewhere", "somewhere"

    def __init__(self, watch: ProcessWatch) -> None:
        self._watch = watch

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._watch.exited(0, self, -9)


class Full:
    """An backend that has a place, or starts a spec, when a test says so."""

    warm = False

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.startable = asyncio.Event()
        self.cancelled: list[str] = []
        self.lenders: list[int] = []
        self.ranks: list[Rank] = []

    async def open(self) -> None: ...

    async def place(self, replica: int) -> None:
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled.append("place")
            raise

    def vacated(self, replica: int) -> None:
        """It is given back."""

    def lost_hosts(self, replica: int) -> tuple[str, ...]:
        return ()

    def cordon(self, replica: int, host: str, reason: str, waits: bool) -> bool:
        return False

    def shrink(self, replica: int, least: int) -> int:
        return 0

    def lend(self, replica: int) -> None:
        self.lenders.append(replica)

    def could_grow(self, replica: int) -> bool:
        return False

    def vacancy(self, replica: int) -> str:
        return f"replica {replica} is too large"

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        try:
            await self.startable.wait()
        except asyncio.CancelledError:
            self.cancelled.append("start")
            raise
        self.ranks.append(Rank(watch))
        watch.started(0, self.ranks[-1])
        return COLD

    def settled(self, spec: ReplicaSpec) -> None: ...

    def committed(self, spec: ReplicaSpec) -> None: ...

    async def close(self) -> None: ...


class Scene:
    """A supervisor of replica 1 over an backend that is full."""

    def __init__(self, run: RunDir) -> None:
        config = parse({"timeouts": {"place_s": 0.05}, "ranks_per_replica": 1, "restart": {"budget": 0}})
        self.backend = Full()
        self.progress = Progress()
        self.events: list[Row] = []
        self.link = LighthouseLink(("http://nowhere",), "secret", self.progress, lambda *_: None)
        self.link.holds = lambda _: True  # type: ignore[method-assign]
        self.supervisor = ReplicaSupervisor(
            1, config, run, backend=self.backend, link=self.link, progress=self.progress, emit=self.events.append
        )

    @property
    def names(self) -> list[str]:
        return [e["event"] for e in self.events]


@asynccontextmanager
async def play(run: RunDir) -> AsyncIterator[tuple[Scene, asyncio.Task[Outcome]]]:
    scene = Scene(run)
    task = asyncio.create_task(scene.supervisor.run())
    try:
        yield scene, task
    finally:
        task.cancel()


async def test_the_others_need_not_wait_for_it_until_it_starts(run_dir: RunDir) -> None:
    async with play(run_dir) as (scene, task):
        await until(lambda: scene.events, "the word that there is no place")
        (unplaced,) = scene.events
        assert (unplaced["event"], unplaced["reason"]) == ("ReplicaUnplaced", "replica 1 is too large")
        assert scene.link.current_report == {"running": {}, "exited": [], "lost": [1], "ended": []}
        await until(lambda: scene.backend.lenders == [1], "the others may have its hosts")
        scene.backend.startable.set()
        scene.backend.free.set()
        await until(lambda: "ReplicaStarted" in scene.names, "the start")
        assert scene.link.current_report["lost"] == []
        assert list(scene.link.current_report["running"]) == ["1"]
        await scene.supervisor.stop(grace_s=0.01)
        assert (await task).kind == "stopped"


@pytest.mark.parametrize(("how", "kind"), [("stop", "stopped"), ("finished", "unplaced"), ("halted", "lost")])
async def test_it_looks_for_a_place_until_the_job_ends(run_dir: RunDir, how: str, kind: str) -> None:
    async with play(run_dir) as (scene, task):
        await until(lambda: scene.events, "the word that there is no place")
        if how == "stop":
            await scene.supervisor.stop(grace_s=1)
        else:
            scene.progress.saw(9, finished=how == "finished", halted="no copy is left" if how == "halted" else "")
        assert (await task).kind == kind
        assert scene.backend.cancelled == ["place"]


async def test_a_drain_ends_the_search_and_counts_against_no_budget(run_dir: RunDir) -> None:
    async with play(run_dir) as (scene, task):
        await until(lambda: scene.events, "the word that there is no place")
        scene.progress.saw(1, drained=frozenset({1}))
        await until(lambda: scene.supervisor.resting, "the rest")
        scene.progress.saw(1, drained=frozenset())
        await until(lambda: scene.names == ["ReplicaUnplaced"] * 2, "another search")
        scene.backend.startable.set()
        scene.backend.free.set()
        await until(lambda: "ReplicaStarted" in scene.names, "the start")
        await scene.supervisor.stop(grace_s=0.01)
        await task


async def test_a_start_that_takes_long_is_given_up_when_the_replica_is_stopped(run_dir: RunDir) -> None:
    async with play(run_dir) as (scene, task):
        scene.backend.free.set()
        await until(lambda: scene.supervisor.current is not None, "the start")
        await scene.supervisor.stop(grace_s=1)
        assert (await task).kind == "stopped"
        assert scene.backend.cancelled == ["start"]
