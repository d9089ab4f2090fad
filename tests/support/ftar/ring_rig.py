"""A ring in one process on any transport: engines in threads on real edges, or actors in virtual time."""

import asyncio
import contextlib
import gc
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from ft_hsdp.core.ring import RingPlan, operations
from ft_hsdp.errors import PeerDead
from ft_hsdp.ftar.allreduce import DTYPES, AllReduceOrder, AllReduceResult, Ring
from ft_hsdp.ftar.connections import Listener, MemberIdentity
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.dataplane.cpu import CpuJob, CpuPlane
from ft_hsdp.ftar.frame import Framing, Key
from ft_hsdp.ftar.pieces import Values
from ft_hsdp.ftar.rendezvous import KINDS
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport import shm
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.kind import Edge
from tests.support.descriptors import warm_libuv
from tests.support.ftar.ring_values import KEY, entry
from tests.support.ftar.sim_ring import Nature, World

TOKEN = "ab" * 32
DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Flavour:
    """A transport by its name in `choose.GOAL_KINDS`, or "sim".

    ``registered``: tensors are in segments that a neighbour can map. ``readable``: the kernel lets a neighbour
    read our memory. ``receivers``: connections have threads of their own.
    """

    name: str
    transport: str
    registered: bool = False
    readable: bool = True
    connections: int = 1
    receivers: bool = True


FLAVOURS = (
    Flavour("tcp", "tcp"),
    Flavour("tcp-3", "tcp", connections=3),
    Flavour("tcp-inline", "tcp", receivers=False),
    Flavour("shm-registered", "shm", registered=True),
    Flavour("shm-remote", "shm"),
    Flavour("shm-inline", "shm", readable=False),
    Flavour("c10d", "c10d"),
    Flavour("sim", "sim"),
    Flavour("sim-references", "sim", registered=True),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a rig's messages go: chunks of ``chunk`` bytes, ``slots`` of them, silence of ``timeout_s``."""

    chunk: int = 64
    slots: int = 4
    timeout_s: float = 30.0

    def plan(self, members: int, elements: int, itemsize: int) -> RingPlan:
        return RingPlan(elements, members, self.chunk // itemsize, self.slots)


class Rig(Protocol):
    names: Sequence[int]
    senders: Sequence[Any]
    receivers: Sequence[Any]

    def plan(self, elements: int, itemsize: int) -> RingPlan: ...

    def tensor(self, position: int, values: Tensor) -> Tensor:
        """A copy of ``values`` in memory of that member, of the flavour's kind."""
        ...

    def submit(self, position: int, order: AllReduceOrder) -> Future[AllReduceResult]: ...

    def wait(self, works: Sequence[Future[AllReduceResult]]) -> None: ...

    def hang_up(self, position: int) -> None:
        """A member closes both its edges."""
        ...

    def dies(self, position: int, chunks: int) -> None:
        """A member closes both its edges when it has that many chunks."""
        ...


class DyingPlane(CpuPlane):
    """Ends its ring when it is given its last chunk."""

    ring: Ring | None = None
    left = -1

    def open(
        self, local: Values | None, out: Values, plan: RingPlan, after: object = None, wire: Any = None
    ) -> CpuJob:
        job = super().open(local, out, plan, after, wire)
        post = job.post

        def counted(*args: Any) -> None:
            self.left -= 1
            if self.left == 0 and self.ring is not None:
                self.ring.fail(PeerDead("dies here"))
            post(*args)

        job.post = counted  # type: ignore[method-assign]
        return job


class Engines:
    """Each member's engine runs on a thread of its own."""

    def __init__(
        self, flavour: Flavour, names: Sequence[int], shape: Shape, make: Sequence[Callable[[Arena], Plane]] = ()
    ) -> None:
        """``make`` makes the plane of each member; () for planes that can die."""
        self.names = names
        self._shape = shape
        self._registered = flavour.registered
        self._arenas = [Arena() for _ in names]
        self._pools = [ThreadPoolExecutor(1, f"member-{name}") for name in names]
        settings = Settings(
            transport=flavour.transport,  # type: ignore[arg-type]
            chunk_bytes=shape.chunk,
            chunks=shape.slots,
            connections=flavour.connections,
            receivers=flavour.receivers,
            timeout_s=shape.timeout_s,
        )
        permission = contextlib.nullcontext()
        if not flavour.readable:
            permission = mock.patch.object(shm, "read_remote", side_effect=PermissionError)  # type: ignore[assignment]
        with permission:
            ends: Any = [(None, None)]
            if len(names) > 1:
                ends = asyncio.run(edges(flavour.transport, names, settings, self._arenas))
        self.senders: list[Any] = [sender for sender, _ in ends]
        self.receivers: list[Any] = [receiver for _, receiver in ends[-1:] + ends[:-1]]
        makers = make or [DyingPlane] * len(names)
        self.planes = [of_member(arena) for of_member, arena in zip(makers, self._arenas, strict=True)]
        self.rings = [
            Ring(KEY.epoch, names, i, self.receivers[i], self.senders[i], self.planes[i], settings)
            for i in range(len(names))
        ]

    def plan(self, elements: int, itemsize: int) -> RingPlan:
        return self._shape.plan(len(self.names), elements, itemsize)

    def tensor(self, position: int, values: Tensor) -> Tensor:
        if not self._registered:
            return values.clone()
        return self._arenas[position].empty(values.shape, values.dtype).copy_(values)

    def submit(self, position: int, order: AllReduceOrder) -> Future[AllReduceResult]:
        return self._pools[position].submit(self.rings[position].all_reduce, order)

    def wait(self, works: Sequence[Future[AllReduceResult]]) -> None:
        for work in works:
            work.exception(DEADLINE_S)

    def hang_up(self, position: int) -> None:
        self.rings[position].fail(PeerDead("hangs up"))

    def dies(self, position: int, chunks: int) -> None:
        plane = self.planes[position]
        assert isinstance(plane, DyingPlane)
        plane.ring, plane.left = self.rings[position], chunks

    def close(self) -> None:
        for ring in self.rings:
            ring.fail(PeerDead("the test is over"))
        for pool in self._pools:
            pool.shutdown()
        for ring in self.rings:
            ring.dispose()


async def edges(
    transport: str, names: Sequence[int], settings: Settings, arenas: Sequence[Arena]
) -> list[tuple[Any, Any]]:
    """The sender of each member, and the receiver of its right neighbour."""
    kind, n = KINDS[transport], len(names)
    listeners = [Listener(MemberIdentity(name, 0, "layout", TOKEN), lambda *_: None) for name in names]
    addresses = [listener.open("127.0.0.1") for listener in listeners]
    try:
        made = []
        for i, name in enumerate(names):
            j = (i + 1) % n
            ticket, calls = listeners[j].expect()
            offer = kind.offer(listeners[j], "127.0.0.1")
            there = Edge(KEY.epoch, names[j], settings, TOKEN, addresses[j], offer, ticket)
            here = Edge(KEY.epoch, name, settings, TOKEN, "", offer, ticket)
            made.append(asyncio.gather(kind.dial(there, arenas[i]), kind.accept(here, calls)))
        async with asyncio.timeout(DEADLINE_S):
            return [(sender, receiver) for sender, receiver in await asyncio.gather(*made)]
    finally:
        for listener in listeners:
            listener.close()
        await asyncio.sleep(0)


class Actors:
    """All members live in virtual time; ``registered``: they read each other's memory."""

    def __init__(self, flavour: Flavour, names: Sequence[int], shape: Shape) -> None:
        self.names = names
        self._shape = shape
        chance = random.Random(len(names))
        nature = Nature(shape.slots, lambda: chance.uniform(1e-3, 1e-2), shape.timeout_s, flavour.registered)
        self._world = World(names, nature, [CpuPlane() for _ in names], self.plan, lambda: 1e-4)
        self.senders: list[Any] = [e.sender for e in self._world.edges]
        self.receivers: list[Any] = [e.receiver for e in self._world.edges[-1:] + self._world.edges[:-1]]

    def plan(self, elements: int, itemsize: int) -> RingPlan:
        return self._shape.plan(len(self.names), elements, itemsize)

    def tensor(self, position: int, values: Tensor) -> Tensor:
        return values.clone()

    def submit(self, position: int, order: AllReduceOrder) -> Future[AllReduceResult]:
        return self._world.actors[position].all_reduce(order)

    def wait(self, works: Sequence[Future[AllReduceResult]]) -> None:
        self._world.run()
        assert all(w.done() for w in works)

    def hang_up(self, position: int) -> None:
        self._world.actors[position].die()

    def dies(self, position: int, chunks: int) -> None:
        self._world.actors[position].mortal = chunks

    def close(self) -> None:
        self._world.run()


def used() -> Counter[str]:
    """Descriptors and threads of this process; segments belong to whoever holds their tensors."""
    held = Counter(re.sub(r"\d+", "N", f"thread {thread.name}") for thread in threading.enumerate())
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            name = os.readlink(f"/proc/self/fd/{fd}")
            held[re.sub(r"\d+", "N", name)] += "memfd:" not in name
    return held


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that the block leaves no descriptor and no thread; gloo closes its own a moment later."""
    warm_libuv()
    before = used()
    yield
    end = time.monotonic() + 2
    while (more := used() - before) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert not more, f"left: {dict(more)}"


@contextlib.contextmanager
def rig(flavour: Flavour, members: int, shape: Shape | None = None) -> Iterator[Rig]:
    """A ring of ``members`` with names that are not their positions; nothing of it may be left afterwards."""
    with nothing_left():
        made = (Actors if flavour.transport == "sim" else Engines)(
            flavour, [5 + i for i in range(members)], shape or Shape()
        )
        try:
            yield made
        finally:
            made.close()


def framing(
    rig_: Rig, position: int, elements: int, dtype: torch.dtype = torch.float32, key: Key = KEY
) -> Framing:
    """How the frames that ``position`` sends should look."""
    plan = rig_.plan(elements, dtype.itemsize)
    return Framing(key, plan, operations(position, plan.members), dtype.itemsize, DTYPES.index(dtype))


def feed(ring: Rig, position: int, n: int, how: Framing) -> list[Tensor]:
    """Play one member of two that sends all that it has to, correctly; hold what is returned until it is read."""
    plan, sender = ring.plan(n, 4), ring.senders[position]
    payloads = []
    sender.begin(lambda error: None)
    for operation in how.operations[:-1]:
        for round_ in range(plan.rounds):
            news = [entry(ring.names[position])] if how.entries(operation.number + 1, round_) else []
            head = how.header(operation, round_, False) + b"".join(e.pack() for e in news)
            payload = ring.tensor(position, torch.zeros(plan.span(operation.shard, round_).size))
            payloads.append(payload)
            sender.send(head, payload, False)
    return payloads
