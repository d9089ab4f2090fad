"""Readers of state as they should not be: slow ones, ones that talk garbage, ones without a token.

One thread that wakes once a second: their own work must not be what a trainer has to wait for.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle

from ft_hsdp import handshake
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Purpose

SLOW, GARBAGE, STRANGERS = 24, 8, 8  # connections of each kind
BEAT_S = 1.0  # a slow reader takes a byte; who was hung up on comes back
WINDOW = 4096  # bytes that the kernel takes for a slow reader
CONNECT_S = 0.5
TEXT = 64  # bytes of garbage


class Crowd:
    """A context: while it is open, they read. addresses: "host:port" of each server; wanted: a path worth reading.

    seen: how often each kind got which answer ("slow 200", "garbage 400"; "slow gone": it was
    hung up on), and "beats".
    """

    def __init__(self, addresses: Sequence[str], token: str, wanted: Callable[[], str]) -> None:
        self.seen: Counter[str] = Counter()
        self._tokens = {"slow": token, "garbage": None, "stranger": "0" * 64}
        self._wanted = wanted
        self._random = random.Random(1)
        self._over = threading.Event()
        where = cycle(addresses)
        kinds = {"slow": SLOW, "garbage": GARBAGE, "stranger": STRANGERS}
        named = [kind for kind, count in kinds.items() for _ in range(count)]
        self._random.shuffle(named)  # a server has room for some: for some of each kind then
        self._readers = [_Reader(kind, next(where)) for kind in named]
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._over.is_set():
            for reader in self._readers:
                if what := reader.beat(self._request, self._tokens[reader.kind]):
                    self.seen[f"{reader.kind} {what}"] += 1
            self.seen["beats"] += 1
            beat = max(beat + BEAT_S, time.monotonic())
            self._over.wait(beat - time.monotonic())
        for reader in self._readers:
            reader.close()

    def _request(self, kind: str) -> bytes:
        if kind == "garbage":
            return self._random.randbytes(TEXT) + b"\r\n\r\n"
        return f"GET {self._wanted()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class _Reader:
    def __init__(self, kind: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.kind = kind
        self._address = host, int(port)
        self._sock: socket.socket | None = None
        self._status = b""

    def beat(self, request: Callable[[str], bytes], token: str | None) -> str:
        """Connect, or take one byte more; what happened, if it is worth counting."""
        try:
            if self._sock is None:
                self._connect(request(self.kind), token)
                return ""
            return self._take(self._sock)
        except BlockingIOError:
            return ""
        except (OSError, ProtocolViolation):
            return self._gone()

    def close(self) -> None:
        """Hang up."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self, request: bytes, token: str | None) -> None:
        self._status = b""
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
        self._sock.settimeout(CONNECT_S)
        self._sock.connect(self._address)
        if token is not None:
            handshake.call_blocking(self._sock, token, Purpose.STATE)
        self._sock.sendall(request)
        self._sock.setblocking(False)

    def _take(self, sock: socket.socket) -> str:
        """The status of the answer comes first and at once, or nothing could be said about it."""
        data = sock.recv(1 if len(self._status) == len("HTTP/1.1 200") else len("HTTP/1.1 200"))
        if not data:
            return self._gone()
        if len(data) == 1 or not data.startswith(b"HTTP"):  # one byte more, or the handshake's first frame
            return ""
        self._status = data
        return data[-3:].decode(errors="replace")

    def _gone(self) -> str:
        self.close()
        return "gone"
