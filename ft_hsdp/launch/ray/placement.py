"""Placement: what a replica or a spare asks of a cluster, and what the cluster has.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ft_hsdp.config import Config, RayConfig
from ft_hsdp.memory.hosts import DOMAINS_VARIABLE, plain
from ft_hsdp.train.identity import HOST_VARIABLE

NODE_LABEL = "ray.io/node-id"  # Ray gives it to each node
RACK_LABEL = "rack"  # of a node, with the name of its rack
_WHERE = {
    "STRICT_PACK": "on one node",
    "PACK": "on few nodes",
    "SPREAD": "on several nodes",
    "STRICT_SPREAD": "each on a node of its own",
}


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A placement group: one bundle per rank, all alike."""

    name: str  # of the placement group
    size: int  # number of bundles
    bundle: dict[str, float]  # resources of a rank, by Ray's names
    strategy: str  # ray.strategy
    labels: dict[str, str]  # that a node must have
    avoid: tuple[str, ...] = ()  # Ray's ids of nodes that it must not be on

    @property
    def selector(self) -> dict[str, str]:
        """Return what a node must have and must not be, as Ray takes it."""
        return {**self.labels, **({NODE_LABEL: f"!in({', '.join(self.avoid)})"} if self.avoid else {})}

    def __str__(self) -> str:
        each = ", ".join(f"{name} {amount:g}" for name, amount in self.bundle.items())
        labels = ", ".join(f"{name}={value}" for name, value in self.labels.items())
        where = _WHERE[self.strategy] if self.size > 1 else "on a node"
        return f"{self.size} x ({each}) {where}" + (f" with {labels}" if labels else "")


def request(config: Config, replica: int) -> PlacementRequest:
    c = config.ray
    labels = dict(c.labels)
    if c.zones:
        labels[c.zone_label] = c.zones[replica % len(c.zones)]
    return PlacementRequest(
        f"{prefix(config.job.name)}-{replica}", config.ranks_per_replica, c.bundle, c.strategy, labels
    )


def spare_requests(config: Config, others: Sequence[Mapping[str, str]]) -> list[PlacementRequest]:
    """Return what a spare may ask for, best first: with ray.zones the zones with the fewest spares come first.

    A spare serves only the replicas of its zone, so it never takes resources for which a replica of another zone
    waits.

    Args:
        config: Of the job.
        others: The labels that each other spare asked for.
    """
    c = config.ray
    places = [{**c.labels, c.zone_label: zone} for zone in dict.fromkeys(c.zones)] or [dict(c.labels)]
    places.sort(key=list(others).count)
    name = f"{prefix(config.job.name)}-spare"
    return [PlacementRequest(name, config.ranks_per_replica, c.bundle, c.strategy, labels) for labels in places]


def has_room(config: Config, resources: Mapping[str, float]) -> bool:
    """Return whether ``resources`` are enough for all replicas that the job may grow to. False with ray.zones."""
    ranks = config.slots * config.ranks_per_replica
    return not config.ray.zones and all(
        ranks * amount <= resources.get(name, 0) for name, amount in config.ray.bundle.items()
    )


@dataclass(frozen=True, slots=True)
class FreeNode:
    node: str  # Ray's id
    labels: Mapping[str, str]
    free: Mapping[str, float]  # resources that nothing has set aside, by Ray's names


def fits(asked: PlacementRequest, nodes: Sequence[FreeNode], taken: Collection[str] = ()) -> bool:
    """Return whether nodes have room for a placement group now.

    Args:
        asked: What it asks for.
        nodes: All nodes that are alive.
        taken: Ids of nodes that have another part of it, which keep STRICT_SPREAD from them.
    """
    rooms = []
    for node in nodes:
        labelled = all(node.labels.get(key) == value for key, value in asked.labels.items())
        spread = asked.strategy == "STRICT_SPREAD"
        if labelled and node.node not in asked.avoid and not (spread and node.node in taken):
            room = min(int(node.free.get(name, 0) // amount) for name, amount in asked.bundle.items())
            rooms.append(min(room, 1) if spread else room)
    most = max(rooms, default=0) if asked.strategy == "STRICT_PACK" else sum(rooms)
    return most >= asked.size


def prefix(job: str) -> str:
    """Return the prefix of the names of a job's actors and placement groups."""
    return f"ft_hsdp-{job}"


def vacancy(asked: PlacementRequest, free: Mapping[str, float], nodes: int) -> str:
    """Return in one line what a replica without a slot asks for, and what `nodes` nodes have free in all."""
    have = ", ".join(f"{name} {free.get(name, 0):g}" for name in asked.bundle)
    return f"it asks for {asked}; free on {nodes} nodes together: {have}"


def host_environment(
    machine: str, node: str, labels: Mapping[str, str], config: RayConfig, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that tell the ranks on a node their host: the node, whose memory is lost with it.

    Args:
        machine: The name of its machine, which may have other nodes, or have had one that was lost.
        node: Ray's id of the node.
        labels: Of the node.
        config: Names the label with the zone.
        given: The environment of the node's processes: what it says of the host stays.
    """
    said = plain(given.get(HOST_VARIABLE, ""))
    name = said or f"{plain(machine)[:50]}-{node[:8]}"
    keys = {"zone": config.zone_label, "rack": RACK_LABEL}
    known = [f"{level}={plain(labels[key])[:63]}" for level, key in keys.items() if labels.get(key)]
    domains = given.get(DOMAINS_VARIABLE) or ",".join(known)
    return {HOST_VARIABLE: name, **({DOMAINS_VARIABLE: domains} if domains else {})}


def local_ranks(nodes: list[str]) -> list[tuple[int, int]]:
    """Return (LOCAL_RANK, LOCAL_WORLD_SIZE) of each rank.

    Args:
        nodes: The node of each rank, in the order of ranks.
    """
    return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]
