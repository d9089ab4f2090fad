from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ft_hsdp import handshake, protocol
from ft_hsdp.handshake import Purpose
from ft_hsdp.state.agent import client, messages, server
from ft_hsdp.state.agent.client import AgentGone
from ft_hsdp.state.agent.messages import Done, Hello, Recall, Welcome
from ft_hsdp.state.agent.server import AgentListener
from ft_hsdp.state.agent.store import SnapshotStore
from tests.support.state.agent_helpers import NBYTES, TOKEN, connect, state, steps, write

REPLICA = 8


def _until_cancelled(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture
def holdings() -> Iterator[SnapshotStore]:
    """What is behind a door on an event loop of its own."""
    holdings = SnapshotStore()
    with server.listen(TOKEN, REPLICA) as sock:
        loop = asyncio.new_event_loop()
        serve = loop.create_task(AgentListener(sock, TOKEN, holdings, "here:1").serve())
        thread = threading.Thread(target=_until_cancelled, args=(loop, serve))
        thread.start()
        yield holdings
        loop.call_soon_threadsafe(serve.cancel)
        thread.join()
    holdings.close()


@contextmanager
def stranger() -> Iterator[socket.socket]:
    """Somebody who connects."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(messages.agent_name(TOKEN, REPLICA))
        yield sock


def line_to(sock: socket.socket) -> client._AgentSocket:
    return client._AgentSocket(sock, end=time.monotonic() + 10)


def hung_up_on(sock: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def greet(sock: socket.socket, token: str, nbytes: int = 100) -> client._AgentSocket:
    handshake.call_blocking(sock, token, Purpose.AGENT)
    line = line_to(sock)
    assert line.ask(Hello(0, 2, nbytes), Welcome) == Welcome("here:1")
    return line


def test_the_name_tells_nothing_and_differs_by_token_and_replica():
    names = {messages.agent_name(token, replica) for token in (TOKEN, "x") for replica in (0, 1)}
    assert len(names) == 4
    assert not any(TOKEN[:8] in name for name in names)


@pytest.mark.usefixtures("holdings")
def test_who_does_not_know_the_token_is_not_let_in(caplog: pytest.LogCaptureFixture):
    with stranger() as sock, pytest.raises(ConnectionError):
        greet(sock, "ef" * 32)
    assert "hung up on 1 connections that did not prove the job's token" in caplog.text
    with stranger() as sock:
        greet(sock, TOKEN)


def test_an_agent_that_does_not_know_the_token_is_not_talked_to():
    def impostor() -> None:
        sock, _ = listening.accept()
        with sock:
            sock.sendall(handshake.MAGIC + bytes(handshake.NONCE))
            sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
            sock.sendall(bytes(handshake.PROOF_BYTES))
            heard.append(sock.recv(1))

    heard: list[bytes] = []
    with server.listen(TOKEN, REPLICA) as listening:
        listening.setblocking(True)
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AgentGone, match=r"not the state agent of replica 8: .* does not know the job's token"):
            connect(REPLICA)
        thread.join()
    assert heard == [b""]


@pytest.mark.usefixtures("holdings")
def test_who_says_nothing_is_hung_up_on_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "_hello_s", 0.2)
    with stranger() as silent, stranger() as slow:
        slow.sendall(handshake.MAGIC)
        rank = connect(REPLICA)
        write(rank, 1)
        assert hung_up_on(silent)
        assert hung_up_on(slow)
        assert steps(rank) == [1]
        rank.close()


@pytest.mark.usefixtures("holdings")
def test_a_crowd_of_strangers_keeps_no_rank_out():
    """The oldest stranger makes room; before, a rank was hung up on as long as the crowd was there."""
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2 * handshake.MAX_STRANGERS)]
    for sock in crowd:
        sock.settimeout(10)
        sock.connect(messages.agent_name(TOKEN, REPLICA))
    rank = connect(REPLICA)
    write(rank, 1)
    assert steps(rank) == [1]
    rank.close()
    assert hung_up_on(crowd[0])
    for sock in crowd:
        sock.close()


def test_who_hangs_up_leaves_its_slots_for_the_next(holdings: SnapshotStore):
    rank = connect(REPLICA)
    assert rank.stage(state(1)) is not None
    before = holdings.slots(0)
    rank.close()
    rank = connect(REPLICA)
    assert rank.stage(state(2)) is not None
    assert holdings.slots(0) == before
    rank.close()


NOISE = [
    struct.pack("!I", 0xFFFFFFFF),
    struct.pack("!I", server.MAX_HELLO + 1),
    struct.pack("!I", 0),
    b"\0\0\0\x04null",
    messages.frame(Recall()),
    protocol.framed(b"[" * 1000),
    protocol.framed(b'{"type": "Hello", "body": {"rank": -1}}'),
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.usefixtures("holdings")
@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_hung_up_on(noise: bytes):
    for proved in (False, True):
        with stranger() as sock:
            if proved:
                handshake.call_blocking(sock, TOKEN, Purpose.AGENT)
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            assert hung_up_on(sock)
    connect(REPLICA).close()


@pytest.mark.usefixtures("holdings")
@pytest.mark.parametrize(
    "noise",
    [
        struct.pack("!I", messages.MAX_MESSAGE + 1),
        b"\0\0\0\x04null",
        messages.frame(Done()),
        protocol.framed(b'{"type": "Pin", "body": {"state": [], "seconds": 1}}'),
        protocol.framed(
            b'{"type": "Pin", "body": {"state": {"commit_epoch": 1, "step": 1, "lineage": ""}, "seconds": NaN}}'
        ),
        protocol.framed(b'{"type": "Staged", "body": {"state": {"commit_epoch": 1, "step": 2, "lineage": ""}}}')
        + struct.pack("!I", messages.MAX_HEADER + 1),
    ],
)
def test_a_rank_that_talks_nonsense_loses_its_connection_and_nothing_else(noise: bytes):
    rank = connect(REPLICA)
    write(rank, 1)
    rank.close()
    with stranger() as sock:
        greet(sock, TOKEN, NBYTES)
        sock.sendall(noise)
        assert hung_up_on(sock)
    rank = connect(REPLICA)
    assert steps(rank) == [1]
    rank.close()
