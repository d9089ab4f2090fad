import json
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ft_hsdp.errors import DataCorruption
from ft_hsdp.handshake import Purpose
from ft_hsdp.state.transfer import donor_connection, shard_manifest
from ft_hsdp.state.transfer.donor_connection import ask_held
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import MAX_HELD, Held, HeldShard
from tests.support.known import admit
from tests.support.state.agent_helpers import TOKEN, state
from tests.support.state.state_helpers import no_thread

ROW = HeldShard(state(7), 2, 1, 4, "a" * 32, 300, True, "r2h1")


class Listed:
    """A source that lists, and lends nothing."""

    def __init__(self, *rows: HeldShard) -> None:
        self.rows = rows

    def held(self) -> tuple[HeldShard, ...]:
        return self.rows

    def borrow(self, *_: object, verify: bool = True) -> None:
        return None

    def give_back(self, _: object) -> None:
        raise AssertionError("nothing was lent")

    def drop_damaged(self, *_: object) -> None:
        raise AssertionError("nothing was lent")


def test_a_list_is_read_back_and_is_bounded() -> None:
    assert shard_manifest.decode_held(shard_manifest.encode_held([ROW])) == (ROW,)
    many = [replace(ROW, rank=rank) for rank in range(MAX_HELD + 5)]
    assert len(shard_manifest.decode_held(shard_manifest.encode_held(many))) == MAX_HELD


@pytest.mark.parametrize(
    "change",
    [{"rank": -1}, {"rank": "1"}, {"state": [1, 2]}, {"layout": "x"}, {"settled": 2}, {"host": "h" * 300}],
)
def test_a_wrong_row_is_refused(change: dict[str, object]) -> None:
    (row,) = json.loads(shard_manifest.encode_held([ROW]))
    with pytest.raises(DataCorruption, match="held shards"):
        shard_manifest.decode_held(json.dumps([row | change]).encode())


def test_lists_that_are_too_long_are_refused() -> None:
    rows = json.loads(shard_manifest.encode_held([ROW])) * (MAX_HELD + 1)
    with pytest.raises(DataCorruption, match=str(MAX_HELD)):
        shard_manifest.decode_held(json.dumps(rows).encode())
    with pytest.raises(DataCorruption, match="allowed"):
        shard_manifest.decode_held(b" " * (shard_manifest.MAX_HELD_BYTES + 1))


def test_all_are_asked_at_once_and_the_gone_the_silent_and_strangers_are_left_out() -> None:
    other = replace(ROW, replica=0)
    servers = [StateServer("127.0.0.1", 0, Listed(row), TOKEN) for row in (ROW, other)]
    foreign = StateServer("127.0.0.1", 0, Listed(ROW), "another token")
    silent = socket.create_server(("127.0.0.1", 0))
    gone = socket.create_server(("127.0.0.1", 0))
    gone_address = f"127.0.0.1:{gone.getsockname()[1]}"
    gone.close()
    try:
        addresses = [servers[0].address, f"127.0.0.1:{silent.getsockname()[1]}", gone_address, foreign.address]
        found = ask_held([*addresses, servers[1].address], TOKEN, 1.0)
        assert found == {servers[0].address: (ROW,), servers[1].address: (other,)}
    finally:
        silent.close()
        for server in (*servers, foreign):
            server.close()


def test_nobody_is_waited_for_once_the_answers_are_enough() -> None:
    silence = socket.create_server(("127.0.0.1", 0))
    with closing(StateServer("127.0.0.1", 0, Listed(ROW), TOKEN)) as server, silence as silent:
        addresses = [server.address, f"127.0.0.1:{silent.getsockname()[1]}"]
        began = time.monotonic()
        assert ask_held(addresses, TOKEN, 600.0, lambda *_: True) == {server.address: (ROW,)}
        assert time.monotonic() - began < 300.0


def many(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in range(1, count + 1)]


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Every agent there is answers `ROW`; the threads that asked."""
    threads: set[int] = set()

    def ask(*_: object) -> Held:
        threads.add(threading.get_ident())
        return (ROW,)

    monkeypatch.setattr(donor_connection, "_ask", ask)
    return threads


@pytest.mark.usefixtures("asking")
def test_at_the_deadline_answers_are_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    # A thread of an earlier test may still be about to try again.
    monkeypatch.setattr(donor_connection, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    taken: list[str] = []

    def enough(address: str, held: Held) -> bool:
        assert held == (ROW,)
        taken.append(address)
        now[0] += 0.4  # it is slow
        return False

    assert list(ask_held(many(80), TOKEN, 1.0, enough)) == taken
    assert len(taken) == 3


def test_few_threads_ask_many_agents(asking: set[int]) -> None:
    asked = many(2 * donor_connection.MAX_THREADS)
    assert set(ask_held(asked, TOKEN, 60.0)) == set(asked)
    assert len(asking) <= donor_connection.MAX_THREADS


@pytest.mark.usefixtures("asking")
@pytest.mark.parametrize("left", [0, 1])
def test_threads_that_cannot_start_are_done_without(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    no_thread(monkeypatch, left=left)
    assert len(ask_held(many(5), TOKEN, 60.0)) == (5 if left else 0)


def test_a_server_that_answers_something_else_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                admit(sock, TOKEN, Purpose.STATE)
                sock.recv(1000)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1,2]")

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask_held([f"127.0.0.1:{listener.getsockname()[1]}"], TOKEN, 5.0) == {}
        thread.join()
