"""c10d transport: an edge is a process group of two, so that payloads travel as torch.distributed lets them.

That is gloo, over TCP, or over RDMA with ``GLOO_DEVICE_TRANSPORT=IBVERBS`` (``TORCH_GLOO_IBV_NAME``, ``_PORT`` and
``_INDEX`` choose the device). Headers and answers go over a socket of our own beside it, which came in by the door:
nothing is received that was not announced and checked, gloo needs no store and no port besides its own, and a dead
neighbour shows as the end of that socket whatever gloo makes of it. K connections are K gloo devices, each with a
thread of its own.

A receive that gloo waits for cannot be aborted, but a wait that expires closes all connections of its context and so
wakes everybody who waits there. An edge is closed by such a wait of a millisecond, on a message that nobody sends.
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

import torch
import torch.distributed as dist
from torch import Tensor

from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout, ProtocolViolation
from ft_hsdp.ftar import control, door
from ft_hsdp.ftar import frame as wire
from ft_hsdp.ftar.door import Call, Door
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.link import Arrival, Landing, Transfer
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.carrier import Bytes, Parcel, Read
from ft_hsdp.ftar.transport.inlet import Lane, StreamInlet
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.outlet import StreamOutlet
from ft_hsdp.protocol import RingReady

CALLER, CALLEE = range(2)
_PAIR = struct.Struct("!HH")
_MOST_KEYS = 256
_EXPIRED = timedelta(milliseconds=1)

ERRORS: tuple[tuple[str, type[FTARError]], ...] = (
    ("Timed out waiting", PeerTimeout),
    ("Application timeout caused pair closure", PeerTimeout),
    ("Connection closed by peer", PeerDead),
)


def classify(error: RuntimeError, member: int) -> FTARError:
    """What gloo's text means for an edge with ``member``: gloo has no types. An unknown text costs the edge, no more."""
    text = str(error)
    kind = next((k for part, k in ERRORS if part in text), PeerDead)
    return kind(f"gloo: {text.partition(' This is typically')[0]}", suspect=member)


class Mirror(dist.Store):
    """A store for two: what one end sets the other one gets, over the connection that they have already.

    Used by one thread while gloo connects; ``sock`` is blocking, with kernel deadlines.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
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
            if len(self._values) == _MOST_KEYS:
                raise ConnectionAbortedError(f"{_MOST_KEYS} keys, and none is {key!r}")
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
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=settings.connect_timeout_s)
    options._threads = 1
    host = sock.getsockname()[0]
    try:
        options._devices = [
            gloo.create_device(hostname=host, lazy_init=False) for _ in range(settings.connections)
        ]
        return gloo(Mirror(sock), rank, 2, options)
    except RuntimeError as error:
        raise ConnectionError(f"gloo: {error}") from error


class Mail:
    """One end of a connected pair: messages in order, each on the context that is next; any thread may ``cut``."""

    def __init__(self, group: dist.ProcessGroupGloo, rank: int, edge: Edge) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._peer = 1 - rank
        self._member = edge.member
        self._contexts = edge.settings.connections
        self._deadline = timedelta(seconds=edge.settings.timeout_s)
        self._count = 0
        self._lock = threading.Lock()
        self._cutter: threading.Thread | None = None

    def send(self, payload: Tensor) -> dist.Work:
        """Post a message; ``payload`` stays as it is until the work is finished.

        Raises:
            PeerDead, PeerTimeout
        """
        return self._post(payload, sends=True)

    def receive(self, place: Tensor) -> dist.Work:
        """Post a receive; ``place`` is written until the work is finished, or the pair disposed of.

        Raises:
            PeerDead, PeerTimeout
        """
        return self._post(place, sends=False)

    def _post(self, tensor: Tensor, sends: bool) -> dist.Work:
        group = self._group
        assert group is not None
        tag = self._count % self._contexts
        self._count += 1
        try:
            return (group.send if sends else group.recv)([tensor.detach().view(torch.uint8)], self._peer, tag)
        except RuntimeError as error:
            raise self._meaning(error) from error

    def finish(self, work: dist.Work) -> None:
        """Wait for a message.

        Raises:
            PeerDead, PeerTimeout
        """
        try:
            work.wait(self._deadline)
        except RuntimeError as error:
            raise self._meaning(error) from error

    def _meaning(self, error: RuntimeError) -> FTARError:
        return PeerDead("the ring was closed") if self._cutter is not None else classify(error, self._member)

    def cut(self) -> None:
        """Wake whoever waits, within milliseconds; gloo itself needs 10 ms more, for which nobody should wait here."""
        with self._lock:
            if self._cutter is None:
                self._cutter = threading.Thread(target=self._cut, name=f"ftar-cut-{self._member}", daemon=True)
                self._cutter.start()

    def _cut(self) -> None:
        group = self._group
        assert group is not None
        for context in range(self._contexts):
            with contextlib.suppress(RuntimeError):  # that it expires is the purpose
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], self._peer, self._contexts + context).wait(_EXPIRED)

    def dispose(self) -> None:
        """No memory is read or written any more once this has returned."""
        self.cut()
        assert self._cutter is not None
        self._cutter.join()
        self._group = None


class Letters:
    """The sender's carrier: a payload is a message of its own, and the header says that it comes.

    A chunk that was answered has arrived, so no more than the slots are ever looked after.
    """

    by_reference = True

    def __init__(self, mail: Mail, slots: int) -> None:
        self._mail = mail
        self._slots = slots
        self._works: deque[dist.Work] = deque()

    def pack(self, payload: Tensor) -> Parcel:
        """Nothing on the stream."""
        if len(self._works) == self._slots:
            self._mail.finish(self._works.popleft())
        self._works.append(self._mail.send(payload))
        return Parcel()

    def settle(self) -> None:
        """Let go of all payloads."""
        while self._works:
            self._mail.finish(self._works.popleft())

    def unpack(self, read: Read, frame: Frame, landing: Landing) -> Tensor:
        """Not this end."""
        raise NotImplementedError

    def receive(self, sock: socket.socket, view: memoryview) -> int:
        """Not this end."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the process group."""
        self._mail.dispose()
        self._works.clear()


class C10dOutlet(StreamOutlet):
    """Headers on ``sock``, payloads by ``mail``."""

    def __init__(self, sock: socket.socket, mail: Mail, slots: int, member: int) -> None:
        self._letters = Letters(mail, slots)
        self._mail = mail
        super().__init__([sock], slots, member, self._letters, f"ftar-tx-{member}")

    def flush(self) -> int:
        """Wait until all has been answered."""
        sent = super().flush()
        self._letters.settle()
        return sent

    def close(self) -> None:
        """Wake the thread, stop gloo."""
        super().close()
        self._mail.cut()


class C10dLane(Lane):
    """Reads headers as far ahead as they have come, so that gloo has receives to fill while a chunk is being added."""

    def __init__(self, sock: socket.socket, slots: int, member: int, mail: Mail) -> None:
        super().__init__(sock, 0, slots, member, Bytes())
        self._mail = mail
        self._left = 0
        self._announced: deque[tuple[Arrival, dist.Work | None]] = deque()

    def receive(self, transfer: Transfer) -> Arrival:
        """Wait for the next frame and its payload."""
        if not self._announced:
            self._announced.append(self._header(transfer))
        arrival, work = self._announced[0]
        return arrival

    def _header(self, transfer: Transfer) -> tuple[Arrival, dist.Work | None]:
        raise NotImplementedError
