"""The connections between two members: how they are accepted, the messages on them, and one connected neighbour.

`send`, `say` and `receive` carry the small control messages; `tune` sets the options of sockets.

`Listener` accepts other members for as long as the process lives. Only callers that prove to know the job's secret
get in (`ft_hsdp.handshake`). After that the first message is either HELLO, on a control connection, or the ticket
of a data connection that this member expects. HELLO carries the whole signed grant: a member that has not heard of
the grant learns it here without the lighthouse, and a caller with a stale grant is refused and sent the newer one.

`Peer` is one edge of a ring: the control connection to a neighbour, and the data connection beside it. An edge
outlives its epoch if the next ring has the same two members side by side and no all-reduce broke on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp import address, caller_gate, fault_injection, handshake, protocol
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.errors import LocalResourceError, ProtocolViolation
from ft_hsdp.ftar.transport.receiver import StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.handshake import Admitted, Purpose
from ft_hsdp.protocol import RingAbort, RingBarrier, RingBeat, RingData, RingHello, RingReady, RingWelcome
from ft_hsdp.record_layer import within_host

FAREWELL_S = 0.5  # how long `hang_up` waits for the peer to close
LOOPBACK_BUFFER = 256 * 1024  # bytes
READ_BYTES = 64 * 1024  # at once from a control connection


async def send(sock: socket.socket, message: object) -> None:
    """Send one message; wait until the kernel has taken all of it."""
    await asyncio.get_running_loop().sock_sendall(sock, protocol.frame(message))


def say(sock: socket.socket, message: object) -> None:
    """Send one small message now or not at all: the peer may be gone, and the caller does not wait for it."""
    with contextlib.suppress(OSError):
        sock.send(protocol.frame(message), socket.MSG_DONTWAIT)


async def receive(sock: socket.socket, *expected: type) -> object | None:
    """Receive one message.

    Args:
        sock: a non-blocking socket.
        *expected: the message types that are allowed here.

    Returns:
        The message; None at the end of the stream.

    Raises:
        ProtocolViolation: the message is too large or not of an expected type.
        OSError: the connection broke.
    """
    head = await _exactly(sock, protocol.LENGTH.size)
    if head is None:
        return None
    body = await _exactly(sock, protocol.frame_length(head))
    return None if body is None else protocol.decode(body, *expected)


async def _exactly(sock: socket.socket, count: int) -> bytes | None:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


async def present(sock: socket.socket, ticket: RingData) -> RingReady:
    """Present the ticket of a data connection, and return the neighbour's answer.

    Raises:
        ConnectionResetError: the neighbour refused the connection.
        ProtocolViolation: the neighbour sent anything else.
        OSError: the connection broke.
    """
    await send(sock, ticket)
    answer = await receive(sock, RingReady)
    if not isinstance(answer, RingReady):
        raise ConnectionResetError("the data connection was refused")
    return answer


@contextlib.contextmanager
def closed_on_error(socks: Sequence[socket.socket]) -> Iterator[None]:
    """Close all `socks` if the ``with`` block fails; a thread that waits in one of them wakes up."""
    try:
        yield
    except BaseException:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        raise


async def hang_up(sock: socket.socket) -> None:
    """Close a connection once the peer has closed its end, or after `FAREWELL_S`.

    An immediate close could reset the connection and lose the last message.
    """
    try:
        with contextlib.suppress(OSError, TimeoutError):
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(FAREWELL_S):
                while await asyncio.get_running_loop().sock_recv(sock, 4096):
                    pass
    finally:
        sock.close()


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Set the options of a connection: no delay, and an error if sent bytes stay unacknowledged for `timeout_s`.

    On loopback also choose what suits memory instead of a network: no pacing, and buffers small enough that each
    byte stays in the cache between its two copies. Unix sockets stay as they are.
    """
    if sock.family == socket.AF_UNIX:
        return
    fault_injection.in_ring(sock)
    address.tune(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
    if address.local(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


Call = tuple[RingData, socket.socket]


@dataclass(frozen=True, slots=True)
class LaneRing:
    """One of the rings of a membership that a rank takes part in: those of a lane (`memory.lanes`).

    Two of them are the same lane, whose edges may be kept, if number and layout are equal.
    """

    number: int  # of the lane; with replicas of equal width the number of the rank
    layout: str  # digest of what is summed and of the sizes; must be the same at both ends of an edge
    owners: tuple[tuple[int, int], ...] = ()  # (width, rank that has the lane); (): of any width, rank `number`

    @property
    def usual(self) -> bool:
        """Whether it is the ring of the ranks with one number, as in replicas of equal width."""
        return not self.owners

    def address(self, member: Member) -> str:
        """Return where `member` listens for its neighbour in this lane, "host:port".

        Raises:
            ProtocolViolation: no rank of it has the lane.
        """
        return member.ring[self.rank_of(member)]

    def rank_of(self, member: Member) -> int:
        """Return the rank of `member` that has this lane.

        Raises:
            ProtocolViolation: no rank of it has the lane.
        """
        width = len(member.ring)
        rank = dict(self.owners).get(width, -1) if self.owners else self.number
        if not 0 <= rank < width:
            raise ProtocolViolation(f"replica {member.replica} of {width} ranks has no lane {self.number}")
        return rank


LanesOf = Callable[[Grant], tuple[LaneRing, ...]]
"""Returns the lanes of a grant in which this rank takes part, by ascending number."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    replica: int
    rank: int  # number of the lane; with replicas of equal width the number of the rank
    layout: str  # digest of what is summed and of the sizes; must be the same at both ends of an edge
    token: str  # secret of the job

    def lanes(self, _: Grant | None = None) -> tuple[LaneRing, ...]:
        """Return the only lane of a rank whose replica is as wide as all others, of any grant."""
        return (LaneRing(self.rank, self.layout),)


def hello(identity: MemberIdentity, grant: Grant, host: str, offers: tuple[str, ...], kept: int = -1) -> RingHello:
    """Build the first message of an edge.

    Args:
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
        lanes: returns the lanes of a grant in which this rank takes part; None: always that of `identity`.

    Attributes:
        local: name of the Unix socket, without the leading zero byte.
    """

    def __init__(
        self,
        identity: MemberIdentity,
        arrived: Callable[[RingHello, socket.socket], None],
        exhausted: Callable[[LocalResourceError], None] = lambda error: None,
        lanes: LanesOf | None = None,
    ) -> None:
        self._identity = identity
        self._lanes_of = lanes or identity.lanes
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
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # maybe before its first line
                sock.close()

        task = asyncio.get_running_loop().create_task(self._greet(proved, sock))
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _greet(self, proved: Admitted, sock: socket.socket) -> None:
        first = RingHello if proved.purpose is Purpose.RING else RingData
        try:
            async with asyncio.timeout(caller_gate.hello_s()):
                sock = await handshake.secured(sock, proved.session, proved.purpose, listening=True)
                message = await receive(sock, first)
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
        """Check that a HELLO carries a genuine grant and is for a lane of this rank, with the same layout.

        Raises:
            ProtocolViolation: it does not.
        """
        protocol.verify(self._identity.token, message.grant)
        if (message.rank, message.layout) not in [(r.number, r.layout) for r in self._lanes_of(message.grant)]:
            raise ProtocolViolation("HELLO of another rank, lane or layout")

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


_MESSAGES = (CommitToken, RingAbort, RingHello, RingWelcome, RingBarrier, RingBeat)
Heard = Callable[["Peer", object], None]


class Peer:
    """The member at the other end of the control connection `sock`. Runs on the control loop.

    Args:
        sock: the connection, non-blocking and past the handshake.
        heard: called with (peer, message) for each message except heartbeats, and at the end with (peer, error),
            an OSError or ProtocolViolation that tells how the connection ended.
    """

    def __init__(self, sock: socket.socket, heard: Heard) -> None:
        self._sock = sock
        self._heard = heard
        self.member: Member | None = None  # known once HELLO was said or heard
        self.receiver: StreamReceiver | None = None  # of the left neighbour
        self.sender: StreamSender | None = None  # of the right neighbour
        self.transport = ""  # of the data connection
        self.gone = False  # the connection has ended, or is not used any more
        self.leaving = False  # it has said that it leaves the ring: the end of its connection is no failure
        self.heard_at = time.monotonic()  # when its last bytes came, monotonic seconds
        self.newest = RingBeat(0, 0, 0)  # its last heartbeat, of any epoch
        self.same_host = within_host(sock)  # then its process can be inspected in /proc
        self._closed = False
        self._reading = False
        self._unread = bytearray()  # the beginning of a message
        self._writing = asyncio.Lock()

    def belongs_to(self, heard: Heard) -> None:
        """Have `heard` called from now on, before the first `listen`: a caller's lane is known after its HELLO."""
        self._heard = heard

    @property
    def _replica(self) -> int | None:
        return None if self.member is None else self.member.replica

    def listen(self) -> None:
        """Begin to read messages, unless that was done before or the connection has ended."""
        if not self._reading and not self.gone:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._sock, self._read)

    def _read(self) -> None:
        """Take what has come. The loop watches the socket all the time: heartbeats come often."""
        end: Exception = ConnectionResetError("closed its connection")
        try:
            if part := self._sock.recv(READ_BYTES):
                self.heard_at = time.monotonic()
                self._unread += part
                for body in self._bodies():
                    message = protocol.beat_in(body) or protocol.decode(body, *_MESSAGES)
                    if isinstance(message, RingBeat):
                        self.newest = message
                    elif not self._closed:
                        self._heard(self, message)
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            end = ConnectionResetError(str(error))
        except ProtocolViolation as error:
            end = error
        self._read_no_more()
        if not self._closed:
            self.gone = True
            self._heard(self, end)

    def _bodies(self) -> Iterator[bytes]:
        """Yield the encoded messages that are here as a whole. Raises ProtocolViolation if one is too large."""
        unread, size = self._unread, protocol.LENGTH.size
        while len(unread) >= size and len(unread) >= (end := size + protocol.frame_length(bytes(unread[:size]))):
            body = bytes(unread[size:end])
            del unread[:end]
            yield body

    def _read_no_more(self) -> None:
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._sock)

    def send_heartbeat(self, frame: bytes) -> None:
        """Send an encoded heartbeat without waiting.

        It is left out while another message is being sent, since any bytes are a sign of life. If the kernel takes
        only a part of it, the peer has not read for a long time, and the connection is shut down.
        """
        if self.gone or self._writing.locked() or fault_injection.cut(self._replica):
            return
        with contextlib.suppress(OSError):
            if self._sock.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self._sock.shutdown(socket.SHUT_RDWR)

    def say(self, message: object) -> None:
        """Send a small message now or not at all.

        A peer that is gone or does not read shows by the end of its connection.
        """
        if not self.gone and not self._writing.locked() and not fault_injection.cut(self._replica):
            say(self._sock, message)

    async def send(self, message: object) -> None:
        """Send a message of any size; wait until the kernel has taken it.

        Raises:
            OSError: the connection has ended.
        """
        async with self._writing:
            if self._replica is not None:
                await fault_injection.passes(self._replica, given_up=lambda: self.gone)
            if self.gone:
                raise ConnectionResetError("closed its connection")
            await send(self._sock, message)

    def cut(self) -> None:
        """Send no more messages, and close the data connection; its users get an error."""
        self.gone = True
        for end in (self.receiver, self.sender):
            if end is not None:
                end.close()

    def release(self) -> None:
        """Give the data connection to the ring alone, which disposes of it."""
        self.receiver = self.sender = None

    async def close(self) -> None:
        """Close the connection, and a data connection that no ring owns; wait until its threads have ended."""
        if self._closed:
            return
        self._closed = self.gone = True
        self._read_no_more()
        ends: list[Any] = [e for e in (self.receiver, self.sender) if e is not None]
        self.receiver = self.sender = None
        for end in ends:
            end.close()
            await asyncio.to_thread(end.dispose)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        async with self._writing:  # a pending send gets its error first: the loop must not watch a closed socket
            await hang_up(self._sock)
