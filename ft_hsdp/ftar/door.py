"""Door: where a member's neighbours come in: lives as long as the process, lets in only who knows the job's token.

A first message is either HELLO, on a control connection, or the ticket of a data connection that somebody inside
waits for. HELLO carries the whole signed grant, so a member that has not heard of it learns it here, lighthouse or
not, and a stale one is refused with the newer grant in hand.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from ft_hsdp import protocol
from ft_hsdp.core.assignment import Grant
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.ftar import control
from ft_hsdp.protocol import RingData, RingHello

HELLO_TIMEOUT_S = 5.0
ACCEPT_RETRY_S = 0.05
Call = tuple[RingData, socket.socket]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this end of an edge is; ``layout`` must be the same at both ends."""

    replica: int
    rank: int
    layout: str
    token: str


def hello(identity: Identity, grant: Grant, host: str, offers: tuple[str, ...], kept: int = -1) -> RingHello:
    """The first message of an edge, under the job's token."""
    plain = RingHello(grant, identity.replica, identity.rank, identity.layout, host, offers, kept)
    return replace(plain, mac=protocol.mac(identity.token, *_claims(plain)))


def _claims(h: RingHello) -> tuple[object, ...]:
    """What the MAC of a HELLO covers."""
    return ("ring", h.grant.mac, h.replica, h.rank, h.layout, h.host, h.offers, h.kept)


def data(token: str, ticket: str, lane: int, probe: int = 0) -> RingData:
    """The first message of a data connection."""
    return RingData(ticket, lane, probe, protocol.mac(token, "data", ticket, lane, probe))


class Door:
    """Listens on TCP, and for callers on the same machine on a Unix socket without a file."""

    def __init__(self, identity: Identity, arrived: Callable[[RingHello, socket.socket], None]) -> None:
        self._identity = identity
        self._arrived = arrived
        self._tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets: dict[str, asyncio.Queue[Call]] = {}
        self.local = f"ftar-{secrets.token_hex(16)}"

    def open(self, host: str) -> str:
        """Listen on a free port of ``host``; its "host:port"."""
        self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._tcp.bind((host, 0))
        self._unix.bind("\0" + self.local)
        for sock in (self._tcp, self._unix):
            sock.listen(64)
            sock.setblocking(False)
            self._spawn(self._accept(sock))
        return f"{host}:{self._tcp.getsockname()[1]}"

    def expect(self) -> tuple[str, asyncio.Queue[Call]]:
        """A new ticket, and the data connections that come with it."""
        ticket = secrets.token_hex(16)
        self._tickets[ticket] = asyncio.Queue()
        return ticket, self._tickets[ticket]

    def forget(self, ticket: str) -> None:
        """Nobody waits for this ticket any more."""
        calls = self._tickets.pop(ticket, None)
        while calls is not None and not calls.empty():
            calls.get_nowait()[1].close()

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # a caller that is gone already, or no file left for it: the next one counts too
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            sock.setblocking(False)
            self._spawn(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await control.receive(sock, RingHello, RingData)
            if isinstance(message, RingData):
                self._take(message, sock)
                return
            if not isinstance(message, RingHello):
                raise ProtocolViolation("closed before HELLO")
            self.check(message)
        except (OSError, TimeoutError, ProtocolViolation):
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        self._arrived(message, sock)

    def check(self, message: RingHello) -> None:
        """Whether a HELLO is genuine and of the same rank and layout.

        Raises:
            ProtocolViolation: it is not.
        """
        protocol.verify(self._identity.token, message.grant)
        if not protocol.genuine(self._identity.token, message.mac, *_claims(message)):
            raise ProtocolViolation("HELLO has a wrong MAC")
        if (message.rank, message.layout) != (self._identity.rank, self._identity.layout):
            raise ProtocolViolation("HELLO of another rank or layout")

    def _take(self, message: RingData, sock: socket.socket) -> None:
        claims = ("data", message.ticket, message.lane, message.probe)
        calls = self._tickets.get(message.ticket)
        if calls is None or not protocol.genuine(self._identity.token, message.mac, *claims):
            raise ProtocolViolation("a data connection that nobody waits for")
        calls.put_nowait((message, sock))

    def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        for ticket in list(self._tickets):
            self.forget(ticket)
        self._tcp.close()
        self._unix.close()
