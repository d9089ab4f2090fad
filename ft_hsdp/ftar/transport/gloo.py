"""Gloo: a process group of two at its two ends: how they meet, exchange messages and part.

Gloo cannot abort a receive, but a wait that expires closes all connections of its context and so wakes everybody
who waits there. A pair is cut by such a wait of a millisecond, on a message that nobody sends.

c10d transport: an edge is a process group of two, so that payloads travel as torch.distributed lets them.

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
import struct
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ft_hsdp import handshake
from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout, ProtocolViolation
from ft_hsdp.ftar import wire
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.listener import Call, Listener
from ft_hsdp.ftar.memory import Arena, bytes_of
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.base import BufferProvider, Chunk, Transfer
from ft_hsdp.ftar.transport.kind import Bytes, Edge, Parcel, Read
from ft_hsdp.ftar.transport.receiver import ReceiveLane, StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingData, RingReady
from ft_hsdp.record_layer import Sealed

_PAIR = struct.Struct("!HH")
MOST_KEYS = 256
_EXPIRED = timedelta(milliseconds=1)

ERRORS: tuple[tuple[str, type[FTARError]], ...] = (
    ("Timed out waiting", PeerTimeout),
    ("Application timeout caused pair closure", PeerTimeout),
    ("Connection closed by peer", PeerDead),
)


def classify(error: RuntimeError, member: int) -> FTARError:
    """What gloo's text means for the pair with ``member``: it has no types. A text unknown here costs the pair."""
    text = str(error)
    kind = next((k for part, k in ERRORS if part in text), PeerDead)
    return kind(f"gloo: {text.partition(' This is typically')[0]}", suspect=member)


class PairStore(dist.Store):
    """A store for two: what one end sets the other one gets, over the connection that they have already.

    Used by one thread while gloo connects; ``sock`` is blocking, with kernel deadlines.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo passes bytes
        """Keep it, and tell the other end."""
        self._values[key] = value
        name = key.encode()
        self._sock.sendall(_PAIR.pack(len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        """What either end has set, as soon as it is here.

        Raises:
            OSError: the other end is gone, or silent for too long.
        """
        while key not in self._values:
            if len(self._values) == MOST_KEYS:
                raise ConnectionAbortedError(f"{MOST_KEYS} keys, and none is {key!r}")
            lengths = _PAIR.unpack(self._exactly(_PAIR.size))
            name, value = (self._exactly(n) for n in lengths)
            self._values[name.decode(errors="replace")] = value
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all ``keys`` are here; the socket's deadline counts."""
        for key in keys:
            self.get(key)

    def _exactly(self, count: int) -> bytes:
        data = self._sock.recv(count, socket.MSG_WAITALL) if count else b""
        if len(data) < count:
            raise ConnectionResetError("the neighbour is gone")
        return data


def connect(sock: socket.socket, rank: int, settings: Settings) -> dist.ProcessGroupGloo:
    """Meet the other end of ``sock`` in a process group of two, on the addresses that ``sock`` has. Blocks.

    Raises:
        OSError: it does not work.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch does not declare its options
    options = gloo._Options()
    options._timeout = timedelta(seconds=settings.connect_timeout_s)
    options._threads = 1
    host = sock.getsockname()[0]
    try:
        options._devices = [
            gloo.create_device(hostname=host, lazy_init=False) for _ in range(settings.connections)
        ]
        group: dist.ProcessGroupGloo = gloo(PairStore(sock), rank, 2, options)
    except RuntimeError as error:
        raise ConnectionError(f"gloo: {error}") from error
    return group


class Mail:
    """One end of a connected pair: messages in order, each on the context that is next; any thread may ``cut``."""

    def __init__(self, group: dist.ProcessGroupGloo, member: int, settings: Settings) -> None:
        self._group: Any = group  # torch does not declare its methods
        self._peer = 1 - group.rank()
        self._member = member
        self._contexts = settings.connections
        self._deadline = timedelta(seconds=settings.timeout_s)
        self._count = 0
        self._works: deque[dist.Work] = deque()
        self._lock = threading.Lock()
        self._cutter: threading.Thread | None = None

    def __len__(self) -> int:
        """How many messages are not finished."""
        return len(self._works)

    def send(self, payload: Tensor) -> None:
        """Post a message; ``payload`` stays as it is until it is finished.

        Raises:
            PeerDead, PeerTimeout
        """
        self._post(payload, sends=True)

    def receive(self, place: Tensor) -> None:
        """Post a receive; ``place`` is written until it is finished, or the pair disposed of.

        Raises:
            PeerDead, PeerTimeout
        """
        self._post(place, sends=False)

    def _post(self, tensor: Tensor, sends: bool) -> None:
        """No local variable holds the group or a work: an error that is kept would keep them too."""
        tag = self._count % self._contexts
        self._count += 1
        try:
            self._works.append(
                (self._group.send if sends else self._group.recv)(
                    [tensor.detach().view(torch.uint8)], self._peer, tag
                )
            )
        except RuntimeError as error:
            raise self._meaning(error) from error

    def finish(self) -> None:
        """Wait for the oldest message that is not finished.

        Raises:
            PeerDead, PeerTimeout
        """
        try:
            self._works[0].wait(self._deadline)
        except RuntimeError as error:
            raise self._meaning(error) from error
        self._works.popleft()

    def _meaning(self, error: RuntimeError) -> FTARError:
        return PeerDead("the ring was closed") if self._cutter is not None else classify(error, self._member)

    def cut(self) -> None:
        """Wake whoever waits within milliseconds; gloo needs 10 ms more to close, on a thread of its own."""
        with self._lock:
            if self._cutter is None:
                self._cutter = threading.Thread(target=self._cut, name=f"ftar-cut-{self._member}", daemon=True)
                self._cutter.start()

    def _cut(self) -> None:
        for context in range(self._contexts):
            with contextlib.suppress(RuntimeError):  # that it expires is the purpose
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._peer, self._contexts + context).wait(_EXPIRED)

    def dispose(self) -> None:
        """No memory is read or written any more once this has returned; after ``cut``, by the last user."""
        self.cut()
        assert self._cutter is not None
        self._cutter.join()
        self._works.clear()
        self._group = None


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

    def unpack(self, label: bytes, read: Read, frame: Frame, buffers: BufferProvider) -> Tensor:
        """Not this end."""
        raise NotImplementedError

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Not this end."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the process group."""
        self._mail.dispose()


class C10dSender(StreamSender):
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


class C10dLane(ReceiveLane):
    """Reads headers as far ahead as they have come, so that gloo has receives to fill while a chunk is added."""

    def __init__(self, sock: socket.socket, mail: Mail, slots: int, member: int) -> None:
        super().__init__(sock, 0, slots, member, Bytes())
        self._mail = mail
        self._most = slots
        self._left = 0
        self._announced: deque[Chunk] = deque()

    def receive(self, transfer: Transfer) -> Chunk:
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
        place = None if frame.empty else transfer.buffers.buffer_for(frame)
        if place is not None and frame.nbytes > INLINE:
            self._mail.receive(place)
        elif place is not None:
            self._read(bytes_of(place))
        self._announced.append(Chunk(frame, entries, place, 0))
        self._left -= 1

    def ready(self) -> bool:
        """Whether a header is there; its payload is on the way."""
        return bool(self._announced) or super().ready()

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        self._mail.dispose()
        self._announced.clear()


class C10dReceiver(StreamReceiver):
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

    def offer(self, listener: Listener, host: str) -> str:
        """The caller knows the address already."""
        return ""

    async def dial(self, edge: Edge, arena: Arena) -> C10dSender:
        """Connect to the door, and there meet in a process group."""
        sock = await handshake.dial(edge.address, edge.token, Purpose.DATA)
        try:
            if isinstance(sock, Sealed):
                raise ProtocolViolation("c10d cannot be encrypted: network.tls: off, or another ftar.transport")
            wire.tune(sock, edge.settings.timeout_s)
            await wire.send(sock, RingData(edge.ticket, 0))
            if not isinstance(await wire.receive(sock, RingReady), RingReady):
                raise ConnectionResetError("the data connection was refused")
            mail = await _meet(sock, CALLER, edge)
        except BaseException:
            _hang_up(sock)
            raise
        return C10dSender(sock, mail, edge.settings.slots, edge.member)

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> C10dReceiver:
        """Take the connection, and meet there in a process group."""
        _, sock = await calls.get()
        try:
            if sock.family == socket.AF_UNIX:
                raise ConnectionResetError("a process group was asked for over a local socket")
            wire.tune(sock, edge.settings.timeout_s)
            await wire.send(sock, RingReady())
            mail = await _meet(sock, CALLEE, edge)
        except BaseException:
            _hang_up(sock)
            raise
        return C10dReceiver(sock, mail, edge.settings.slots, edge.member)


async def _meet(sock: socket.socket, rank: int, edge: Edge) -> Mail:
    """Gloo connects on a thread. If cancelled, shut ``sock`` and wait until gloo has given up: nothing stays."""
    wire.blocking(sock, edge.settings.connect_timeout_s)
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
    wire.blocking(sock, edge.settings.timeout_s)
    return Mail(group, edge.member, edge.settings)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
