from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ft_hsdp import address, caller_gate, handshake, protocol, record_layer
from ft_hsdp.control import key_table
from ft_hsdp.control.key_table import CallRefused, KeyTable, TableServer, checked, packed, unpacked
from ft_hsdp.control.rank_channel import RankLine
from ft_hsdp.control.rank_store import RankStore, connect, serve
from ft_hsdp.errors import ProtocolViolation, Retryable
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RankHello, StoreAnswer, StoreCall
from tests.support.known import known, streams

TOKEN = "ab" * 32


def call(what: Any, *keys: str, values: tuple[bytes, ...] = (), amount: int = 0, wait_s: float = 0.0) -> StoreCall:
    return StoreCall(1, 7, what, keys, packed(values), amount, wait_s)


def ask(table: KeyTable, *args: Any, **more: Any) -> StoreAnswer:
    """The answer to a call that does not wait."""
    return asyncio.run(table.answer(call(*args, **more)))


async def test_who_waits_hears_of_keys_as_they_come() -> None:
    table = KeyTable()
    waits = asyncio.create_task(table.answer(call("wait", "a", "b", wait_s=10)))
    gets = asyncio.create_task(table.answer(call("get", "b", wait_s=10)))
    for key in ("a", "b"):
        await asyncio.sleep(0)
        assert not waits.done()
        assert not gets.done()
        await table.answer(call("set", key, values=(key.encode(),)))
    assert not (await waits).error
    assert unpacked((await gets).value) == b"b"


async def test_who_waits_in_vain_is_told_for_what() -> None:
    table = KeyTable()
    answer = await table.answer(call("wait", "here/not", "nor this", wait_s=0.01))
    assert answer.number == 7
    assert "'here/not' and 1 more" in answer.error


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (call("set", "k" * 1025, values=(b"",)), "a key of 1025 bytes ('kkkk"),
        (call("set", "k", values=(bytes((256 << 10) + 1),)), "a value of 262145 bytes for 'k'; allowed: 262144"),
        (call("wait", *(["k" * 1000] * 100)), "100 keys of 100000 bytes in one call; allowed: 98304"),
        (call("set", "k"), "set of 1 keys and 0 values"),
        (call("get"), "get of 0 keys"),
        (call("count", "k"), "count of 1 keys"),
        (call("get", "\ud800"), "a key that is no text"),
        (call("add", "k", amount=2**63), "no number of 64 bits"),
        (StoreCall(1, 1, "set", ("k",), ("!!",)), "a value that is no base64"),
    ],
)
async def test_a_call_beyond_its_bounds_is_refused(asked: StoreCall, why: str) -> None:
    with pytest.raises(CallRefused) as caught:
        checked(asked)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 200
    assert why in (await KeyTable().answer(asked)).error


def test_the_largest_call_is_a_message() -> None:
    """However JSON writes it."""
    keys = tuple("\x01" * 1023 + chr(n + 1) for n in range(key_table.MAX_NAMES // 1024))
    largest = StoreCall(1 << 40, 1 << 40, "compare_set", keys, packed([bytes(key_table.MAX_VALUE - 2), b"xy"]))
    assert len(protocol.encode(largest)) <= protocol.MAX_MESSAGE


def test_keys_and_bytes_are_bounded() -> None:
    table = KeyTable(most_keys=2, most_bytes=100)
    assert not ask(table, "set", "a", values=(bytes(90),)).error
    assert "may have 100 bytes" in ask(table, "set", "b", values=(bytes(20),)).error
    assert not ask(table, "set", "a", values=(bytes(10),)).error, "less is no more"
    assert not ask(table, "set", "b", values=(bytes(20),)).error
    assert "there are 2 keys" in ask(table, "add", "c").error
    assert table.nbytes == 2 + 30
    assert ask(table, "delete", "b").amount == 1
    assert ask(table, "delete", "b").amount == 0
    assert table.nbytes == 11
    assert ask(table, "count").amount == 1


def test_only_numbers_are_added_to() -> None:
    table = KeyTable()
    assert ask(table, "add", "n", amount=3).amount == 3
    assert ask(table, "add", "n", amount=-5).amount == -2
    assert unpacked(ask(table, "get", "n").value) == b"-2"
    ask(table, "set", "n", values=(b"9" * 200_000,))
    assert "is no number" in ask(table, "add", "n", amount=1).error
    ask(table, "set", "n", values=(str(2**63 - 1).encode(),))
    assert "no number of 64 bits" in ask(table, "add", "n", amount=1).error


class Rank:
    """Another rank's line, and what it is answered."""

    def __init__(self, rank: int, token: str = TOKEN) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.lost = asyncio.Event()
        self._rank = rank
        self._line = RankLine(token, self.answers.put_nowait, self.lost.set, Purpose.STORE, (StoreAnswer,))

    async def connect(self, port: int) -> Rank:
        await self._line.connect("127.0.0.1", port, RankHello(self._rank, "", ""))
        return self

    def send(
        self, what: Any, *keys: str, number: int = 1, values: tuple[bytes, ...] = (), wait_s: float = 0
    ) -> None:
        self._line.send(StoreCall(self._rank, number, what, keys, packed(values), 0, wait_s))

    def close(self) -> None:
        self._line.close()


class Rank0:
    def __init__(self, ranks: int) -> None:
        self.server = TableServer(ranks, TOKEN, KeyTable())

    async def __aenter__(self) -> Rank0:
        self.port = self.server.open(address.bound("127.0.0.1"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await asyncio.sleep(0.02)


async def test_ranks_meet_in_the_table_and_then_nobody_listens() -> None:
    async with Rank0(3) as rank0:
        one = await Rank(1).connect(rank0.port)
        assert list(rank0.server.awaited) in ([1, 2], [2])
        two = await Rank(2).connect(rank0.port)
        await rank0.server.all_here(30)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", rank0.port)
        one.send("get", "k", number=4, wait_s=10)
        one.send("check", "k", number=5)
        assert await one.answers.get() == StoreAnswer(5), "a call that waits holds up no other"
        two.send("set", "k", values=(b"v",))
        assert await two.answers.get() == StoreAnswer(1)
        assert await one.answers.get() == StoreAnswer(4, 0, *packed([b"v"]))
        for rank in (one, two):
            rank.close()


@pytest.fixture
def hello_s() -> Iterator[Callable[[float], None]]:
    """Sets how long listeners wait for a caller; at the end it is as before."""
    before = caller_gate.hello_s()
    yield caller_gate.use
    caller_gate.use(before)


async def test_frozen_callers_hold_up_nobody(hello_s: Callable[[float], None]) -> None:
    """Neither those who have not proved the token, nor one who has and then says half a word."""
    hello_s(0.2)
    async with Rank0(2) as rank0:
        silent = [await asyncio.open_connection("127.0.0.1", rank0.port) for _ in range(40)]
        reader, writer = await streams(f"127.0.0.1:{rank0.port}", TOKEN, Purpose.STORE)
        writer.write(b"\0\0")
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        rank = await Rank(1).connect(rank0.port)
        await rank0.server.all_here(30)
        for stranger, other in silent:
            with contextlib.suppress(ConnectionResetError):
                assert len(await asyncio.wait_for(stranger.read(), 30)) == handshake.CHALLENGE_BYTES
            other.close()
        rank.close()


async def test_a_rank_with_too_many_calls_is_hung_up_on() -> None:
    async with Rank0(3) as rank0:
        greedy, other = [await Rank(rank).connect(rank0.port) for rank in (1, 2)]
        await rank0.server.all_here(30)
        for number in range(key_table.MAX_CALLS + 1):
            greedy.send("get", "never", number=number, wait_s=30)
        await asyncio.wait_for(greedy.lost.wait(), 30)
        other.send("count")
        assert await other.answers.get() == StoreAnswer(1)
        for rank in (greedy, other):
            rank.close()


@pytest.fixture
def encrypted() -> Iterator[None]:
    record_layer.use("on")
    yield
    record_layer.use("auto")


@pytest.mark.usefixtures("encrypted")
async def test_who_does_not_encrypt_is_not_heard_where_that_is_wanted() -> None:
    async with Rank0(2) as rank0:
        plain = await asyncio.to_thread(known, f"127.0.0.1:{rank0.port}", TOKEN, Purpose.STORE)
        with plain:
            plain.sendall(protocol.frame(RankHello(1, "", "")) + bytes(100))
            plain.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                while data := await asyncio.get_running_loop().sock_recv(plain, 4096):
                    assert len(data) == record_layer.PUBLIC + record_layer.MAC
        assert list(rank0.server.awaited) == [1]
        rank = await Rank(1).connect(rank0.port)
        rank.send("count")
        assert await rank.answers.get() == StoreAnswer(1)
        rank.close()


# The ranks' store as torch uses it: its methods, their errors, and rank 0 that is late, frozen or gone.


class Ranks:
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
        assert waits.result(30) == b"now"


def test_rank_0_that_ends_is_an_error_of_torchs() -> None:
    with Ranks(3) as stores, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(stores[1].get, "never")
        stores[0].close()
        with pytest.raises(dist.DistNetworkError, match="get: rank 0"):
            waits.result(30)
        for store in stores[1:]:
            with pytest.raises(dist.DistNetworkError, match="set: rank 0"):
                store.set("k", "v")
        with pytest.raises(dist.DistNetworkError, match="it is closed"):
            stores[0].set("k", "v")


def test_rank_0_that_is_frozen_is_an_error_of_torchs(hello_s: Callable[[float], None]) -> None:
    thaw = threading.Event()
    with Ranks(2) as (rank0, store):
        hello_s(0.1)
        rank0._loop.call_soon_threadsafe(thaw.wait, 20)
        store.set_timeout(timedelta(seconds=0.1))
        try:
            with pytest.raises(dist.DistNetworkError, match=r"add: rank 0, .* has not answered within 0\.1 s"):
                store.add("n", 1)
        finally:
            thaw.set()
        store.set_timeout(timedelta(seconds=10))
        hello_s(10.0)
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


def test_a_rank_alone_has_its_store_and_no_thread_outlives_it() -> None:
    before = set(threading.enumerate())
    store = serve(1, TOKEN, None, 5.0)
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.close()
    store.close()
    with Ranks(2):
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
