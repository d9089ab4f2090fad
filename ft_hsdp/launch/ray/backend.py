"""The backend of a Ray cluster: it starts the ranks of a replica, or of a spare, in the slot given to them.

A replica keeps its slot until one of its actors or nodes dies, or until it takes over the slot of a spare, whose
ranks are warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import ray
import ray.util

from ft_hsdp import secret
from ft_hsdp.config import Config, dump, load
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ProcessWatch, ReplicaSpec, WorkerGroup
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.backend.processes import ONE_THREAD
from ft_hsdp.launch.backend.spares import SparePool
from ft_hsdp.launch.ray import placement
from ft_hsdp.launch.ray.actor import Home, StartOrder
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import local_ranks
from ft_hsdp.launch.ray.slot import Bundle, ReplicaSlot, ReplicaSlots
from ft_hsdp.launch.run.directory import Row, RunDir


async def starts(
    slot: ReplicaSlot, group: WorkerGroup, run: RunDir, urls: tuple[str, ...], home: Home
) -> list[StartOrder]:
    """A start for each rank. urls: where the lighthouse listens. Raises Retryable."""
    places, here = slot.places, ray.util.get_node_ip_address()
    alone = loopback(urlsplit(urls[0]).hostname or "")
    far = next((place.seat.address for place in places if place.seat.address != here), None)
    if alone and far is not None:
        raise Retryable(f"{far} cannot reach {urls[0]}; give network.host an address that the cluster reaches")
    first = "127.0.0.1" if alone else places[0].seat.address
    port = await slot.port(first)
    token, key = secret.current(run.token), secret.current(run.checkpoint_key)
    locals_ = local_ranks([place.seat.node for place in places])
    config = load(group.config)
    found = []
    for place, (local, local_size) in zip(places, locals_, strict=True):
        env = {
            **ONE_THREAD,
            "RANK": str(place.rank),
            "WORLD_SIZE": str(group.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": first,
            "MASTER_PORT": str(port),
            **_devices(place, places),
        }
        text = dump(_abroad(config, "127.0.0.1" if alone else place.seat.address, home))
        found.append(
            StartOrder(place.rank, group.called, group.number, env, text, token, key, urls, str(run.path))
        )
    return found


def _abroad(config: Config, address: str, home: Home) -> Config:
    """The configuration of a rank on a node: the node's own address, and its folder for prepared data."""
    changes = {
        "job": config.job.model_copy(update={"runs_dir": home.folder}),
        "network": config.network.model_copy(update={"host": address}),
    }
    return config.model_copy(update=changes)


def _devices(place: Bundle, places: Sequence[Bundle]) -> dict[str, str]:
    """The GPUs of all ranks on one node, in the order of their local ranks: each takes the one with its number."""
    gpus = [gpu for other in places if other.seat.node == place.seat.node for gpu in other.seat.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def loopback(host: str) -> bool:
    """Whether only processes of one machine reach an address; a name counts as what it usually means."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ELSEWHERE_S = 10.0  # how long a spare looks for a place in one zone before it does in the next


class RayBackend:
    """The backend of a cluster. urls: where the lighthouse listens; cwd: see `Home`; emit: takes each event."""

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
        self._config = config
        self._run = run
        self._urls = urls
        self._emit = emit
        waits = config.timeouts
        self._home = Home(config.job.name, config.ray.folder, cwd, entry, preload, waits.boot_s, waits.spawn_s)
        self._calls = ThreadPoolExecutor(1, "ray-calls")
        self._inbox = LogReceiver(run.path, lambda lost: emit({**lost.event, "source": "supervisor"}))
        self._slots = ReplicaSlots(self._berth)
        spares, quiet_s = config.spares // config.ranks_per_replica, config.restart.hold_s
        self._pool = SparePool(spares, run.spares, self._make, emit, quiet_s, self._dropped)
        self._making: dict[WorkerGroup, asyncio.Task[None]] = {}  # what has been begun for each spare
        self._promised: dict[int, WorkerGroup] = {}  # replica -> the spare that is called with its next start
        self._groups: dict[int, WorkerGroup] = {}  # the specs of replicas
        self._training: dict[int, WorkerGroup] = {}  # those that have trained, or have ended
        self._seeking: dict[
            int, Mapping[str, str]
        ] = {}  # labels of replicas that have looked for a place for long

    @property
    def warm(self) -> bool:
        """Whether a spare is ready."""
        return self._pool.ready

    async def open(self) -> None:
        """Do nothing: nothing is made before the first start."""

    async def place(self, replica: int) -> None:
        """Find a place for a replica: its own, a spare's, or a new one where it has none."""
        try:
            with self._pool.held(f"the place of {replica}"):
                slot = await self._choose(replica)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.timeouts.place_s):
                        await slot.settle()
                        return
                self._seeking[replica] = slot.request.labels
            await slot.settle()  # spares that ask for other places need not wait for it
        except asyncio.CancelledError:
            own = self._slots.of(replica)
            if own is not None and not own.settled:
                self._withdraw(replica)
            raise
        finally:
            self._seeking.pop(replica, None)
            self._pool.wake()

    def vacancy(self, replica: int) -> str:
        """What a replica without a place asks for, and what is free."""
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        return placement.vacancy(placement.request(self._config, replica), ray.available_resources(), nodes)

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        """Assign the spare whose slot the replica took, or start all ranks. Raises Retryable; some may run."""
        self._pool.began(spec)
        slot = self._slots.of(spec.replica)
        assert slot is not None, "place() comes first"
        group = self._promised.pop(spec.replica, None)
        self._training.pop(spec.replica, None)
        if group is None:
            group = self._groups[spec.replica] = WorkerGroup(spec.size, spec.config, spec)
            group.given(watch)
            manned = bool(slot.places)
            try:
                await self._start(group, slot)
            except ConfigError as error:
                if not self._training:
                    raise
                slot.gone = True  # what others train with is refused by a node of this one
                raise Retryable(str(error)) from None
            hosts = ", ".join(sorted({place.seat.host for place in slot.places}))
            return COLD if manned else f"on {hosts}"
        how = WARM if group.ready else WARMING
        self._groups[spec.replica] = group
        group.given(watch)
        making = self._making[group]
        await asyncio.wait([making])
        del self._making[group]
        making.result()
        group.called = spec
        try:
            await slot.call(group, spec)
        except Retryable:
            slot.gone = True
            raise
        return how

    def vacated(self, replica: int) -> None:
        """Give its resources back: to the cluster, a spare, or a replica that has none."""
        self._unpromise(replica)
        self._training.pop(replica, None)
        self._slots.give_back(replica)

    def settled(self, spec: ReplicaSpec) -> None:
        """Let the pool make spares again: this incarnation trains, or has ended."""
        group = self._groups.get(spec.replica)
        if group is not None and group.called == spec:
            self._training[spec.replica] = group
        self._pool.settled(spec)

    async def close(self) -> None:
        """End all actors, and with them whatever they run; give all resources back."""
        await self._pool.close()
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        await self._slots.close()
        self._calls.shutdown()

    def _berth(self, asked: placement.PlacementRequest) -> ReplicaSlot:
        return ReplicaSlot(asked, self._calls, self._inbox, self._emit, self._config.timeouts.gone_s / 3)

    async def _choose(self, replica: int) -> ReplicaSlot:
        """Return the slot of a replica from now on.

        Without one it takes a spare's, ready or not: no spare may have the place that a replica looks for. From a
        slot that lives it moves into a spare that is ready, where another replica trains: else the agents of its
        own hosts may have the only copies of the newest state.
        """
        own = self._slots.of(replica)
        if own is not None and own.gone:
            self._withdraw(replica)
            own = None
        asked = placement.request(self._config, replica)
        others_train = any(n != replica and group.complete for n, group in self._training.items())
        if own is None or (others_train and replica not in self._promised):
            group = self._pool.take(lambda group: (own is None or group.ready) and self._fits(group, asked))
            if group is not None:
                self._promised[replica] = group
                return self._slots.move(group, replica)
        return own or self._slots.reuse(replica, asked.labels) or await self._slots.new(replica, asked)

    def _fits(self, group: WorkerGroup, asked: placement.PlacementRequest) -> bool:
        slot = self._slots.of(group)
        return slot is not None and not slot.gone and slot.request.labels == asked.labels

    def _withdraw(self, replica: int) -> None:
        """Give up a replica's slot, or the search for one."""
        self._unpromise(replica)
        self._slots.release(replica)

    def _unpromise(self, replica: int) -> None:
        group = self._promised.pop(replica, None)
        if group is not None:
            self._making.pop(group).cancel()

    async def _make(self, group: WorkerGroup) -> None:
        """Make a spare, wherever there is room for it. Raises Retryable; some ranks may run then."""
        making = self._making[group] = asyncio.create_task(self._prepare(group))
        await asyncio.wait([making])
        if making.cancelled():
            raise Retryable("its place was given up")
        making.result()

    async def _prepare(self, group: WorkerGroup) -> None:
        try:
            slot = self._slots.reuse(group) or await self._look_around(group)
            group.began = time.monotonic()
            await self._start(group, slot)
        except ConfigError as error:  # of one node: replicas were started with the same configuration
            raise Retryable(str(error)) from None

    async def _look_around(self, group: WorkerGroup) -> ReplicaSlot:
        """Find a new slot for a spare, however long that takes: in one zone for a while, then in the next.

        Not where a replica looks for a place.
        """
        requests = placement.spare_requests(self._config, self._slots.labels_of_spares())
        others = itertools.cycle(requests)
        while True:
            await self._pool.wait_for(lambda: any(map(self._unsought, requests)))
            asked = next(filter(self._unsought, others))
            slot = await self._slots.new(group, asked)
            await self._pool.wait_for(lambda b=slot: self._pool.quiet or self._slots.of(group) is not b)  # type: ignore[misc]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ELSEWHERE_S if len(requests) > 1 else None):
                    await slot.settle()
                    return slot
            if self._slots.of(group) is not slot:  # a replica has it now
                break
            self._slots.release(group)
        await slot.settle()
        return slot

    def _unsought(self, asked: placement.PlacementRequest) -> bool:
        return asked.labels not in self._seeking.values()

    def _dropped(self, group: WorkerGroup) -> None:
        """Free the slot of a lost spare; the next one takes it, if it lives."""
        del self._making[group]
        self._slots.release(group)

    async def _start(self, group: WorkerGroup, slot: ReplicaSlot) -> None:
        """Start all ranks of a group in a slot. Raises ConfigError, Retryable; some may run then."""
        if not slot.places:
            await slot.man(self._home)
        each = await starts(slot, group, self._run, self._urls(), self._home)
        started = await asyncio.gather(*(slot.start(start, group) for start in each), return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                slot.gone = True
                raise error
