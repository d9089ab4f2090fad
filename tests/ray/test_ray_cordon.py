"""A node that is cordoned: whose ranks leave it, and what Ray is asked for then. Ray is a stand-in here."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ft_hsdp.launch.backend.base import COLD, WARM
from ft_hsdp.launch.ray import backend, slot
from ft_hsdp.launch.ray.actor import ActorLocation, ActorSetup
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import FreeNode, PlacementRequest
from ft_hsdp.launch.ray.slot import ReplicaSlot
from tests.ray.test_ray_slots import World
from tests.support.waiting import async_until

pytestmark = pytest.mark.usefixtures("_quick")

WHY = "a rank found its host broken (exit code 76)"


def free(monkeypatch: pytest.MonkeyPatch, nodes: int, cpus: float = 1.0) -> None:
    """So many nodes have so many free CPUs; a rank needs one."""
    found = [FreeNode(f"n{n}", {}, {"CPU": cpus}) for n in range(nodes)]
    monkeypatch.setattr(backend, "free_nodes", lambda: found)


def named(world: World, event: str) -> list[Any]:
    return [e for e in world.events if e["event"] == event]


async def test_the_ranks_of_a_cordoned_node_move_and_the_others_stay(tmp_path, monkeypatch) -> None:
    async with World(tmp_path, {"": 2}, spares=0, strategy="SPREAD").running(0, 1) as world:
        hurt, kept = world.of(1), world.of(1).bundles[0]
        free(monkeypatch, 1)
        world.kill(1)
        assert world.backend.cordon(1, "h1", WHY, waits=True)
        assert world.backend.cordon(1, "h1", WHY, waits=True), "it is already"
        assert [(e["replica"], e["host"], e["reason"]) for e in named(world, "HostCordoned")] == [(1, "h1", WHY)]
        world.room[""] += 1
        assert await world.train(1) == "on h0, h2"
        assert (world.of(1), hurt.bundles[0]) == (hurt, kept)
        (replaced,) = named(world, "HostReplaced")
        assert (replaced["before"], replaced["host"], replaced["ranks"]) == ("h1", "h2", [1])
        assert replaced["reason"].startswith("h1 is cordoned; ")
        world.kill(1)
        assert await world.train(1) == COLD
        # What is asked for later avoids the node, too.
        world.room[""] += 1
        await world.backend.place(2)
        assert world.of(2).request.avoid == ("h1",)


async def test_a_node_with_all_ranks_of_a_replica_is_given_back(tmp_path, monkeypatch) -> None:
    async with World(tmp_path, {"": 3}, spares=0).running(0, 1) as world:
        left = world.of(1)
        free(monkeypatch, 1)
        assert not world.backend.cordon(1, "h", WHY, waits=False), "no node has room for both ranks"
        free(monkeypatch, 1, cpus=2.0)
        assert world.backend.cordon(1, "h", WHY, waits=False)
        world.kill(1)
        await world.train(1)
        assert left.removed
        assert world.of(1).request.avoid == ("h",)


async def test_without_room_a_node_is_left_only_if_the_replica_waits(tmp_path, monkeypatch) -> None:
    async with World(tmp_path, {"": 2}, spares=0, strategy="SPREAD").running(1) as world:
        free(monkeypatch, 0)
        assert not world.backend.cordon(1, "elsewhere", WHY, waits=True)
        assert not world.backend.cordon(1, "h1", WHY, waits=False)
        assert named(world, "HostCordoned") == []
        assert world.backend.cordon(1, "h1", WHY, waits=True)


async def test_a_spare_on_a_cordoned_node_is_lost_and_one_elsewhere_is_room(tmp_path, monkeypatch) -> None:
    async with World(tmp_path, {"": 4}, strategy="SPREAD").running(0, 1) as world:
        spare = await world.ready()
        for bundle in spare.bundles:
            bundle.location.node = "elsewhere"
        free(monkeypatch, 0)
        assert world.backend.cordon(1, "h1", WHY, waits=False), "the spare is ready"
        world.kill(1)
        assert await world.train(1) == WARM
        assert world.of(1) is spare
        after = await world.ready()
        world.of(0).bundles[0].location.node = "h0"
        assert world.backend.cordon(0, "h0", WHY, waits=True)
        await async_until(lambda: after.removed, "the end of the spare there")
        assert len(named(world, "SpareLost")) == 1


async def test_a_host_is_lost_when_its_node_is_and_not_when_an_actor_dies(tmp_path, monkeypatch) -> None:
    async with World(tmp_path, {"": 2}, spares=0, strategy="SPREAD").running(1) as world:
        assert world.backend.lost_hosts(1) == world.backend.lost_hosts(0) == ()
        world.of(1).lose(1)
        lives = [True]
        known = lambda: [{"NodeID": "h0", "Alive": True}, {"NodeID": "h1", "Alive": lives[0]}]  # noqa: E731
        monkeypatch.setattr(backend.ray, "nodes", known)
        assert world.backend.lost_hosts(1) == ()
        lives[0] = False
        assert world.backend.lost_hosts(1) == ("h1",)


class PretendRay:
    """Placement groups and actors; `nodes` says where the next bundles go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: list[str]) -> None:
        self.nodes = iter(nodes)
        self.asked: list[tuple[str, int, Any]] = []
        self.groups: dict[str, list[str]] = {}  # by name: the node of each bundle
        self.removed: list[str] = []
        self.killed: list[str] = []
        for name, stand_in in {
            "POLL_S": 0.01,
            "placement_group": self.ask,
            "remove_placement_group": self.removed.append,
            "_nodes_of": self.groups.__getitem__,
            "ray": SimpleNamespace(kill=lambda actor: self.killed.append(actor.node)),
        }.items():
            monkeypatch.setattr(slot, name, stand_in)

    def ask(self, bundles: list[Any], strategy: str, name: str, bundle_label_selector: Any) -> str:
        self.asked.append((name, len(bundles), (bundle_label_selector or [None])[0]))
        self.groups[name] = [next(self.nodes) for _ in bundles]
        return name

    def actor(self, group: str, number: int) -> Any:
        node = self.groups[group][number]

        async def location() -> ActorLocation:
            return ActorLocation("m", f"host-{node}", "127.0.0.1", node, ())

        async def nothing(*_: object) -> None:
            await asyncio.sleep(3600)

        async def closed() -> None:
            await asyncio.sleep(0)

        answers: dict[str, Callable[..., Any]] = {"open": location, "news": nothing, "close": closed}
        methods = {name: SimpleNamespace(remote=answer) for name, answer in answers.items()}
        return SimpleNamespace(node=node, **methods)


class PretendSlot(ReplicaSlot):
    def __init__(self, ray: PretendRay, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pretends = ray

    def _actor(self, group: Any, number: int, setup: object) -> Any:
        return self.pretends.actor(group, number)


@pytest.fixture
def calls() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


async def test_ray_is_asked_for_another_place_of_what_leaves_a_node(tmp_path, monkeypatch, calls) -> None:
    ray = PretendRay(monkeypatch, ["a", "b", "b", "c", "d"])
    setup: ActorSetup = SimpleNamespace(boot_s=5.0, spawn_s=5.0)  # type: ignore[assignment]
    request = PlacementRequest("g", 2, {"CPU": 1.0}, "STRICT_SPREAD", {})
    made = PretendSlot(ray, request, calls, LogReceiver(tmp_path), lambda _: None, 1.0)
    await made.reserve()
    await made.start_actors(setup)
    assert ray.asked == [("g", 2, None)]
    kept = made.bundles[0]

    made.avoid("b")
    assert (made.gone, made.repairable) == (True, True)
    made.repair()
    await made.reserve()  # first it is given a place on the same node again
    await made.start_actors(setup)
    beside = {"ray.io/node-id": "!in(a, b)"}
    assert ray.asked[1:] == [("g+1", 1, beside), ("g+2", 1, beside)]
    assert [bundle.location.node for bundle in made.bundles] == ["a", "c"]
    assert made.bundles[0] is kept
    assert (ray.killed, ray.removed, made.gone) == (["b"], ["g+1"], False)

    kept.dead = True  # Ray would place the bundle on b again as well: the rank leaves the group
    made.repair()
    await made.reserve()
    await made.start_actors(setup)
    assert ray.asked[3:] == [("g+3", 1, {"ray.io/node-id": "!in(b, c)"})]
    assert [bundle.location.node for bundle in made.bundles] == ["d", "c"]
    await asyncio.wait_for(made.remove(), 10)
    assert sorted(ray.removed) == ["g", "g+1", "g+2", "g+3"]
    assert sorted(ray.killed) == ["a", "b", "c", "d"]
