from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from ft_hsdp.config import Config, dump, parse
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ReplicaSpec, WorkerGroup, WorkerProcess
from ft_hsdp.launch.ray import backend as backends
from ft_hsdp.launch.ray.actor import ActorLocation, News, StartOrder
from ft_hsdp.launch.ray.backend import RayBackend
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.ray.slot import Bundle, ReplicaSlot
from ft_hsdp.launch.ray.slots import ReplicaSlots, SlotOwner
from ft_hsdp.launch.run.directory import Row, RunDir, read_json
from ft_hsdp.secret import write_private
from tests.support.waiting import async_until

pytestmark = pytest.mark.usefixtures("_quick")


class Watched:
    def __init__(self) -> None:
        self.running: dict[int, WorkerProcess] = {}
        self.gone: dict[int, int] = {}

    def started(self, rank: int, process: WorkerProcess) -> None:
        self.running[rank] = process

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        self.gone[rank] = code


class StandIn:
    """A slot of a world: it has its place when there is room, and its ranks are warm when the world says so."""

    def __init__(self, world: World, request: PlacementRequest) -> None:
        self.world, self.request = world, request
        self.asked = self.reserved = self.failed = self.removed = False
        self.bundles: list[Any] = []
        self.dead: set[int] = set()  # ranks whose actors died
        self.before: dict[int, Any] = {}
        self.nodes = 0  # that it had
        self.searches = 0  # how often its owner has begun to wait for its place, since it was made or repaired
        self.groups: list[WorkerGroup] = []
        self.called: list[ReplicaSpec] = []
        self.orders: list[StartOrder] = []
        world.slots.append(self)

    @property
    def zone(self) -> str:
        return self.request.labels.get("zone", "")

    @property
    def gone(self) -> bool:
        return self.failed or bool(self.lost)

    @property
    def lost(self) -> set[int]:
        """Ranks whose actor died, or whose node is to be avoided."""
        return self.dead | {b.rank for b in self.bundles if b.location.node in self.request.avoid}

    @property
    def lost_nodes(self) -> dict[str, str]:
        return {b.location.node: b.location.host for b in self.bundles if b.rank in self.dead}

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(b.location.host for b in self.bundles)

    def node_of(self, host: str) -> str | None:
        return next((b.location.node for b in self.bundles if b.location.host == host), None)

    def avoid(self, node: str) -> None:
        self.request = replace(self.request, avoid=(*self.request.avoid, node))

    @property
    def complete(self) -> bool:
        return len(self.bundles) == self.request.size

    @property
    def repairable(self) -> bool:
        return 0 < len(self.lost) < len(self.bundles) and not self.failed

    @property
    def missing(self) -> list[int]:
        there = {bundle.rank for bundle in self.bundles}
        return sorted({*range(self.request.size)} - there) if there else []

    def repair(self) -> None:
        lost = self.lost
        self.before = {b.rank: b.location for b in self.bundles if b.rank in lost}
        self.bundles = [b for b in self.bundles if b.rank not in lost]
        self.dead.clear()
        self.reserved = False
        self.searches = 0

    async def reserve(self) -> None:
        self.asked = True
        self.searches += 1
        while not self.reserved:
            if self.world.room[self.zone] > 0:
                self.world.room[self.zone] -= 1
                self.reserved = True
            else:
                await asyncio.sleep(0.002)

    async def start_actors(self, setup: object) -> None:
        await async_until(lambda: self.world.actors, "actors")
        if self.gone:
            raise Retryable("its node is gone")
        for rank in self.missing or range(self.request.size):
            node = f"h{self.nodes}" if self.request.strategy == "SPREAD" else "h"
            location = SimpleNamespace(host=node, address="127.0.0.1", node=node, gpus=())
            self.bundles.append(SimpleNamespace(rank=rank, location=location))
            self.nodes += 1
        self.bundles.sort(key=lambda bundle: bundle.rank)

    async def port(self, host: str) -> int:
        return 1

    async def start(self, start: StartOrder, group: WorkerGroup) -> None:
        await asyncio.sleep(0)
        self.orders.append(start)
        process = SimpleNamespace(
            pid=next(self.world.pids), host="h", signal=lambda _: self.world.deaf or self.end(group, start.rank)
        )
        if group not in self.groups:
            self.groups.append(group)
        group.started(start.rank, process)
        if start.called is None and self.world.warms:
            group.warm(start.rank)

    async def call(self, group: WorkerGroup, spec: ReplicaSpec) -> None:
        self.called.append(spec)

    async def remove(self) -> None:
        await asyncio.sleep(0)
        self.removed = True
        self.world.room[self.zone] += self.reserved

    def end(self, group: WorkerGroup, rank: int) -> None:
        if rank not in group.gone:
            group.exited(rank, group.processes[rank], -9)

    def die(self) -> None:
        self.failed = True
        self.world.room[self.zone] -= 1
        for group in self.groups:
            for rank in group.processes:
                self.end(group, rank)

    def lose(self, rank: int) -> None:
        """The node of one rank is lost, and its replica ends."""
        self.dead.add(rank)
        for each in (0, 1):
            self.end(self.groups[-1], each)


class World:
    """A cluster with so much room, and the backend of a job of two ranks a replica on it."""

    def __init__(
        self,
        folder: Path,
        room: dict[str, int],
        spares: int = 1,
        timeouts: dict[str, float] | None = None,
        **ray: object,
    ) -> None:
        document = {
            "timeouts": {"stop_s": 0.5, **(timeouts or {})},
            "ranks_per_replica": 2,
            "replicas": 3,
            "spares": 2 * spares,
        }
        self.config: Config = parse({"job": {"name": "a"}, "ray": ray, **document})
        self.run = RunDir(folder)
        self.run.config.write_text(dump(self.config))
        write_private(self.run.token, "t")
        write_private(self.run.checkpoint_key, "checkpoint_key")
        self.room = Counter(room)
        self.actors = self.warms = True
        self.deaf = False  # ranks that are killed do not end
        self.pids = iter(range(1, 1000))
        self.slots: list[StandIn] = []
        self.events: list[Row] = []
        self.restarts: Counter[int] = Counter()
        self.every = ReplicaSlots(lambda asked: StandIn(self, asked))  # type: ignore[arg-type,return-value]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "ReplicaSlots", lambda _: self.every)
            self.backend = RayBackend(
                self.config, self.run, lambda: ("http://127.0.0.1:1",), "", self.events.append
            )

    def of(self, replica: int) -> StandIn:
        slot = self.every.of(replica)
        assert isinstance(slot, StandIn)
        return slot

    async def start(self, replica: int) -> tuple[str, Watched]:
        """Place a replica, and start it; it does not train yet."""
        await self.backend.place(replica)
        self.spec = ReplicaSpec(replica, 2, "a", self.restarts[replica], self.run.config)
        self.restarts[replica] += 1
        watched = Watched()
        return await self.backend.start(self.spec, watched), watched

    async def train(self, *replicas: int) -> str:
        """Start them, and have them train; how the last one was started."""
        for replica in replicas:
            how, _ = await self.start(replica)
            self.backend.settled(self.spec)
            self.backend.committed(self.spec)
        return how

    async def ready(self) -> StandIn:
        await async_until(lambda: self.backend.warm, "a spare")
        return self.spares[-1]

    @property
    def spares(self) -> list[StandIn]:
        return [slot for _, slot in self.every.of_spares() if isinstance(slot, StandIn)]

    async def sought(self, replica: int, waits: int = 1) -> None:
        """Wait until a replica has waited for its place for so many times the longest wait."""
        await async_until(
            lambda: isinstance(slot := self.every.of(replica), StandIn) and slot.searches > waits,
            "the end of its patience",
        )

    def kill(self, replica: int) -> None:
        """A replica loses all its ranks; its node lives."""
        slot = self.of(replica)
        for rank in (0, 1):
            slot.end(slot.groups[-1], rank)

    @asynccontextmanager
    async def running(self, *replicas: int) -> AsyncIterator[Self]:
        """These replicas train. With the end of the block the backend is closed, and nothing is left."""
        try:
            if replicas:
                await self.train(*replicas)
            yield self
        finally:
            await self.backend.close()
        assert all(slot.removed for slot in self.slots)
        assert (read_json(self.run.spares / "spares.json") or {"spares": []}) == {"spares": []}


async def test_a_replica_whose_berth_is_lost_takes_the_spare_s(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 4}).running() as world:
        assert await world.train(0, 1, 2) == "on h"
        spare = await world.ready()
        assert spare.request.name == "ft_hsdp-a-spare"
        old = world.of(1)
        old.die()
        how, watched = await world.start(1)
        assert (how, world.of(1)) == (WARM, spare)
        assert spare.called == [world.spec]
        assert {n: p.pid for n, p in watched.running.items()} == {
            n: p.pid for n, p in spare.groups[0].processes.items()
        }
        await async_until(lambda: old.removed, "the old slot to be given back")
        world.backend.settled(world.spec)
        await async_until(lambda: len(world.slots) == 5, "another spare that looks for a place")
        assert world.spares[0].request.name == "ft_hsdp-a-spare:2"  # the name is the replica's slot's now
        assert not world.backend.warm
        world.room[""] += 1
        await world.ready()
        assert not [e for e in world.events if e["event"] == "SpareLost"]


@pytest.mark.parametrize("stage", ["no room", "no actors", "not warm"])
async def test_a_replica_without_a_place_takes_a_spare_s_ready_or_not(tmp_path: Path, stage: str) -> None:
    async with World(tmp_path, {"": 3 if stage == "no room" else 4}).running(0, 1, 2) as world:
        world.actors, world.warms = stage != "no actors", False
        await async_until(lambda: world.spares, "a spare")
        spare = world.spares[0]
        if stage != "no room":
            await async_until(lambda: spare.reserved, "its place")
        if stage == "not warm":
            await async_until(lambda: spare.groups and spare.groups[0].complete, "its ranks")
        world.of(1).die()
        starting = asyncio.create_task(world.start(1))
        await async_until(lambda: world.every.of(1) is spare, "the move")
        world.room[""] += 1
        world.actors = True
        assert (await starting)[0] == WARMING
        assert spare.called == [world.spec]
        assert len(world.slots) == 4
        assert len(spare.groups) == 1


async def test_no_spare_is_made_while_a_replica_looks_for_a_place(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 2}).running(0, 1) as world:
        await async_until(lambda: world.spares, "a spare that looks for a place")
        (spare,) = world.spares
        looking = asyncio.create_task(world.start(2))
        await async_until(lambda: not world.spares, "its withdrawal")
        assert world.of(2) is spare
        assert len(world.slots) == 3
        world.warms = False  # else the spare may be ready before the replica is started
        world.room[""] += 1
        assert (await looking)[0] == WARMING
        assert not world.spares
        world.backend.settled(world.spec)
        await async_until(lambda: world.spares, "another one")


async def test_a_replica_that_is_not_wanted_any_more_looks_for_no_place(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 2}).running(0, 1) as world:
        await async_until(lambda: world.spares, "a spare that looks for a place")
        looking = asyncio.create_task(world.backend.place(2))
        await async_until(lambda: not world.spares, "its withdrawal")
        looking.cancel()
        await async_until(lambda: len(world.spares) == 1, "a spare instead")
        assert [b.removed for b in world.slots] == [False, False, True, False]


async def test_the_place_of_a_replica_that_rests_is_the_next_spare_s_or_another_replica_s(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 3}).running(0, 1, 2) as world:
        drained, old = world.of(2), world.of(1)
        await async_until(lambda: world.spares, "a spare that looks for a place")
        world.backend.vacated(2)
        await world.ready()
        assert drained.removed
        old.die()
        assert await world.train(1) == WARM  # on the room of the one that rests


async def test_a_node_that_refuses_what_others_train_with_ends_no_job(tmp_path: Path) -> None:
    world = World(tmp_path, {"": 3}, spares=0)

    async def refuse(_: object) -> None:
        raise ConfigError("ray.folder", "/f", "a folder that can be written on h")

    async with world.running():
        await world.backend.place(0)
        world.of(0).start_actors = refuse  # type: ignore[method-assign]
        spec = ReplicaSpec(0, 2, "a", 0, world.run.config)
        with pytest.raises(ConfigError):
            await world.backend.start(spec, Watched())
        world.backend.vacated(0)
        await world.train(1, 2)
        await world.backend.place(0)
        world.of(0).start_actors = refuse  # type: ignore[method-assign]
        with pytest.raises(Retryable, match=r"^ray\.folder: got '/f'"):
            await world.backend.start(spec, Watched())
        refused = world.of(0)
        await world.train(0)
        assert refused.removed


def silent(*_: object) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def berth_with(actor: dict[str, Callable[..., Any]], receiver: Any, calls: Any = None) -> ReplicaSlot:
    slot = ReplicaSlot(PlacementRequest("n", 1, {"CPU": 1.0}, "PACK", {}), calls, receiver, lambda _: None, 1.0)
    actors = SimpleNamespace(**{name: SimpleNamespace(remote=answer) for name, answer in actor.items()})
    slot.bundles = [Bundle(0, actors, ActorLocation("h", "h-1", "127.0.0.1", "node", ()))]
    return slot


async def test_an_actor_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    slot = berth_with({"port": silent, "start": silent}, LogReceiver(tmp_path))
    slot._patience_s = 0.01
    with pytest.raises(Retryable, match="do not answer"):
        await slot.port("127.0.0.1")
    assert slot.gone


async def test_an_actor_that_names_a_file_which_is_no_log_is_ended() -> None:
    killed: list[object] = []

    async def news(_: int) -> News:
        return News(1, [])

    def refuse(_: object) -> None:
        raise ValueError("'/etc/passwd' is no log of a rank")

    calls = SimpleNamespace(submit=lambda kill, actor: killed.append(actor))
    slot = berth_with({"news": news}, SimpleNamespace(add=refuse), calls)
    await asyncio.wait_for(slot._poll(slot.bundles[0]), 5)
    assert (slot.gone, killed) == (True, [slot.bundles[0].actor])


async def test_a_replica_that_only_lost_ranks_moves_and_its_berth_is_the_next_spare_s(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 4}).running(0, 1, 2) as world:
        spare, old = await world.ready(), world.of(1)
        world.kill(1)
        assert await world.train(1) == WARM
        assert world.of(1) is spare
        assert await world.ready() is old
        assert len(world.slots) == 4
        old.die()
        await async_until(lambda: old.removed, "the end of the lost spare")
        assert [e["event"] for e in world.events].count("SpareLost") == 1


async def test_a_replica_stays_where_the_only_copy_of_the_state_may_be(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 4}).running(0, 1) as world:
        spare, old = await world.ready(), world.of(1)
        world.kill(0)
        world.kill(1)
        assert await world.train(1) == COLD
        assert world.of(1) is old
        assert await world.train(0) == WARM
        assert world.of(0) is spare


async def test_a_spare_serves_its_zone_only(tmp_path: Path) -> None:
    async with World(tmp_path, {"p": 3, "q": 2}, zones=["p", "q"], zone_label="zone").running(0, 1, 2) as world:
        spare = await world.ready()
        assert spare.zone == "p"
        world.of(1).die()
        world.room["q"] += 1
        assert await world.train(1) == "on h"
        assert (world.of(1).zone, world.spares) == ("q", [spare])
        world.of(2).die()
        assert await world.train(2) == WARM
        assert world.of(2) is spare


async def test_where_a_zone_has_no_room_a_spare_is_made_in_another(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(backends, "ELSEWHERE_S", 0.05)
    async with World(tmp_path, {"p": 2, "q": 2}, spares=2, zones=["p", "q"], zone_label="zone").running(
        0, 1, 2
    ) as world:
        spare = await world.ready()
        assert spare.zone == "q"
        assert [b.removed for b in world.slots if b.zone == "p"] == [False, False, True]
        await async_until(lambda: len(world.slots) >= 7, "a look around for the second one")
        world.room["p"] += 1
        await async_until(lambda: [s.zone for s in world.spares if s.bundles] == ["q", "p"], "the second one")


@pytest.mark.parametrize("zones", [["p", "q"], []])
async def test_a_replica_without_a_place_holds_up_only_spares_that_would_take_it(tmp_path, zones) -> None:
    there, missing = ("p", "q") if zones else ("", "")
    room = {"p": 2} if zones else {"": 1}
    async with World(tmp_path, room, timeouts={"place_s": 0.05}, zones=zones, zone_label="zone").running(
        0
    ) as world:
        looking = asyncio.create_task(world.backend.place(1))
        if zones:
            assert (await world.ready()).zone == there
        else:
            await world.sought(1, waits=3)
            assert not any(spare.asked for spare in world.spares)
        assert not looking.done()
        world.room[missing] += 1
        await looking
        assert world.of(1).reserved
        assert [s.zone for s in world.spares if s.reserved] == [there] * bool(zones)
        world.backend.vacated(1)


async def test_a_spare_that_was_about_to_look_leaves_the_room_to_a_replica(tmp_path, monkeypatch) -> None:
    """Its slot comes when a replica already waits for the same resources."""
    due, goes_on = asyncio.Event(), asyncio.Event()
    new = ReplicaSlots.new

    async def slow(self: ReplicaSlots, owner: SlotOwner, asked: PlacementRequest) -> ReplicaSlot:
        if isinstance(owner, WorkerGroup):
            due.set()
            await goes_on.wait()
        return await new(self, owner, asked)

    monkeypatch.setattr(ReplicaSlots, "new", slow)
    async with World(tmp_path, {"": 1}, timeouts={"place_s": 0.05}).running(0) as world:
        await due.wait()
        looking = asyncio.create_task(world.backend.place(1))
        await world.sought(1)
        goes_on.set()
        await async_until(lambda: len(world.slots) == 3 and world.slots[2].removed, "the spare to wait")
        assert [slot.asked for slot in world.slots] == [True, True, False]
        world.room[""] += 1
        await looking
        assert world.of(1).reserved
        world.backend.vacated(1)


@pytest.mark.parametrize("stage", ["no room", "no actors", "not warm"])
async def test_the_end_of_the_job_is_the_end_of_spares_that_are_made(tmp_path: Path, stage: str) -> None:
    async with World(tmp_path, {"": 2 if stage == "no room" else 3}).running(0, 1) as world:
        world.actors, world.warms = stage != "no actors", False
        await async_until(lambda: len(world.slots) == 3, "a spare")
        if stage == "not warm":
            await async_until(lambda: world.spares[0].groups, "its ranks")


# A replica of two nodes that loses one of them.


async def test_the_node_that_is_lost_is_replaced_and_the_other_one_stays(tmp_path: Path) -> None:
    async with World(tmp_path, {"": 2}, spares=0, strategy="SPREAD").running(0, 1) as world:
        hurt = world.of(1)
        kept = hurt.bundles[0]
        hurt.lose(1)
        placing = asyncio.create_task(world.train(1))
        await async_until(lambda: hurt.missing == [1] and not hurt.reserved, "the wait for a place")
        assert not hurt.removed
        world.room[""] += 1
        assert await placing == "on h0, h2"
        assert (world.of(1), hurt.bundles[0]) == (hurt, kept)
        assert [order.hosts for order in hurt.orders] == [("h0", "h1")] * 2 + [("h0", "h2")] * 2
        (replaced,) = [e for e in world.events if e["event"] == "HostReplaced"]
        assert [replaced[key] for key in ("replica", "before", "host", "ranks")] == [1, "h1", "h2", [1]]
        assert await world.train(1) == COLD  # a later start finds all actors


async def test_two_replicas_lose_a_node_each_at_once_and_what_is_left_of_both_stays(tmp_path: Path) -> None:
    """The exit of replica 1 is reported after replica 0 has taken the spare's slot."""
    async with World(tmp_path, {"": 3}, strategy="SPREAD").running(0, 1) as world:
        spare = await world.ready()
        first, second = world.of(0), world.of(1)
        first.lose(1)
        how, _ = await world.start(0)
        life = world.spec
        assert (how, world.of(0)) == (WARM, spare)
        second.lose(0)
        placing = asyncio.create_task(world.backend.place(1))
        await async_until(lambda: second.missing == [0], "the wait for another node")
        assert not first.removed, "its agent may have the only copy of a shard"
        world.kill(0)
        world.backend.settled(life)
        world.restarts[0] += 1
        await world.start(0)
        assert not first.removed, "the life before has contributed nothing"
        world.backend.settled(world.spec)
        assert not first.removed, "nor has this one"
        world.backend.committed(world.spec)
        await async_until(lambda: first.removed, "the end of what is left of the old slot")
        world.room[""] += 1
        await placing


async def test_a_replica_that_loses_the_slot_of_a_spare_at_once_has_what_is_left_of_its_own(tmp_path) -> None:
    async with World(tmp_path, {"": 3}, strategy="SPREAD").running(0, 1) as world:
        spare = await world.ready()
        hurt = world.of(1)
        hurt.lose(1)
        await world.start(1)
        assert world.of(1) is spare
        spare.die()
        world.backend.settled(world.spec)
        placing = asyncio.create_task(world.start(1))
        await async_until(lambda: world.of(1) is hurt and hurt.missing == [1], "the repair of its own")
        world.room[""] += 1
        await placing
        assert not hurt.removed
        world.backend.vacated(1)
        await async_until(lambda: hurt.removed, "its end")


@pytest.mark.parametrize("others", [True, False])
async def test_the_nodes_of_a_replica_are_kept_in_vain_only_where_the_state_is_nowhere_else(
    tmp_path: Path, others: bool
) -> None:
    async with World(
        tmp_path, {"": 2}, spares=0, timeouts={"place_s": 0.05}, strategy="SPREAD"
    ).running() as world:
        await world.train(1, *([0] if others else []))
        hurt = world.of(1)
        hurt.lose(1)
        placing = asyncio.create_task(world.train(1))
        world.room[""] = 0
        if others:
            await async_until(lambda: hurt.removed, "its end")
            await async_until(lambda: world.of(1) is not hurt, "another one")
        else:
            await world.sought(1)
            assert world.of(1) is hurt
            assert hurt.missing == [1]
        world.room[""] += 1
        await placing
        assert (world.of(1) is hurt) == (not others)


@pytest.mark.parametrize("lost", ["all nodes", "before the start", "twice"])
async def test_what_is_lost_meanwhile_is_replaced_too(tmp_path: Path, lost: str) -> None:
    async with World(tmp_path, {"": 3}, spares=0, strategy="SPREAD").running(0, 1) as world:
        hurt = world.of(1)
        hurt.lose(1)
        if lost == "all nodes":
            hurt.lose(0)
            world.room[""] += 1
            await world.train(1)
            assert world.of(1) is not hurt
            return
        if lost == "before the start":
            await world.backend.place(1)
            hurt.dead.add(0)
            with pytest.raises(Retryable, match="lost before the start"):
                await world.backend.start(ReplicaSpec(1, 2, "a", 9, world.run.config), Watched())
            return
        world.room[""] += 1
        await world.train(1)
        hurt.lose(0)
        world.room[""] += 1
        assert await world.train(1) == "on h2, h3"
        assert world.of(1) is hurt
