"""A reservation: a placement group that Ray was asked for, and the actors in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.ray.actor import ActorSetup, HostActor
from ft_hsdp.launch.ray.cluster import first_line
from ft_hsdp.launch.ray.placement import PlacementRequest


class Reservation:
    """A placement group of one bundle for each host, until its last user has left it."""

    def __init__(self, request: PlacementRequest, calls: Executor) -> None:
        """Ask for it.

        Args:
            request: What is asked for.
            calls: Runs Ray's calls that may block.
        """
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
