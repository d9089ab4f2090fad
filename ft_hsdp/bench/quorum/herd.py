"""Herd: many clients of one server, in one process and one thread, that all ask at once.

Both sides of a comparison get the same herd: requests are made before the clock starts, and an answer counts
when its last byte is there.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ft_hsdp.errors import Retryable

CONNECT_S = 5.0
ROUND_S = 10.0  # longest time of one round
READ = 1 << 18


class Wire(Protocol):
    """One connection's protocol."""

    def greeting(self) -> bytes:
        """What is said first."""

    def request(self, message: bytes) -> bytes:
        """The bytes that ask."""

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came: the answer once it is whole, and what must be sent now."""


class Herd:
    """`count` connections to `address`, each with a wire of its own."""

    def __init__(self, address: tuple[str, int], count: int, wire: Callable[[], Wire]) -> None:
        self._epoll = select.epoll()
        self._socks: list[socket.socket] = []
        self._wires = [wire() for _ in range(count)]
        self._who: dict[int, int] = {}
        for number, each in enumerate(self._wires):
            sock = socket.create_connection(address, CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(each.greeting())
            self._socks.append(sock)
            self._who[sock.fileno()] = number
            self._epoll.register(sock, select.EPOLLIN)

    def round(self, messages: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Seconds from the first byte of the first request to the last byte of the last answer, and the answers.

        Raises Retryable where an answer does not come or is none.
        """
        requests = [wire.request(message) for wire, message in zip(self._wires, messages, strict=True)]
        answers: list[bytes | None] = [None] * len(requests)
        open_ = len(requests)
        begin = time.perf_counter()
        for sock, data in zip(self._socks, requests, strict=True):
            sock.sendall(data)
        while open_:
            ready = self._epoll.poll(max(0.0, begin + ROUND_S - time.perf_counter()))
            if not ready:
                raise Retryable(f"{open_} of {len(requests)} answers did not come within {ROUND_S:g} s")
            for descriptor, _ in ready:
                number = self._who[descriptor]
                data = self._socks[number].recv(READ)
                if not data:
                    raise Retryable("the lighthouse closed a connection")
                answer, reply = self._wires[number].feed(data)
                if reply:
                    self._socks[number].sendall(reply)
                if answer is not None:
                    answers[number] = answer
                    open_ -= 1
        return time.perf_counter() - begin, [answer for answer in answers if answer is not None]

    def close(self) -> None:
        """Hang up."""
        for sock in self._socks:
            sock.close()
        self._epoll.close()
