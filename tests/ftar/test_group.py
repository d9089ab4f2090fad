import asyncio
import socket
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch

from ft_hsdp import handshake, protocol
from ft_hsdp.address import split
from ft_hsdp.core.commit import AttemptId, CommitToken
from ft_hsdp.errors import FTARError, PeerDead, RemoteAbort, Skipped, StaleEpoch
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.connections import MemberIdentity, Peer
from ft_hsdp.ftar.lane import GroupState
from ft_hsdp.ftar.rendezvous import Rendezvous
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingData, RingHello
from tests.support.flood import Flood
from tests.support.ftar.ring_helpers import LAYOUT, TOKEN, Ring, Transport, cut, error, grant
from tests.support.known import streams
from tests.support.waiting import async_until


async def test_stale_and_reused_epochs_are_refused() -> None:
    async with Ring(0, 1) as ring:
        given = await ring.form(5)
        for old in (given, grant(4, ring.addresses), grant(5, {1: ring.addresses[1], 0: ring.addresses[0]})):
            for peer in ring.peers:
                peer.group.configure(old)
        assert [p.group.state for p in ring.peers] == [GroupState.READY] * 2
        await ring.check(5)
        for peer in ring.peers:
            peer.group.stop(9, "for a test")
            peer.group.configure(grant(9, ring.addresses))
        assert [p.group.state for p in ring.peers] == [GroupState.BROKEN] * 2
        assert isinstance(await error(ring.peers[0].reduce(9, torch.empty(3))), StaleEpoch)
        assert [p.connected for p in ring.peers] == [[5], [5]]


async def test_a_stale_caller_gets_the_newer_grant() -> None:
    async with Ring(0, 1, 2) as ring:
        newer = await ring.form(4, ring.peers[:2])
        late = ring.peers[2]
        late.group.configure(grant(3, {2: late.address, 0: ring.addresses[0]}))
        await async_until(lambda: late.broken, "it is refused")
        assert late.shown == [newer]
        assert (late.broken[0].epoch, late.broken[0].planned) == (3, True)
        await ring.check(4, ring.peers[:2])


async def test_a_caller_of_the_future_is_reported_and_waits() -> None:
    async with Ring(0, 1) as ring:
        await ring.form(1)
        future = grant(2, ring.addresses)
        early, other = ring.peers
        early.group.configure(future)
        await async_until(lambda: other.shown, "the grant is shown")
        assert all(g == future for g in other.shown)
        assert early.connected == [1]
        other.group.configure(future)
        await async_until(lambda: early.connected[-1] == other.connected[-1] == 2, "both are connected")
        await ring.check(2)


async def test_a_caller_that_comes_while_its_ring_breaks_is_told_so_at_once() -> None:
    """Its call and the news that the ring is over come in one turn of the loop. Nobody else may tell it, and it
    would wait for as long as a connection may take."""
    async with Ring(0, 1, connect_s=20.0) as ring:
        caller, called = ring.peers
        usual = called.group._hello

        def at_once(hello: RingHello, peer: Peer) -> None:
            usual(hello, peer)
            called.group.abort(PeerDead("for a test", suspect=2))

        async def cannot_call(rendezvous: Rendezvous, spare: Peer | None) -> None:
            await asyncio.Event().wait()

        with mock.patch.object(called.group, "_hello", at_once):
            given = grant(1, ring.addresses)
            with mock.patch.object(Rendezvous, "_call", cannot_call):
                called.group.configure(given)
                await asyncio.sleep(0)
            caller.group.configure(given)
            await async_until(lambda: caller.broken, "the caller hears of it")
        assert (caller.broken[0].cause, caller.broken[0].suspect) == ("for a test", 2)


async def test_a_parked_caller_is_refused_once_its_epoch_is_over() -> None:
    async with Ring(0, 1) as ring:
        early, other = ring.peers
        early.group.configure(grant(2, ring.addresses))
        await async_until(lambda: other.shown, "the grant is shown")
        other.group.stop(2, "holds a newer state")
        await async_until(lambda: early.broken, "it is refused")
        assert early.broken[0].cause == "holds a newer state"
        assert early.broken[0].planned, "nothing failed: no ring is reported as broken"


@pytest.mark.parametrize("wrong", ["token", "layout", "rank", "forged", "noise", "empty", "huge", "ticket"])
async def test_strangers_are_dropped_without_an_answer(wrong: str) -> None:
    async with Ring(0, 1) as ring:
        await ring.form(1)
        mine = MemberIdentity(1, 0, LAYOUT, TOKEN)
        given = grant(2, ring.addresses)
        if wrong == "token":
            mine, given = replace(mine, token="cd" * 32), grant(2, ring.addresses, "cd" * 32)
        elif wrong == "layout":
            mine = replace(mine, layout="another")
        elif wrong == "rank":
            mine = replace(mine, rank=1)
        elif wrong == "forged":
            given = replace(given, base=replace(given.base, step=9))
        address = ring.addresses[0]
        raw = {
            "noise": b"GET / HTTP/1.1\r\n\r\n",
            "empty": b"",
            "huge": b"\xff\xff\xff\xff",
            "ticket": protocol.frame(RingData("ab" * 16, 0)),
        }
        said = raw[wrong] if wrong in raw else protocol.frame(connections.hello(mine, given, "here", ("tcp",)))
        for proved in (False, True):
            opened = streams(address, TOKEN, Purpose.RING) if proved else asyncio.open_connection(*split(address))
            reader, writer = await opened
            writer.write(said)
            writer.write_eof()
            with suppress(ConnectionResetError):  # it need not read what it does not want
                told = await asyncio.wait_for(reader.read(), 30)
                assert len(told) == (0 if proved else handshake.CHALLENGE_BYTES)
            writer.close()
            with suppress(ConnectionResetError):
                await writer.wait_closed()
        assert not ring.peers[0].shown
        await ring.check(1)


async def test_hostile_first_frames_cost_a_ring_nothing() -> None:
    """From many at once, also 1 MiB of a HELLO of wrong items: nothing is decoded, little is kept, beats go on."""
    decoded: list[int] = []
    usual = protocol.decode

    def counting(data: bytes, *expected: type) -> object:
        decoded.append(len(data))
        return usual(data, *expected)

    with mock.patch.object(protocol, "decode", counting):
        async with Ring(0, 1) as ring:
            await ring.form(1)
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            try:
                with Flood([ring.addresses[0]]) as flood:
                    while flood.sent < 300:
                        await ring.check(1)
                        await asyncio.sleep(0)
                peak = tracemalloc.get_traced_memory()[1] - before
            finally:
                tracemalloc.stop()
            assert all(p.connected == [1] and not p.broken for p in ring.peers)
            assert peak < 32 << 20, peak
    assert max(decoded) < 1 << 16, "only what members say is decoded"


@pytest.mark.parametrize("replica", [1, 2])
async def test_a_second_connection_of_a_neighbour_does_not_replace_the_first(replica: int) -> None:
    async with Ring(0, 1) as ring:
        given = await ring.form(1)
        reader, writer = await streams(ring.addresses[0], TOKEN, Purpose.RING)
        again = connections.hello(MemberIdentity(replica, 0, LAYOUT, TOKEN), given, "here", ("tcp",))
        writer.write(protocol.frame(again))
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await writer.wait_closed()
        await ring.check(1)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
async def test_one_that_leaves_in_an_all_reduce_is_known_to_all_of_eight(transport: Transport) -> None:
    """ABORT goes both ways round: the one farthest away hears of it, once, and knows that it was planned."""
    async with Ring(*range(8), transport=transport) as ring:
        await ring.form(1)
        works = [p.reduce(1, torch.empty(900)) for p in ring.peers[:7]]  # replica 7 does not take part
        behind = [p.reduce(1, torch.empty(9), 2) for p in ring.peers[:7]]
        await async_until(lambda: all(p.group.state is GroupState.RUNNING for p in ring.peers[:7]), "they wait")
        await ring.peers[7].group.close()
        for work, skipped in zip(works, behind, strict=True):
            assert isinstance(await error(work), FTARError)
            assert work.status == "RETRYABLE"
            assert isinstance(await error(skipped), Skipped)
            assert skipped.status == "SKIPPED"
        await async_until(lambda: all(p.broken for p in ring.peers[:7]), "all know")
        assert {(a.cause, a.planned) for p in ring.peers[:7] for a in p.broken} == {("the replica ends", True)}
        assert all(len(p.broken) == 1 for p in ring.peers[:7]), "told more than once"
        assert isinstance(works[3].exception(), RemoteAbort)
        await ring.form(2, ring.peers[:7])
        await ring.check(2, ring.peers[:7])


async def test_a_break_names_the_suspect_to_the_farthest_of_eight() -> None:
    """The network cuts both connections between 2 and 3; 6 is four away from either."""
    async with Ring(*range(8)) as ring:
        await ring.form(1)
        works = [p.reduce(1, torch.empty(900)) for p in ring.peers if p.replica != 3]
        cut(ring.peers[2].rendezvous.right)
        await async_until(lambda: all(p.broken for p in ring.peers), "all know")
        assert not any(p.broken[0].planned for p in ring.peers)
        assert {p.broken[0].suspect for p in ring.peers} <= {2, 3}
        errors = [await error(w) for w in works]
        assert all(isinstance(e, PeerDead | RemoteAbort) and e.suspect in (2, 3) for e in errors)
        assert isinstance(errors[5], RemoteAbort)
        await ring.form(2)
        await ring.check(2)


async def test_an_abort_is_told_to_all() -> None:
    async with Ring(*range(4)) as ring:
        await ring.form(1)
        work = ring.peers[2].reduce(1, torch.empty(9))
        ring.peers[0].group.abort(RemoteAbort("had enough", suspect=3))
        await async_until(lambda: all(p.broken for p in ring.peers), "all know")
        assert {(p.broken[0].cause, p.broken[0].suspect) for p in ring.peers} == {("had enough", 3)}
        failed = await error(work)
        assert isinstance(failed, RemoteAbort)
        assert failed.suspect == 3


async def test_a_neighbour_that_never_comes_is_the_suspect() -> None:
    async with Ring(0, 1, 2, connect_s=0.3) as ring:
        given = grant(1, ring.addresses)
        for peer in ring.peers[:2]:  # replica 2 listens but knows of nothing
            peer.group.configure(given)
        await async_until(lambda: all(p.broken for p in ring.peers[:2]), "they give up")
        # 1 waits for the welcome of its right neighbour, 0 for the call of its left one.
        assert [p.broken[0].suspect for p in ring.peers[:2]] == [2, 2]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            gone = f"127.0.0.1:{taken.getsockname()[1]}"
        alone = ring.peers[0]
        alone.group.configure(grant(2, {0: alone.address, 1: gone}))
        await async_until(lambda: len(alone.broken) == 2, "nobody listens there")
        assert (alone.broken[1].epoch, alone.broken[1].suspect) == (2, 1)


def token(epoch: int, step: int = 1) -> CommitToken:
    return CommitToken(AttemptId(epoch, step, 0), False, True, "0" * 32, equal=(0, 1))


async def test_tokens_go_round_to_the_right() -> None:
    async with Ring(0, 1, 2) as ring:
        await ring.form(1)
        for sender in ring.peers:
            sender.group.send_token(token(1, step=sender.replica + 1))
        await async_until(lambda: all(p.tokens for p in ring.peers), "the tokens")
        assert [p.tokens for p in ring.peers] == [[token(1, 3)], [token(1, 1)], [token(1, 2)]]
        for step in range(20):
            ring.peers[0].group.send_token(token(1, step))
        await async_until(lambda: len(ring.peers[1].tokens) == 21, "all of them")
        assert [t.fence.step for t in ring.peers[1].tokens[1:]] == list(range(20)), "the order is lost"
        ring.peers[0].group.send_token(token(2))  # of another epoch
        ring.peers[0].group.stop(1, "for a test")
        ring.peers[0].group.send_token(token(1))  # of a ring that is over
        await async_until(lambda: ring.peers[1].broken, "the end of the ring")
        assert len(ring.peers[1].tokens) == 21


async def test_nonsense_on_a_control_connection_breaks_the_ring() -> None:
    async with Ring(0, 1, 2) as ring:
        await ring.form(1)
        right = ring.peers[0].rendezvous.right
        assert right is not None
        right.send_heartbeat(protocol.LENGTH.pack(4) + b"nope")
        await async_until(lambda: all(p.broken for p in ring.peers), "the ring breaks")
        assert (ring.peers[1].broken[0].suspect, "protocol" in ring.peers[1].broken[0].cause) == (0, True)


async def test_an_error_of_ours_does_not_end_the_thread() -> None:
    """What fails beside the ring: the loop's owner hears of it, and works of a later ring still run."""
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["exception"]))
    async with Ring(0) as ring:
        await ring.form(1)
        with mock.patch.object(ring.peers[0].plane, "open", side_effect=MemoryError("none left")):
            wrong = ring.peers[0].reduce(1, torch.empty(3))
            assert isinstance(await error(wrong), MemoryError)
        await async_until(lambda: heard == [wrong.exception()], "the loop's owner hears of it")
        assert wrong.status == "FATAL"
        await ring.form(2)
        await ring.check(2)
