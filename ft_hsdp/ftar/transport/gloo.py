"""The c10d transport: each edge is a gloo process group of two, which carries the payloads (torch.distributed).

Gloo runs over TCP, or over RDMA with ``GLOO_DEVICE_TRANSPORT=IBVERBS`` where torch was built with it
(``TORCH_GLOO_IBV_NAME``, ``_PORT`` and ``_INDEX`` choose the device). Headers and answers travel over a socket of
our own that came in through the listener. So nothing is received that was not announced and checked, gloo needs no
store server, and a dead neighbour shows as the end of that socket whatever gloo does. K connections are K gloo
devices, each with a thread of its own.

Gloo cannot abort a receive. But a wait that expires closes all connections of its context and wakes every thread
that waits there; a pair is cut by such a wait of one millisecond, on a message that is never sent.
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
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.connections import Call, Listener
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.base import Chunk, EncodedPayload, InlineCodec, Transfer, blocking, bytes_of
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.receiver import ReceiveLane, StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingData, RingReady
from ft_hsdp.record_layer import Sealed

_PAIR = struct.Struct("!HH")
MOST_KEYS = 256  # that a peer may set: it cannot fill our memory
_EXPIRED = timedelta(milliseconds=1)

ERRORS: tuple[tuple[str, type[FTARError]], ...] = (
    ("Timed out waiting", PeerTimeout),
    ("Application timeout caused pair closure", PeerTimeout),
    ("Connection closed by peer", PeerDead),
)


def classify(error: RuntimeError, member: int) -> FTARError:
    """Return the error that gloo's text means for the pair with `member`.

    Gloo has no error types. A text that is not in `ERRORS` counts as a dead peer.
    """
    text = str(error)
    kind = next((k for part, k in ERRORS if part in text), PeerDead)
    return kind(f"gloo: {text.partition(' This is typically')[0]}", suspect=member)


class PairStore(dist.Store):
    """The store by which gloo connects a pair.

    Each key that one end sets is sent to the other end over their socket. One thread uses the store while gloo
    connects. `sock` is blocking, with the kernel's deadlines set.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo passes bytes
        """Keep the value and send it to the other end."""
        self._values[key] = value
        name = key.encode()
        self._sock.sendall(_PAIR.pack(len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        """Return the value that either end has set; block until it has arrived.

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
        """Block until all `keys` have arrived. The deadline of the socket counts, not `timeout`."""
        for key in keys:
            self.get(key)

    def _exactly(self, count: int) -> bytes:
        data = self._sock.recv(count, socket.MSG_WAITALL) if count else b""
        if len(data) < count:
            raise ConnectionResetError("the neighbour is gone")
        return data


def connect(sock: socket.socket, rank: int, settings: Settings) -> dist.ProcessGroupGloo:
    """Connect to the other end of `sock` in a process group of two. Blocks.

    Args:
        sock: blocking control socket; gloo listens on the same local address.
        rank: 0 at the caller, 1 at the callee.
        settings: number of connections and the deadline.

    Raises:
        OSError: the other end is gone, or gloo cannot connect.
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


class GlooPair:
    """One end of a connected pair: messages in order, round-robin over the gloo contexts.

    One thread sends and receives; any thread may call `cut`.
    """

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
        """Return how many messages are not finished."""
        return len(self._works)

    def send(self, payload: Tensor) -> None:
        """Post a message. `payload` must not change until `finish` has returned for it.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: gloo ran into its deadline.
        """
        self._post(payload, sends=True)

    def receive(self, place: Tensor) -> None:
        """Post a receive. `place` is written until `finish` has returned for it, or the pair is disposed of.

        Raises:
            PeerDead: the connection broke.
            PeerTimeout: gloo ran into its deadline.
        """
        self._post(place, sends=False)

    def _post(self, tensor: Tensor, sends: bool) -> None:
        """Post a send or a receive on the next context.

        No local variable refers to the group or a work: an error that is kept would keep them alive through its
        traceback.
        """
        tag = self._count % self._contexts
        self._count += 1
        try:
            self._works.append(
                (self._group.send if sends else self._group.recv)(
                    [tensor.detach().view(torch.uint8)], self._peer, tag
                )
            )
        except RuntimeError as error:
            raise self._classified(error) from error

    def finish(self) -> None:
        """Block until the oldest unfinished message is finished.

        Raises:
            PeerDead: the connection broke, or the pair was cut.
            PeerTimeout: the message was not finished before the deadline.
        """
        try:
            self._works[0].wait(self._deadline)
        except RuntimeError as error:
            raise self._classified(error) from error
        self._works.popleft()

    def _classified(self, error: RuntimeError) -> FTARError:
        return PeerDead("the ring was closed") if self._cutter is not None else classify(error, self._member)

    def cut(self) -> None:
        """Wake all waiting threads within milliseconds. Any thread; does not block.

        Gloo needs about 10 ms more to close its connections, on a thread of its own.
        """
        with self._lock:
            if self._cutter is None:
                self._cutter = threading.Thread(target=self._cut, name=f"ftar-cut-{self._member}", daemon=True)
                self._cutter.start()

    def _cut(self) -> None:
        for context in range(self._contexts):
            with contextlib.suppress(RuntimeError):  # the wait is meant to expire
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._peer, self._contexts + context).wait(_EXPIRED)

    def dispose(self) -> None:
        """Cut the pair and block until gloo reads and writes no memory any more.

        The last user calls this.
        """
        self.cut()
        assert self._cutter is not None
        self._cutter.join()
        self._works.clear()
        self._group = None


CALLER, CALLEE = range(2)  # ranks in the process group
INLINE = 64 * 1024  # bytes; smaller payloads go over the stream: gloo's handshake costs more than it brings


class GlooEncoder(InlineCodec):
    """The sender's codec: the header announces a gloo message; a small payload follows on the stream instead.

    A chunk that was answered has arrived, so there are never more messages than slots.
    """

    by_reference = True

    def __init__(self, pair: GlooPair, slots: int) -> None:
        self._pair = pair
        self._slots = slots

    def pack(self, payload: Tensor | None) -> EncodedPayload:
        """Post the payload as a gloo message, or return its bytes if it is small."""
        if payload is None:
            return EncodedPayload()
        if payload.nbytes <= INLINE:
            return EncodedPayload(b"", (bytes_of(payload),))
        if len(self._pair) == self._slots:
            self._pair.finish()
        self._pair.send(payload)
        return EncodedPayload()

    def close(self) -> None:
        """Leave the process group."""
        self._pair.dispose()


class C10dSender(StreamSender):
    """The sending end of a c10d edge: headers on `sock`, payloads by `pair`."""

    def __init__(self, sock: socket.socket, pair: GlooPair, slots: int, member: int) -> None:
        super().__init__([sock], slots, member, GlooEncoder(pair, slots), f"ftar-tx-{member}")
        self._pair = pair

    def flush(self) -> int:
        """Block until the neighbour has finished with all frames, and release their gloo messages."""
        sent = super().flush()
        while len(self._pair):
            self._pair.finish()
        return sent

    def close(self) -> None:
        """Wake the sending thread and stop gloo."""
        super().close()
        self._pair.cut()


class C10dLane(ReceiveLane):
    """Reads headers as far ahead as they have come, so that gloo can receive while the engine adds a chunk."""

    def __init__(self, sock: socket.socket, pair: GlooPair, slots: int, member: int) -> None:
        super().__init__(sock, 0, slots, member, InlineCodec())
        self._pair = pair
        self._most = slots
        self._left = 0
        self._announced: deque[Chunk] = deque()

    def receive(self, transfer: Transfer) -> Chunk | None:
        """Block until the next frame and its payload are here, and return them; None after `WAIT_S` of nothing."""
        if not self._announced:
            self._left = self._left or transfer.frames
            if not self._announce(transfer):
                return None
        while self._left and len(self._announced) < self._most and super().ready():
            self._announce(transfer)
        if self._announced[0].frame.nbytes > INLINE:
            self._pair.finish()
        return self._announced.popleft()

    def _announce(self, transfer: Transfer) -> bool:
        """Read one header, and post the receive of its payload or read the payload from the stream.

        Return False if no header has come within `WAIT_S`.
        """
        if (header := self._header(transfer)) is None:
            return False
        _, frame, entries = header
        place = None if frame.empty else transfer.buffers.buffer_for(frame)
        if place is not None and frame.nbytes > INLINE:
            self._pair.receive(place)
        elif place is not None:
            self._read(bytes_of(place))
        self._announced.append(Chunk(frame, entries, place, 0))
        self._left -= 1
        return True

    def ready(self) -> bool:
        """Return whether a header is here; its payload is on the way."""
        return bool(self._announced) or super().ready()

    def close(self) -> None:
        """Leave the process group and close the connection."""
        super().close()
        self._pair.dispose()
        self._announced.clear()


class C10dReceiver(StreamReceiver):
    """The receiving end of a c10d edge: headers on `sock`, payloads by `pair`."""

    def __init__(self, sock: socket.socket, pair: GlooPair, slots: int, member: int) -> None:
        self._pair = pair
        super().__init__([sock], slots, member, InlineCodec(), f"ftar-rx-{member}")

    def _lane(self, sock: socket.socket, number: int, slots: int, member: int) -> ReceiveLane:
        return C10dLane(sock, self._pair, slots, member)

    def close(self) -> None:
        """Wake the receiving thread and the engine, and stop gloo."""
        super().close()
        self._pair.cut()


class C10d:
    """Makes c10d edges, wherever gloo works."""

    def offer(self, listener: Listener, host: str) -> str:
        """Return nothing: the caller knows the address from the grant."""
        return ""

    async def dial(self, edge: Edge, arena: Arena) -> C10dSender:
        """Connect to the listener, then meet the neighbour in a process group."""
        sock = await handshake.dial(edge.address, edge.token, Purpose.DATA)
        with connections.closed_on_error([sock]):
            if isinstance(sock, Sealed):
                raise ProtocolViolation("c10d cannot be encrypted: network.tls: off, or another ftar.transport")
            connections.tune(sock, edge.settings.timeout_s)
            await connections.present(sock, RingData(edge.ticket, 0))
            pair = await _meet(sock, CALLER, edge)
        return C10dSender(sock, pair, edge.settings.slots, edge.member)

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> C10dReceiver:
        """Accept the connection, then meet the neighbour in a process group."""
        _, sock = await calls.get()
        with connections.closed_on_error([sock]):
            if sock.family == socket.AF_UNIX:
                raise ConnectionResetError("a process group was asked for over a local socket")
            connections.tune(sock, edge.settings.timeout_s)
            await connections.send(sock, RingReady())
            pair = await _meet(sock, CALLEE, edge)
        return C10dReceiver(sock, pair, edge.settings.slots, edge.member)


async def _meet(sock: socket.socket, rank: int, edge: Edge) -> GlooPair:
    """Let gloo connect on a thread of its own.

    If this is cancelled, shut `sock` down and wait until gloo has given up, so that no thread or connection is
    left.
    """
    blocking(sock, edge.settings.connect_timeout_s)
    meeting = asyncio.ensure_future(asyncio.to_thread(connect, sock, rank, edge.settings))
    try:
        group = await asyncio.shield(meeting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        while not meeting.done():  # it may be cancelled more than once
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([meeting])
        meeting.exception()  # retrieve it, or asyncio logs that it was never retrieved
        raise
    blocking(sock, edge.settings.timeout_s)
    return GlooPair(group, edge.member, edge.settings)
