"""Slots: the places in a cluster where the ranks of one replica, or of one spare, run.

A `ReplicaSlot` is a placement group and the actors in it; it is lost as a whole. `ReplicaSlots` knows which slot
belongs to a replica, to a spare, or to neither for the moment.
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
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ft_hsdp.errors import ConfigError, FtHsdpError, Retryable
from ft_hsdp.launch.backend.base import ReplicaSpec, WorkerGroup
from ft_hsdp.launch.ray.actor import ActorPlace, Home, News, RankActor, StartOrder
from ft_hsdp.launch.ray.cluster import first_line
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.run.directory import Row

LOOK_S = 0.25  # between two looks at a placement group that waits for its place
AGAIN_S = 0.2  # before an actor that could not be reached is asked again
CLOSE_S = 5.0  # longest wait for actors to clean up
KILLED = -int(signal.SIGKILL)

T = TypeVar("T")


@dataclass(slots=True)
class Bundle:
    """One bundle: its actor, where that is, and the ranks of groups that run there, by pid.

    early: what was heard of a rank before its start was known: a code where it is gone, None where it is warm.
    """

    rank: int
    actor: Any
    seat: ActorPlace
    running: dict[int, tuple[WorkerGroup, RayProcess]] = field(default_factory=dict)
    early: dict[int, list[int | None]] = field(default_factory=dict)


class RayProcess:
    """A rank that an actor started. An actor that has not killed it after `deaf_s` is `deaf`."""

    def __init__(self, pid: int, place: Bundle, deaf_s: float, deaf: Callable[[], None]) -> None:
        self.pid = pid
        self.host = place.seat.host
        self._actor = place.actor
        self._deaf_s = deaf_s
        self._deaf = deaf

    def signal(self, number: int) -> None:
        """Have the actor signal it; an actor that does not end it when it is to be killed is ended by Ray."""
        self._actor.signal.remote(self.pid, int(number))
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(self._deaf_s, self._deaf)


class ReplicaSlot:
    """calls: where calls of Ray that may block are made; emit: takes each event; inbox: gets what ranks write.

    deaf_s: how long an actor may take to end a rank that it was told to kill; then Ray ends the actor.
    """

    def __init__(
        self,
        request: PlacementRequest,
        calls: Executor,
        inbox: LogReceiver,
        emit: Callable[[Row], None],
        deaf_s: float,
    ) -> None:
        self.request = request
        self.settled = False  # the resources are set aside
        self.gone = False  # an actor has died, or could not be started
        self.places: list[Bundle] = []
        self._calls = calls
        self._inbox = inbox
        self._emit = emit
        self._deaf_s = deaf_s
        self._patience_s = 0.0
        self._grouping: asyncio.Future[PlacementGroup] | None = None
        self._actors: list[Any] = []
        self._hearing: list[asyncio.Task[None]] = []

    async def settle(self) -> None:
        """Wait until the cluster has set the resources aside. Raises ConfigError."""
        r = self.request
        if self._grouping is None:
            labels = [r.labels] * r.size if r.labels else None
            bundles = [dict(r.bundle)] * r.size
            asking = self._call(placement_group, bundles, r.strategy, r.name, bundle_label_selector=labels)
            self._grouping = asyncio.ensure_future(asking)
        try:
            group = await asyncio.shield(
                self._grouping
            )  # the caller may be cancelled: what is made is still removed
        except (ValueError, TypeError) as error:
            raise ConfigError("ray", str(r), f"what Ray takes ({first_line(error)})") from None
        while not self.settled:
            self.settled = await self._call(_settled, group)
            if not self.settled:
                await asyncio.sleep(LOOK_S)

    async def man(self, home: Home) -> None:
        """Start the actors. Raises ConfigError for what a node refuses, Retryable."""
        assert self._grouping is not None, "settle() comes first"
        group = self._grouping.result()
        self._patience_s = home.boot_s + home.spawn_s
        try:
            seats = await self._answered(self._open(group, home))
        except FtHsdpError:
            self.gone = True
            raise
        self.places = [
            Bundle(n, actor, seat) for n, (actor, seat) in enumerate(zip(self._actors, seats, strict=True))
        ]
        self._hearing = [asyncio.create_task(self._hear(place)) for place in self.places]

    async def port(self, host: str) -> int:
        """A port that is free on the node of rank 0. Raises Retryable."""
        return int(await self._answered(self.places[0].actor.port.remote(host)))

    async def start(self, start: StartOrder, group: WorkerGroup) -> None:
        """Start a rank of a group. Raises Retryable."""
        place = self.places[start.rank]
        pid = int(await self._answered(place.actor.start.remote(start)))
        process = RayProcess(pid, place, self._deaf_s, lambda: self._deaf(place, pid))
        place.running[pid] = (group, process)
        group.started(place.rank, process)
        for code in place.early.pop(pid, []):
            self._heard(place, pid, code)
        if self.gone and pid in place.running:
            self._heard(place, pid, KILLED)

    async def call(self, group: WorkerGroup, spec: ReplicaSpec) -> None:
        """Tell the ranks of a spare whose they are. Raises Retryable."""
        told = (self.places[n].actor.call.remote(p.pid, spec, n) for n, p in group.processes.items())
        await self._answered(asyncio.gather(*told))

    async def remove(self) -> None:
        """End the actors and whatever they run, and give the resources back."""
        for task in self._hearing:
            task.cancel()
        closing = [asyncio.ensure_future(actor.close.remote()) for actor in self._actors]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for each in closing:
            if each.done():
                each.exception()  # an actor that has died is closed, too
            else:
                each.cancel()
        for actor in self._actors:
            await self._call(ray.kill, actor)
        if self._grouping is not None:
            with contextlib.suppress(ValueError, TypeError):  # Ray did not take the request
                await self._call(remove_placement_group, await self._grouping)

    async def _open(self, group: PlacementGroup, home: Home) -> list[ActorPlace]:
        for number in range(self.request.size):
            self._actors.append(await self._call(self._actor, group, number, home))
        return await asyncio.gather(*(actor.open.remote() for actor in self._actors))

    async def _answered(self, asked: Awaitable[T]) -> T:
        """What actors answer, in time. Raises what they raise, Retryable."""
        try:
            async with asyncio.timeout(self._patience_s):
                return await asked
        except TimeoutError:
            self.gone = True  # they may do it yet
            why = f"the actors of {self.request.name} do not answer within {self._patience_s:g} s"
            raise Retryable(why) from None
        except RayError as error:
            raise cause(error) from None

    def _actor(self, group: PlacementGroup, number: int, home: Home) -> Any:
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
        return ray.remote(RankActor).options(**options).remote(home)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call Ray beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._calls, lambda: function(*args, **kwargs))

    async def _hear(self, place: Bundle) -> None:
        """Take what an actor has to say until it is dead: only Ray says so."""
        arrived = 0
        while True:
            try:
                news: News = await place.actor.news.remote(arrived)
            except ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)
                continue
            except RayError as error:
                self._died(place, str(cause(error)))
                return
            if news.number <= arrived:
                continue
            arrived = news.number
            try:
                self._inbox.add(news.pieces)
            except ValueError as error:
                self._calls.submit(ray.kill, place.actor)
                self._died(place, f"what it wrote cannot be kept: {error}")
                return
            for pid in news.warm:
                self._heard(place, pid, None)
            for pid, code in news.exits:
                self._heard(place, pid, code)

    def _heard(self, place: Bundle, pid: int, code: int | None) -> None:
        """A rank is gone, or, without a code, warm."""
        if pid not in place.running:
            place.early.setdefault(pid, []).append(code)
            return
        group, process = place.running[pid]
        if code is None:
            group.warm(place.rank)
        else:
            del place.running[pid]
            group.exited(place.rank, process, code)

    def _died(self, place: Bundle, why: str) -> None:
        """An actor is dead, and with it its rank; what that wrote last is gone."""
        self.gone = True
        for pid, (group, _) in list(place.running.items()):
            if group.called is not None:
                about = {"replica": group.called.replica, "rank": place.rank, "incarnation": group.called.name}
                head = {"t": time.time(), "event": "LogCut", "source": "supervisor"}
                self._emit({**head, **about, "reason": f"on {place.seat.host}: {why}"})
            self._heard(place, pid, KILLED)

    def _deaf(self, place: Bundle, pid: int) -> None:
        """Time is up for an actor that was to kill a rank."""
        if pid in place.running:
            self._calls.submit(ray.kill, place.actor)


def _settled(group: PlacementGroup) -> bool:
    """Whether the resources of a placement group are set aside. Blocks shortly."""
    return bool(placement_group_table(group).get("state") == "CREATED")


def cause(error: RayError) -> FtHsdpError:
    """What an actor raised, or else why there is none, in one line."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, FtHsdpError):
        return error.cause
    lines = [line.strip() for line in str(error).splitlines()]
    telling = next((line for line in lines if line.startswith("The actor died because")), "")
    return Retryable(telling[:300] or first_line(error))


Holder = int | WorkerGroup
"""A replica, by its id, or a spare."""


class ReplicaSlots:
    """All slots of a job. make: a new one."""

    def __init__(self, make: Callable[[PlacementRequest], ReplicaSlot]) -> None:
        self._make = make
        self._held: dict[Holder, ReplicaSlot] = {}
        self._idle: list[ReplicaSlot] = []
        self._leaving: dict[asyncio.Task[None], ReplicaSlot] = {}

    def of(self, holder: Holder) -> ReplicaSlot | None:
        """What it has."""
        return self._held.get(holder)

    def labels_of_spares(self) -> list[Mapping[str, str]]:
        """What the spares asked for."""
        return [slot.request.labels for holder, slot in self._held.items() if isinstance(holder, WorkerGroup)]

    def move(self, spare: WorkerGroup, replica: int) -> ReplicaSlot:
        """Have a replica take the slot of a spare; its own is another's then, if it lives."""
        self.release(replica)
        slot = self._held[replica] = self._held.pop(spare)
        return slot

    def reuse(self, holder: Holder, labels: Mapping[str, str] | None = None) -> ReplicaSlot | None:
        """Return a free slot with these labels, if labels matter."""
        lost, self._idle = [b for b in self._idle if b.gone], [b for b in self._idle if not b.gone]
        for slot in lost:
            self._remove(slot)
        fit = next((b for b in self._idle if labels is None or b.request.labels == labels), None)
        if fit is not None:
            self._idle.remove(fit)
            self._held[holder] = fit
        return fit

    async def new(self, holder: Holder, asked: PlacementRequest) -> ReplicaSlot:
        """Return a slot that has still to find its place; first those being given back are gone."""
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        names = {slot.request.name for slot in (*self._held.values(), *self._idle)}
        number, name = 1, asked.name
        while name in names:  # the holder for which it was made may have moved
            number += 1
            name = f"{asked.name}:{number}"
        slot = self._held[holder] = self._make(replace(asked, name=name))
        return slot

    def release(self, holder: Holder) -> None:
        """Free the holder's slot: another takes it, or it is given back if it is lost or not found yet."""
        slot = self._held.pop(holder, None)
        if slot is None:
            return
        if slot.settled and not slot.gone:
            self._idle.append(slot)
        else:
            self._remove(slot)

    def give_back(self, holder: Holder) -> None:
        """Remove the holder's slot: no other holder is to have it."""
        slot = self._held.pop(holder, None)
        if slot is not None:
            self._remove(slot)

    async def close(self) -> None:
        """End all actors, and with them whatever they run; give all resources back."""
        for slot in (*self._held.values(), *self._idle):
            self._remove(slot)
        self._held.clear()
        self._idle.clear()
        await asyncio.gather(*self._leaving)

    def _remove(self, slot: ReplicaSlot) -> None:
        task = asyncio.create_task(slot.remove())
        self._leaving[task] = slot
        task.add_done_callback(self._leaving.pop)
