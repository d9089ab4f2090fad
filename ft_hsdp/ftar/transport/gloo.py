"""Gloo: a process group of two at its two ends: how they meet, exchange messages and part.

Gloo cannot abort a receive, but a wait that expires closes all connections of its context and so wakes everybody
who waits there. A pair is cut by such a wait of a millisecond, on a message that nobody sends.
"""

from __future__ import annotations

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

from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout
from ft_hsdp.ftar.settings import Settings

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


class Mirror(dist.Store):
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
        group: dist.ProcessGroupGloo = gloo(Mirror(sock), rank, 2, options)
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
