"""Slots: the places in a cluster where the ranks of one replica, or of one spare, run.

A `ReplicaSlot` is a placement group and the actors in it. If only some of its nodes are lost, it can be repaired:
Ray places their bundles on other nodes. The actors on the rest stay, with their state agents and memory. The same
is done about a node that is cordoned. Ray moves no bundle from a node that lives, so the ranks that were there get
a placement group of their own, and their bundles stay empty as long as the others of their group are in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
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
from ft_hsdp.launch.run.directory import Row, supervised

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


@dataclass(eq=False, slots=True)
class Reservation:
    """A placement group that was asked for."""

    ranks: tuple[int, ...]  # whose bundles it has, in its order
    asking: asyncio.Future[PlacementGroup]
    nodes: list[str] = field(default_factory=list)  # where they are; []: they have no places yet
    left: bool = False  # one of its bundles is not used any more, and is not waited for


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
    """A bundle of a placement group, and an actor in it, for each rank of a replica or a spare."""

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
        self._reservations: dict[int, Reservation] = {}  # by rank
        self._asked = 0  # placement groups
        self._actors: dict[int, Any] = {}  # by rank
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def gone(self) -> bool:
        """Return whether it cannot be used as it is: an actor died or could not be started, or is to be left."""
        return self.failed or bool(self._lost)

    def node_of(self, host: str) -> str | None:
        """Return Ray's id of the node that is a host; None if no rank is there."""
        return next((b.location.node for b in self.bundles if b.location.host == host), None)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the name of each rank's host, once it has its actors."""
        return tuple(bundle.location.host for bundle in self.bundles)

    @property
    def lost_nodes(self) -> dict[str, str]:
        """Return the nodes on which actors died, each with the name of the host."""
        return {b.location.node: b.location.host for b in self.bundles if b.dead}

    @property
    def _lost(self) -> list[Bundle]:
        """Return the bundles that are not used again: their actor died, or their node is to be avoided."""
        return [b for b in self.bundles if b.dead or b.location.node in self.request.avoid]

    @property
    def complete(self) -> bool:
        return len(self.bundles) == self.request.size

    @property
    def repairable(self) -> bool:
        """Return whether it has to leave some of its nodes, but not all."""
        lost = {bundle.location.node for bundle in self._lost}
        return bool(lost) and not self.failed and any(b.location.node not in lost for b in self.bundles)

    @property
    def missing(self) -> list[int]:
        """Return the ranks without an actor, if others have one."""
        there = {bundle.rank for bundle in self.bundles}
        return [rank for rank in range(self.request.size) if rank not in there] if there else []

    def avoid(self, node: str) -> None:
        """Use a node no more: ranks that run there stay until they end."""
        if node not in self.request.avoid:
            self.request = replace(self.request, avoid=(*self.request.avoid, node))

    def repair(self) -> None:
        """Keep what is not lost. `reserve` then waits for other places, and `start_actors` starts actors there."""
        lost = self._lost
        self.before |= {bundle.rank: bundle.location for bundle in lost}
        self.bundles = [bundle for bundle in self.bundles if bundle not in lost]
        self.reserved = False
        for bundle in lost:
            if bundle.location.node in self.request.avoid or self._reservations[bundle.rank].left:
                self._leave(bundle.rank)

    async def reserve(self) -> None:
        """Wait without an end until the cluster has set the resources aside; a caller may cancel, and call again.

        Raises:
            ConfigError: Ray refuses the request.
        """
        while not self.reserved:
            wanted = self.missing or list(range(self.request.size))
            if unplaced := [rank for rank in wanted if rank not in self._reservations]:
                self._ask(unplaced)
            self.reserved = await self._placed(wanted)
            if not self.reserved:
                await asyncio.sleep(POLL_S)

    def _ask(self, ranks: Sequence[int]) -> None:
        r, self._asked = self.request, self._asked + 1
        name = r.name if self._asked == 1 else f"{r.name}+{self._asked - 1}"
        others = {node for each in self._reservations.values() for node in each.nodes}
        avoid = {*r.avoid, *others} if r.strategy == "STRICT_SPREAD" else r.avoid
        selector = replace(r, avoid=tuple(sorted(avoid))).selector
        labels = [selector] * len(ranks) if selector else None
        bundles = [dict(r.bundle)] * len(ranks)
        asking = self._call(placement_group, bundles, r.strategy, name, bundle_label_selector=labels)
        made = Reservation(tuple(ranks), asyncio.ensure_future(asking))
        self._reservations |= dict.fromkeys(ranks, made)

    async def _placed(self, wanted: Sequence[int]) -> bool:
        """Return whether ranks have places; those on nodes to be avoided are given up.

        Raises:
            ConfigError: Ray refuses the request.
        """
        placed = True
        for reservation in {self._reservations[rank] for rank in wanted}:
            try:
                # If the caller is cancelled, `remove` still needs the group.
                group = await asyncio.shield(reservation.asking)
            except (ValueError, TypeError) as error:
                raise ConfigError("ray", str(self.request), f"what Ray takes ({first_line(error)})") from None
            reservation.nodes = await self._call(_nodes_of, group)
            placed = placed and bool(reservation.nodes)
            for rank, node in zip(reservation.ranks, reservation.nodes, strict=False):
                if rank in wanted and node in self.request.avoid:
                    self._leave(rank)
                    placed = False
        return placed

    def _leave(self, rank: int) -> None:
        """Give up the bundle of a rank, and its actor; the placement group, when it has no other rank."""
        reservation = self._reservations.pop(rank)
        reservation.left = True
        unused = reservation if reservation not in self._reservations.values() else None
        poll = self._polls.pop(rank, None)
        if poll is not None:
            poll.cancel()
        task = asyncio.create_task(self._retire(self._actors.pop(rank, None), unused))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, actor: Any, unused: Reservation | None) -> None:
        """End an actor, and give a placement group back."""
        if actor is not None:
            await self._close([actor])
        if unused is not None:
            with contextlib.suppress(ValueError, TypeError):  # Ray did not take the request
                await self._call(remove_placement_group, await unused.asking)

    async def start_actors(self, setup: ActorSetup) -> None:
        """Start the actors of bundles that have none, after `reserve`.

        Raises:
            ConfigError: A node refuses the configuration.
            Retryable: An actor does not start or does not answer.
        """
        self._patience_s = setup.boot_s + setup.spawn_s
        ranks = self.missing or list(range(self.request.size))
        try:
            locations = await self._answered(self._open(setup, ranks))
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
        at = self.hosts
        told = (self.bundles[n].actor.call.remote(p.pid, spec, n, at) for n, p in group.processes.items())
        await self._answered(asyncio.gather(*told))

    async def remove(self) -> None:
        """End the actors and their ranks, and give the resources back."""
        for task in self._polls.values():
            task.cancel()
        await self._close(list(self._actors.values()))
        for reservation in {*self._reservations.values()}:
            await self._retire(None, reservation)
        await asyncio.gather(*self._retiring)

    async def _close(self, actors: Sequence[Any]) -> None:
        closing = [asyncio.ensure_future(actor.close.remote()) for actor in actors]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for each in closing:
            if each.done():
                each.exception()  # read it, so that asyncio does not log it: a dead actor is closed as well
            else:
                each.cancel()
        for actor in actors:
            await self._call(ray.kill, actor)

    async def _open(self, setup: ActorSetup, ranks: list[int]) -> list[ActorLocation]:
        for number in ranks:
            reservation = self._reservations[number]
            at = reservation.ranks.index(number)
            self._actors[number] = await self._call(self._actor, reservation.asking.result(), at, setup)
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
                self._emit(supervised("LogCut", f"on {bundle.location.host}: {why}", **about))
            self._rank_changed(bundle, pid, KILLED)

    def _not_killed(self, bundle: Bundle, pid: int) -> None:
        """End an actor whose rank still runs `kill_s` after SIGKILL."""
        if pid in bundle.running:
            self._calls.submit(ray.kill, bundle.actor)


def _nodes_of(group: PlacementGroup) -> list[str]:
    """Return the nodes of a placement group's bundles; [] unless all have places and live. Blocks shortly."""
    known = placement_group_table(group)
    if known.get("state") != "CREATED":
        return []
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    nodes = [node for _, node in sorted(known["bundles_to_node_id"].items())]
    return nodes if living.issuperset(nodes) else []


def cause(error: RayError) -> FtHsdpError:
    """Return what an actor raised, or a Retryable that says in one line why there is no answer."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, FtHsdpError):
        return error.cause
    lines = [line.strip() for line in str(error).splitlines()]
    telling = next((line for line in lines if line.startswith("The actor died because")), "")
    return Retryable(telling[:300] or first_line(error))
