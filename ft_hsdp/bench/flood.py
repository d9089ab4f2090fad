"""Strangers: connections to listeners of a job, each with a hostile first frame; a sink that they go to instead.

``python -m ft_hsdp.bench.flood`` is the sink: it prints its port, takes connections, looks once at what
came, and hangs up.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from ft_hsdp import address, handshake
from ft_hsdp.handshake import Caller, Purpose
from ft_hsdp.protocol import LENGTH

PER_S = 1000  # hostile first frames, of all listeners together
BEAT_S = 0.01
HELD = 256  # connections that strangers keep open
BIG = b'{"type":"RingHello","body":{"grant":{"members":[' + b"0," * ((1 << 19) - 100) + b"0]}}}"


def frames(seed: int = 1) -> list[bytes]:
    """One of each kind: 1 MiB of a message of wrong items, a wrong proof, HTTP, noise, silence."""
    proof = Caller("0" * 64, Purpose.RING).answer(handshake.MAGIC + os.urandom(handshake.NONCE))
    request = b"GET /v1/state/1/1/00000000000000000000000000000000/0/data HTTP/1.1\r\nHost: x\r\n\r\n"
    return [LENGTH.pack(len(BIG)) + BIG, proof, request, random.Random(seed).randbytes(4096), b""]


class Flood:
    """A context: while it is open, strangers call ``targets`` in turn, PER_S a second. ``sent`` counts them.

    targets: "host:port", or a local socket's name behind a zero byte.
    """

    def __init__(self, targets: Sequence[str], per_s: int = PER_S) -> None:
        self.sent = 0
        self.refused = 0
        self._targets = targets
        self._per_s = per_s
        self._over = threading.Event()
        self._held: deque[socket.socket] = deque()
        self._thread = threading.Thread(target=self._run, name="strangers", daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        kinds, began, made = frames(), time.monotonic(), 0
        while not self._over.wait(BEAT_S):
            due = int((time.monotonic() - began) * self._per_s)
            for number in range(made, due):
                # Every listener gets every kind, whatever their numbers are.
                turn = number // len(self._targets)
                self._call(self._targets[number % len(self._targets)], kinds[turn % len(kinds)])
            made = due
        while self._held:
            self._held.popleft().close()

    def _call(self, target: str, frame: bytes) -> None:
        local = target.startswith("\0")
        family = socket.AF_UNIX if local else address.family(address.split(target)[0])
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)  # a full backlog holds up nobody but its own stranger
        self._held.append(sock)
        if len(self._held) > HELD:
            self._held.popleft().close()
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(target if local else address.split(target))
            sock.send(frame)
            self.sent += 1
        except BlockingIOError:
            self.sent += 1
        except OSError:
            self.refused += 1


def main() -> None:
    """Be the sink until killed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)  # noqa: T201 - what the bench reads
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    held: deque[socket.socket] = deque()
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                sock, _ = listener.accept()
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
                held.append(sock)
                if len(held) > handshake.MAX_STRANGERS:
                    _drop(selector, held.popleft())
                continue
            assert isinstance(key.fileobj, socket.socket)
            with contextlib.suppress(OSError):
                key.fileobj.recv(handshake.ANSWER_BYTES)
            held.remove(key.fileobj)
            _drop(selector, key.fileobj)


def _drop(selector: selectors.BaseSelector, sock: socket.socket) -> None:
    selector.unregister(sock)
    sock.close()


if __name__ == "__main__":
    main()
