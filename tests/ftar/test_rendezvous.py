import asyncio
from typing import Any
from unittest import mock

import pytest
import torch

from ft_hsdp import protocol
from ft_hsdp.errors import FTARError
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.connections import MemberIdentity, Peer
from ft_hsdp.ftar.lane import GroupState
from ft_hsdp.ftar.rendezvous import choose
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingBarrier
from tests.support.ftar.ring_helpers import LAYOUT, TOKEN, Replica, Ring, Transport, error, grant
from tests.support.known import streams
from tests.support.waiting import async_until


def ends(peer: Replica) -> tuple[Any, Any]:
    left, right = peer.rendezvous.left, peer.rendezvous.right
    assert left is not None
    assert right is not None
    return left.receiver, right.sender


@pytest.mark.parametrize("held", [0, 2])
async def test_nobody_begins_before_the_token_has_been_everywhere(held: int) -> None:
    """All edges stand; one member does not pass the token on."""
    go = asyncio.Event()
    usual = Peer.send

    async def hold(to: Peer, message: object) -> None:
        if isinstance(message, RingBarrier) and to is ring.peers[held].rendezvous.right:
            await go.wait()
        await usual(to, message)

    with mock.patch.object(Peer, "send", hold):
        async with Ring(*range(4)) as ring:
            given = grant(1, ring.addresses)
            for peer in ring.peers:
                peer.group.configure(given)
            await async_until(lambda: all(len(p.group.transports) == 2 for p in ring.peers), "all edges")
            await asyncio.sleep(0.05)
            assert not any(p.connected for p in ring.peers)
            go.set()
            await async_until(lambda: all(p.connected for p in ring.peers), "the ring")


async def test_edges_far_from_a_change_are_kept() -> None:
    """Replica 3 leaves and comes back: the edges among the others carry on, with what they have counted."""
    async with Ring(*range(4)) as ring:
        await ring.form(1)
        await ring.check(1)
        before = [ends(p) for p in ring.peers]
        counts = before[0][1].frames
        assert counts > 0
        shrunk = ring.peers[:3]
        await ring.form(2, shrunk)
        after = [ends(p) for p in shrunk]
        assert (after[0][1], after[1][1]) == (before[0][1], before[1][1])
        assert (after[1][0], after[2][0]) == (before[1][0], before[2][0])
        assert after[2][1] is not before[2][1]
        assert after[0][0] is not before[0][0]
        await ring.check(2, shrunk)
        assert after[0][1].frames == after[1][0].frames > counts
        await ring.form(3)
        assert ends(ring.peers[0])[1] is before[0][1]
        assert ends(ring.peers[2])[0] is before[2][0]
        await ring.check(3)
        await ring.form(4, ring.peers[::-1])  # everybody has another right neighbour
        assert not {id(e) for p in ring.peers for e in ends(p)} & {id(e) for pair in before for e in pair}
        await ring.check(4, ring.peers[::-1])


@pytest.mark.parametrize("side", ["sent", "received"])
async def test_an_edge_whose_ends_have_counted_differently_is_made_anew(side: str) -> None:
    """One of them is in the middle of something that the other does not know of."""
    async with Ring(0, 1, 2) as ring:
        await ring.form(1)
        await ring.check(1)
        sender, receiver = ends(ring.peers[0])[1], ends(ring.peers[1])[0]
        (sender if side == "sent" else receiver).frames += 1
        await ring.form(2)
        assert ends(ring.peers[0])[1] is not sender
        assert ends(ring.peers[1])[0] is not receiver
        assert ends(ring.peers[0])[1].frames == 0
        await ring.check(2)


async def test_an_edge_is_not_kept_in_the_middle_of_a_work() -> None:
    async with Ring(0, 1, 2) as ring:
        await ring.form(1)
        before = ends(ring.peers[0])[1]
        works = [p.reduce(1, torch.empty(900)) for p in ring.peers[:2]]
        await async_until(lambda: all(p.group.state is GroupState.RUNNING for p in ring.peers[:2]), "they wait")
        await ring.form(2)
        assert ends(ring.peers[0])[1] is not before
        for work in works:
            assert isinstance(await error(work), FTARError)
        await ring.check(2)


async def test_a_spare_edge_whose_neighbour_is_gone_is_made_anew() -> None:
    """It has died and come back at the same address before anybody looked."""
    async with Ring(0, 1, 2) as ring:
        await ring.form(1)
        right = ring.peers[0].rendezvous.right
        assert right is not None
        ring.peers[1].group.stop(1, "comes back")
        await async_until(lambda: ring.peers[0].broken, "it hears of it")
        await ring.form(2)
        assert ring.peers[0].rendezvous.right is not right
        await ring.check(2)


@pytest.mark.parametrize("change", ["layout", "transport", "ring"])
async def test_members_that_do_not_fit_do_not_connect(change: str) -> None:
    a = Replica(0, connect_s=0.3)
    b = Replica(1, 0.3, "shm" if change == "transport" else "tcp", "another" if change == "layout" else LAYOUT)
    addresses = {0: a.address, 1: b.address}
    a.group.configure(grant(1, addresses))
    b.group.configure(grant(1, dict(reversed(addresses.items())) if change == "ring" else addresses))
    await async_until(lambda: a.broken and b.broken, "they give up")
    assert a.broken[0].suspect == 1
    assert not a.connected + b.connected
    await asyncio.gather(a.group.close(), b.group.close())


@pytest.mark.parametrize("transport", ["tcp", "auto", "c10d"])
async def test_a_ring_over_ipv6(transport: Transport) -> None:
    async with Ring(0, 1, transport=transport, host="::1") as ring:
        assert all(a.startswith("[::1]:") for a in ring.addresses.values())
        await ring.form(1)
        await ring.check(1)
        await ring.form(2)
        await ring.check(2)


@pytest.mark.parametrize(
    ("mine", "theirs", "same_host", "expected"),
    [
        (("shm", "tcp"), ("shm", "tcp"), True, "shm"),
        (("shm", "tcp"), ("shm", "tcp"), False, "tcp"),
        (("tcp",), ("shm", "tcp"), True, "tcp"),
        (("shm",), ("shm",), False, None),
        (("c10d",), ("tcp",), True, None),
    ],
)
def test_which_transport_an_edge_gets(mine, theirs, same_host, expected) -> None:
    assert choose(mine, theirs, same_host) == expected


async def test_a_host_that_only_claims_to_be_ours_gets_no_edge() -> None:
    """Whoever says that it is on this machine has to come through the local listener."""
    async with Ring(0, 1, transport="shm", connect_s=0.5) as ring:
        given = grant(1, ring.addresses)
        ring.peers[0].group.configure(given)
        address = ring.addresses[0]
        reader, writer = await streams(address, TOKEN, Purpose.RING)
        context = ring.peers[0].rendezvous._context
        hello = connections.hello(MemberIdentity(1, 0, LAYOUT, TOKEN), given, context.host, ("shm",))
        writer.write(protocol.frame(hello))
        head = await reader.readexactly(protocol.LENGTH.size)
        welcome = protocol.decode(await reader.readexactly(protocol.LENGTH.unpack(head)[0]), protocol.RingWelcome)
        assert welcome.transport == "shm"
        data_reader, data_writer = await streams(address, TOKEN, Purpose.DATA)
        data_writer.write(protocol.frame(protocol.RingData(welcome.ticket, 0)))
        assert await asyncio.wait_for(data_reader.read(), 30) == b""
        for stream in (writer, data_writer):
            stream.close()
        await async_until(lambda: ring.peers[0].broken, "it gives up")
