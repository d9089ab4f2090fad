from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from agent_helpers import NBYTES, TOKEN, connect, state, steps, write

from ft_hsdp import protocol
from ft_hsdp.state import client, door, messages
from ft_hsdp.state.client import AgentGone
from ft_hsdp.state.door import Door
from ft_hsdp.state.holdings import Holdings
from ft_hsdp.state.messages import Challenge, Done, Hello, Recall, Welcome

REPLICA = 8


def _until_cancelled(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture
def holdings() -> Iterator[Holdings]:
    """What is behind a door on an event loop of its own."""
    holdings = Holdings()
    with door.listen(TOKEN, REPLICA) as sock:
        loop = asyncio.new_event_loop()
        serve = loop.create_task(Door(sock, TOKEN, holdings, "here:1").serve())
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


def line_to(sock: socket.socket) -> client._Line:
    return client._Line(sock, end=time.monotonic() + 10)


def hung_up_on(sock: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def greet(sock: socket.socket, token: str) -> client._Line:
    line = line_to(sock)
    assert client._greet(line, token, Hello(0, 2, 100, "ab" * 16, "")) == "here:1"
    return line


def test_the_name_tells_nothing_and_differs_by_token_and_replica():
    names = {messages.agent_name(token, replica) for token in (TOKEN, "x") for replica in (0, 1)}
    assert len(names) == 4
    assert not any(TOKEN[:8] in name for name in names)


@pytest.mark.usefixtures("holdings")
def test_who_does_not_know_the_token_is_not_let_in(caplog: pytest.LogCaptureFixture):
    with stranger() as sock, pytest.raises(ConnectionError):
        greet(sock, "ef" * 32)
    assert "a stranger does not know the token" in caplog.text
    with stranger() as sock:
        greet(sock, TOKEN)


def test_an_agent_that_does_not_know_the_token_is_not_talked_to():
    def impostor() -> None:
        sock, _ = listening.accept()
        with sock:
            line = line_to(sock)
            line._wait()
            sock.sendall(messages.frame(Challenge("ab" * 16)))
            line.read(messages.MAX_MESSAGE)
            sock.sendall(messages.frame(Welcome("here:1", "ab" * 32)))
            heard.append(sock.recv(1))

    heard: list[bytes] = []
    with door.listen(TOKEN, REPLICA) as listening:
        listening.setblocking(True)
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AgentGone, match="not the state agent of replica 8: it does not know the token"):
            connect(REPLICA)
        thread.join()
    assert heard == [b""]


@pytest.mark.usefixtures("holdings")
def test_who_says_nothing_is_hung_up_on_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door, "HELLO_TIMEOUT_S", 0.2)
    with stranger() as silent, stranger() as slow:
        slow.sendall(b"\0")
        rank = connect(REPLICA)
        write(rank, 1)
        assert hung_up_on(silent)
        assert hung_up_on(slow)
        assert steps(rank) == [1]
        rank.close()


@pytest.mark.usefixtures("holdings")
def test_a_crowd_of_strangers_keeps_ranks_out_only_as_long_as_it_is_there():
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(door.MAX_PENDING)]
    for sock in crowd:
        sock.connect(messages.agent_name(TOKEN, REPLICA))
        assert sock.recv(1)  # it has been let in
    with stranger() as sock:
        assert hung_up_on(sock)
    with pytest.raises(AgentGone, match="no state agent"):
        connect(REPLICA, deadline_s=0.1)
    for sock in crowd:
        sock.close()
    connect(REPLICA).close()


def test_who_hangs_up_leaves_its_slots_for_the_next(holdings: Holdings):
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
    struct.pack("!I", door.MAX_HELLO + 1),
    struct.pack("!I", 0),
    b"\0\0\0\x04null",
    messages.frame(Recall()),
    messages.framed(b"[" * 1000),
    messages.framed(b'{"type": "Hello", "body": {"rank": -1}}'),
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.usefixtures("holdings")
@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_hung_up_on(noise: bytes):
    with stranger() as sock:
        sock.sendall(noise)
        assert hung_up_on(sock)
    connect(REPLICA).close()


@pytest.mark.usefixtures("holdings")
@pytest.mark.parametrize(
    "noise",
    [
        struct.pack("!I", messages.MAX_MESSAGE + 1),
        b"\0\0\0\x04null",
        messages.frame(Done()),
        messages.framed(b'{"type": "Pin", "body": {"state": [], "seconds": 1}}'),
        messages.framed(
            b'{"type": "Pin", "body": {"state": {"commit_epoch": 1, "step": 1, "lineage": ""}, "seconds": NaN}}'
        ),
        messages.framed(b'{"type": "Staged", "body": {"state": {"commit_epoch": 1, "step": 2, "lineage": ""}}}')
        + struct.pack("!I", messages.MAX_HEADER + 1),
    ],
)
def test_a_rank_that_talks_nonsense_loses_its_connection_and_nothing_else(noise: bytes):
    rank = connect(REPLICA)
    write(rank, 1)
    rank.close()
    with stranger() as sock:
        hello = Hello(0, 2, NBYTES, "ab" * 16, "")
        client._greet(line_to(sock), TOKEN, hello)
        sock.sendall(noise)
        assert hung_up_on(sock)
    rank = connect(REPLICA)
    assert steps(rank) == [1]
    rank.close()


def test_proofs_are_of_all_that_is_claimed():
    hello = Hello(0, 2, 100, "ab", "")
    claims = {
        messages.rank_claims("c", hello),
        messages.rank_claims("d", hello),
        *(
            messages.rank_claims("c", Hello(*values, ""))
            for values in ((1, 2, 100, "ab"), (0, 3, 100, "ab"), (0, 2, 101, "ab"), (0, 2, 100, "ac"))
        ),
        messages.agent_claims("c", "ab", "x"),
        messages.agent_claims("d", "ab", "x"),
        messages.agent_claims("c", "ac", "x"),
        messages.agent_claims("c", "ab", "y"),
    }
    assert len({protocol.mac(TOKEN, *claim) for claim in claims}) == 10
