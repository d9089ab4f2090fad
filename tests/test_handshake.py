"""The handshake at both ends, and what strangers can do to a listener."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ft_hsdp import address, caller_gate, handshake
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.errors import LocalResourceError, ProtocolViolation
from ft_hsdp.handshake import Admitted, Caller, HungUp, Purpose, admit

TOKEN = "ab" * 32


class Listener:
    def __init__(self, *purposes: Purpose, host: str = "127.0.0.1") -> None:
        self.admitted: asyncio.Queue[tuple[Admitted, socket.socket]] = asyncio.Queue()
        self.failed: list[LocalResourceError] = []
        self.gate = CallerGate(
            TOKEN, purposes or (Purpose.RING,), lambda *who: self.admitted.put_nowait(who), self.failed.append
        )
        self.bound = address.bound(host)
        self.where = address.join(host, self.bound.getsockname()[1])

    async def __aenter__(self) -> Listener:
        self.gate.watch(self.bound)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.close()
        while not self.admitted.empty():
            self.admitted.get_nowait()[1].close()

    async def stranger(self, origin: str = "127.0.0.1") -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((origin, 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, address.split(self.where))
        assert (await loop.sock_recv(sock, 100)).startswith(handshake.MAGIC)
        return sock


@pytest.fixture
def hello() -> Iterator[None]:
    """How long a stranger may take is as it was, afterwards."""
    yield
    caller_gate.use(caller_gate.HELLO_S)


async def hung_up_on(sock: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return not await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 10)
    return True


def proof(purpose: Purpose = Purpose.RING, token: str = TOKEN) -> tuple[Caller, bytes, bytes]:
    challenge, caller = os.urandom(handshake.NONCE), Caller(token, purpose)
    return caller, challenge, caller.answer(handshake.MAGIC + challenge)


@pytest.mark.parametrize("purpose", Purpose)
def test_both_ends_prove_the_token_and_share_a_secret(purpose: Purpose) -> None:
    caller, challenge, answer = proof(purpose)
    assert len(answer) == handshake.ANSWER_BYTES <= 256
    proved = admit(TOKEN, (purpose,), challenge, answer)
    assert proved is not None
    assert proved.purpose is purpose
    assert caller.session(proved.proof) == proved.session


def test_every_bit_of_the_answer_counts() -> None:
    _, challenge, answer = proof()
    for bit in range(len(answer) * 8):
        changed = bytearray(answer)
        changed[bit // 8] ^= 1 << bit % 8
        assert admit(TOKEN, tuple(Purpose), challenge, bytes(changed)) is None


def test_a_recorded_answer_is_of_no_use() -> None:
    """Not on another connection, not for another purpose, and not as the listener's own proof."""
    caller, challenge, answer = proof()
    assert admit(TOKEN, (Purpose.RING,), os.urandom(handshake.NONCE), answer) is None
    assert admit(TOKEN, (Purpose.DATA, Purpose.STATE), challenge, answer) is None
    as_data = answer[:4] + bytes([Purpose.DATA]) + answer[5:]
    assert admit(TOKEN, (Purpose.RING, Purpose.DATA), challenge, as_data) is None
    with pytest.raises(ProtocolViolation):
        caller.session(answer[-handshake.MAC :])


async def test_a_listener_challenges_each_connection_anew() -> None:
    """What was recorded of one connection is played back on the next one."""
    async with Listener() as here:
        loop, caller, recorded = asyncio.get_running_loop(), Caller(TOKEN, Purpose.RING), b""
        for known in (True, False):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, address.split(here.where))
            challenge = await loop.sock_recv(sock, handshake.CHALLENGE_BYTES)
            recorded = recorded or caller.answer(challenge)
            await loop.sock_sendall(sock, recorded)
            if known:
                caller.session(await loop.sock_recv(sock, handshake.PROOF_BYTES))
            else:
                assert await hung_up_on(sock)
            sock.close()
        assert here.admitted.qsize() == 1


def test_the_token_itself_never_passes() -> None:
    _, challenge, answer = proof()
    proved = admit(TOKEN, (Purpose.RING,), challenge, answer)
    assert proved is not None
    said = answer + proved.proof
    assert TOKEN.encode() not in said
    assert bytes.fromhex(TOKEN) not in said


@pytest.mark.parametrize("given", [b"", b"x", bytes(36), handshake.MAGIC, b"HTTP/1.1 200 OK\r\n" + bytes(19)])
def test_a_listener_of_something_else(given: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="does not speak"):
        Caller(TOKEN, Purpose.RING).answer(given)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_who_knows_the_token_is_let_in(host: str) -> None:
    async with Listener(Purpose.RING, Purpose.DATA, host=host) as here:
        for purpose in (Purpose.RING, Purpose.DATA):
            sock = await handshake.dial(here.where, TOKEN, purpose)
            proved, theirs = await here.admitted.get()
            assert proved.purpose is purpose
            theirs.send(b"first")
            assert await asyncio.get_running_loop().sock_recv(sock, 9) == b"first"
            sock.close()
            theirs.close()
        assert here.gate.strangers == 0


@pytest.mark.parametrize(
    ("token", "purpose"), [("cd" * 32, Purpose.RING), ("", Purpose.RING), (TOKEN, Purpose.STATE)]
)
async def test_who_does_not_is_hung_up_on(token: str, purpose: Purpose) -> None:
    async with Listener() as here:
        with pytest.raises(HungUp):
            await handshake.dial(here.where, token, purpose)
        assert here.admitted.empty()
        assert here.gate.strangers == 0


async def test_a_caller_that_is_crowded_out_calls_again() -> None:
    here = Listener()
    here.bound.listen()
    here.bound.setblocking(False)
    calling = asyncio.create_task(handshake.dial(here.where, TOKEN, Purpose.RING))
    (await asyncio.get_running_loop().sock_accept(here.bound))[0].close()
    async with here:
        (await calling).close()
        assert not here.admitted.empty()


async def test_a_listener_that_does_not_know_the_token_is_told_nothing() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake.MAGIC + bytes(handshake.NONCE))
        await reader.readexactly(handshake.ANSWER_BYTES)
        writer.write(bytes(handshake.PROOF_BYTES))
        heard.append(await reader.read())
        writer.close()
        over.set()

    heard: list[bytes] = []
    over = asyncio.Event()
    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    with pytest.raises(ProtocolViolation, match="does not know the job's token"):
        await handshake.dial(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", TOKEN, Purpose.RING)
    await over.wait()
    server.close()
    assert heard == [b""]


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"\xff" * 2_000_000, handshake.MAGIC + b"\xff" * 100, b"F"],
)
@pytest.mark.usefixtures("hello")
async def test_noise_is_hung_up_on_at_its_first_wrong_byte(said: bytes) -> None:
    caller_gate.use(60.0)  # not because its time is over
    async with Listener() as here:
        sock = await here.stranger()
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(sock, said)
        if handshake.MAGIC.startswith(said):  # nothing is wrong with it yet
            sock.shutdown(socket.SHUT_WR)
        assert await hung_up_on(sock)
        assert (here.gate.strangers, here.admitted.qsize()) == (0, 0)
        sock.close()


async def test_the_oldest_stranger_makes_room() -> None:
    async with Listener() as here:
        each = caller_gate.MAX_STRANGERS // 4
        crowd = [await here.stranger(f"127.0.0.{2 + i // each}") for i in range(2 * caller_gate.MAX_STRANGERS)]
        assert here.gate.strangers == caller_gate.MAX_STRANGERS
        for sock in crowd[: caller_gate.MAX_STRANGERS]:
            assert await hung_up_on(sock)
        (await handshake.dial(here.where, TOKEN, Purpose.RING)).close()
        for sock in crowd:
            sock.close()


async def test_one_address_has_a_share_of_the_places() -> None:
    async with Listener() as here:
        other = await here.stranger("127.0.0.9")
        crowd = [await here.stranger() for _ in range(2 * caller_gate.MAX_STRANGERS)]
        assert here.gate.strangers == caller_gate.MAX_STRANGERS_PER_ADDRESS + 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(other, 1), 0.01)
        for sock in (other, *crowd):
            sock.close()


@pytest.mark.usefixtures("hello")
async def test_a_silent_stranger_and_one_that_drips_are_hung_up_on() -> None:
    caller_gate.use(0.1)
    async with Listener() as here:
        silent, slow = await here.stranger(), await here.stranger()
        slow.send(handshake.MAGIC)
        dripping = asyncio.create_task(hung_up_on(slow))
        while not dripping.done():
            with suppress(OSError):
                slow.send(b"\0")
            await asyncio.sleep(0.01)
        assert await hung_up_on(silent)
        assert here.gate.strangers == 0
        for sock in (silent, slow):
            sock.close()


async def test_other_work_has_its_turn_between_two_callers() -> None:
    """An accept loop that does not give way would take all callers that wait before anything else runs."""
    async with Listener() as here:
        crowd = []
        for _ in range(20):
            crowd.append(socket.create_connection(address.split(here.where)))
        seen = []
        while not seen or seen[-1] < 20:
            seen.append(here.gate.strangers)
            await asyncio.sleep(0)
        assert max(b - a for a, b in itertools.pairwise(seen)) == 1
        for sock in crowd:
            sock.close()


class NoDescriptor(socket.socket):
    """A listener of a process that has no descriptor left, as often as ``errors`` says."""

    errors = 0

    def accept(self) -> Any:
        if self.errors:
            self.errors -= 1
            raise OSError(24, "Too many open files")
        return super().accept()


async def test_without_a_descriptor_strangers_go_first_and_then_it_pauses() -> None:
    here = Listener()
    listener = NoDescriptor(fileno=here.bound.detach())
    here.gate.watch(listener)
    stranger = await here.stranger()
    listener.errors = 1 + caller_gate.ACCEPT_TRIES + 3
    calling = asyncio.create_task(handshake.dial(here.where, TOKEN, Purpose.RING))
    assert await hung_up_on(stranger)
    (await calling).close()
    assert ["EMFILE" in str(error) for error in here.failed] == [True]
    await here.__aexit__()
    stranger.close()


async def test_a_flood_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with Listener() as here:
            for _ in range(50):
                sock = await here.stranger()
                sock.send(b"noise")
                assert await hung_up_on(sock)
                sock.close()
    assert len(caplog.records) == 1


async def test_who_only_looks_whether_somebody_listens_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with Listener() as here:
            sock = await here.stranger()
            sock.shutdown(socket.SHUT_WR)
            assert await hung_up_on(sock)
            sock.close()
    assert caplog.records == []


def test_a_connection_on_loopback_has_neither_delay_nor_pacing() -> None:
    with address.bound("127.0.0.1") as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as sock:
            address.tune(sock)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:8", ("127.0.0.1", 8)), ("[::1]:65535", ("::1", 65535)), ("host.example:0", ("host.example", 0))],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert address.split(text) == parts
    assert address.join(*parts) == text


@pytest.mark.parametrize("text", ["", ":1", "a", "a:", "::1:80", "[::1]", "[::1:80", "a:65536", "a:-1", "[a]:1:2"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        address.split(text)
