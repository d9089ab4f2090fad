"""The backend of a Ray cluster: it starts the ranks of a replica, or of a spare, in the slot given to them.

A replica keeps its slot until it takes over that of a spare, whose ranks are warm, or until all its nodes are
lost or cordoned. If only some of them are, and there is no such spare, its slot is repaired: ranks on the other
nodes start again there, where their memory is. Exits are heard of at different times, so a replica that seems to
train may be lost as well. So what is left of a slot is kept until the replica has committed a step in its new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ray
import ray.util

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ProcessWatch, ReplicaSpec, WorkerGroup
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.backend.spares import SparePool
from ft_hsdp.launch.ray import placement
from ft_hsdp.launch.ray.actor import ActorSetup
from ft_hsdp.launch.ray.cluster import free_nodes
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import fits
from ft_hsdp.launch.ray.slot import ReplicaSlot
from ft_hsdp.launch.ray.slots import ReplicaSlots
from ft_hsdp.launch.ray.start_orders import start_orders
from ft_hsdp.launch.run.directory import Row, RunDir, supervised

ELSEWHERE_S = 10.0  # how long a spare waits for a slot in one zone before it asks for one in the next


class RayBackend:
    """Runs the ranks of a job in slots of a Ray cluster. All methods belong to the supervisor's event loop."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        urls: Callable[[], tuple[str, ...]],
        cwd: str,
        emit: Callable[[Row], None],
        *,
        entry: str = ENTRY,
        preload: tuple[str, ...] = PRELOAD,
    ) -> None:
        """Make a backend without slots.

        Args:
            config: Of the job.
            run: The run directory on this node.
            urls: Returns the lighthouse's URLs.
            cwd: As in `ActorSetup`.
            emit: Takes each event.
            entry: What runs in a rank, as in `ForkServer`.
            preload: As in `ForkServer`.
        """
        self._config = config
        self._run = run
        self._urls = urls
        self._emit = emit
        waits = config.timeouts
        self._setup = ActorSetup(config.job.name, config.ray, cwd, entry, preload, waits.boot_s, waits.spawn_s)
        self._calls = ThreadPoolExecutor(1, "ray-calls")
        self._receiver = LogReceiver(run.path, lambda lost: emit({**lost.event, "source": "supervisor"}))
        self._slots = ReplicaSlots(self._new_slot)
        spares, quiet_s = config.spares // config.ranks_per_replica, config.timeouts.hold_s
        self._pool = SparePool(spares, run.spares, self._make, emit, quiet_s, self._dropped)
        self._making: dict[WorkerGroup, asyncio.Task[None]] = {}  # spare -> the task that starts it
        self._promised: dict[int, WorkerGroup] = {}  # replica -> the spare that its next start takes over
        self._groups: dict[int, WorkerGroup] = {}  # replica -> its newest incarnation
        self._training: dict[int, WorkerGroup] = {}  # replica -> the incarnation that has trained, or has ended
        self._cordoned: dict[str, str] = {}  # Ray's id of a node that gets no ranks any more, and its host
        # Replica -> the labels that it asks for, once it has waited for a slot longer than timeouts.place_s.
        self._seeking: dict[int, Mapping[str, str]] = {}

    @property
    def warm(self) -> bool:
        return self._pool.ready

    async def open(self) -> None:
        """Do nothing: actors are made with the first start."""

    async def place(self, replica: int) -> None:
        """Wait until a replica has a slot: its own, that of a spare, or else a new one.

        While it waits, up to timeouts.place_s, the pool makes no spares. After that only spares with other labels
        are made: they compete for other resources. A slot that waits for other nodes instead of lost ones is given
        back then, if another replica trains.
        """
        try:
            with self._pool.held(f"the place of {replica}"):
                slot = await self._choose(replica)
                if await self._reserved(slot):
                    return
                slot = await self._choose_again(replica, slot)
                self._seeking[replica] = slot.request.labels
            while not await self._reserved(slot):  # others begin to train meanwhile, or more nodes are lost
                if slot.missing and not slot.gone and not self._others_train(replica):
                    self._give_back_spares(slot.request)  # nobody trains before this replica has its nodes
                slot = await self._choose_again(replica, slot)
        except asyncio.CancelledError:
            own = self._slots.of(replica)
            if own is not None and not own.reserved:
                self._withdraw(replica)
            raise
        finally:
            self._seeking.pop(replica, None)
            self._pool.wake()

    async def _reserved(self, slot: ReplicaSlot) -> bool:
        """Wait for a slot's resources, up to timeouts.place_s; return whether it has them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.timeouts.place_s):
                await slot.reserve()
                return True
        return False

    async def _choose_again(self, replica: int, slot: ReplicaSlot) -> ReplicaSlot:
        """Return the slot of a replica that has waited for the rest of ``slot`` in vain."""
        if slot.missing and self._others_train(replica):
            self._withdraw(replica)  # others have the state, and may need the nodes that it keeps
        elif not slot.gone:
            return slot
        return await self._choose(replica)

    def _give_back_spares(self, asked: placement.PlacementRequest) -> None:
        """Give the cluster what spares with these labels keep, and what nobody has."""
        while (group := self._pool.take(lambda group: self._fits(group, asked))) is not None:
            self._making.pop(group).cancel()
            self._slots.give_back(group)
        self._slots.give_free_ones_back()

    def shrink(self, replica: int, least: int) -> int:
        """Return 0: on a cluster a replica waits for nodes."""
        return 0

    def lend(self, replica: int) -> None:
        """Do nothing: a replica keeps its nodes while it waits for others."""

    def could_grow(self, replica: int) -> bool:
        """Return False: no replica has fewer ranks than all."""
        return False

    def vacancy(self, replica: int) -> str:
        """Return in one line what a replica without a slot asks for, and what the cluster has free."""
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        asked, slot = placement.request(self._config, replica), self._slots.of(replica)
        if slot is not None and slot.missing:
            asked = replace(asked, size=len(slot.missing))
        cordoned = ", ".join(sorted(self._cordoned.values()))
        return placement.vacancy(asked, ray.available_resources(), nodes) + (
            f"; cordoned: {cordoned}" if cordoned else ""
        )

    def lost_hosts(self, replica: int) -> tuple[str, ...]:
        """Return the hosts of a replica whose nodes are gone; one on which only an actor died is not."""
        slot = self._slots.of(replica)
        lost = {} if slot is None else slot.lost_nodes
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if lost else set()
        return tuple(sorted({host for node, host in lost.items() if node not in living}))

    def cordon(self, replica: int, host: str, reason: str, waits: bool) -> bool:
        """Start no rank on a node any more. The next `place` of each replica there moves its ranks.

        Nothing is done if the cluster has no room elsewhere now, unless the replica waits for it.
        """
        slot = self._slots.of(replica)
        node = None if slot is None else slot.node_of(host)
        if slot is None or node is None:
            return False
        if node in self._cordoned:
            return True
        if not waits and not self._room_beside(slot, node, replica):
            return False
        self._cordoned[node] = host
        self._emit(supervised("HostCordoned", reason, replica=replica, host=host))
        for spare in self._slots.avoid(node):
            for process in spare.processes.values():
                process.signal(signal.SIGKILL)
        return True

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        """Start all ranks of an incarnation, or give it the ranks of the spare whose slot its replica took.

        Returns:
            COLD, WARM, WARMING, or the hosts if this is the first start in its slot.

        Raises:
            Retryable: A rank cannot be started; others may run then.
            ConfigError: A node refuses the configuration, and no replica trains with it.
        """
        self._pool.began(spec)
        slot = self._slots.of(spec.replica)
        assert slot is not None, "place() comes first"
        group = self._promised.pop(spec.replica, None)
        self._training.pop(spec.replica, None)
        if group is None:
            group = self._groups[spec.replica] = WorkerGroup(spec.size, spec.config, spec)
            group.given(watch)
            had_actors = slot.complete
            try:
                await self._start(group, slot)
            except ConfigError as error:
                if not self._training:
                    raise
                slot.failed = True  # others train with this configuration, so the fault is a node of this slot
                raise Retryable(str(error)) from None
            self._report_replaced(spec.replica, slot)
            hosts = ", ".join(sorted({bundle.location.host for bundle in slot.bundles}))
            return COLD if had_actors else f"on {hosts}"
        how = WARM if group.ready else WARMING
        self._groups[spec.replica] = group
        group.given(watch)
        making = self._making[group]
        await asyncio.wait([making])
        del self._making[group]
        making.result()
        group.spec = spec
        try:
            await slot.call(group, spec)
        except Retryable:
            slot.failed = True
            raise
        return how

    def vacated(self, replica: int) -> None:
        """Remove a replica's slot: the cluster gets its resources back."""
        self._unpromise(replica)
        self._training.pop(replica, None)
        self._slots.let_go(replica)
        self._slots.give_back(replica)

    def settled(self, spec: ReplicaSpec) -> None:
        """Let the pool make spares again: this incarnation trains, has ended, or has had its time to start."""
        self._pool.settled(spec)

    def committed(self, spec: ReplicaSpec) -> None:
        """Note that an incarnation has the state: the agents in a slot that is kept for its replica may end."""
        group = self._groups.get(spec.replica)
        if group is not None and group.spec == spec:
            self._training[spec.replica] = group
            if group.complete:
                self._slots.let_go(spec.replica)

    async def close(self) -> None:
        """End all actors and their ranks, and give all resources back."""
        await self._pool.close()
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        await self._slots.close()
        self._calls.shutdown()

    def _new_slot(self, asked: placement.PlacementRequest) -> ReplicaSlot:
        return ReplicaSlot(asked, self._calls, self._receiver, self._emit, self._config.timeouts.gone_s / 3)

    async def _choose(self, replica: int) -> ReplicaSlot:
        """Return the slot of a replica from now on.

        A replica without a slot takes that of a spare, ready or not: a spare must not keep what a replica waits
        for. A replica with a slot moves to that of a ready spare only if another replica trains. Else the state
        agents on its own hosts may have the only copies of the newest state. If it loses the slot to which it
        moved before it has committed a step, it has what is left of the one before.
        """
        own = self._slots.of(replica)
        if own is not None and own.gone and (replica in self._promised or not own.repairable):
            self._withdraw(replica)
            own = self._slots.take_back(replica)
        asked = placement.request(self._config, replica)
        if own is None or (self._others_train(replica) and replica not in self._promised):
            group = self._pool.take(lambda group: (own is None or group.ready) and self._fits(group, asked))
            if group is not None:
                self._promised[replica] = group
                return self._slots.move(group, replica)
        if own is not None and own.gone:
            own.repair()
        return own or self._slots.reuse(replica, asked.labels) or await self._slots.new(replica, asked)

    def _room_beside(self, slot: ReplicaSlot, node: str, replica: int) -> bool:
        """Return whether what a slot has on a node would find room elsewhere now."""
        asked = replace(slot.request, avoid=(*slot.request.avoid, node))
        for spare, other in self._slots.of_spares():
            on_it = node in {bundle.location.node for bundle in other.bundles}
            if spare.ready and not on_it and self._fits(spare, asked) and self._others_train(replica):
                return True
        nodes = [bundle.location.node for bundle in slot.bundles]
        rest = {*nodes} - {node}
        return fits(replace(asked, size=nodes.count(node) if rest else asked.size), free_nodes(), rest)

    def _others_train(self, replica: int) -> bool:
        return any(n != replica and group.complete for n, group in self._training.items())

    def _report_replaced(self, replica: int, slot: ReplicaSlot) -> None:
        """Report each host of a replica that another one has replaced since its last start."""
        moved: dict[tuple[str, str], list[int]] = {}
        for rank, location in slot.before.items():
            moved.setdefault((location.host, slot.bundles[rank].location.host), []).append(rank)
        slot.before.clear()
        for (before, host), ranks in moved.items():
            if host == before:
                continue
            why = "cordoned" if before in self._cordoned.values() else "lost"
            reason = f"{before} is {why}; Ray gave its ranks {', '.join(map(str, ranks))} another node"
            self._emit(supervised("HostReplaced", reason, replica=replica, host=host, before=before, ranks=ranks))

    def _fits(self, group: WorkerGroup, asked: placement.PlacementRequest) -> bool:
        slot = self._slots.of(group)
        return slot is not None and not slot.gone and slot.request.labels == asked.labels

    def _withdraw(self, replica: int) -> None:
        """Release a replica's slot, or stop waiting for one."""
        self._unpromise(replica)
        self._slots.release(replica)

    def _unpromise(self, replica: int) -> None:
        group = self._promised.pop(replica, None)
        if group is not None:
            self._making.pop(group).cancel()

    async def _make(self, group: WorkerGroup) -> None:
        """Start a spare, as soon as there is a slot for it.

        Raises:
            Retryable: A rank cannot be started, or a replica gave the slot up; some ranks may run then.
        """
        making = self._making[group] = asyncio.create_task(self._prepare(group))
        await asyncio.wait([making])
        if making.cancelled():
            raise Retryable("its slot was given up")
        making.result()

    async def _prepare(self, group: WorkerGroup) -> None:
        try:
            slot = self._slots.reuse(group) or await self._find_slot(group)
            group.began = time.monotonic()
            await self._start(group, slot)
            if slot.gone:
                raise Retryable(f"a node of {slot.request.name} was lost or cordoned during the start")
        except ConfigError as error:  # the fault is one node's: replicas were started with the same configuration
            raise Retryable(str(error)) from None

    async def _find_slot(self, group: WorkerGroup) -> ReplicaSlot:
        """Wait without an end for a new slot for a spare: `ELSEWHERE_S` in one zone, then in the next.

        Zones in which a replica waits for a slot are left out.
        """
        requests = placement.spare_requests(
            self._config, [slot.request.labels for _, slot in self._slots.of_spares()]
        )
        others = itertools.cycle(requests)
        while True:
            await self._pool.wait_for(lambda: any(map(self._not_sought, requests)))
            asked = next(filter(self._not_sought, others))
            slot = await self._slots.new(group, asked)
            await self._pool.wait_for(lambda b=slot: self._pool.quiet or self._slots.of(group) is not b)  # type: ignore[misc]
            if self._not_sought(asked):  # a replica may have come to wait for the same nodes
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ELSEWHERE_S if len(requests) > 1 else None):
                        await slot.reserve()
                        return slot
            if self._slots.of(group) is not slot:  # a replica took the slot while it was not reserved yet
                break
            self._slots.release(group)
        await slot.reserve()
        return slot

    def _not_sought(self, asked: placement.PlacementRequest) -> bool:
        return asked.labels not in self._seeking.values()

    def _dropped(self, group: WorkerGroup) -> None:
        """Release the slot of a lost spare: the next owner takes it, unless it would share it with dying ranks."""
        del self._making[group]
        if len(group.gone) == len(group.processes):
            self._slots.release(group)
        else:
            self._slots.give_back(group)

    async def _start(self, group: WorkerGroup, slot: ReplicaSlot) -> None:
        """Start all ranks of a group in a slot, and the slot's actors first if it has none.

        Raises:
            ConfigError: A node refuses the configuration.
            Retryable: A rank cannot be started; others may run then.
        """
        if slot.gone:
            raise Retryable(f"a node of {slot.request.name} was lost before the start")
        if not slot.complete:
            await slot.start_actors(self._setup)
        try:
            each = await start_orders(slot, group, self._run, self._urls(), self._setup)
        except ConfigError as refused:  # read on this machine: no node is at fault
            if self._training:
                raise Retryable(str(refused)) from None
            raise
        started = await asyncio.gather(*(slot.start(start, group) for start in each), return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                slot.failed = slot.failed or not slot.gone  # a node that was lost is replaced
                raise error
