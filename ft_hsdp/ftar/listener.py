"""Accepts the connections of other members, for as long as the process lives.

Only callers that prove to know the job's secret get in (`ft_hsdp.handshake`). After that the first message is
either HELLO, on a control connection, or the ticket of a data connection that this member expects. HELLO carries
the whole signed grant: a member that has not heard of the grant learns it here without the lighthouse, and a
caller with a stale grant is refused and sent the newer one.
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
    """Identifies this member to its peers."""

    replica: int
    rank: int
    layout: str  # digest of what is summed and of the sizes; must be the same at both ends of an edge
    token: str  # secret of the job


def hello(identity: MemberIdentity, grant: Grant, host: str, offers: tuple[str, ...], kept: int = -1) -> RingHello:
    """Build the first message of an edge.

    Args:
        identity: this member.
        grant: the signed grant of the ring.
        host: id of this machine.
        offers: transports that this member can use, best first.
        kept: number of chunks sent on the data connection that this end has kept; -1: it has none.
    """
    return RingHello(grant, identity.replica, identity.rank, identity.layout, host, offers, kept)


class Listener:
    """Listens on TCP, and for callers on this machine on an abstract Unix socket. Runs on the control loop.

    Args:
        identity: this member; its token is the secret that callers must know.
        arrived: called with HELLO and its connection, once HELLO is checked.
        exhausted: called when no descriptor or memory is left to accept connections.

    Attributes:
        local: name of the Unix socket, without the leading zero byte.
    """

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
        """Listen on a free port of `host` and on the Unix socket.

        Returns:
            "host:port" of the TCP socket.

        Raises:
            OSError: `host` is not an address of this machine, or no port is left.
        """
        tcp = address.bound(host)
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0" + self.local)
        for sock in (tcp, unix):
            self._gate.watch(sock)
        return address.join(host, tcp.getsockname()[1])

    def expect(self) -> tuple[str, asyncio.Queue[Call]]:
        """Make a new ticket; return it and the queue of the data connections that present it."""
        ticket = secrets.token_hex(16)
        self._tickets[ticket] = asyncio.Queue()
        return ticket, self._tickets[ticket]

    def forget(self, ticket: str) -> None:
        """Cancel a ticket and close the connections that still wait in its queue."""
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
        """Check that a HELLO carries a genuine grant and comes from the same rank and layout.

        Raises:
            ProtocolViolation: it does not.
        """
        protocol.verify(self._identity.token, message.grant)
        if (message.rank, message.layout) != (self._identity.rank, self._identity.layout):
            raise ProtocolViolation("HELLO of another rank or layout")

    def _take(self, message: RingData, sock: socket.socket) -> None:
        calls = self._tickets.get(message.ticket)
        if calls is None:
            raise ProtocolViolation("a data connection that is not expected")
        calls.put_nowait((message, sock))

    def close(self) -> None:
        """Stop listening and close all connections that were not taken."""
        for task in self._tasks:
            task.cancel()
        for ticket in list(self._tickets):
            self.forget(ticket)
        self._gate.close()
