"""What passes between hosts is encrypted: records, connections, a ring and a fetch; and what is not is refused."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ft_hsdp import record_layer
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.record_layer import Direction, KeyExchange, Sealed
from tests.support.refused import refused

SESSION = b"s" * 32
KEY = b"k" * 16


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    yield
    record_layer.use("auto")


def tcp() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def both(*calls: Callable[[], Any]) -> list[Any]:
    """What calls give that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(10) for each in [pool.submit(call) for call in calls]]


@pytest.fixture
def ends() -> Iterator[tuple[Sealed, Sealed]]:
    """Both ends of an encrypted connection."""
    one, other = tcp()
    a, b = Sealed(one, SESSION, False), Sealed(other, SESSION, True)
    both(lambda: a.agree(b"x"), lambda: b.agree(b"x"))
    with a, b:
        yield a, b


def opened(direction: Direction, record: bytes) -> bytes:
    data = bytearray(record_layer.length(record[: record_layer.HEAD]))
    direction.open_into(record[: record_layer.HEAD], memoryview(record)[record_layer.HEAD :], memoryview(data))
    return bytes(data)


def test_both_ends_agree_on_two_keys_and_nobody_in_between_does() -> None:
    caller, listener = KeyExchange(SESSION, False), KeyExchange(SESSION, True)
    (out, into), (out2, into2) = caller.accept(listener.offer), listener.accept(caller.offer)
    assert opened(into2, out.seal(b"there")) == b"there"
    assert opened(into, out2.seal(b"back")) == b"back"
    assert caller.offer[:32] != KeyExchange(SESSION, False).offer[:32], "fresh for each connection"
    for offer in (
        KeyExchange(b"t" * 32, True).offer,  # does not know the secret
        caller.offer,  # its own, sent back
        KeyExchange(SESSION, True, b"other").offer,  # means another connection
        os.urandom(64),
    ):
        with pytest.raises(ConnectionAbortedError):
            caller.accept(offer)


@pytest.mark.parametrize("harm", ["changed", "repeated", "left out", "length", "swapped"])
def test_a_record_that_is_not_the_next_one_ends_it(harm: str) -> None:
    out, into = Direction(KEY), Direction(KEY)
    first, second = out.seal(b"first record"), out.seal(b"second record")
    if harm == "repeated":
        opened(into, first)
        second = first
    elif harm == "changed":
        opened(into, first)
        second = second[:-1] + bytes([second[-1] ^ 1])
    elif harm == "length":
        opened(into, first)
        second = (len(b"second record") - 1).to_bytes(4, "big") + second[4:-1]
    with pytest.raises(ConnectionAbortedError):
        opened(into, second)


def test_keys_change_after_so_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Direction(KEY)
    with_one_key = [first.seal(b"%d" % n) for n in range(10)]
    monkeypatch.setattr(record_layer, "REKEY", 3)
    out, into = Direction(KEY), Direction(KEY)
    records = [out.seal(b"%d" % n) for n in range(10)]
    assert [opened(into, record) for record in records] == [b"%d" % n for n in range(10)]
    assert [a == b for a, b in zip(records, with_one_key, strict=True)] == [True] * 3 + [False] * 7


@pytest.mark.parametrize("head", [0, record_layer.RECORD + 1, 2**32 - 1])
def test_the_size_of_a_record_is_bounded(head: int) -> None:
    with pytest.raises(ConnectionAbortedError, match="a record of"):
        record_layer.length(head.to_bytes(4, "big"))


@pytest.mark.parametrize(
    "size", [1, 16, record_layer.RECORD, record_layer.RECORD + 1, 3 * record_layer.RECORD + 7]
)
def test_bytes_arrive_as_they_were_sent(ends: tuple[Sealed, Sealed], size: int) -> None:
    one, other = ends
    data, got = os.urandom(size), bytearray(size)
    _, n = both(lambda: one.sendall(data), lambda: other.recv_into(got, 0, socket.MSG_WAITALL))
    assert (n, bytes(got)) == (size, data)


def test_parts_that_are_no_records_and_both_ways_at_once(ends: tuple[Sealed, Sealed]) -> None:
    one, other = ends
    data = os.urandom(100_000)

    def take(end: Sealed) -> bytes:
        got = b""
        while len(got) < len(data):
            got += end.recv(777)
        return got

    sent, back, there, here = both(
        lambda: one.sendmsg([data[:10], memoryview(data)[10:]]),
        lambda: other.sendall(data),
        lambda: take(other),
        lambda: take(one),
    )
    assert (sent, back, there, here) == (len(data), None, data, data)


def test_nothing_readable_passes_and_what_is_changed_ends_it() -> None:
    (one, left), (right, other) = tcp(), tcp()
    a, b = Sealed(one, SESSION, False), Sealed(other, SESSION, True)
    wire, flip = bytearray(), threading.Event()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test closes the sockets
            while data := bytearray(source.recv(65536)):
                wire.extend(data)
                if flip.is_set():
                    data[-1] ^= 1
                target.sendall(data)

    for pair in ((left, right), (right, left)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
    both(a.agree, b.agree)
    secret = b"the weights of a model " * 100
    a.sendall(secret)
    assert b.recv(len(secret), socket.MSG_WAITALL) == secret
    assert b"weights" not in wire
    flip.set()
    a.sendall(secret)
    with pytest.raises(ConnectionAbortedError, match="changed on its way"):
        b.recv(10)
    for sock in (a, b):
        sock.close()
    for sock in (left, right):
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def test_an_end_inside_a_record_is_no_end(ends: tuple[Sealed, Sealed]) -> None:
    one, other = ends
    socket.socket.sendall(one, (100).to_bytes(4, "big") + b"part")
    one.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionResetError, match="in the middle of a record"):
        other.recv(10)


def test_a_plain_end_is_refused_and_not_believed() -> None:
    one, other = tcp()
    with Sealed(one, SESSION, False) as end, other:
        other.sendall(b"plain words, as many as a key has, and a few more than that to be sure")
        with pytest.raises(ConnectionAbortedError, match=r"network\.tls"):
            end.agree()


@pytest.mark.parametrize(("mode", "wanted"), [("auto", False), ("on", True), ("off", False)])
def test_within_a_host_it_is_for_the_mode_to_say(mode: record_layer.Mode, wanted: bool) -> None:
    record_layer.use(mode)
    one, other = tcp()
    with one, other:
        assert (record_layer.wanted(one), record_layer.wanted(other)) == (wanted, wanted)
    near, far = socket.socketpair()
    with near, far:
        assert not record_layer.wanted(near)


class Elsewhere(socket.socket):
    """A connection whose other end is on another host."""

    def getpeername(self) -> tuple[str, int]:
        return ("10.0.0.2", 1)

    def getsockname(self) -> tuple[str, int]:
        return ("10.0.0.1", 1)


def test_between_hosts_it_is_encrypted_unless_that_is_off() -> None:
    with Elsewhere() as sock:
        assert record_layer.wanted(sock)
        record_layer.use("off")
        assert not record_layer.wanted(sock)


async def test_a_control_connection_is_carried_both_ways_and_ends_as_it_should() -> None:
    record_layer.use("on")
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    one, other = tcp()
    for sock in (one, other):
        sock.setblocking(False)
    a, b = await asyncio.gather(
        record_layer.spliced(one, SESSION, listening=False), record_layer.spliced(other, SESSION, listening=True)
    )
    data = os.urandom(600_000)
    sending = loop.create_task(loop.sock_sendall(a, data))
    got = b""
    while len(got) < len(data):
        got += await loop.sock_recv(b, 65536)
    await sending
    assert got == data
    await loop.sock_sendall(b, b"last words")
    b.close()
    assert await loop.sock_recv(a, 100) == b"last words"
    assert await loop.sock_recv(a, 100) == b""
    assert record_layer.within_host(a), "127.0.0.1, as its connection says"
    a.close()
    await asyncio.wait(asyncio.all_tasks() - before)


@pytest.mark.parametrize(("written", "mode"), [("off", "off"), (True, "on"), (False, "off"), ("auto", "auto")])
def test_yaml_says_on_and_off_in_its_own_way(written: object, mode: str) -> None:
    assert parse({"network": {"tls": written}}).network.tls == mode


def test_what_cannot_be_encrypted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ftar.transport: got 'c10d'.*gloo does not encrypt"):
        parse({"network": {"tls": "on"}, "ftar": {"transport": "c10d"}})
    refused(lambda: parse({"network": {"tls": "maybe"}}), r"network.tls")
