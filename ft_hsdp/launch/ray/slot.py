"""Slots: the places in a cluster where the ranks of one replica, or of one spare, run.

A `ReplicaSlot` is a placement group and the actors in it. If only some of its nodes are lost, it can be repaired:
Ray places their bundles on other nodes. The actors on the rest stay, with their state agents and memory.
`ReplicaSlots` knows whether a slot belongs to a replica or a spare, or is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ft_hsdp.errors import ConfigError, FtHsdpError, Retryable
from ft_hsdp.launch.backend.base import ReplicaSpec, WorkerGroup
from ft_hsdp.launch.ray.actor import ActorLocation, ActorSetup, News, RankActor, StartOrder
from ft_hsdp.launch.ray.cluster import first_line
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.run.directory import Row

POLL_S = 0.25  # between two looks at a placement group that is not reserved yet
AGAIN_S = 0.2  # before an actor that could not be reached is asked again
CLOSE_S = 5.0  # longest wait for actors to clean up
KILLED = -int(signal.SIGKILL)

T = TypeVar("T")


@dataclass(slots=True)
class Bundle:
    """One bundle of a placement group, its actor, and the ranks that this has started."""

    rank: int
    actor: Any
    location: ActorLocation
    running: dict[int, tuple[WorkerGroup, RayProcess]] = field(default_factory=dict)  # by pid
    # Pid -> news of a rank whose start was not answered yet: None if it is warm, else its exit code.
    early: dict[int, list[int | None]] = field(default_factory=dict)
    dead: bool = False  # its actor died


class RayProcess:
    """A rank that an actor started (a `WorkerProcess`)."""

    def __init__(self, pid: int, bundle: Bundle, kill_s: float, not_killed: Callable[[], None]) -> None:
        """Name a rank.

        Args:
            pid: On its node.
            bundle: Whose actor started it.
            kill_s: Time from SIGKILL until `not_killed` is called; it checks whether the rank is gone.
            not_killed: Ends the actor if the rank still runs.
        """
        self.pid = pid
        self.host, self.machine = bundle.location.host, bundle.location.machine
        self._actor = bundle.actor
        self._kill_s = kill_s
        self._not_killed = not_killed

    def signal(self, number: int) -> None:
        """Tell the actor to send a signal. If SIGKILL has no effect within `kill_s`, Ray ends the actor."""
        self._actor.signal.remote(self.pid, int(number))
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(self._kill_s, self._not_killed)


class ReplicaSlot:
    """A placement group with one actor for each rank of a replica or a spare."""

    def __init__(
        self,
        request: PlacementRequest,
        calls: Executor,
        receiver: LogReceiver,
        emit: Callable[[Row], None],
        kill_s: float,
    ) -> None:
        """Make a slot that has no resources yet.

        Args:
            request: What it asks of the cluster.
            calls: Runs Ray's calls that may block.
            receiver: Takes what ranks write.
            emit: Takes each event.
            kill_s: How long an actor may take to kill a rank before Ray ends the actor.
        """
        self.request = request
        self.reserved = False  # the cluster has set the resources aside
        self.failed = False  # it cannot be used any more
        self.bundles: list[Bundle] = []  # that have an actor, by rank
        self.before: dict[int, ActorLocation] = {}  # where ranks were whose bundles are repaired
        self._calls = calls
        self._receiver = receiver
        self._emit = emit
        self._kill_s = kill_s
        self._patience_s = 0.0
        self._grouping: asyncio.Future[PlacementGroup] | None = None
        self._actors: dict[int, Any] = {}  # by rank
        self._polls: dict[int, asyncio.Task[None]] = {}

    @property
    def gone(self) -> bool:
        """Return whether it cannot be used as it is: an actor died, or could not be started."""
        return self.failed or any(bundle.dead for bundle in self.bundles)

    @property
    def complete(self) -> bool:
        """Return whether each bundle has an actor."""
        return len(self.bundles) == self.request.size

    @property
    def repairable(self) -> bool:
        """Return whether actors died, but none on some of its nodes."""
        lost = {bundle.location.node for bundle in self.bundles if bundle.dead}
        return bool(lost) and not self.failed and any(b.location.node not in lost for b in self.bundles)

    @property
    def missing(self) -> list[int]:
        """Return the ranks without an actor, if others have one."""
        there = {bundle.rank for bundle in self.bundles}
        return [rank for rank in range(self.request.size) if rank not in there] if there else []

    def repair(self) -> None:
        """Keep actors that live. `reserve` then waits for places of the others; `start_actors` starts them."""
        self.before |= {bundle.rank: bundle.location for bundle in self.bundles if bundle.dead}
        self.bundles = [bundle for bundle in self.bundles if not bundle.dead]
        self.reserved = False

    async def reserve(self) -> None:
        """Wait without an end until the cluster has set the resources aside; a caller may cancel, and call again.

        Raises:
            ConfigError: Ray refuses the request.
        """
        r = self.request
        if self._grouping is None:
            labels = [r.labels] * r.size if r.labels else None
            bundles = [dict(r.bundle)] * r.size
            asking = self._call(placement_group, bundles, r.strategy, r.name, bundle_label_selector=labels)
            self._grouping = asyncio.ensure_future(asking)
        try:
            # If the caller is cancelled, `remove` still needs the group.
            group = await asyncio.shield(self._grouping)
        except (ValueError, TypeError) as error:
            raise ConfigError("ray", str(r), f"what Ray takes ({first_line(error)})") from None
        while not self.reserved:
            self.reserved = await self._call(_reserved, group)
            if not self.reserved:
                await asyncio.sleep(POLL_S)

    async def start_actors(self, setup: ActorSetup) -> None:
        """Start the actors of bundles that have none, after `reserve`.

        Raises:
            ConfigError: A node refuses the configuration.
            Retryable: An actor does not start or does not answer.
        """
        assert self._grouping is not None, "reserve() comes first"
        group = self._grouping.result()
        self._patience_s = setup.boot_s + setup.spawn_s
        ranks = self.missing or list(range(self.request.size))
        try:
            locations = await self._answered(self._open(group, setup, ranks))
        except FtHsdpError as error:
            # A node that was added and is lost already is replaced like the one before it.
            self.failed = self.failed or not self.bundles or not isinstance(error, Retryable)
            self.reserved = False
            for rank in ranks:
                if rank in self._actors:
                    await self._call(ray.kill, self._actors.pop(rank))
            raise
        made = [Bundle(n, self._actors[n], location) for n, location in zip(ranks, locations, strict=True)]
        self.bundles = sorted([*self.bundles, *made], key=lambda bundle: bundle.rank)
        self._polls |= {bundle.rank: asyncio.create_task(self._poll(bundle)) for bundle in made}

    async def port(self, host: str) -> int:
        """Return a port that is free on the node of rank 0.

        Raises:
            Retryable: The actor does not answer.
        """
        first = self.bundles[0]
        return int(await self._answered(first.actor.port.remote(host), first))

    async def start(self, start: StartOrder, group: WorkerGroup) -> None:
        """Start a rank of a group, and report it to the group.

        Raises:
            Retryable: The actor does not answer, or cannot fork.
        """
        bundle = self.bundles[start.rank]
        pid = int(await self._answered(bundle.actor.start.remote(start), bundle))
        process = RayProcess(pid, bundle, self._kill_s, lambda: self._not_killed(bundle, pid))
        bundle.running[pid] = (group, process)
        group.started(bundle.rank, process)
        for code in bundle.early.pop(pid, []):
            self._rank_changed(bundle, pid, code)
        if (self.failed or bundle.dead) and pid in bundle.running:
            self._rank_changed(bundle, pid, KILLED)

    async def call(self, group: WorkerGroup, spec: ReplicaSpec) -> None:
        """Tell the ranks of a spare which incarnation they belong to.

        Raises:
            Retryable: An actor does not answer.
        """
        told = (self.bundles[n].actor.call.remote(p.pid, spec, n) for n, p in group.processes.items())
        await self._answered(asyncio.gather(*told))

    async def remove(self) -> None:
        """End the actors and their ranks, and give the resources back."""
        for task in self._polls.values():
            task.cancel()
        closing = [asyncio.ensure_future(actor.close.remote()) for actor in self._actors.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for each in closing:
            if each.done():
                each.exception()  # read it, so that asyncio does not log it: a dead actor is closed as well
            else:
                each.cancel()
        for actor in self._actors.values():
            await self._call(ray.kill, actor)
        if self._grouping is not None:
            with contextlib.suppress(ValueError, TypeError):  # Ray did not take the request
                await self._call(remove_placement_group, await self._grouping)

    async def _open(self, group: PlacementGroup, setup: ActorSetup, ranks: list[int]) -> list[ActorLocation]:
        for number in ranks:
            self._actors[number] = await self._call(self._actor, group, number, setup)
        return await asyncio.gather(*(self._actors[number].open.remote() for number in ranks))

    async def _answered(self, asked: Awaitable[T], bundle: Bundle | None = None) -> T:
        """Return what actors answer, or the one of a bundle.

        Raises:
            FtHsdpError: What an actor raised.
            Retryable: No answer in time, or an actor died.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                return await asked
        except TimeoutError:
            self.failed = True  # the actors may still carry the order out, so the slot cannot be used again
            why = f"the actors of {self.request.name} do not answer within {self._patience_s:g} s"
            raise Retryable(why) from None
        except RayError as error:
            if bundle is not None and isinstance(error, ActorDiedError):
                bundle.dead = True  # before `_poll` hears of it
            raise cause(error) from None

    def _actor(self, group: PlacementGroup, number: int, setup: ActorSetup) -> Any:
        """Create an actor in its bundle."""
        r = self.request
        resources = {name: amount for name, amount in r.bundle.items() if name not in ("CPU", "GPU")}
        options = {
            "num_cpus": r.bundle.get("CPU", 0),
            "num_gpus": r.bundle.get("GPU", 0),
            "resources": resources or None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
            "enable_task_events": False,
            "max_concurrency": 100,
        }
        return ray.remote(RankActor).options(**options).remote(setup)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of Ray in the executor, because it may block."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._calls, lambda: function(*args, **kwargs))

    async def _poll(self, bundle: Bundle) -> None:
        """Take an actor's news until Ray reports that it is dead."""
        arrived = 0
        while True:
            try:
                news: News = await bundle.actor.news.remote(arrived)
            except ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)
                continue
            except RayError as error:
                self._actor_died(bundle, str(cause(error)))
                return
            if news.number <= arrived:
                continue
            arrived = news.number
            try:
                self._receiver.add(news.pieces)
            except ValueError as error:
                self._calls.submit(ray.kill, bundle.actor)
                self._actor_died(bundle, f"what it wrote cannot be kept: {error}")
                return
            for pid in news.warm:
                self._rank_changed(bundle, pid, None)
            for pid, code in news.exits:
                self._rank_changed(bundle, pid, code)

    def _rank_changed(self, bundle: Bundle, pid: int, code: int | None) -> None:
        """Report that a rank has ended with `code`, or is warm if that is None."""
        if pid not in bundle.running:
            bundle.early.setdefault(pid, []).append(code)
            return
        group, process = bundle.running[pid]
        if code is None:
            group.warm(bundle.rank)
        else:
            del bundle.running[pid]
            group.exited(bundle.rank, process, code)

    def _actor_died(self, bundle: Bundle, why: str) -> None:
        """Report that the ranks of a dead actor were killed. The last lines of their logs are lost."""
        bundle.dead = True
        for pid, (group, _) in list(bundle.running.items()):
            if group.spec is not None:
                about = {"replica": group.spec.replica, "rank": bundle.rank, "incarnation": group.spec.name}
                head = {"t": time.time(), "event": "LogCut", "source": "supervisor"}
                self._emit({**head, **about, "reason": f"on {bundle.location.host}: {why}"})
            self._rank_changed(bundle, pid, KILLED)

    def _not_killed(self, bundle: Bundle, pid: int) -> None:
        """End an actor whose rank still runs `kill_s` after SIGKILL."""
        if pid in bundle.running:
            self._calls.submit(ray.kill, bundle.actor)


def _reserved(group: PlacementGroup) -> bool:
    """Return whether the resources of a placement group are set aside, on nodes that live. Blocks shortly."""
    known = placement_group_table(group)
    if known.get("state") != "CREATED":
        return False
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return living.issuperset(known["bundles_to_node_id"].values())


def cause(error: RayError) -> FtHsdpError:
    """Return what an actor raised, or a Retryable that says in one line why there is no answer."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, FtHsdpError):
        return error.cause
    lines = [line.strip() for line in str(error).splitlines()]
    telling = next((line for line in lines if line.startswith("The actor died because")), "")
    return Retryable(telling[:300] or first_line(error))


SlotOwner = int | WorkerGroup
"""A replica, by its id, or a spare."""


class ReplicaSlots:
    """All slots of a job, by owner, and the free ones."""

    def __init__(self, make: Callable[[PlacementRequest], ReplicaSlot]) -> None:
        """Start without slots; `make` makes one."""
        self._make = make
        self._slots: dict[SlotOwner, ReplicaSlot] = {}
        self._idle: list[ReplicaSlot] = []
        self._leaving: dict[asyncio.Task[None], ReplicaSlot] = {}

    def of(self, owner: SlotOwner) -> ReplicaSlot | None:
        """Return the slot of an owner; None if it has none."""
        return self._slots.get(owner)

    def labels_of_spares(self) -> list[Mapping[str, str]]:
        """Return the labels that each spare asked for."""
        return [slot.request.labels for owner, slot in self._slots.items() if isinstance(owner, WorkerGroup)]

    def move(self, spare: WorkerGroup, replica: int) -> ReplicaSlot:
        """Give a spare's slot to a replica, and release the replica's own."""
        self.release(replica)
        slot = self._slots[replica] = self._slots.pop(spare)
        return slot

    def reuse(self, owner: SlotOwner, labels: Mapping[str, str] | None = None) -> ReplicaSlot | None:
        """Give a free slot to an owner, and return it; None if there is none.

        Args:
            owner: The replica or spare.
            labels: What the slot must have asked for; None: any.
        """
        lost, self._idle = [b for b in self._idle if b.gone], [b for b in self._idle if not b.gone]
        for slot in lost:
            self._remove(slot)
        fit = next((b for b in self._idle if labels is None or b.request.labels == labels), None)
        if fit is not None:
            self._idle.remove(fit)
            self._slots[owner] = fit
        return fit

    async def new(self, owner: SlotOwner, asked: PlacementRequest) -> ReplicaSlot:
        """Return a new slot, which is not reserved yet. Waits first until slots that are given back are gone."""
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        names = {slot.request.name for slot in (*self._slots.values(), *self._idle)}
        number, name = 1, asked.name
        while name in names:  # a slot keeps the name of its first owner
            number += 1
            name = f"{asked.name}:{number}"
        slot = self._slots[owner] = self._make(replace(asked, name=name))
        return slot

    def release(self, owner: SlotOwner) -> None:
        """Make an owner's slot free for another; remove it if it is lost or not reserved yet."""
        slot = self._slots.pop(owner, None)
        if slot is None:
            return
        if slot.reserved and not slot.gone:
            self._idle.append(slot)
        else:
            self._remove(slot)

    def give_back(self, owner: SlotOwner) -> None:
        """Remove an owner's slot: the cluster gets its resources back."""
        slot = self._slots.pop(owner, None)
        if slot is not None:
            self._remove(slot)

    async def close(self) -> None:
        """End all actors and their ranks, and give all resources back."""
        for slot in (*self._slots.values(), *self._idle):
            self._remove(slot)
        self._slots.clear()
        self._idle.clear()
        await asyncio.gather(*self._leaving)

    def _remove(self, slot: ReplicaSlot) -> None:
        task = asyncio.create_task(slot.remove())
        self._leaving[task] = slot
        task.add_done_callback(self._leaving.pop)
