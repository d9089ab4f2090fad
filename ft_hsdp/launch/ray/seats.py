"""What a job wants of a cluster: seats for hosts, in groups that are reserved together.

A `RayHost` is an actor that has a seat. A `HostGroup` has the hosts of a replica, or a spare one. The hosts of a
`Pool` can take each other's places. A `Reservation` is a placement group that Ray was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.ray import placement
from ft_hsdp.launch.ray.actor import ActorLocation, ActorSetup, HeldNews, HostActor
from ft_hsdp.launch.ray.cluster import first_line
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.run.directory import Row


class Reservation:
    """A placement group of one bundle for each host, until its last user has left it."""

    def __init__(self, request: PlacementRequest, calls: Executor) -> None:
        self.request = request
        self.nodes: list[str] = []  # where its bundles are, as far as they have places
        self._calls = calls
        self._users: set[object] = set()
        r = request
        labels = [r.selector] * r.size if r.selector else None
        bundles = [dict(r.bundle)] * r.size
        asking = self._call(placement_group, bundles, r.strategy, r.name, bundle_label_selector=labels)
        self._asking: asyncio.Future[PlacementGroup] = asyncio.ensure_future(asking)

    def use(self, user: object) -> None:
        self._users.add(user)

    def leave(self, user: object) -> bool:
        """Note that a user has left; return whether it was the last one."""
        self._users.discard(user)
        return not self._users

    async def node(self, place: int) -> str:
        """Return Ray's id of the node where a bundle is; "": it has no place now.

        Raises:
            ConfigError: Ray refuses the request.
        """
        try:
            group = await asyncio.shield(self._asking)  # if the caller is cancelled, `remove` still needs it
        except (ValueError, TypeError) as error:
            raise ConfigError("ray", str(self.request), f"what Ray takes ({first_line(error)})") from None
        self.nodes = await self._call(_nodes_of, group)
        return self.nodes[place] if self.nodes else ""

    async def actor(self, place: int, setup: ActorSetup) -> Any:
        """Return a new actor in a bundle."""
        bundle = self.request.bundle
        resources = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": resources or None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(await self._asking, place),
            "enable_task_events": False,
            "max_concurrency": 100,
        }
        return await self._call(lambda: ray.remote(HostActor).options(**options).remote(setup))

    def kill(self, actor: Any) -> None:
        """End an actor at once; a dead one stays so."""
        self._calls.submit(ray.kill, actor)

    async def remove(self) -> None:
        """Give the resources back."""
        with contextlib.suppress(ValueError, TypeError):  # Ray did not take the request
            await self._call(remove_placement_group, await self._asking)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._calls, lambda: function(*args, **kwargs))


def _nodes_of(group: PlacementGroup) -> list[str]:
    """Return the nodes of a placement group's bundles; [] unless all have places and live. Blocks shortly."""
    known = placement_group_table(group)
    if known.get("state") != "CREATED":
        return []
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    nodes = [node for _, node in sorted(known["bundles_to_node_id"].items())]
    return nodes if living.issuperset(nodes) else []


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A rank on a host (a `WorkerProcess`)."""

    pid: int
    machine: str
    host: str
    actor: Any

    def signal(self, number: int) -> None:
        self.actor.signal.remote(self.pid, int(number))


@dataclass(eq=False, slots=True)
class RayHost:
    """An actor that runs the agent of a host, and what it has said."""

    actor: Any
    location: ActorLocation
    reservation: Reservation
    held: tuple[HeldNews, ...] = ()
    spares: list[Row] = field(default_factory=list)
    over: bool = False  # its agent has ended
    left: asyncio.Event = field(default_factory=asyncio.Event)  # another one takes its place
    polling: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not any(runs for held in self.held for _, _, runs in held.ranks)


@dataclass(eq=False, slots=True)
class Seat:
    """A host that is wanted, whoever is it now."""

    name: str  # of the host, after that of the node
    number: int  # of all seats
    place: int  # in its first reservation
    reservation: Reservation
    host: RayHost | None = None
    former: list[RayHost] = field(default_factory=list)  # cordoned ones
    lives: int = 0  # hosts that it had
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class HostGroup:
    """What is reserved together: the hosts of a replica, or a spare one."""

    owner: int | None  # the replica that has them first; None: they are spare
    request: PlacementRequest
    seats: list[Seat] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return all(seat.host is None or seat.host.idle for seat in self.seats)

    def needed(self, replicas: Sequence[int]) -> tuple[bool, bool, bool]:
        """Return how much it is needed: it has hosts, they have had ranks of these replicas, or have a spare."""
        hosts = [seat.host for seat in self.seats if seat.host is not None]
        had = any(held.replica in replicas for host in hosts for held in host.held)
        return len(hosts) == len(self.seats), had, any(host.spares for host in hosts)


@dataclass(eq=False, slots=True)
class Pool:
    """Hosts of which each can take the place of another."""

    only: tuple[int, ...]  # replicas that they serve
    zone: str
    spare: int  # how many are spare
    groups: list[HostGroup] = field(default_factory=list)


def pools(config: Config) -> list[Pool]:
    """Return the hosts that a job wants: of each zone, or of each replica that has several of them."""
    if placement.hosts_of_a_replica(config) > 1:
        return [Pool((replica,), "", 0) for replica in range(config.slots)]
    zones = config.ray.zones or ("",)
    names, spares = list(dict.fromkeys(zones)), config.spares // config.ranks_per_replica
    return [
        Pool(
            tuple(replica for replica in range(config.slots) if zones[replica % len(zones)] == name),
            name,
            len(range(n, spares, len(names))),
        )
        for n, name in enumerate(names)
    ]
