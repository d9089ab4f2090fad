import asyncio
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest

from ft_hsdp import address, caller_gate, handshake, protocol
from ft_hsdp.handshake import Purpose
from ft_hsdp.lifetime import MARK_VARIABLE, UNMARKED
from ft_hsdp.state.agent import client, messages, server, starter
from ft_hsdp.state.agent.client import AgentGone, StateAgent
from ft_hsdp.state.agent.copies import CopyFetcher
from ft_hsdp.state.agent.messages import CompleteSnapshot, Done, Hello, Pin, Recall, Settle, Welcome
from ft_hsdp.state.agent.server import AgentListener, main
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import SliceName
from tests.support.forked import Forked
from tests.support.state import agent_helpers
from tests.support.state.agent_helpers import (
    DEADLINE_S,
    NBYTES,
    TOKEN,
    Running,
    command,
    connect,
    content,
    environment,
    header,
    state,
    steps,
    write,
)


@pytest.fixture(scope="module")
def agent() -> Iterator[Running]:
    with agent_helpers.agent(0) as running:
        yield running


def test_a_manifest_may_be_longer_than_a_message(agent: Running):
    rank, more = connect(0, 14), {"x": "y" * messages.MAX_MESSAGE}
    array = rank.stage(state(1))
    assert array is not None
    array[:] = content(1, 14)
    long = shard_manifest.encode(replace(shard_manifest.decode(header(1, 14)), hyper=(more,)))
    rank.staged(state(1), long)
    taken = rank.acquire(state(1))
    assert taken is not None
    assert taken[1] == long
    rank.close()


def trainer(pipe: Connection, token: str, rank: int, last: int) -> None:
    """A rank that writes some snapshots, half of one more, and stays."""
    agent_helpers.TOKEN = token
    agent = connect(0, rank)
    for step in range(1, last + 1):
        write(agent, step, rank, settle=step < last)
    array = agent.stage(state(last + 1))
    assert array is not None
    array[: len(array) // 2] = content(last + 1, rank)[: len(array) // 2]
    pipe.send("half")
    pipe.recv()


def test_trainers_are_killed_while_they_write_and_what_was_complete_lives(agent: Running):
    for each in [Forked(trainer, TOKEN, rank, last) for rank, last in ((0, 3), (1, 2))]:
        assert each.hear() == "half"
        each.close()
    for rank, has in ((0, {2, 3}), (1, {1, 2})):
        assert {step for step in range(1, 5) if agent.serves(step, rank)} == has
    ranks = [connect(0, rank) for rank in (0, 1)]
    recalls = [rank.list() for rank in ranks]
    assert recalls[0] == (CompleteSnapshot(state(3), False), CompleteSnapshot(state(2), True))
    newest = state(2)
    assert {kept.state for kept in recalls[0]} & {kept.state for kept in recalls[1]} == {newest}
    for rank, one in enumerate(ranks):
        taken = one.acquire(newest)
        assert taken is not None
        data, kept = taken
        assert np.array_equal(data, content(2, rank))
        assert kept == header(2, rank)
        assert one.acquire(state(4)) is None
        one.close()


def test_a_newer_connection_supersedes_and_never_gets_what_the_older_is_writing(agent: Running):
    older = connect(0, 4)
    write(older, 1, 4)
    array = older.stage(state(2))
    assert array is not None
    newer = connect(0, 4)
    for step in (3, 4):
        write(newer, step, 4)
        array[:] = 0
    with pytest.raises(AgentGone):
        older.staged(state(2), header(2, 4))
    assert steps(newer) == [4, 3]
    assert agent.serves(3, 4)
    assert agent.serves(4, 4)
    newer.close()


def test_what_has_another_size_is_forgotten(agent: Running):
    rank = connect(0, 6)
    write(rank, 1, 6)
    rank.close()
    rank = connect(0, 6, nbytes=0)
    assert rank.list() == ()
    assert not agent.serves(1, 6)
    write(rank, 2, 6)
    assert agent.serves(2, 6)
    rank.close()


def test_a_header_of_another_snapshot_is_not_served(agent: Running):
    rank = connect(0, 7)
    assert rank.stage(state(1)) is not None
    rank.staged(state(1), header(2, 7))
    assert agent.ask(1, 7, "manifest") == (404, b"")
    assert rank.stage(state(2)) is not None
    rank.staged(state(2), b"\xff" * 100)
    assert agent.ask(2, 7, "manifest") == (404, b"")
    write(rank, 3, 7)
    assert agent.serves(3, 7)
    rank.close()


def access(array: np.ndarray) -> str:
    """How this process may use the memory of an array: "r--", "rw-"."""
    at = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        first, end = (int(each, 16) for each in span.split("-"))
        if first <= at < end:
            return rights[:3]
    raise AssertionError("no such memory")


def test_a_copy_that_is_complete_can_be_written_no_more(agent: Running):
    """A wild write of the trainer ends it, and does not damage what it would be restored from."""
    rank = connect(0, 12)
    for step in (1, 2, 3, 4):
        array = rank.stage(state(step))
        assert array is not None
        assert access(array) == "rw-"
        array[:] = content(step, 12)
        rank.staged(state(step), header(step, 12))
        assert access(array) == "r--"
        rank.order(Settle(state(step), True))
    rank.close()


def test_threads_may_share_a_connection():
    with agent_helpers.agent(1):
        rank = connect(1)
        write(rank, 1)
        seen: list[int] = []

        def look() -> None:
            for _ in range(100):
                rank.order(Pin(state(1), 1.0))
                seen.append(len(rank.list()))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(2, 30):
            write(rank, step)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(seen) == 300
        assert min(seen) >= 1
        rank.close()


def run(*arguments: str, said: str | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        arguments, input=said, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    return done.returncode, done.stdout, done.stderr


def test_a_second_agent_is_refused(agent: Running):
    code, out, told = run(*command(0))
    assert (code, out, told.count("\n")) == (75, "", 1)
    assert told.startswith("replica 0 ")


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "x"], "arguments"),
        (["--linger", "0"], "--linger"),
        (["--linger", "nan"], "--linger"),
        (["--hello", "0"], "--hello"),
        (["--replica", "-1"], "--replica"),
        (["--host", "192.0.2.1"], "--host, --port"),
        (["--more"], "arguments"),
    ],
)
def test_bad_arguments_are_one_line(more, key, monkeypatch, capsys):
    monkeypatch.setenv("FT_HSDP_TOKEN", agent_helpers.TOKEN)
    assert main([*command(3)[3:], *more]) == 64
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"{key}: got ")


def test_it_needs_a_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FT_HSDP_TOKEN", "")
    assert main(command(3)[3:]) == 64
    assert capsys.readouterr().err.startswith("FT_HSDP_TOKEN: got ''")


def test_it_ends_when_told(agent: Running):
    with agent_helpers.agent(2) as running:
        rank = connect(2)
        write(rank, 1)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(DEADLINE_S) == 0
        with pytest.raises(AgentGone):
            rank.list()


def test_it_ends_by_itself_once_no_rank_is_there():
    with agent_helpers.agent(2, "--linger", "2") as running:
        rank = connect(2)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(3)
        write(rank, 1)
        rank.close()
        assert running.process.wait(DEADLINE_S) == 0


def test_it_goes_on_without_a_rank_while_it_is_visited():
    with agent_helpers.agent(2, "--linger", "3") as running:
        rank = connect(2)
        write(rank, 1)
        rank.close()
        for _ in range(7):
            starter.visit(TOKEN, 2)
            with pytest.raises(subprocess.TimeoutExpired):
                running.process.wait(0.5)
        assert running.serves(1)
        assert running.process.wait(DEADLINE_S) == 0
    with pytest.raises(ConnectionRefusedError):
        starter.visit(TOKEN, 2)


def test_a_stranger_has_as_long_as_it_was_told():
    with agent_helpers.agent(2, "--hello", "0.2") as running:
        with socket.create_connection(address.split(running.address), timeout=caller_gate.HELLO_S - 1) as sock:
            heard = b""
            while part := sock.recv(4096):
                heard += part
        assert len(heard) == handshake.CHALLENGE_BYTES, "and then it is hung up on"


def test_tied_it_dies_with_whoever_started_it():
    script = """
import subprocess, sys
from ft_hsdp.launch.backend.processes import tied
subprocess.Popen(tied(*sys.argv[1:]))
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *command(2)[2:]],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    try:
        assert parent.stdout.readline().startswith(b'{"pid": ')
        rank = connect(2)
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
        parent.stdin.close()
        parent.stdout.close()
    with pytest.raises(AgentGone):
        any(rank.list() for _ in range(1_000_000))


class Ended:
    """An agent's process that has ended. While one thread looks at it for the first time, another one does."""

    def __init__(self, other: Callable[[], None]) -> None:
        self.others = [other]

    def poll(self) -> int:
        while self.others:
            self.others.pop()()
        return 75


class Runs:
    """An agent's process that has not come to listen yet."""

    def poll(self) -> None: ...


def test_an_agent_that_one_thread_starts_is_not_lost_by_another_that_looks(tmp_path, monkeypatch):
    one = starter.Starter(secrets.token_hex(16), 0, "127.0.0.1", os.getpid(), tmp_path / "log", 60.0)
    started = [Runs() for _ in range(2)]
    made = iter(started)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: next(made))
    one.started.append(Ended(one.ensure))  # type: ignore[arg-type]
    one.ensure()
    assert one.started == started[:1], "a second one was started beside it"


FORKS = """
import json, sys, threading, time
from pathlib import Path
from ft_hsdp.lifetime import wear
from ft_hsdp.state.agent import server, starter
token, folder, threads = sys.argv[1:]
wear("1" * 32)
kept = open(Path(folder) / "kept", "w")
for _ in range(int(threads)):
    threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()
one = starter.Starter(token, 0, "127.0.0.1", None, Path(folder) / "log", 60.0)
while (found := one.ensure(fork=server.main)) is None:
    time.sleep(0.01)
(process,) = one.started
assert process.pid == found[1]
print(json.dumps([process.pid, type(process).__name__]))
"""


@pytest.mark.parametrize(("threads", "how"), [(0, "ForkedAgent"), (1, "Popen")])
def test_a_rank_with_one_thread_forks_its_agent_which_keeps_nothing_of_it(threads, how, tmp_path):
    token = secrets.token_hex(16)
    command = [sys.executable, "-c", FORKS, token, str(tmp_path), str(threads)]
    env = {**os.environ, MARK_VARIABLE: UNMARKED}
    made = subprocess.run(command, stdout=subprocess.PIPE, env=env, timeout=60, check=True)
    pid, found = json.loads(made.stdout)
    agent = psutil.Process(pid)
    try:
        assert found == how
        assert (os.getsid(pid), agent.open_files()[0].path) == (pid, str(tmp_path / "log"))
        assert {file.path for file in agent.open_files()} == {str(tmp_path / "log")}
        assert agent.cmdline()[1:5] == ["-m", "ft_hsdp.state.agent.server", "--replica", "0"]
        assert "1" * 32 not in agent.environ().values()
        StateAgent.connect(token, 0, 0, 1, 64, 10.0).close()
    finally:
        agent.terminate()
    assert psutil.wait_procs([agent], timeout=10)[1] == []
    assert "hung up" not in (tmp_path / "log").read_text(), "who looks whether it listens is no stranger"


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
        serve = loop.create_task(
            AgentListener(sock, TOKEN, holdings, CopyFetcher(holdings, TOKEN), "here:1").serve()
        )
        thread = threading.Thread(target=_until_cancelled, args=(loop, serve))
        thread.start()
        yield holdings
        loop.call_soon_threadsafe(serve.cancel)
        thread.join()
    holdings.close()


@contextmanager
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(messages.agent_name(TOKEN, REPLICA))
        yield sock


def hung_up_on(sock: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


def greet(sock: socket.socket, token: str, nbytes: int = 100, line: messages.Line = "snapshots") -> None:
    handshake.call_blocking(sock, token, Purpose.AGENT)
    connection = client.AgentSocket(sock, end=time.monotonic() + 10)
    assert connection.ask(Hello(0, 2, nbytes, line), Welcome) == Welcome("here:1")


def test_the_name_tells_nothing_and_differs_by_token_replica_and_host():
    names = {
        messages.agent_name(token, replica, host=host)
        for token in (TOKEN, "x")
        for replica in (0, 1)
        for host in ("", "r0h0", "r0h1")
    }
    assert len(names) == 12
    assert not any(TOKEN[:8] in name for name in names)


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
        + struct.pack("!I", messages.MAX_MESSAGE + 1),
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


@pytest.mark.usefixtures("holdings")
@pytest.mark.parametrize(
    ("line", "noise"),
    [
        ("copies", messages.frame(Recall())),
        ("copies", messages.frame(Hello(0, 2, 100))),
        ("copies", protocol.framed(b'{"type": "AwaitCopies", "body": {"state": [], "wait_s": 1}}')),
        ("copies", messages.frame(messages.AwaitCopies(state(1), -1.0))),
        ("blocks", messages.frame(messages.Forget())),
        ("snapshots", messages.frame(messages.DropSlices("0" * 32, ()))),
        ("blocks", messages.frame(messages.Stage(state(1)))),
        ("snapshots", messages.frame(messages.Stage(SliceName("0" * 32, "points", 0, 1, 10, 10)))),
    ],
)
def test_a_connection_is_for_one_thing(line: messages.Line, noise: bytes):
    with stranger() as sock:
        greet(sock, TOKEN, line=line)
        sock.sendall(noise)
        assert hung_up_on(sock)
    connect(REPLICA).close()
