"""Placement: what a replica or a spare one asks of a cluster, and what the cluster has.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """A placement group: one bundle per host, all alike."""

    name: str  # of the placement group
    size: int  # number of bundles
    bundle: dict[str, float]  # resources of a host, by Ray's names
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


def hosts_of_a_replica(config: Config) -> int:
    """Return how many hosts a replica has on a cluster: one for all ranks of it, or one for each."""
    return 1 if config.ray.strategy == "STRICT_PACK" else config.ranks_per_replica


def request(config: Config, replica: int | None, zone: str = "") -> PlacementRequest:
    """Return what a replica asks for; None: what a spare one in a zone does."""
    c, hosts = config.ray, hosts_of_a_replica(config)
    labels = dict(c.labels)
    if c.zones:
        labels[c.zone_label] = zone if replica is None else c.zones[replica % len(c.zones)]
    name = f"{prefix(config.job.name)}-{'spare' if replica is None else replica}"
    each = config.ranks_per_replica // hosts
    return PlacementRequest(name, hosts, {k: each * v for k, v in c.bundle.items()}, c.strategy, labels)


def has_room(config: Config, resources: Mapping[str, float]) -> bool:
    """Return whether ``resources`` are enough for all replicas that the job may grow to. False with ray.zones."""
    ranks = config.slots * config.ranks_per_replica
    return not config.ray.zones and all(
        ranks * amount <= resources.get(name, 0) for name, amount in config.ray.bundle.items()
    )


def prefix(job: str) -> str:
    """Return the prefix of the names of a job's actors and placement groups."""
    return f"ft_hsdp-{job}"


def vacancy(asked: PlacementRequest, free: Mapping[str, float], nodes: int) -> str:
    """Return in one line what a replica without hosts asks for, and what `nodes` nodes have free in all."""
    have = ", ".join(f"{name} {free.get(name, 0):g}" for name in asked.bundle)
    return f"it asks for {asked}; free on {nodes} nodes together: {have}"


def host_environment(
    machine: str, node: str, labels: Mapping[str, str], config: RayConfig, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that tell the ranks on a node their host: the node, whose memory is lost with it.

    Args:
        machine: The name of its machine, which may have other nodes, or have had one that was lost.
        node: Ray's id of the node.
        config: Names the label with the zone.
        given: The environment of the node's processes: what it says of the host stays.
    """
    said = plain(given.get(HOST_VARIABLE, ""))
    name = said or f"{plain(machine)[:40]}-{node[:8]}"
    keys = {"zone": config.zone_label, "rack": RACK_LABEL}
    known = [f"{level}={plain(labels[key])[:63]}" for level, key in keys.items() if labels.get(key)]
    domains = given.get(DOMAINS_VARIABLE) or ",".join(known)
    return {HOST_VARIABLE: name, **({DOMAINS_VARIABLE: domains} if domains else {})}
