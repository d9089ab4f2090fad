"""Hostile callers of a job's listeners, each kind on one thread of the bench, so that their own work stays small.

- `Flood`: strangers that call all listeners, each with a hostile first frame;
- `BadReaders`: readers of state that are slow, talk garbage, or do not know the token.

`python -m ft_hsdp.bench.hostile FILE` is a sink that strangers can call instead of a job: it writes its address to
FILE, takes connections, looks once at what came, and hangs up.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Self

from ft_hsdp import address, handshake
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Caller, Purpose
from ft_hsdp.launch.run.directory import write_json
from ft_hsdp.protocol import LENGTH

PER_S = 1000  # hostile first frames, of all listeners together
TICK_S = 0.01  # between two looks at how many are due
OPEN = 256  # connections that strangers keep open
BIG = b'{"type":"RingHello","body":{"grant":{"members":[' + b"0," * ((1 << 19) - 100) + b"0]}}}"

READERS = {"slow": 24, "garbage": 8, "stranger": 8}  # connections of each kind
BEAT_S = 1.0  # a slow reader takes a byte; a reader that was hung up on comes back
WINDOW = 4096  # bytes that the kernel takes for a slow reader
CONNECT_S = 0.5
TEXT = 64  # bytes of garbage
STATUS = len("HTTP/1.1 200")


class Hostile(ABC):
    """A context: while it is open, its callers call on a thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Call until it is over."""


class Flood(Hostile):
    """Strangers that call the targets in turn, so many a second."""

    def __init__(self, targets: Sequence[str], per_s: int = PER_S) -> None:
        """Prepare the calls; each of ``targets`` is "host:port", or a local socket's name behind a zero byte."""
        super().__init__()
        self.sent = 0
        self.refused = 0
        self._targets = targets
        self._per_s = per_s
        self._open: deque[socket.socket] = deque()

    def _run(self) -> None:
        kinds, began, sent = frames(), time.monotonic(), 0
        while not self._over.wait(TICK_S):
            due = int((time.monotonic() - began) * self._per_s)
            for number in range(sent, due):
                # Every listener gets every kind, whatever their numbers are.
                turn = number // len(self._targets)
                self._call(self._targets[number % len(self._targets)], kinds[turn % len(kinds)])
            sent = due
        while self._open:
            self._open.popleft().close()

    def _call(self, target: str, frame: bytes) -> None:
        local = target.startswith("\0")
        family = socket.AF_UNIX if local else address.family(address.split(target)[0])
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)  # a full backlog holds up its own stranger only
        self._open.append(sock)
        if len(self._open) > OPEN:
            self._open.popleft().close()
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(target if local else address.split(target))
            sock.send(frame)
            self.sent += 1
        except BlockingIOError:
            self.sent += 1
        except OSError:
            self.refused += 1


def frames(seed: int = 1) -> list[bytes]:
    """Return one of each kind: 1 MiB of a message of wrong items, a wrong proof, HTTP, noise, silence."""
    proof = Caller("0" * 64, Purpose.RING).answer(handshake.MAGIC + os.urandom(handshake.NONCE))
    request = b"GET /v1/state/1/1/00000000000000000000000000000000/0/data HTTP/1.1\r\nHost: x\r\n\r\n"
    return [LENGTH.pack(len(BIG)) + BIG, proof, request, random.Random(seed).randbytes(4096), b""]


class BadReaders(Hostile):
    """Readers of state, `READERS` of each kind, that wake every `BEAT_S`."""

    def __init__(self, addresses: Sequence[str], token: str, wanted: Callable[[], str]) -> None:
        """Prepare the readers of servers at "host:port"; ``wanted`` returns a path that is worth reading."""
        super().__init__()
        # How often each kind got which answer ("slow 200"; "slow gone": it was hung up on), and "beats".
        self.seen: Counter[str] = Counter()
        self._tokens = {"slow": token, "garbage": None, "stranger": "0" * 64}
        self._wanted = wanted
        self._random = random.Random(1)
        kinds = [kind for kind, count in READERS.items() for _ in range(count)]
        self._random.shuffle(kinds)  # a server has room for some: for some of each kind then
        self._readers = [_Reader(kind, where) for kind, where in zip(kinds, cycle(addresses), strict=False)]

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
    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self._address = address.split(where)
        self._sock: socket.socket | None = None
        self._status = b""

    def beat(self, request: Callable[[str], bytes], token: str | None) -> str:
        """Connect, or take one byte more; return what happened, if it is worth counting."""
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
        """Take the status of the answer at once, so that it is known, and then byte after byte."""
        data = sock.recv(1 if len(self._status) == STATUS else STATUS)
        if not data:
            return self._gone()
        if len(data) == 1 or not data.startswith(b"HTTP"):  # one byte more, or the handshake's first frame
            return ""
        self._status = data
        return data[-3:].decode(errors="replace")

    def _gone(self) -> str:
        self.close()
        return "gone"


def serve_sink(file: Path) -> None:
    """Be the sink until killed; it must take less of a processor than a listener of a job."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    write_json(file, {"address": address.join(*listener.getsockname())})
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    callers: deque[socket.socket] = deque()

    def drop(sock: socket.socket) -> None:
        if sock in callers:  # else it was dropped for a newer one since `select` returned
            callers.remove(sock)
            selector.unregister(sock)
            sock.close()

    while True:
        for key, _ in selector.select():
            if isinstance(sock := key.fileobj, socket.socket) and sock is not listener:
                with contextlib.suppress(OSError):
                    sock.recv(handshake.ANSWER_BYTES)
                drop(sock)
                continue
            caller, _ = listener.accept()
            caller.setblocking(False)
            selector.register(caller, selectors.EVENT_READ)
            callers.append(caller)
            if len(callers) > handshake.MAX_STRANGERS:
                drop(callers[0])


if __name__ == "__main__":
    serve_sink(Path(sys.argv[1]))
