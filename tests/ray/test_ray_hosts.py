"""Which hosts a driver provides on a cluster. Ray is a stand-in here, and so are the agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

from ray.exceptions import RayActorError

from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.ray import hosts
from ft_hsdp.launch.ray.actor import ActorLocation, HeldNews, HostOrder, News
from ft_hsdp.launch.ray.hosts import RayHosts
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.run.directory import Row, RunDir, read_json
from ft_hsdp.protocol import SupervisorReply
from ft_hsdp.secret import write_private
from tests.support.waiting import async_until


class Actor:
    """An actor in a bundle; tests say what is new there."""

    def __init__(self, world: World, node: str) -> None:
        self.world, self.node, self.news_of, self.number = world, node, asyncio.Queue[Any](), 0
        self.calls: list[tuple[Any, ...]] = []
        world.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.append((name, *args))
            return asyncio.ensure_future(getattr(type(self), f"_{name}", Actor._nothing)(self, *args))

        return SimpleNamespace(remote=remote)

    async def _open(self, order: HostOrder) -> ActorLocation:
        self.order = order
        if self.world.refuses:
            raise self.world.refuses
        return ActorLocation("m", f"{self.node}-{order.name}", self.node)

    async def _news(self, arrived: int) -> News:
        found = await self.news_of.get()
        if isinstance(found, Exception):
            raise found
        self.number += 1
        return News(self.number, **found)

    async def _stop(self, number: int) -> None:
        self.says(over=True)

    async def _nothing(self, *_: object) -> None:
        await asyncio.sleep(0)

    def says(self, **what: Any) -> None:
        self.news_of.put_nowait(what)

    def holds(self, incarnation: str, *ranks: int, runs: bool = True, trains: bool = False, size: int = 1) -> None:
        replica, _, restarts = incarnation.split("-")
        rows = tuple((rank, 100 + rank, runs) for rank in ranks)
        self.says(held=(HeldNews(incarnation, int(replica), int(restarts), size, trains, rows),))

    def dies(self) -> None:
        self.news_of.put_nowait(RayActorError())


class Group:
    """A placement group: bundles get the next nodes of the world."""

    def __init__(self, world: World, request: PlacementRequest) -> None:
        self.world, self.request, self.users, self.removed = world, request, set[object](), False
        self.nodes: list[str] = []
        world.groups.append(self)

    def use(self, user: object) -> None:
        self.users.add(user)

    def leave(self, user: object) -> bool:
        self.users.discard(user)
        return not self.users

    async def node(self, place: int) -> str:
        await asyncio.sleep(0)
        if not self.nodes and len(self.world.nodes) >= self.request.size:
            self.nodes = [self.world.nodes.pop(0) for _ in range(self.request.size)]
        return self.nodes[place] if self.nodes else ""

    async def actor(self, place: int, setup: object) -> Actor:
        return Actor(self.world, self.nodes[place])

    def kill(self, actor: Actor) -> None:
        self.world.killed.append(actor)

    async def remove(self) -> None:
        self.removed = True


class World:
    """Hosts of a job on nodes that come in the given order."""

    def __init__(self, folder: Path, nodes: str, **document: Any) -> None:
        self.nodes, self.run = [*nodes], RunDir(folder)
        self.actors, self.groups, self.killed = list[Actor](), list[Group](), list[Actor]()
        self.events, self.lost = list[Row](), list[str]()
        self.refuses: Exception | None = None
        write_private(self.run.token, "t")
        write_private(self.run.checkpoint_key, "k")
        config = parse({"job": {"name": "a"}, "timeouts": {"place_s": 0.2}, **document})
        cluster: Any = SimpleNamespace(address="10.0.0.1", free=({"CPU": 3.0}, 2))
        setup: Any = SimpleNamespace()
        reserve: Any = lambda request: Group(self, request)  # noqa: E731
        self.hosts = RayHosts(config, self.run, cluster, setup, self.events.append, self._lost, reserve)
        self.hosts.urls = ("http://10.0.0.1:1",)

    async def _lost(self, host: str, why: str) -> None:
        self.lost.append(host)

    def say(self, **reply: Any) -> None:
        self.hosts.provide(SupervisorReply(0, False, **reply))

    @property
    def names(self) -> list[str]:
        return sorted(host.location.host for host in self.hosts.hosts)

    async def until(self, ready: Callable[[], object], what: str, **reply: Any) -> None:
        def asked() -> object:
            self.say(**reply)
            return ready()

        await async_until(asked, what, said=lambda: f"{self.names} {self.events}")

    async def has(self, *names: str, **reply: Any) -> None:
        await self.until(lambda: self.names == sorted(names), f"hosts {names}", **reply)

    def told(self, event: str) -> list[Row]:
        return [each for each in self.events if each["event"] == event]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        try:
            yield self
        finally:
            await self.hosts.close()
        assert not self.hosts.failed
        assert {*self.actors} == {*self.killed}
        assert all(group.removed for group in self.groups)


async def test_each_replica_that_is_wanted_has_a_host_and_spare_ones_come_after_them(tmp_path: Path) -> None:
    async with World(tmp_path, "abc", replicas=3, ranks_per_replica=2, spares=2).running() as world:
        await world.has("a-r0", "b-r1", "c-s3", drained=(2,))
        first, _, spare = (actor.order for actor in world.actors)
        assert (first.home, spare.home, {o.only for o in (first, spare)}) == ((0, 0), None, {(0, 1, 2)})
        assert len({first.spare, spare.spare}) == 2
        # The replica on the spare host is scaled away: an idle host is given back, once it has left.
        world.actors[2].holds("1-x-0", 0, 1, size=2)
        world.actors[0].holds("0-x-0", 0, 1, size=2)
        await world.until(lambda: world.hosts.ranks(1)[1], "ranks", drained=(2,))
        assert (world.hosts.newest(1), len(world.hosts.ranks(1)[1])) == (("1-x-0", 2), 2)
        world.say(drained=(1, 2))
        assert len(world.hosts.hosts) == 3
        world.actors[2].holds("1-x-0", 0, 1, size=2, runs=False)
        await world.has("a-r0", "c-s3", drained=(1, 2))
        await async_until(lambda: world.groups[1].removed, "its resources")


async def test_a_host_serves_the_replicas_of_its_zone_or_its_own_if_that_has_several(tmp_path: Path) -> None:
    zones = {"ray": {"zones": ["p", "q"], "zone_label": "zone"}, "spares": 2}
    async with World(tmp_path, "abcd", replicas=3, **zones).running() as world:
        await world.until(lambda: len(world.hosts.hosts) == 4, "hosts")
        assert [actor.order.only for actor in world.actors] == [(0, 2), (0, 2), (1,), (0, 2)]
        assert [group.request.labels["zone"] for group in world.groups] == ["p", "p", "q", "p"]
    spread = {"ray": {"strategy": "STRICT_SPREAD"}, "ranks_per_replica": 2}
    async with World(tmp_path, "abcdef", replicas=2, **spread).running() as world:
        await world.has("a-r0-p0", "b-r0-p1", "c-r1-p0", "d-r1-p1")
        assert [(o.home, o.only, o.spare) for o in (actor.order for actor in world.actors[2:])] == [
            ((1, 0), (1,), None),
            ((1, 1), (1,), None),
        ]
        await world.has("a-r0-p0", "c-r1-p0", "d-r1-p1", "e-r0-p1-2", cordoned=("b-r0-p1",))
        assert world.groups[2].request.avoid == ("a", "b")  # of the replica, and cordoned
        assert not world.groups[0].removed  # the other host of the replica has a bundle of it


async def test_of_a_lost_host_all_ranks_count_as_ended_and_another_one_is_started(tmp_path: Path) -> None:
    async with World(tmp_path, "a", replicas=1).running() as world:
        await world.has("a-r0")
        world.hosts.stay_away(0, 7)
        world.actors[0].holds("0-x-0", 0)
        await async_until(lambda: world.hosts.ranks(0)[1], "a rank")
        world.hosts.ranks(0)[1][0].signal(9)
        assert world.actors[0].calls[-1] == ("signal", 100, 9)
        world.actors[0].dies()
        await world.has("a-r0-2")
        assert world.lost == ["a-r0"]
        assert [(e["rank"], e["incarnation"]) for e in world.told("LogCut")] == [(0, "0-x-0")]
        assert ("stay_away", 0, 7) in world.actors[1].calls
        await async_until(lambda: (read_json(world.run.processes(0)) or {}).get("ranks"), "its file")
        assert read_json(world.run.processes(0))["ranks"][0]["state"] == "exited"
        assert len(world.groups) == 1


async def test_a_cordoned_host_is_kept_until_its_replica_trains_elsewhere(tmp_path: Path) -> None:
    async with World(tmp_path, "a", replicas=1).running() as world:
        await world.has("a-r0")
        world.actors[0].holds("0-x-0", 0, runs=False)
        cordoned = {"cordoned": ("a-r0",)}
        await world.until(lambda: world.told("StartPrevented"), "the word on what is asked for", **cordoned)
        assert world.told("StartPrevented")[0]["reason"].endswith("cordoned: a")
        assert world.groups[1].request.avoid == ("a",)
        world.nodes += "ab"  # Ray moves the bundle to the node that is to be avoided
        await world.has("a-r0", "b-r0-2", **cordoned)
        assert world.groups[1].removed
        world.actors[1].holds("0-x-1", 0)
        await world.until(lambda: world.hosts.newest(0)[0] == "0-x-1", "the replica there", **cordoned)
        assert "a-r0" in world.names
        world.actors[1].holds("0-x-1", 0, trains=True)
        await world.has("b-r0-2", **cordoned)
        assert world.told("StartPrevented")[-1]["over"]


async def test_what_a_node_refuses_is_the_fault_of_the_configuration_only_if_none_takes_it(tmp_path: Path) -> None:
    async with World(tmp_path, "a", replicas=1).running() as world:
        world.refuses = ConfigError("ray.folder", "/x", "a folder")
        await world.until(lambda: world.hosts.wrong, "the end")
        assert world.hosts.end()
    async with World(tmp_path, "abb", replicas=2).running() as world:
        await world.until(lambda: len(world.hosts.hosts) == 2, "hosts")
        world.refuses = Retryable("no process")
        world.actors[0].dies()
        await world.until(lambda: len(world.told("StartPrevented")) == 1, "the first refusal")
        world.refuses = None
        await world.has("a-r0-3", "b-r1")
        assert not world.hosts.wrong
        world.hosts.end()
        for actor in world.actors:
            actor.says(over=True, events=[{"event": "Seen"}])
        await async_until(world.hosts.end, "the end of all agents")
        assert len(world.told("Seen")) == 2


async def test_a_host_that_does_not_open_is_tried_elsewhere_and_there_again_if_no_node_is_free(tmp_path) -> None:
    with mock.patch.object(hosts, "PAUSE_S", 0.01):
        async with World(tmp_path, "a", replicas=1).running() as world:
            world.refuses = Retryable("no lighthouse")
            await world.until(lambda: len(world.groups) == 3, "a place on any node")
            assert [group.request.avoid for group in world.groups] == [(), ("a",), ()]
            assert [row["reason"] for row in world.told("StartPrevented")] == ["no lighthouse"] * 2
            world.refuses = None
            world.nodes += "a"
            await world.has("a-r0-3")
