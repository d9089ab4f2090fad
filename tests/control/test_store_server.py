"""The ranks' key table: its operations, its bounds, and what callers can do to it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from ft_hsdp import address, handshake, protocol, record_layer
from ft_hsdp.control import rank_store
from ft_hsdp.control.rank_channel import RankLine
from ft_hsdp.control.rank_store import CallRefused, KeyTable, TableServer, checked, packed, unpacked
from ft_hsdp.handshake import HungUp, Purpose
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
    assert table._coming == {}


async def test_who_waits_in_vain_is_told_for_what() -> None:
    table = KeyTable()
    answer = await table.answer(call("wait", "here/not", "nor this", wait_s=0.01))
    assert answer == StoreAnswer(7, error="no rank has set 'here/not' and 1 more within 0.01 s")
    assert table._coming == {}


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
    keys = tuple("\x01" * 1023 + chr(n + 1) for n in range(rank_store.MAX_NAMES // 1024))
    largest = StoreCall(1 << 40, 1 << 40, "compare_set", keys, packed([bytes(rank_store.MAX_VALUE - 2), b"xy"]))
    assert len(protocol.encode(largest)) <= protocol.MAX_MESSAGE


def test_keys_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "MAX_KEYS", 2)
    monkeypatch.setattr(rank_store, "MAX_BYTES", 100)
    table = KeyTable()
    assert not ask(table, "set", "a", values=(bytes(90),)).error
    assert "keys and values may have 100 bytes" in ask(table, "set", "b", values=(bytes(20),)).error
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
    """A table that other ranks are given."""

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
        await rank0.server.all_here(5)
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


async def test_who_does_not_know_the_token_is_not_heard() -> None:
    async with Rank0(2) as rank0:
        with pytest.raises(HungUp):
            await Rank(1, "cd" * 32).connect(rank0.port)
        with pytest.raises(HungUp):  # nor who has a proof for something else
            await streams(f"127.0.0.1:{rank0.port}", TOKEN, Purpose.HUB)
        assert list(rank0.server.awaited) == [1]


async def test_frozen_callers_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those who have not proved the token, nor one who has and then says half a word."""
    monkeypatch.setattr(handshake, "_hello_s", 0.2)
    async with Rank0(2) as rank0:
        silent = [await asyncio.open_connection("127.0.0.1", rank0.port) for _ in range(40)]
        reader, writer = await streams(f"127.0.0.1:{rank0.port}", TOKEN, Purpose.STORE)
        writer.write(b"\0\0")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        rank = await Rank(1).connect(rank0.port)
        await rank0.server.all_here(5)
        for stranger, other in silent:
            with contextlib.suppress(ConnectionResetError):
                assert len(await asyncio.wait_for(stranger.read(), 5)) == handshake.CHALLENGE_BYTES
            other.close()
        rank.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff\xff\xff",
        protocol.frame(RankHello(1, "", "")),
        protocol.frame(StoreAnswer(1)),
        protocol.LENGTH.pack(20) + b'{"type":"StoreCall"}',
    ],
)
async def test_a_rank_that_talks_nonsense_is_hung_up_on(noise: bytes) -> None:
    async with Rank0(2) as rank0:
        rank = await Rank(1).connect(rank0.port)
        await rank0.server.all_here(5)
        rank._line._writer.write(noise)
        rank.send("count")
        await asyncio.wait_for(rank.lost.wait(), 5)
        assert rank.answers.empty()
        rank.close()


async def test_a_rank_with_too_many_calls_is_hung_up_on() -> None:
    async with Rank0(3) as rank0:
        greedy, other = [await Rank(rank).connect(rank0.port) for rank in (1, 2)]
        await rank0.server.all_here(5)
        for number in range(rank_store.MAX_CALLS + 1):
            greedy.send("get", "never", number=number, wait_s=30)
        await asyncio.wait_for(greedy.lost.wait(), 5)
        other.send("count")
        assert await other.answers.get() == StoreAnswer(1)
        for rank in (greedy, other):
            rank.close()


async def test_who_does_not_encrypt_is_not_heard_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_layer, "_mode", "on")
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
