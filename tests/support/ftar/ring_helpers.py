"""Replicas of one rank or of several, also of unequal width, on one loop: real sockets, a grant for each epoch."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ft_hsdp import protocol
from ft_hsdp.core.commit import CommitToken, Contribution
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.ftar.connections import LaneRing, LanesOf, MemberIdentity, Peer
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.lane import GroupState, LaneMember
from ft_hsdp.ftar.rendezvous import Rendezvous
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.protocol import RingAbort
from ft_hsdp.train.lanes import GradientLanes, one_lane
from tests.support.ftar.ring_values import entry
from tests.support.waiting import DEADLINE_S, async_until

TOKEN = "ab" * 32
LAYOUT = "layout"
BASE = StateId(0, 0, "0" * 32)
Transport = Literal["auto", "tcp", "shm", "c10d"]


def grant(epoch: int, addresses: dict[int, str], token: str = TOKEN) -> Grant:
    """A signed grant: replica to address, in ring order."""
    members = tuple(Member(r, f"{r}-x-0", "contribute", (a,), ("",)) for r, a in addresses.items())
    return protocol.sign(token, Grant(1, epoch, BASE, members, len(members), "test"))


def lane_of(group: Group, number: int | None = None) -> LaneMember:
    """A lane of a rank by its number; None: the only one, in replicas of equal width."""
    lanes = group._lanes
    return lanes[number] if number is not None else next(iter(lanes.values()))


def cut(peer: Peer | None) -> None:
    """The network cuts the control connection to a peer."""
    assert peer is not None
    peer._sock.shutdown(socket.SHUT_RDWR)


class Rank:
    """A rank: its group, and what the group said."""

    def __init__(
        self,
        identity: MemberIdentity,
        settings: Settings,
        plane: Plane | None = None,
        lanes: LanesOf | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.replica, self.settings = identity.replica, settings
        self.connected: list[int] = []
        self.broken: list[RingAbort] = []
        self.shown: list[Grant] = []
        self.tokens: list[CommitToken] = []
        events = GroupEvents(self.connected.append, self.broken.append, self.shown.append, self.tokens.append)
        self.pause_until = 0.0  # of its training loop, on the monotonic clock
        self.group = Group(identity, settings, events, plane, None, self._pause_s, lanes)
        self.address = self.group.listen(host)

    def _pause_s(self) -> float:
        return max(0.0, self.pause_until - time.monotonic())


class Replica(Rank):
    """A replica of one rank."""

    def __init__(
        self,
        replica: int,
        connect_s: float = 2.0,
        transport: Transport = "tcp",
        layout: str = LAYOUT,
        token: str = TOKEN,
        timeout_s: float = 5.0,
        host: str = "127.0.0.1",
    ) -> None:
        settings = Settings(
            transport, chunk_bytes=256, timeout_s=timeout_s, pause_s=60.0, connect_timeout_s=connect_s
        )
        self.plane = CpuPlane()
        super().__init__(MemberIdentity(replica, 0, layout, token), settings, self.plane, host=host)

    def reduce(self, epoch: int, out: torch.Tensor, step: int = 1) -> Work:
        """Add one's own number to the sum."""
        key = Key(epoch, step, 0, 0, "00" * 16)
        local = torch.full_like(out, float(self.replica + 1))
        return self.group.all_reduce(key, local, out, entry(self.replica))

    @property
    def rendezvous(self) -> Rendezvous:
        current = lane_of(self.group).current
        assert current is not None
        return current


class Rings:
    """Ranks that form rings for each epoch; a context that leaves none of them open."""

    made: Sequence[Rank] = ()

    async def __aexit__(self, *_: object) -> None:
        groups = [rank.group for rank in self.made]
        await asyncio.gather(*(group.close() for group in groups if group.state is not GroupState.CLOSED))

    @staticmethod
    async def connect(given: Grant, ranks: Sequence[Rank], within_s: float = DEADLINE_S) -> Grant:
        """All configure; wait until all are connected."""
        for rank in ranks:
            rank.group.configure(given)
        epoch = given.epoch
        await async_until(lambda: all(epoch in r.connected for r in ranks), f"the ring of epoch {epoch}", within_s)
        return given


class Ring(Rings):
    """Replicas of one rank each, with what more `Replica` takes."""

    def __init__(self, *replicas: int, **more: Any) -> None:
        self._replicas, self._more = replicas, more

    async def __aenter__(self) -> Ring:
        self.made = self.peers = [Replica(replica, **self._more) for replica in self._replicas]
        self.addresses = {p.replica: p.address for p in self.peers}
        return self

    async def form(self, epoch: int, peers: list[Replica] | None = None) -> Grant:
        chosen = peers or self.peers
        return await self.connect(grant(epoch, {p.replica: p.address for p in chosen}), chosen)

    async def check(self, epoch: int, peers: list[Replica] | None = None, n: int = 100) -> None:
        chosen = peers or self.peers
        outs = [torch.empty(n) for _ in chosen]
        works = [p.reduce(epoch, out) for p, out in zip(chosen, outs, strict=True)]
        results = await asyncio.gather(*map(asyncio.wrap_future, works))
        total = float(sum(p.replica + 1 for p in chosen))
        for out, result in zip(outs, results, strict=True):
            assert torch.equal(out, torch.full((n,), total))
            assert [e.replica for e in result.entries] == [p.replica for p in chosen]


async def error(work: Work) -> BaseException | None:
    await async_until(work.done, "the end of a work", 10.0)
    return work.exception()


Shapes = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
SHAPES: Shapes = ((("a", (10, 4)), ("b", (7,)), ("c", (3, 5))), (("d", (40, 30)),), (("e", (12,)),))
COUNTS = 3  # elements of a bucket that is not cut


def values(replica: int, shapes: Shapes = SHAPES) -> list[dict[str, torch.Tensor]]:
    """The whole tensors of a replica, by bucket: the sum depends on the order of addition."""
    made = torch.Generator().manual_seed(replica)
    return [{name: torch.randn(shape, generator=made) for name, shape in bucket} for bucket in shapes]


def flat(bucket: dict[str, torch.Tensor], width: int, rank: int) -> torch.Tensor:
    """A rank's flat gradient shard, as FSDP2 makes it: of each tensor its rows, padded."""
    parts = []
    for tensor in bucket.values():
        chunk = -(-len(tensor) // width)
        rows = tensor[rank * chunk : (rank + 1) * chunk].reshape(-1)
        parts.append(torch.cat([rows, torch.zeros(chunk * tensor[0].numel() - rows.numel())]))
    return torch.cat(parts)


def lanes_of(
    shapes: Shapes, width: int, rank: int, usual: LaneRing | None = None, whole: Sequence[int] = ()
) -> GradientLanes:
    sizes = [sum(-(-shape[0] // width) * math.prod(shape[1:]) for _, shape in bucket) for bucket in shapes]
    counted = [((0, size),) for size in sizes]
    return GradientLanes(shapes, one_lane(usual or LaneRing(rank, ""), [*sizes, *whole], counted), width, rank)


class WideRank(Rank):
    """One rank of several: its lanes, and its gradient."""

    def __init__(
        self,
        replica: int,
        width: int,
        rank: int,
        transport: Transport = "tcp",
        timeout_s: float = 20.0,
        connect_s: float = 20.0,
    ) -> None:
        self.rank, self.width = rank, width
        usual = LaneRing(rank, f"{width} ranks")
        self.lanes = lanes_of(SHAPES, width, rank, usual, (COUNTS,))
        settings = Settings(transport, chunk_bytes=256, timeout_s=timeout_s, connect_timeout_s=connect_s)
        identity = MemberIdentity(replica, usual.number, usual.layout, TOKEN)
        super().__init__(identity, settings, lanes=self.lanes.of)

    def reduce(
        self, grant: Grant, buckets: Sequence[torch.Tensor], step: int = 1, only: Sequence[int] | None = None
    ) -> tuple[list[torch.Tensor], list[Work]]:
        """Queue the buckets, lane by lane; return where the sums go. `only`: places of lanes that take part."""
        lanes = self.lanes.plan(grant.widths).lanes
        mine = Entry(self.replica, (Contribution(self.replica, 1, 0, self.replica),))
        outs, works = [torch.zeros_like(b) for b in buckets], []
        for index, (bucket, out) in enumerate(zip(buckets, outs, strict=True)):
            key = Key(grant.epoch, step, 0, index, "00" * 16)
            for lane in lanes if only is None else [lanes[i] for i in only]:
                part = lane.parts[index]
                target = part.target(out, lambda _, numel: torch.empty(numel))
                given = part.gather(bucket, target)
                work = self.group.all_reduce(key, given, target, mine, lane=lane.ring.number)
                work.add_done_callback(
                    lambda w, part=part, target=target, out=out: w.exception() or part.scatter(target, out)
                )
                works.append(work)
        return outs, works


class WideRing(Rings):
    """Replicas of given widths, with what more `WideRank` takes."""

    def __init__(self, widths: Sequence[int], transport: Transport = "tcp", **more: float) -> None:
        self._widths = widths
        self._transport: Transport = transport
        self._more = more

    async def __aenter__(self) -> WideRing:
        self.made = self._every = list[WideRank]()
        self.replicas = [self.replica(r, width) for r, width in enumerate(self._widths)]
        return self

    def replica(self, replica: int, width: int) -> list[WideRank]:
        found = [WideRank(replica, width, rank, self._transport, **self._more) for rank in range(width)]
        self._every += found
        return found

    @property
    def ranks(self) -> list[WideRank]:
        return [rank for ranks in self.replicas for rank in ranks]

    def grant(self, epoch: int) -> Grant:
        members = tuple(
            Member(ranks[0].replica, "x", "contribute", tuple(r.address for r in ranks), ("",) * len(ranks))
            for ranks in self.replicas
        )
        return protocol.sign(TOKEN, Grant(1, epoch, BASE, members, len(members), "test"))

    async def form(self, epoch: int) -> Grant:
        """All configure; wait until all lanes of all ranks are connected."""
        return await self.connect(self.grant(epoch), self.ranks, 90.0)

    async def check(self, given: Grant, step: int = 1) -> None:
        """All sum; each member has the same bits, and they are the sum over the replicas."""
        widest = max(len(m.ring) for m in given.members)
        whole = {ranks[0].replica: values(ranks[0].replica) for ranks in self.replicas}
        sums: dict[int, list[dict[str, torch.Tensor]]] = {}
        queued = {}
        for rank in self.ranks:
            buckets = [flat(bucket, rank.width, rank.rank) for bucket in whole[rank.replica]]
            queued[rank.replica, rank.rank] = rank.reduce(given, buckets, step)
        for outs_works in queued.values():
            await asyncio.gather(*map(asyncio.wrap_future, outs_works[1]))
        for ranks in self.replicas:
            got = [queued[r.replica, r.rank][0] for r in ranks]
            sums[ranks[0].replica] = [
                joined([each[b] for each in got], bucket) for b, bucket in enumerate(whole[ranks[0].replica])
            ]
        first, *others = sums.values()
        for index, bucket in enumerate(first):
            for name, total in bucket.items():
                assert all(torch.equal(total, other[index][name]) for other in others), f"other bits of {name}"
                expected = sum(whole[r[0].replica][index][name] * (r[0].width / widest) for r in self.replicas)
                torch.testing.assert_close(total, expected)


def joined(shards: Sequence[torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors of a bucket from the flat shards of all ranks."""
    found, place = {}, 0
    for name, tensor in like.items():
        chunk = -(-len(tensor) // len(shards)) * tensor[0].numel()
        whole = torch.cat([shard[place : place + chunk] for shard in shards])[: tensor.numel()]
        found[name] = whole.view(tensor.shape)
        place += chunk
    return found
