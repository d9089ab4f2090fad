"""Edges: how the connections of a ring are made, for one grant at a time.

Each member dials its right neighbour twice, once for data and once for control, and is dialled twice by its left
one. HELLO carries the whole signed grant, so a member that has not heard of it learns it here, lighthouse or not,
and a stale one is refused with the newer grant in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Literal

from ft_hsdp import protocol
from ft_hsdp.core.assignment import Grant
from ft_hsdp.errors import ConnectFailed, ProtocolViolation, StaleEpoch
from ft_hsdp.protocol import RingAbort, RingHello, RingWelcome

HELLO_TIMEOUT_S = 5.0
ACCEPT_RETRY_S = 0.05
Channel = Literal["data", "control"]


async def send(sock: socket.socket, message: object) -> None:
    """Send one control message."""
    await asyncio.get_running_loop().sock_sendall(sock, protocol.frame(message))


async def receive(sock: socket.socket, *expected: type) -> object | None:
    """Receive one control message; None at the end of the stream.

    Raises:
        ProtocolViolation: it is too large or not of an expected type.
    """
    head = await _exactly(sock, protocol.LENGTH.size)
    if head is None:
        return None
    (length,) = protocol.LENGTH.unpack(head)
    if length > protocol.MAX_MESSAGE:
        raise ProtocolViolation(f"message of {length} bytes; allowed: {protocol.MAX_MESSAGE}")
    body = await _exactly(sock, length)
    return None if body is None else protocol.decode(body, *expected)


async def _exactly(sock: socket.socket, count: int) -> bytes | None:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def tune(sock: socket.socket, timeout_s: float) -> None:
    """No delay, a congestion control that suits a fast link, and an end to silence of ``timeout_s``."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
    if sock.getpeername()[0].startswith("127."):
        with contextlib.suppress(OSError):  # the kernel's default serves too
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def blocking(sock: socket.socket, timeout_s: float) -> socket.socket:
    """Make ``sock`` blocking, with kernel deadlines: MSG_WAITALL works only without Python's own timeout."""
    sock.setblocking(True)
    deadline = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
    return sock


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this end of an edge is; ``layout`` must be the same at both ends."""

    replica: int
    rank: int
    layout: str
    token: str


def hello(identity: Identity, grant: Grant, channel: Channel) -> RingHello:
    """The first message of a connection, under the job's token."""
    plain = RingHello(grant, identity.replica, identity.rank, channel, identity.layout)
    return replace(plain, mac=_mac(identity.token, plain))


def _mac(token: str, h: RingHello) -> str:
    return protocol.mac(token, *_claims(h))


def _claims(h: RingHello) -> tuple[object, ...]:
    """What the MAC of a HELLO covers."""
    return ("ring", h.grant.mac, h.replica, h.rank, h.channel, h.layout)


async def dial(
    identity: Identity, grant: Grant, address: str, channel: Channel, timeout_s: float
) -> socket.socket:
    """Connect to the right neighbour and wait until it is in the same epoch.

    Raises:
        StaleEpoch: it knows a newer grant or refuses this one; ``newer`` holds the grant that it showed.
        ConnectFailed: nobody answered.
    """
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        tune(sock, timeout_s)
        await send(sock, hello(identity, grant, channel))
        answer = await receive(sock, RingWelcome, RingAbort)
    except (OSError, ProtocolViolation) as error:
        sock.close()
        raise ConnectFailed(f"{address}: {error}") from error
    except BaseException:
        sock.close()
        raise
    if isinstance(answer, RingWelcome) and answer.epoch == grant.epoch:
        return sock
    sock.close()
    if isinstance(answer, RingAbort):
        raise Refusal(answer)
    raise ConnectFailed(f"{address} closed the connection")


class Refusal(StaleEpoch):
    """The neighbour refused the grant; ``abort`` says why and may hold a newer one."""

    def __init__(self, abort: RingAbort) -> None:
        super().__init__(abort.cause)
        self.abort = abort


class Listener:
    """The door of one rank: lives as long as the process, hands over connections whose HELLO is genuine."""

    def __init__(self, identity: Identity, arrived: Callable[[RingHello, socket.socket], None]) -> None:
        self._identity = identity
        self._arrived = arrived
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, host: str) -> str:
        """Listen on a free port of ``host``; its "host:port"."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind((host, 0))
        self._sock.listen(64)
        self._sock.setblocking(False)
        self._spawn(self._accept())
        return f"{host}:{self._sock.getsockname()[1]}"

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError:  # a caller that is gone already, or no file left for it: the next one counts too
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            sock.setblocking(False)
            self._spawn(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await receive(sock, RingHello)
            if not isinstance(message, RingHello):
                raise ProtocolViolation("closed before HELLO")
            protocol.verify(self._identity.token, message.grant)
            if not protocol.genuine(self._identity.token, message.mac, *_claims(message)):
                raise ProtocolViolation("HELLO has a wrong MAC")
            if (message.rank, message.layout) != (self._identity.rank, self._identity.layout):
                raise ProtocolViolation("HELLO of another rank or model layout")
        except (OSError, TimeoutError, ProtocolViolation):
            sock.close()
            return
        self._arrived(message, sock)

    def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        self._sock.close()
