"""Group: one rank's place in the rings of successive epochs, and the all-reduces that run on them.

Made once. ``configure`` forms the ring of a grant, ``all_reduce`` queues work on it, ``stop`` leaves it. A ring
that broke stays broken: only a larger epoch helps. Everything but ``all_reduce`` runs on the control loop.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ft_hsdp.core.assignment import Grant
from ft_hsdp.core.commit import Token
from ft_hsdp.errors import ConnectFailed, FTARError, PeerDead, ProtocolViolation, StaleEpoch
from ft_hsdp.ftar import edges
from ft_hsdp.ftar.edges import Identity, Listener
from ft_hsdp.ftar.engine import Result, Ring
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.protocol import RingAbort, RingHello, RingWelcome

_CHANNELS: tuple[Literal["data", "control"], ...] = ("data", "control")


@dataclass(frozen=True, slots=True)
class Events:
    """Whom to tell, on the control loop."""

    connected: Callable[[int], None]
    broken: Callable[[RingAbort], None]
    shown: Callable[[Grant], None]
    token: Callable[[Token], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and bytes: silence of a neighbour, forming a ring, size of a chunk."""

    timeout_s: float
    connect_timeout_s: float
    chunk_bytes: int


@dataclass(slots=True)
class _Formation:
    """A ring that is being formed or is in use: its grant, its sockets, what runs for it."""

    grant: Grant
    position: int
    left: dict[str, socket.socket] = field(default_factory=dict)
    right: dict[str, socket.socket] = field(default_factory=dict)
    arrival: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    ring: Ring | None = None
    over: bool = False

    def neighbour(self, side: int) -> int:
        """The replica to the left (-1) or right (+1)."""
        ring = self.grant.ring
        return ring[(self.position + side) % len(ring)]


@dataclass(frozen=True, slots=True)
class _Op:
    """A queued all-reduce."""

    key: Key
    local: torch.Tensor | None
    out: torch.Tensor
    mine: Entry
    work: Future[Result]


class Group:
    """The all-reduce group of one rank index across replicas (FT-HSDP §4.2)."""

    def __init__(self, identity: Identity, limits: Limits, events: Events) -> None:
        self._identity = identity
        self._limits = limits
        self._events = events
        self._listener = Listener(identity, self._arrived)
        self._current: _Formation | None = None
        self._floor = 0
        self._reason = ""
        self._parked: dict[int, list[tuple[RingHello, socket.socket]]] = {}
        self._ready = threading.Condition()
        self._ops: queue.SimpleQueue[_Op | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ftar", daemon=True)
        self._thread.start()

    def listen(self, host: str) -> str:
        """Open the door; "host:port" for the grant."""
        self._loop = asyncio.get_running_loop()
        return self._listener.open(host)

    # Forming and leaving rings: on the control loop.

    def configure(self, grant: Grant) -> None:
        """Form the ring of ``grant``; older rings are left. Stale and reused epochs are refused."""
        if grant.epoch <= self._floor:
            return
        self._leave("a newer epoch", grant)
        self._floor = grant.epoch
        formation = _Formation(grant, grant.ring.index(self._identity.replica))
        self._current = formation
        for hello, sock in self._parked.pop(grant.epoch, []):
            self._attach(formation, hello, sock)
        for epoch in [e for e in self._parked if e < grant.epoch]:
            for hello, sock in self._parked.pop(epoch):
                self._refuse(hello, sock)
        self._spawn(formation, self._form(formation))

    def stop(self, epoch: int, reason: str) -> None:
        """Leave the ring of ``epoch`` and refuse all up to it; its members are told ``reason``."""
        self._reason = reason
        if self._current is not None and self._current.grant.epoch <= epoch:
            self._leave(reason, None)
        self._floor = max(self._floor, epoch)
        for parked in [e for e in self._parked if e <= self._floor]:
            for hello, sock in self._parked.pop(parked):
                self._refuse(hello, sock)

    def send_token(self, token: Token) -> None:
        """Pass the commit token to the right neighbour; a failure shows as a broken ring."""
        formation = self._current
        if formation is None or formation.over or formation.grant.epoch != token.fence.epoch:
            return
        self._spawn(formation, self._tell(formation, formation.right["control"], token))

    def close(self) -> None:
        """Leave the ring, end the threads."""
        self.stop(max([self._floor, *self._parked]), "the replica ends")
        self._listener.close()
        self._ops.put(None)

    def _spawn(self, formation: _Formation, coroutine: Coroutine[object, object, Any]) -> None:
        formation.tasks = [t for t in formation.tasks if not t.done()]
        formation.tasks.append(self._loop.create_task(coroutine))

    async def _form(self, formation: _Formation) -> None:
        """Dial right, wait for left, then let the queued work run."""
        grant, members = formation.grant, len(formation.grant.members)
        if members > 1:
            right = grant.members[(formation.position + 1) % members]
            address = right.ring[self._identity.rank]
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s):
                    for channel in _CHANNELS:
                        formation.right[channel] = await edges.dial(
                            self._identity, grant, address, channel, self._limits.timeout_s
                        )
                    self._spawn(formation, self._watch(formation, formation.right["control"], +1))
                    await formation.arrival.wait()
            except edges.Refusal as refusal:
                self._aborted(formation, refusal.abort)
                return
            except (ConnectFailed, StaleEpoch, TimeoutError) as error:
                side = +1 if len(formation.right) < 2 else -1
                cause = str(error) or f"not connected within {self._limits.connect_timeout_s} s"
                self._break(formation, cause, formation.neighbour(side))
                return
        if formation.over:
            return
        sockets = [side.get("data") for side in (formation.left, formation.right)]
        left, right_sock = (edges.blocking(s, self._limits.timeout_s) if s is not None else None for s in sockets)
        ring = Ring(grant.epoch, grant.ring, formation.position, left, right_sock, self._limits.chunk_bytes)
        with self._ready:
            formation.ring = ring
            self._ready.notify_all()
        self._events.connected(grant.epoch)

    def _arrived(self, hello: RingHello, sock: socket.socket) -> None:
        """A neighbour's connection: take it, park it for a later epoch, or refuse it."""
        epoch = hello.grant.epoch
        formation = self._current
        if formation is not None and epoch == formation.grant.epoch and not formation.over:
            self._attach(formation, hello, sock)
        elif epoch <= self._floor:
            self._refuse(hello, sock)
        else:
            self._parked.setdefault(epoch, []).append((hello, sock))
            self._events.shown(hello.grant)

    def _attach(self, formation: _Formation, hello: RingHello, sock: socket.socket) -> None:
        """The left neighbour is here, on one of its channels."""
        if hello.grant.mac != formation.grant.mac or hello.replica != formation.neighbour(-1):
            sock.close()
            return
        if hello.channel in formation.left:
            sock.close()
            return
        edges.tune(sock, self._limits.timeout_s)
        formation.left[hello.channel] = sock
        self._spawn(formation, self._welcome(formation, hello, sock))

    async def _welcome(self, formation: _Formation, hello: RingHello, sock: socket.socket) -> None:
        if not await self._tell(formation, sock, RingWelcome(formation.grant.epoch)):
            return
        if hello.channel == "control":
            self._spawn(formation, self._watch(formation, sock, -1))
        if len(formation.left) == 2:
            formation.arrival.set()

    def _refuse(self, hello: RingHello, sock: socket.socket) -> None:
        """Tell a caller that its epoch is over, and show it the newer grant if there is one."""
        newer = self._current.grant if self._current and self._current.grant.epoch > hello.grant.epoch else None
        self._loop.create_task(_farewell(sock, RingAbort(hello.grant.epoch, self._reason or "stale", None, newer)))

    async def _tell(self, formation: _Formation, sock: socket.socket, message: object) -> bool:
        try:
            await edges.send(sock, message)
        except OSError as error:
            self._break(formation, f"control: {error}", None)
            return False
        return True

    async def _watch(self, formation: _Formation, sock: socket.socket, side: int) -> None:
        """Read one control connection until it ends: tokens and aborts; its end is a dead neighbour."""
        cause = "closed its connection"
        try:
            while (message := await edges.receive(sock, Token, RingAbort)) is not None:
                if isinstance(message, RingAbort):
                    self._aborted(formation, message)
                    return
                if not formation.over and isinstance(message, Token):
                    self._events.token(message)
        except OSError as error:
            cause = str(error)
        except ProtocolViolation as error:
            cause = f"broke the protocol: {error}"
        self._break(formation, f"replica {formation.neighbour(side)} {cause}", formation.neighbour(side))

    def _aborted(self, formation: _Formation, abort: RingAbort) -> None:
        """A neighbour says that the ring is over; it may know a newer grant."""
        if abort.grant is not None and abort.grant.epoch > self._floor:
            self._events.shown(abort.grant)
        self._break(formation, abort.cause, abort.suspect, abort.planned)

    def _break(self, formation: _Formation, cause: str, suspect: int | None, planned: bool = False) -> None:
        """The ring is of no more use: tell both neighbours and the leader, once."""
        if formation.over:
            return
        abort = RingAbort(formation.grant.epoch, cause, suspect, planned=planned)
        self._end(formation, abort)
        self._events.broken(abort)

    def _leave(self, reason: str, newer: Grant | None) -> None:
        """Leave the current ring on purpose."""
        if self._current is not None and not self._current.over:
            self._end(self._current, RingAbort(self._current.grant.epoch, reason, None, newer, planned=True))

    def _end(self, formation: _Formation, abort: RingAbort) -> None:
        formation.over = True
        with self._ready:
            self._ready.notify_all()
        told = [side["control"] for side in (formation.left, formation.right) if "control" in side]
        self._loop.create_task(self._bury(formation, told, abort))

    async def _bury(self, formation: _Formation, told: list[socket.socket], abort: RingAbort) -> None:
        """Say goodbye both ways round before the data ends, then close everything that the ring had."""
        await asyncio.gather(*(_say(sock, abort) for sock in told))
        if formation.ring is not None:
            formation.ring.close()
        for task in formation.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*formation.tasks, return_exceptions=True)
        if formation.ring is not None:
            await asyncio.to_thread(formation.ring.release)
        self._shut(formation)

    @staticmethod
    def _shut(formation: _Formation) -> None:
        for side in (formation.left, formation.right):
            for sock in side.values():
                sock.close()

    # The work: on its own thread.

    def all_reduce(self, key: Key, local: torch.Tensor | None, out: torch.Tensor, mine: Entry) -> Future[Result]:
        """Queue a sum of ``local`` [n] fp32 over the ring of ``key.epoch`` into ``out`` [n].

        ``local`` None relays. The work fails with StaleEpoch or PeerDead if the ring is or gets of no more use;
        ``local`` is never written. Any thread may call; works run in the order of the calls.
        """
        work: Future[Result] = Future()
        self._ops.put(_Op(key, local, out, mine, work))
        return work

    def _work(self) -> None:
        while (op := self._ops.get()) is not None:
            try:
                result = self._ring(op.key.epoch).all_reduce(op.key, op.local, op.out, op.mine)
            except FTARError as error:
                self._loop.call_soon_threadsafe(self._failed, op.key.epoch, error)
                op.work.set_exception(error)
            except Exception as error:  # ours, not the ring's
                self.crashed(f"an all-reduce of epoch {op.key.epoch} failed", error)
                op.work.set_exception(error)
            else:
                op.work.set_result(result)

    def crashed(self, message: str, error: Exception) -> None:
        """Something failed that is no ring's fault: whoever owns the control loop decides what it means."""
        context = {"message": message, "exception": error}
        self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)

    def _ring(self, epoch: int) -> Ring:
        """The ring of ``epoch``, once it is formed."""
        with self._ready:
            while True:
                formation = self._current
                if formation is None or formation.grant.epoch != epoch or formation.over:
                    raise StaleEpoch(f"epoch {epoch} is over")
                if formation.ring is not None:
                    return formation.ring
                if not self._ready.wait(self._limits.connect_timeout_s + 1.0):
                    raise PeerDead(f"the ring of epoch {epoch} was not formed in time")

    def _failed(self, epoch: int, error: FTARError) -> None:
        formation = self._current
        if formation is not None and formation.grant.epoch == epoch:
            self._break(formation, str(error), error.suspect)


async def _say(sock: socket.socket, message: object) -> None:
    """Best effort: the neighbour may be gone."""
    try:
        async with asyncio.timeout(0.5):
            await edges.send(sock, message)
    except (OSError, TimeoutError):
        pass


async def _farewell(sock: socket.socket, abort: RingAbort) -> None:
    await _say(sock, abort)
    sock.close()
