"""What changes while a replica or a spare waits on a cluster: nodes, other replicas, what the driver has."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.base import ReplicaProcess, ReplicaSpec, WorkerGroup
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.ray import backend, submit
from ft_hsdp.launch.supervisor import ReplicaSupervisor
from tests.launch.test_supervisor import Book
from tests.ray.test_ray_slots import Watched, World
from tests.support.waiting import async_until

pytestmark = pytest.mark.usefixtures("_quick")

SOON = {"place_s": 0.05}


@contextlib.asynccontextmanager
async def placing(world: World, *replicas: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Replicas that look for a place; at the end they stop."""
    tasks = [asyncio.create_task(world.backend.place(replica)) for replica in replicas]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def settling(world: World, replica: int, **config: Any) -> AsyncIterator[None]:
    """A supervisor that waits until its replica commits a step, which it does not."""
    supervisor = ReplicaSupervisor(
        replica,
        parse({"ranks_per_replica": 2, **config}),
        world.run,
        backend=world.backend,
        link=Book(),  # type: ignore[arg-type]
        progress=Progress(),
        emit=lambda _: None,
    )
    task = asyncio.create_task(supervisor._settle(ReplicaProcess(world.spec, world.run)))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("then", ["another replica trains again", "its other node is lost too"])
async def test_it_takes_the_ready_spare_once_its_own_place_may_go(tmp_path: Path, then: str) -> None:
    async with World(tmp_path, {"": 3}, timeouts=SOON, strategy="SPREAD").running(0, 1) as world:
        spare, hurt = await world.ready(), world.of(1)
        world.kill(0)  # its node lives
        hurt.lose(1)
        async with placing(world, 1) as (waits,):
            if then.startswith("another"):
                await world.sought(1)
                await world.train(0)
            else:
                await async_until(lambda: hurt.missing == [1], "the wait for another node")
                hurt.dead.add(0)
            await async_until(waits.done, "the spare, or its room")
            assert world.of(1) is spare or (spare.removed and then.startswith("another"))


async def test_two_of_them_get_the_nodes_of_a_spare_if_nobody_trains(tmp_path: Path) -> None:
    """Both exits are reported before either is placed."""
    async with World(tmp_path, {"": 3}, timeouts=SOON, strategy="SPREAD").running(0, 1) as world:
        spare = await world.ready()
        world.of(0).lose(1)
        world.of(1).lose(1)
        async with placing(world, 0, 1) as waits:
            await async_until(lambda: any(task.done() for task in waits), "the nodes of the spare")
            assert spare.removed


async def test_a_spare_that_looks_for_the_same_nodes_stops(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 2}, timeouts=SOON, strategy="SPREAD").running(0, 1) as world:
        await async_until(lambda: world.spares and world.spares[0].asked, "a spare that looks for a place")
        (spare,) = world.spares
        world.kill(0)
        world.of(1).lose(1)
        async with placing(world, 1):
            await async_until(lambda: spare.removed, "the spare to leave the room to the replica")


# Only who has committed a step has the state.


async def test_a_replica_without_the_state_does_not_count_as_one_that_trains(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 2}, spares=0, timeouts=SOON, strategy="SPREAD").running(1) as world:
        hurt = world.of(1)
        await world.start(0)
        async with settling(world, 0):
            hurt.lose(1)  # its other node has the only copies
            async with placing(world, 1):
                await world.sought(1)
                assert world.of(1) is hurt


async def test_a_node_that_is_cordoned_while_a_spare_starts_there_gets_no_spare(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 4}, strategy="SPREAD").running(0, 1) as world:
        world.actors = False
        await async_until(lambda: world.spares and world.spares[0].reserved, "a spare whose actors start")
        (spare,) = world.spares
        assert world.backend.cordon(0, "h0", "test", waits=True)  # the first node of each slot here
        world.actors = True
        await async_until(lambda: spare.groups and spare.groups[0].complete, "its ranks")
        await async_until(lambda: spare.groups[0].gone, "their end")


async def test_an_error_of_the_system_does_not_end_the_making_of_spares(tmp_path, monkeypatch) -> None:
    orders, failed = backend.start_orders, asyncio.Event()

    async def once(slot: Any, group: WorkerGroup, *rest: Any) -> Any:
        if group.spec is None and not failed.is_set():
            failed.set()
            raise OSError(24, "Too many open files")
        return await orders(slot, group, *rest)

    monkeypatch.setattr(backend, "start_orders", once)
    async with World(tmp_path, {"": 3}).running(0, 1) as world:
        await failed.wait()
        await async_until(lambda: world.backend.warm, "another spare")


async def test_a_script_that_is_gone_on_the_driver_is_no_fault_of_a_node(tmp_path, monkeypatch) -> None:
    async def gone(*_: Any) -> Any:
        raise ConfigError("entry", "my_train.py", "a script that exists")

    async with World(tmp_path, {"": 3}, spares=0).running(0, 1) as world:
        world.kill(1)
        own = world.of(1)
        monkeypatch.setattr(backend, "start_orders", gone)
        await world.backend.place(1)
        with pytest.raises(Retryable, match="a script that exists"):
            await world.backend.start(ReplicaSpec(1, 2, "a", 7, world.run.config), Watched())
        assert not own.failed, "its state agents would end"


async def test_the_slot_of_a_spare_whose_ranks_still_die_is_not_used_again(tmp_path: Path) -> None:
    """The actor of a slot is ended for a rank that does not die, and with it the rank of a new owner."""
    async with World(tmp_path, {"": 3}).running(0, 1) as world:
        spare = await world.ready()
        world.deaf = True
        spare.end(spare.groups[0], 0)
        await async_until(lambda: spare.removed, "the end of its slot")
        spare.end(spare.groups[0], 1)


def test_a_job_whose_submission_is_interrupted_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the cluster has the job, and before its answer is here."""
    running: set[str] = set()

    class Client:
        def __init__(self, url: str) -> None: ...

        def submit_job(self, *, entrypoint: str, runtime_env: object, submission_id: str = "unknown") -> str:
            running.add(submission_id)
            raise KeyboardInterrupt

        def stop_job(self, job: str) -> None:
            running.discard(job)

    monkeypatch.setattr(submit, "check_listening", lambda _: None)
    monkeypatch.setattr(submit.ray.job_submission, "JobSubmissionClient", Client)
    with pytest.raises(KeyboardInterrupt):
        submit.submit_through_jobs_api(
            parse({"job": {"name": "a"}}), tmp_path / "c.yaml", (), "http://h:8265", json=False
        )
    assert not running
