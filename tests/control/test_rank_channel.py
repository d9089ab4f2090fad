from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, get_args

import pytest

from ft_hsdp import protocol
from ft_hsdp.control import rank_channel
from ft_hsdp.control.rank_channel import RankHub, RankLine
from ft_hsdp.core import effects
from ft_hsdp.core.commit import AttemptId, Vote
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RankBeat, RankHello, RankStopped, Telemetry
from tests.support.known import admit_stream, streams

TOKEN = "ab" * 32


def hello(rank: int) -> RankHello:
    return RankHello(rank, f"r{rank}", f"s{rank}")


def known(port: int) -> Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return streams(f"127.0.0.1:{port}", TOKEN, Purpose.HUB)


class Leader:
    def __init__(self, ranks: int) -> None:
        self.heard: asyncio.Queue[object] = asyncio.Queue()
        self.lost: asyncio.Queue[int] = asyncio.Queue()
        self.hub = RankHub(ranks, TOKEN, self.heard.put_nowait, self.lost.put_nowait)

    async def __aenter__(self) -> Leader:
        self.port = await self.hub.listen("127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.hub.close()
        await asyncio.sleep(0.02)


class Rank:
    def __init__(self, token: str = TOKEN) -> None:
        self.orders: asyncio.Queue[object] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.line = RankLine(token, self.orders.put_nowait, self.lost.set)

    async def connect(self, port: int, said: RankHello) -> Rank:
        await self.line.connect("127.0.0.1", port, said)
        return self


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Leader, Rank]]:
    """A leader of two ranks, and the other one, which has said hello."""
    async with Leader(2) as leader:
        rank = await Rank().connect(leader.port, hello(1))
        await leader.hub.all_here(30)
        yield leader, rank
        rank.line.close()


def test_every_effect_that_is_not_the_leader_s_own_reaches_its_ranks() -> None:
    own = {effects.RequestGrant, effects.SendToken}
    assert set(get_args(effects.Effect)) - own <= set(rank_channel.ORDERS)


async def test_orders_and_reports() -> None:
    async with Leader(3) as leader:
        ranks = [await Rank().connect(leader.port, hello(r)) for r in (2, 1)]
        await leader.hub.all_here(30)
        assert leader.hub.hellos == {1: hello(1), 2: hello(2)}
        orders = [
            effects.RunBatch(4),
            effects.StopRing(3, "why"),
            effects.Reduce(AttemptId(1, 2, 3), "behind", "0" * 32),
        ]
        for order in (*orders, effects.Exit(75, "enough")):
            leader.hub.broadcast(order)
        for rank in ranks:
            assert [await rank.orders.get() for _ in range(4)] == [*orders, effects.Exit(75, "enough")]
        vote = Vote(1, AttemptId(1, 2, 3), "d", 0.5, ())
        seen = Telemetry("0-x-0", ({"event": "RingConnected"},), (), (RankBeat(1, 7, "here", 5),))
        for report in (RankStopped(1, 4), vote, seen):
            ranks[1].line.send(report)
            assert await leader.heard.get() == report
        for rank in ranks:
            rank.line.close()


@pytest.mark.parametrize("said", [hello(0), hello(3), hello(-1)])
async def test_a_wrong_hello_is_hung_up_on(said: RankHello) -> None:
    async with Leader(3) as leader:
        rank = await Rank().connect(leader.port, said)
        await asyncio.wait_for(rank.lost.wait(), 30)
        with pytest.raises(TimeoutError):
            await leader.hub.all_here(0.05)
        assert leader.hub.hellos == {}
        assert leader.lost.empty(), "a stranger is not a rank"
        rank.line.close()


async def test_a_hub_that_has_all_its_ranks_listens_no_more(pair: tuple[Leader, Rank]) -> None:
    leader, rank = pair
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", leader.port)
    leader.hub.broadcast(effects.RunBatch(1))
    assert await rank.orders.get() == effects.RunBatch(1)


async def test_a_rank_says_hello_once() -> None:
    async with Leader(3) as leader:
        first = await Rank().connect(leader.port, hello(1))
        with pytest.raises(TimeoutError):  # rank 2 is not there
            await leader.hub.all_here(0.1)
        assert 1 in leader.hub.hellos
        second = await Rank().connect(leader.port, hello(1))
        await asyncio.wait_for(second.lost.wait(), 30)
        leader.hub.broadcast(effects.RunBatch(1))
        assert await first.orders.get() == effects.RunBatch(1)
        for rank in (first, second):
            rank.line.close()


async def test_the_end_of_a_rank_is_reported() -> None:
    async with Leader(3) as leader:
        rank = await Rank().connect(leader.port, hello(2))
        _, writer = await known(leader.port)
        writer.write(protocol.frame(hello(1)))
        await leader.hub.all_here(30)
        rank.line.close()
        assert await asyncio.wait_for(leader.lost.get(), 30) == 2
        writer.write(b"\x00\x00\x00\x02{}")  # nonsense counts as its end, too
        assert await asyncio.wait_for(leader.lost.get(), 30) == 1
        writer.close()


async def test_a_rank_may_not_give_orders_nor_a_leader_reports(pair: tuple[Leader, Rank]) -> None:
    leader, rank = pair
    leader.hub.broadcast(RankStopped(0, 1))
    await asyncio.wait_for(rank.lost.wait(), 30)
    assert rank.orders.empty()
    rank.line.send(effects.Exit(0, "says who"))
    assert await asyncio.wait_for(leader.lost.get(), 30) == 1
    assert leader.heard.empty()


async def test_the_end_of_the_leader_is_noticed(pair: tuple[Leader, Rank]) -> None:
    leader, rank = pair
    leader.hub.close()
    await asyncio.wait_for(rank.lost.wait(), 30)


async def test_a_leader_that_reads_nothing_is_told_nothing_more() -> None:
    async def stopped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await admit_stream(reader, writer, TOKEN, Purpose.HUB)
        await over.wait()
        writer.transport.abort()

    over = asyncio.Event()
    server = await asyncio.start_server(stopped, "127.0.0.1", 0)
    rank = await Rank().connect(server.sockets[0].getsockname()[1], hello(1))
    row = {"event": "RingConnected", "reason": "x" * 50_000}
    telemetry, told = Telemetry("0-x-0", (row,)), 0
    with contextlib.suppress(LighthouseUnreachable):
        while told < 10_000:
            rank.line.tell(telemetry)
            told += 1
    assert 0 < told < 10_000
    over.set()
    await rank.lost.wait()
    rank.line.close()
    server.close()
