"""c10d transport: an edge is a process group of two, so that payloads travel as torch.distributed lets them.

That is gloo: over TCP, or over RDMA with ``GLOO_DEVICE_TRANSPORT=IBVERBS`` where torch was built with it
(``TORCH_GLOO_IBV_NAME``, ``_PORT`` and ``_INDEX`` choose the device). Headers and answers go over a socket of our
own beside it, which came in by the door: nothing is received that was not announced and checked, gloo needs no
store, and a dead neighbour shows as the end of that socket whatever gloo makes of it. K connections are K gloo
devices, each with a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

from torch import Tensor

from ft_hsdp import handshake
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.ftar import control
from ft_hsdp.ftar.door import Call, Door
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.link import Arrival, Landing, Transfer
from ft_hsdp.ftar.memory import Arena, bytes_of
from ft_hsdp.ftar.transport.carrier import Bytes, Parcel, Read
from ft_hsdp.ftar.transport.gloo import Mail, connect
from ft_hsdp.ftar.transport.inlet import Lane, StreamInlet
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.outlet import StreamOutlet
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingData, RingReady
from ft_hsdp.sealed import Sealed

CALLER, CALLEE = range(2)
INLINE = 64 * 1024  # bytes of a payload up to which gloo's handshake costs more than it brings


class Letters:
    """The sender's carrier: the header says that a message comes; a small payload follows it on the stream.

    A chunk that was answered has arrived, so there are never more messages than slots.
    """

    label = 0
    by_reference = True

    def __init__(self, mail: Mail, slots: int) -> None:
        self._mail = mail
        self._slots = slots

    def pack(self, payload: Tensor | None) -> Parcel:
        """A message, or what follows the header."""
        if payload is None:
            return Parcel()
        if payload.nbytes <= INLINE:
            return Parcel(b"", (bytes_of(payload),))
        if len(self._mail) == self._slots:
            self._mail.finish()
        self._mail.send(payload)
        return Parcel()

    def unpack(self, label: bytes, read: Read, frame: Frame, landing: Landing) -> Tensor:
        """Not this end."""
        raise NotImplementedError

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Not this end."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the process group."""
        self._mail.dispose()


class C10dOutlet(StreamOutlet):
    """Headers on ``sock``, payloads by ``mail``."""

    def __init__(self, sock: socket.socket, mail: Mail, slots: int, member: int) -> None:
        super().__init__([sock], slots, member, Letters(mail, slots), f"ftar-tx-{member}")
        self._mail = mail

    def flush(self) -> int:
        """Wait until all has been answered, and let go of it."""
        sent = super().flush()
        while len(self._mail):
            self._mail.finish()
        return sent

    def close(self) -> None:
        """Wake the thread, stop gloo."""
        super().close()
        self._mail.cut()


class C10dLane(Lane):
    """Reads headers as far ahead as they have come, so that gloo has receives to fill while a chunk is added."""

    def __init__(self, sock: socket.socket, mail: Mail, slots: int, member: int) -> None:
        super().__init__(sock, 0, slots, member, Bytes())
        self._mail = mail
        self._most = slots
        self._left = 0
        self._announced: deque[Arrival] = deque()

    def receive(self, transfer: Transfer) -> Arrival:
        """Wait for the next frame and its payload."""
        if not self._announced:
            self._left = self._left or transfer.frames
            self._announce(transfer)
        while self._left and len(self._announced) < self._most and super().ready():
            self._announce(transfer)
        if self._announced[0].frame.nbytes > INLINE:
            self._mail.finish()
        return self._announced.popleft()

    def _announce(self, transfer: Transfer) -> None:
        """Read one header, and post the receive of what it announces, or read what follows it."""
        _, frame, entries = self._header(transfer)
        place = None if frame.empty else transfer.landing.land(frame)
        if place is not None and frame.nbytes > INLINE:
            self._mail.receive(place)
        elif place is not None:
            self._read(bytes_of(place))
        self._announced.append(Arrival(frame, entries, place, 0))
        self._left -= 1

    def ready(self) -> bool:
        """Whether a header is there; its payload is on the way."""
        return bool(self._announced) or super().ready()

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        self._mail.dispose()
        self._announced.clear()


class C10dInlet(StreamInlet):
    """Headers on ``sock``, payloads by ``mail``."""

    def __init__(self, sock: socket.socket, mail: Mail, slots: int, member: int) -> None:
        super().__init__([sock], slots, member, Bytes(), f"ftar-rx-{member}")
        self._lanes = [C10dLane(sock, mail, slots, member)]
        self._mail = mail

    def close(self) -> None:
        """Wake the thread and the engine, stop gloo."""
        super().close()
        self._mail.cut()


class C10d:
    """Works wherever gloo does."""

    def offer(self, door: Door, host: str) -> str:
        """The caller knows the address already."""
        return ""

    async def dial(self, edge: Edge, arena: Arena) -> C10dOutlet:
        """Connect to the door, and there meet in a process group."""
        sock = await handshake.dial(edge.address, edge.token, Purpose.DATA)
        try:
            if isinstance(sock, Sealed):
                raise ProtocolViolation("c10d cannot be encrypted: network.tls: off, or another ftar.transport")
            control.tune(sock, edge.settings.timeout_s)
            await control.send(sock, RingData(edge.ticket, 0))
            if not isinstance(await control.receive(sock, RingReady), RingReady):
                raise ConnectionResetError("the data connection was refused")
            mail = await _meet(sock, CALLER, edge)
        except BaseException:
            _hang_up(sock)
            raise
        return C10dOutlet(sock, mail, edge.settings.slots, edge.member)

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> C10dInlet:
        """Take the connection, and meet there in a process group."""
        _, sock = await calls.get()
        try:
            if sock.family == socket.AF_UNIX:
                raise ConnectionResetError("a process group was asked for over a local socket")
            control.tune(sock, edge.settings.timeout_s)
            await control.send(sock, RingReady())
            mail = await _meet(sock, CALLEE, edge)
        except BaseException:
            _hang_up(sock)
            raise
        return C10dInlet(sock, mail, edge.settings.slots, edge.member)


async def _meet(sock: socket.socket, rank: int, edge: Edge) -> Mail:
    """Gloo connects on a thread. If cancelled, shut ``sock`` and wait until gloo has given up: nothing stays."""
    control.blocking(sock, edge.settings.connect_timeout_s)
    meeting = asyncio.ensure_future(asyncio.to_thread(connect, sock, rank, edge.settings))
    try:
        group = await asyncio.shield(meeting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        while not meeting.done():  # it may be cancelled more than once
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([meeting])
        meeting.exception()  # or asyncio complains that nobody has seen it
        raise
    control.blocking(sock, edge.settings.timeout_s)
    return Mail(group, edge.member, edge.settings)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
