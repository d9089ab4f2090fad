from __future__ import annotations

import asyncio
import socket

import pytest
from ring_helpers import BASE, LAYOUT, TOKEN, grant, run, until

from ft_hsdp import protocol
from ft_hsdp.core.commit import Token
from ft_hsdp.errors import ConnectFailed, ProtocolViolation
from ft_hsdp.ftar import edges
from ft_hsdp.ftar.edges import Identity, Listener, Refusal
from ft_hsdp.protocol import RingAbort, RingHello, RingWelcome

ME, OTHER = Identity(0, 0, LAYOUT, TOKEN), Identity(1, 0, LAYOUT, TOKEN)


def test_the_messages_of_edges() -> None:
    async def body() -> None:
        a, b = socket.socketpair()
        for sock in (a, b):
            sock.setblocking(False)
        await edges.send(a, RingAbort(3, "why"))
        assert await edges.receive(b, RingAbort) == RingAbort(3, "why")
        await edges.send(a, RingAbort(3, "why"))
        with pytest.raises(ProtocolViolation):
            await edges.receive(b, Token)
        a.send(protocol.LENGTH.pack(2**31))
        with pytest.raises(ProtocolViolation, match="allowed"):
            await edges.receive(b, RingAbort)
        a.send(protocol.LENGTH.pack(10) + b"half")
        a.close()
        assert await edges.receive(b, RingAbort) is None
        b.close()

    run(body())


@pytest.mark.parametrize("answer", [RingWelcome(3), RingWelcome(2), RingAbort(3, "no"), Token, None])
def test_dial_is_through_only_with_a_welcome_of_its_epoch(answer: object) -> None:
    async def body() -> None:
        callers: list[tuple[RingHello, socket.socket]] = []
        listener = Listener(OTHER, lambda hello, sock: callers.append((hello, sock)))
        address = listener.open("127.0.0.1")
        given = grant(3, {0: "", 1: address})
        call = asyncio.ensure_future(edges.dial(ME, given, address, "control", 5.0))
        await until(lambda: callers, "the call")
        hello, sock = callers[0]
        assert (hello.grant, hello.replica, hello.rank, hello.channel) == (given, 0, 0, "control")
        if answer is Token:
            await edges.send(sock, RingHello(given, 0, 0, "data", LAYOUT))
        elif answer is not None:
            await edges.send(sock, answer)
        sock.close()
        if answer == RingWelcome(3):
            (await call).close()
        else:
            with pytest.raises(Refusal if isinstance(answer, RingAbort) else ConnectFailed) as refused:
                await call
            if isinstance(refused.value, Refusal):
                assert refused.value.abort == answer
        listener.close()
        await asyncio.sleep(0)

    run(body())


def test_nobody_there() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            gone = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectFailed, match=gone):
            await edges.dial(ME, grant(1, {0: "", 1: gone}), gone, "data", 5.0)

    run(body())


def test_a_hello_is_bound_to_its_sender_channel_and_grant() -> None:
    """Nothing in a genuine HELLO can be exchanged, not even for another genuine thing."""

    async def body() -> None:
        arrived: list[RingHello] = []

        def take(hello: RingHello, sock: socket.socket) -> None:
            arrived.append(hello)
            sock.close()

        listener = Listener(OTHER, take)
        host, port = listener.open("127.0.0.1").split(":")
        good = edges.hello(ME, grant(1, {0: "", 1: ""}), "data")
        other = grant(2, {0: "", 1: ""})
        changes = [{"replica": 1}, {"channel": "control"}, {"grant": other}, {"mac": ""}, {"mac": good.mac[:-1]}]
        for change in ({}, *changes):
            reader, writer = await asyncio.open_connection(host, int(port))
            fields = {name: getattr(good, name) for name in RingHello.__slots__}
            writer.write(protocol.frame(RingHello(**(fields | change))))
            assert await asyncio.wait_for(reader.read(), 2) == b""
            writer.close()
            await writer.wait_closed()
        assert arrived == [good]
        assert arrived[0].grant.base == BASE
        listener.close()
        await asyncio.sleep(0)

    run(body())


def test_a_caller_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "HELLO_TIMEOUT_S", 0.1)

    async def body() -> None:
        listener = Listener(OTHER, lambda *_: pytest.fail("nobody said hello"))
        host, port = listener.open("127.0.0.1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 2) == b""
        writer.close()
        await writer.wait_closed()
        listener.close()
        await asyncio.sleep(0)

    run(body())


def test_a_blocking_socket_gives_up_after_its_time() -> None:
    a, b = socket.socketpair()
    edges.blocking(a, 0.25)
    with pytest.raises(BlockingIOError):
        a.recv_into(bytearray(4), 0, socket.MSG_WAITALL)
    a.close()
    b.close()
