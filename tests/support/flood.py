"""Strangers that call listeners, each with a hostile first frame."""

import contextlib
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from ft_hsdp import address, handshake
from ft_hsdp.handshake import Caller, Purpose
from ft_hsdp.protocol import LENGTH

PER_S = 1000  # calls of all listeners together
TICK_S = 0.01  # between two looks at how many are due
OPEN = 256  # connections that strangers keep open
BIG = b'{"type":"RingHello","body":{"grant":{"members":[' + b"0," * ((1 << 19) - 100) + b"0]}}}"


class Flood:
    """A context: strangers call the targets in turn on a thread, so many a second."""

    def __init__(self, targets: Sequence[str], per_s: int = PER_S) -> None:
        """Prepare the calls; each of ``targets`` is "host:port", or a local socket's name behind a zero byte."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strangers", daemon=True)
        self.sent = 0
        self.refused = 0
        self._targets = targets
        self._per_s = per_s
        self._open: deque[socket.socket] = deque()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

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
