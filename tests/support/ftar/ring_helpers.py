"""Replicas of one rank each, on one loop: real sockets, a grant for each epoch."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ft_hsdp import protocol
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.ftar.connections import LanesOf, MemberIdentity, Peer
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.frame import Key
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.lane import GroupState, LaneMember
from ft_hsdp.ftar.rendezvous import Rendezvous
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.protocol import RingAbort
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
