"""The ranks' store as torch uses it: its methods, their errors, and rank 0 that is late, frozen or gone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ft_hsdp import address, handshake
from ft_hsdp.bench.flood import Flood
from ft_hsdp.control.rank_store import RankStore, connect, serve
from ft_hsdp.errors import ProtocolViolation, Retryable

TOKEN = "ab" * 32


class Ranks:
    """The stores of the ranks of one replica, in one process."""

    def __init__(self, ranks: int, timeout_s: float = 10.0) -> None:
        listener = address.bound("127.0.0.1")
        self.port = listener.getsockname()[1]
        with ThreadPoolExecutor(ranks) as pool:
            first = pool.submit(serve, ranks, TOKEN, listener, timeout_s)
            others = [pool.submit(connect, r, TOKEN, "127.0.0.1", self.port, timeout_s) for r in range(1, ranks)]
            self.stores = [each.result(30) for each in (first, *others)]

    def __enter__(self) -> list[RankStore]:
        return self.stores

    def __exit__(self, *_: object) -> None:
        for store in reversed(self.stores):
            store.close()


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def store(request: pytest.FixtureRequest) -> Iterator[RankStore]:
    with Ranks(2) as stores:
        yield stores[request.param]


def operations(store: dist.Store) -> Iterator[Any]:
    """What a store says to all that torch may ask, through a prefix as torch does."""
    named: Any = dist.PrefixStore("0-x-0", store)
    named.set("k", "text")
    yield named.get("k")
    named.set("k", b"\x00\xff\n")
    yield named.get("k")
    yield named.add("n", 2), named.add("n", -5), named.get("n")
    yield named.check(["k", "n"]), named.check(["k", "none"]), named.check([])
    named.wait(["k", "n"])
    named.wait(["k"], timedelta(seconds=1))
    yield named.compare_set("c", "", "first"), named.compare_set("c", "first", "second")
    yield named.compare_set("c", "first", "third"), named.compare_set("none", "first", "x")
    yield named.num_keys()
    yield named.delete_key("c"), named.delete_key("c"), named.check(["c"])
    named.barrier("all", 1, timedelta(seconds=5))
    yield named.num_keys()
    yield named.clone().get("k")


def test_it_says_what_torchs_own_stores_say(store: RankStore) -> None:
    assert list(operations(store)) == list(operations(dist.HashStore()))


def test_python_finds_what_cpp_finds(store: RankStore) -> None:
    store.set("k", "v")
    assert (store.num_keys(), store.delete_key("k"), store.num_keys()) == (1, True, 0)
    assert store.clone() is store


def test_a_key_that_nobody_sets_is_an_error_of_torchs(store: RankStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match=r"get: no rank has set 'p/k' within 0\.05 s"):
        dist.PrefixStore("p", store).get("k")
    with pytest.raises(dist.DistStoreError, match=r"wait: no rank has set 'k' within 0\.02 s"):
        store.wait(["k"], timedelta(seconds=0.02))
    store.set("k", "it goes on")
    assert store.get("k") == b"it goes on"


def test_a_key_or_value_that_is_too_large_is_an_error_of_torchs(store: RankStore) -> None:
    with pytest.raises(dist.DistStoreError, match="set: a value of 300000 bytes for 'k'; allowed: 262144"):
        store.set("k", bytes(300_000))
    with pytest.raises(dist.DistStoreError, match="get: a key of 2000 bytes"):
        store.get("k" * 2000)
    with pytest.raises(dist.DistStoreError, match="add: 'k' has b'x', which is no number"):
        (store.set("k", "x"), store.add("k", 1))
    store.set("k" * 1024, bytes(256 << 10))
    assert len(store.get("k" * 1024)) == 256 << 10


def test_threads_of_one_rank_do_not_wait_for_each_other(store: RankStore) -> None:
    with ThreadPoolExecutor(17) as pool:
        waits: Future[bytes] = pool.submit(store.get, "late")
        sums = list(pool.map(lambda _: store.add("n", 1), range(200)))
        assert sorted(sums) == list(range(1, 201))
        assert not waits.done()
        store.set("late", "now")
        assert waits.result(10) == b"now"


def test_rank_0_that_ends_is_an_error_of_torchs() -> None:
    with Ranks(3) as stores, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(stores[1].get, "never")
        while not stores[0]._server._calls[1]:  # type: ignore[union-attr]
            time.sleep(0.001)
        stores[0].close()
        with pytest.raises(dist.DistNetworkError, match=r"get: rank 0, .*, cannot be asked: it is gone"):
            waits.result(5)
        for store in stores[1:]:
            with pytest.raises(dist.DistNetworkError, match="set: rank 0"):
                store.set("k", "v")
        with pytest.raises(dist.DistNetworkError, match="it is closed"):
            stores[0].set("k", "v")


def test_rank_0_that_is_frozen_is_an_error_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    thaw = threading.Event()
    with Ranks(2) as (rank0, store):
        monkeypatch.setattr(handshake, "_hello_s", 0.1)
        rank0._loop.call_soon_threadsafe(thaw.wait, 20)
        store.set_timeout(timedelta(seconds=0.1))
        try:
            with pytest.raises(dist.DistNetworkError, match=r"add: rank 0, .* has not answered within 0\.1 s"):
                store.add("n", 1)
        finally:
            thaw.set()
        store.set_timeout(timedelta(seconds=10))
        monkeypatch.setattr(handshake, "_hello_s", 10.0)
        assert store.add("n", 1) == 2, "an answer that comes too late is not that of the next call"


def test_a_rank_that_does_not_come() -> None:
    listener = address.bound("127.0.0.1")
    with pytest.raises(Retryable, match=r"ranks \[1, 2\] of this replica have not come within 0\.05 s"):
        serve(3, TOKEN, listener, 0.05)
    assert listener.fileno() < 0


def test_rank_0_that_does_not_come() -> None:
    with address.bound("127.0.0.1") as taken:  # nobody listens there
        port = taken.getsockname()[1]
        with pytest.raises(Retryable, match=rf"rank 0 .* at 127.0.0.1:{port} within 0\.1 s .*Connect call failed"):
            connect(1, TOKEN, "127.0.0.1", port, 0.1)


def test_rank_0_that_comes_late() -> None:
    listener = address.bound("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(connect, 1, TOKEN, "127.0.0.1", listener.getsockname()[1], 20.0)
        with contextlib.suppress(TimeoutError):
            other.result(0.1)
        first = serve(2, TOKEN, listener, 20.0)
        other.result(20).close()
        first.close()


def test_a_caller_with_another_token_is_not_let_in() -> None:
    listener = address.bound("127.0.0.1")
    where = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(serve, 2, TOKEN, listener, 20.0)
        with pytest.raises(Retryable, match="it closed the connection before the handshake"):
            connect(1, "cd" * 32, "127.0.0.1", where, 2.0)
        connect(1, TOKEN, "127.0.0.1", where, 20.0).close()
        first.result(20).close()


def test_a_listener_of_somebody_else_is_not_asked_again() -> None:
    with address.bound("127.0.0.1") as listener, ThreadPoolExecutor(1) as pool:
        listener.listen()

        def web() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                sock.recv(1)

        pool.submit(web)
        with pytest.raises(ProtocolViolation, match="does not speak this job's protocol"):
            connect(1, TOKEN, "127.0.0.1", listener.getsockname()[1], 20.0)


@pytest.mark.multiproc
def test_ranks_meet_while_strangers_call() -> None:
    """A thousand hostile first frames a second."""
    listener = address.bound("127.0.0.1")
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(serve, 5, TOKEN, listener, 60.0)
        with Flood([address.join("127.0.0.1", port)]) as flood:
            while flood.sent < 200:
                time.sleep(0.005)
            others = [pool.submit(connect, rank, TOKEN, "127.0.0.1", port, 60.0) for rank in range(1, 5)]
            stores = [each.result(60) for each in (*others, first)]
        assert sorted(pool.map(lambda store: store.add("n", 1), stores)) == [1, 2, 3, 4, 5]
        for store in stores:
            store.close()


def test_a_rank_alone_has_its_store_and_no_thread_outlives_it() -> None:
    store = serve(1, TOKEN, None, 5.0)
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.close()
    store.close()
    with Ranks(2) as stores:
        pass
    assert not any(each._thread.is_alive() for each in (store, *stores))
