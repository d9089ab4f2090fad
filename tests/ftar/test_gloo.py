"""What is particular to process groups of two; the rest is in the conformance suite."""

import contextlib
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout
from ft_hsdp.ftar import Communicator, Settings
from ft_hsdp.ftar.transport import gloo
from ft_hsdp.ftar.transport.gloo import GlooPair, PairStore, classify, connect
from tests.support.ftar.ring_rig import nothing_left

SETTINGS = Settings(transport="c10d", connections=2, timeout_s=60.0)
MOMENT = timedelta(milliseconds=1)


def wires() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    for sock in (a, b):
        sock.settimeout(10.0)
    return a, b


@contextlib.contextmanager
def groups() -> Iterator[tuple[Any, Any]]:
    a, b = wires()
    with a, b, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(connect, sock, rank, SETTINGS) for rank, sock in enumerate((a, b))]
        yield ends[0].result(10), ends[1].result(10)


@contextlib.contextmanager
def gloo_pairs(deadline_s: float = 60.0) -> Iterator[tuple[GlooPair, GlooPair]]:
    settings = Settings(connections=2, timeout_s=deadline_s)
    with groups() as (first, second):
        ends = GlooPair(first, 6, settings), GlooPair(second, 5, settings)
        del first, second
        yield ends
        for end in ends:
            end.dispose()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def text_of(act: Callable[[], object]) -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        act()
    return RuntimeError(str(caught.value))


def test_what_the_installed_gloo_says_is_understood() -> None:
    nothing = torch.empty(8, dtype=torch.uint8)
    with groups() as (a, b):
        expired = text_of(lambda: a.recv([nothing], 1, 0).wait(MOMENT))
        after = text_of(lambda: a.recv([nothing], 1, 0).wait(MOMENT))
        theirs = text_of(lambda: b.recv([nothing], 0, 0).wait(timedelta(seconds=10)))
        a = b = None
    assert "Timed out waiting" in str(expired)
    assert isinstance(classify(expired, 3), PeerTimeout)
    assert isinstance(classify(after, 3), PeerTimeout)
    assert isinstance(classify(theirs, 3), PeerDead)
    assert classify(theirs, 3).suspect == 3
    known = [part for part, _ in gloo.ERRORS]
    assert all(any(part in str(e) for part in known) for e in (expired, after, theirs))


def test_an_unknown_text_costs_the_pair_only() -> None:
    error = classify(RuntimeError("something new"), 4)
    assert isinstance(error, PeerDead)
    assert str(error) == "gloo: something new (suspect: replica 4)"


def test_messages_keep_their_order_on_two_contexts() -> None:
    sizes = [1, 300_000, 7, 2_000_000, 5]
    with gloo_pairs() as (sender, receiver):
        places = [torch.zeros(n) for n in sizes]
        for place in places[:3]:
            receiver.receive(place)
        for i, n in enumerate(sizes):
            sender.send(torch.full((n,), float(i + 1)))
        for place in places[3:]:
            receiver.receive(place)
        for end in (receiver, sender):
            while len(end):
                end.finish()
        assert [p.unique().tolist() for p in places] == [[1.0], [2.0], [3.0], [4.0], [5.0]]


@pytest.mark.parametrize("context", [0, 1])
@pytest.mark.parametrize("what", ["receive", "send"])
def test_a_cut_releases_whoever_waits_at_both_ends(what: str, context: int) -> None:
    """Without the other end's help; it only sees the end of the connection."""
    with gloo_pairs() as (mine, theirs), ThreadPoolExecutor(2) as pool:
        if context:
            mine.receive(torch.empty(8))
            theirs.send(torch.empty(8))
            mine.finish()
            theirs.finish()
        getattr(mine, what)(torch.empty(8))
        if what == "receive":
            theirs.receive(torch.empty(8))
        waits = [pool.submit(mine.finish)]
        if what == "receive":
            waits.append(pool.submit(theirs.finish))
        for _ in range(2):
            mine.cut()
        errors = [wait.exception(10) for wait in waits]
        assert all(isinstance(e, PeerDead) for e in errors), errors
        assert isinstance(errors[0], FTARError)
        assert errors[0].suspect is None  # nobody's fault
        if what == "receive":
            assert isinstance(errors[1], FTARError)
            assert errors[1].suspect == 5


def test_a_caller_that_goes_away_ends_the_meeting() -> None:
    a, b = wires()
    with b, ThreadPoolExecutor(1) as pool:
        meeting: Future[object] = pool.submit(connect, b, 1, SETTINGS)
        a.close()
        error = meeting.exception(10)
        assert isinstance(error, OSError), error
        del meeting, error


def test_a_store_of_endless_keys_is_left() -> None:
    a, b = wires()
    with a, b:
        mine, theirs = PairStore(a), PairStore(b)
        for i in range(gloo.MOST_KEYS):
            theirs.set(f"{i}", b"")
        assert mine.get("3") == b""
        with pytest.raises(OSError, match="keys"):
            mine.get("nothing")


def test_what_was_sent_is_let_go() -> None:
    class Memory(bytearray):
        pass

    pair = [Communicator(i, token="ab" * 32, settings=SETTINGS) for i in range(2)]
    addresses = [(i, c.address) for i, c in enumerate(pair)]
    with ThreadPoolExecutor(2) as pool:
        try:
            list(pool.map(lambda c: c.reconfigure(1, addresses, 10), pair))
            memories = [Memory(4_000_000) for _ in pair]
            held = [weakref.ref(m) for m in memories]
            for n in (1_000_000, 5):
                tensors = [torch.frombuffer(m, dtype=torch.float32, count=n) for m in memories]
                memories = [Memory(20) for _ in pair]
                works = [c.all_reduce(x, out=x) for c, x in zip(pair, tensors, strict=True)]
                for work in works:
                    work.wait(20)
            del tensors, works, work
            gc.collect()
            assert [ref() for ref in held] == [None, None]
        finally:
            list(pool.map(lambda c: c.close(), pair))
