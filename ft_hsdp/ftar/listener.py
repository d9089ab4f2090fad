"""Door: where a member's neighbours come in: lives as long as the process, lets in only who knows the job's token.

Behind the handshake the first message is HELLO on a control connection, or the ticket of a data connection that
somebody inside waits for. HELLO carries the whole signed grant, so a member that has not heard of it learns it
here, lighthouse or not, and a stale one is refused with the newer grant in hand.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ft_hsdp import address, handshake, protocol
from ft_hsdp.core.grant import Grant
from ft_hsdp.errors import LocalResourceError, ProtocolViolation
from ft_hsdp.ftar import wire
from ft_hsdp.handshake import Admitted, CallerGate, Purpose
from ft_hsdp.protocol import RingData, RingHello

Call = tuple[RingData, socket.socket]


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Who this end of an edge is; ``layout`` must be the same at both ends."""

    replica: int
    rank: int
    layout: str
    token: str


def hello(identity: MemberIdentity, grant: Grant, host: str, offers: tuple[str, ...], kept: int = -1) -> RingHello:
    """The first message of an edge."""
    return RingHello(grant, identity.replica, identity.rank, identity.layout, host, offers, kept)


class Listener:
    """Listens on TCP, and for callers on the same machine on a Unix socket without a file."""

    def __init__(
        self,
        identity: MemberIdentity,
        arrived: Callable[[RingHello, socket.socket], None],
        exhausted: Callable[[LocalResourceError], None] = lambda error: None,
    ) -> None:
        self._identity = identity
        self._arrived = arrived
        self._gate = CallerGate(identity.token, (Purpose.RING, Purpose.DATA), self._admitted, exhausted)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets: dict[str, asyncio.Queue[Call]] = {}
        self.local = f"ftar-{secrets.token_hex(16)}"

    def open(self, host: str) -> str:
        """Listen on a free port of ``host``; its address."""
        tcp = address.bound(host)
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0" + self.local)
        for sock in (tcp, unix):
            self._gate.watch(sock)
        return address.join(host, tcp.getsockname()[1])

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

    def _admitted(self, proved: Admitted, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._greet(proved, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, proved: Admitted, sock: socket.socket) -> None:
        first = RingHello if proved.purpose is Purpose.RING else RingData
        try:
            async with asyncio.timeout(handshake.hello_s()):
                sock = await handshake.secured(sock, proved.session, proved.purpose, listening=True)
                message = await wire.receive(sock, first)
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
        """Whether a HELLO shows a genuine grant and is of the same rank and layout.

        Raises:
            ProtocolViolation: it is not.
        """
        protocol.verify(self._identity.token, message.grant)
        if (message.rank, message.layout) != (self._identity.rank, self._identity.layout):
            raise ProtocolViolation("HELLO of another rank or layout")

    def _take(self, message: RingData, sock: socket.socket) -> None:
        calls = self._tickets.get(message.ticket)
        if calls is None:
            raise ProtocolViolation("a data connection that nobody waits for")
        calls.put_nowait((message, sock))

    def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        for ticket in list(self._tickets):
            self.forget(ticket)
        self._gate.close()
