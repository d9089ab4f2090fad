import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest

from ft_hsdp import caller_gate, handshake, protocol
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.errors import EXIT_RETRYABLE, LocalResourceError, ProtocolViolation, exhausted
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.connections import Listener, MemberIdentity
from ft_hsdp.ftar.rendezvous import Rendezvous
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingAbort, RingData
from tests.support.ftar.ring_helpers import LAYOUT, TOKEN, Ring, grant
from tests.support.known import streams
from tests.support.waiting import async_until

ME, OTHER = MemberIdentity(0, 0, LAYOUT, TOKEN), MemberIdentity(1, 0, LAYOUT, TOKEN)


async def test_control_messages() -> None:
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.setblocking(False)
    await connections.send(a, RingAbort(3, "why"))
    connections.say(a, RingAbort(4, "why not"))
    assert await connections.receive(b, RingAbort) == RingAbort(3, "why")
    assert await connections.receive(b, RingAbort) == RingAbort(4, "why not")
    await connections.send(a, RingAbort(3, "why"))
    with pytest.raises(ProtocolViolation):
        await connections.receive(b, CommitToken)
    a.send(protocol.LENGTH.pack(2**31))
    with pytest.raises(ProtocolViolation, match="allowed"):
        await connections.receive(b, RingAbort)
    a.send(protocol.LENGTH.pack(10) + b"half")
    a.close()
    assert await connections.receive(b, RingAbort) is None
    b.close()


async def test_what_was_said_last_arrives() -> None:
    """A socket that is closed with unread data is reset, and the reset destroys what is on the way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    for sock in (a, b):
        sock.setblocking(False)
    b.send(b"unread")
    connections.say(a, RingAbort(3, "why"))
    leaving = asyncio.create_task(connections.hang_up(a))
    assert await connections.receive(b, RingAbort) == RingAbort(3, "why")
    assert await connections.receive(b, RingAbort) is None
    b.close()
    await leaving
    assert a.fileno() == -1


def test_saying_something_to_nobody_is_no_error() -> None:
    a, b = socket.socketpair()
    b.close()
    connections.say(a, RingAbort(3, "why"))
    a.close()
    connections.say(a, RingAbort(3, "why"))


@pytest.fixture
def brief_hello() -> Iterator[None]:
    """Callers have a moment to prove the token, and to say hello."""
    usual = caller_gate.hello_s()
    caller_gate.use(0.05)
    yield
    caller_gate.use(usual)


@pytest.mark.usefixtures("brief_hello")
async def test_a_caller_that_says_nothing_is_hung_up_on() -> None:
    here = Listener(OTHER, lambda *_: pytest.fail("nobody said hello"))
    address = here.open("127.0.0.1")
    reader, writer = await streams(address, TOKEN, Purpose.RING)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    await writer.wait_closed()
    here.close()
    await asyncio.sleep(0)


async def test_a_caller_that_is_let_in_as_the_listener_closes_is_hung_up_on() -> None:
    here = Listener(OTHER, lambda *_: pytest.fail("nobody said hello"))
    ours, theirs = socket.socketpair()
    with theirs:
        here._admitted(handshake.Admitted(Purpose.RING, b"", b""), ours)
        here.close()  # before the loop has begun to read its hello
        await async_until(lambda: ours.fileno() < 0, "its connection is closed", 20.0)


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "unix"])
async def test_data_connections_come_with_a_ticket(local: bool) -> None:
    here = Listener(OTHER, lambda *_: pytest.fail("nobody said hello"))
    address = here.open("127.0.0.1")

    async def call(message: object) -> socket.socket:
        sock = await handshake.dial("\0" + here.local if local else address, TOKEN, Purpose.DATA)
        await connections.send(sock, message)
        return sock

    ticket, calls = here.expect()
    good = RingData(ticket, 1, 99)
    first, second = await call(good), await call(RingData(ticket, 2))
    got = await calls.get()
    assert got[0] == good
    await async_until(lambda: not calls.empty(), "the second call")
    refused = await call(RingData("ab" * 16, 0))
    assert await asyncio.get_running_loop().sock_recv(refused, 1) == b""
    refused.close()
    here.forget(ticket)
    assert await asyncio.get_running_loop().sock_recv(second, 1) == b"", "it was not taken"
    late = await call(good)
    assert await asyncio.get_running_loop().sock_recv(late, 1) == b"", "nobody waits for it any more"
    for sock in (first, second, late, got[1]):
        sock.close()
    here.close()
    await asyncio.sleep(0)


# A rank that has run out of descriptors, ports or memory names itself and ends; no neighbour is blamed.


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
def test_what_is_used_up_is_named_with_its_limit(number: int) -> None:
    error = exhausted(OSError(number, os.strerror(number)))
    assert error is not None
    assert error.exit_code == EXIT_RETRYABLE
    assert errno.errorcode[number] in str(error)
    assert "RLIMIT" in str(error) or "/proc/sys" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "number", [errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EAGAIN, errno.EPIPE]
)
def test_what_a_neighbour_may_have_caused_is_not_local(number: int) -> None:
    assert exhausted(OSError(number, os.strerror(number))) is None


def test_a_local_error_is_found_behind_what_was_raised_from_it() -> None:
    raised = httpx.ConnectError("All connection attempts failed")
    raised.__cause__ = ExceptionGroup("all", [OSError(errno.EMFILE, "none left")])
    assert exhausted(raised) is not None
    assert exhausted(RuntimeError("can't start new thread")) is not None
    assert exhausted(MemoryError()) is not None
    assert exhausted(RuntimeError("something else")) is None


@pytest.mark.parametrize("side", ["_call", "_admit"])
async def test_a_member_without_descriptors_names_itself(side: str) -> None:
    """It may be the one that calls or the one that is called; the others hear whose fault it is."""
    usual = getattr(Rendezvous, side)
    ended: list[Exception] = []

    async def fail(rendezvous: Rendezvous, *arguments: Any) -> None:
        if rendezvous.position == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        await usual(rendezvous, *arguments)

    with mock.patch.object(Rendezvous, side, fail):
        async with Ring(0, 1, 2) as ring:
            ring.peers[1].group.crashed = lambda message, error: ended.append(error)  # type: ignore[method-assign]
            for peer in ring.peers:
                peer.group.configure(grant(1, ring.addresses))
            await async_until(lambda: all(p.broken for p in ring.peers), "all know")
            assert [p.broken[0].suspect for p in ring.peers] == [1, 1, 1]
            assert all("RLIMIT_NOFILE" in p.broken[0].cause for p in ring.peers)
    assert ended
    assert all(isinstance(error, LocalResourceError) for error in ended)
