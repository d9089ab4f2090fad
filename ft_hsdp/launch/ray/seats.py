"""What a job wants of a cluster: seats for hosts, in groups that are reserved together.

A `RayHost` is an actor that has a seat. A `HostGroup` has the hosts of a replica, or a spare one. The hosts of a
`Pool` can take each other's places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.launch.ray import placement
from ft_hsdp.launch.ray.actor import ActorLocation, HeldNews
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.ray.reservation import Reservation
from ft_hsdp.launch.run.directory import Row


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
