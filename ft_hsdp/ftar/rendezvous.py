"""How the ring of one grant is formed at one member.

A member calls its right neighbour and is called by its left one. The caller says HELLO and offers transports; the
callee chooses one and answers WELCOME; then the caller opens the data connection. When a member has both edges, a
barrier goes round the ring twice: after the first lap all members are connected, after the second all know it, so
that none begins an all-reduce too early.

Edges whose two members stay neighbours in the next ring are kept (`SpareEdges`) and not made again. Everything
here runs on the control loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp import address, fault_injection, handshake
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.errors import ConnectFailed, ProtocolViolation, StaleEpoch, exhausted
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.allreduce import Ring
from ft_hsdp.ftar.connections import Heard, Listener, MemberIdentity, Peer, hello
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.gloo import C10d
from ft_hsdp.ftar.transport.kind import Edge, TransportKind
from ft_hsdp.ftar.transport.shm import Shm
from ft_hsdp.ftar.transport.tcp import Tcp
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingBarrier, RingHello, RingWelcome

KINDS: dict[str, TransportKind] = {"tcp": Tcp(), "shm": Shm(), "c10d": C10d()}


def choose(mine: Sequence[str], theirs: Sequence[str], same_host: bool) -> str | None:
    """Choose the transport of an edge: the first one that the caller offers and this end has.

    Args:
        mine: names of the transports that this end may use.
        theirs: names that the caller offers, best first.
        same_host: whether both ends can share memory; without it "shm" is never chosen.

    Returns:
        The name of the transport; None if no offer is possible.
    """
    return next((o for o in theirs if o in mine and (o != "shm" or same_host)), None)


ROUND = 1.5  # x the time to connect: how long the barrier may take, while other members still connect


@dataclass(frozen=True, slots=True)
class MemberContext:
    """What a member brings to the rendezvous of each epoch."""

    identity: MemberIdentity
    settings: Settings
    listener: Listener  # accepts data connections
    arena: Arena  # registered memory that peers on this host can map
    host: str  # id of this machine, by which two members see that they can share memory
    heard: Heard  # gets the messages of peers
    address: Callable[[Member], str]  # where a member listens for its neighbour in this lane, "host:port"


class Rendezvous:
    """The ring of one grant at one member: its edges while they are made, and as long as the ring lasts.

    Args:
        grant: the members in ring order, with their addresses.
        context: this member's identity, settings, listener and memory.

    Attributes:
        position: index of this member in the ring.
        right: the edge to the right neighbour; None until it is made, and in a ring of one.
        left: the edge from the left neighbour; likewise.
    """

    def __init__(self, grant: Grant, context: MemberContext) -> None:
        self.grant = grant
        self.position = grant.ring.index(context.identity.replica)
        self.right: Peer | None = None
        self.left: Peer | None = None
        self._context = context
        self._trying: Peer | None = None  # a spare edge that is being reused
        self._welcome: asyncio.Queue[RingWelcome | None] = asyncio.Queue()  # None: the spare edge has ended
        self._laps: asyncio.Queue[RingBarrier] = asyncio.Queue()
        self._called = asyncio.Event()  # the left edge is made
        self._admitting: asyncio.Task[Any] | None = None  # waits for the left neighbour's data connection

    def member_at(self, side: int) -> Member:
        """Return the member to the left (`side` -1) or to the right (+1) of this one, or this one (0)."""
        members = self.grant.members
        return members[(self.position + side) % len(members)]

    @property
    def edges(self) -> tuple[Peer, ...]:
        return tuple(n for n in (self.left, self.right) if n is not None)

    async def form(self, spare: Peer | None) -> None:
        """Connect to both neighbours and pass the barrier; wait until that is done.

        A neighbour that refuses the grant answers with RingAbort. The group handles it, and cancels this.

        Args:
            spare: the edge to the right neighbour that the epoch before has left; None: connect anew.

        Raises:
            ConnectFailed: the deadline passed or a connection failed. `suspect` is the neighbour that did not
                answer; None if both did, since then another member holds the barrier up.
            LocalResourceError: this process has no descriptor, port or memory left.
        """
        wait_s = self._context.settings.connect_timeout_s
        suspect: int | None = self.member_at(+1).replica
        try:
            async with asyncio.timeout(wait_s) as limit:
                await self._call(spare)
                suspect = self.member_at(-1).replica
                await self._called.wait()
                # This member has both edges and suspects no one. It waits longer than members that lack an edge,
                # so that their abort, which names a suspect, comes first.
                suspect = None
                limit.reschedule(asyncio.get_running_loop().time() + ROUND * wait_s)
                await self._go_round()
        except (OSError, ProtocolViolation, TimeoutError) as error:
            if (local := exhausted(error)) is not None:
                raise local from error
            cause = str(error) or f"not connected within {wait_s} s"
            raise ConnectFailed(cause, suspect=suspect) from error

    async def _call(self, spare: Peer | None) -> None:
        """Make the edge to the right: reuse the spare one, or connect anew if the neighbour has not kept it."""
        if spare is not None:
            self._trying = spare
            try:
                await self._greet(spare)
                return
            except OSError:
                self.right = None
                await spare.close()
            finally:
                self._trying = None
        await fault_injection.passes(self.member_at(+1).replica)
        sock = await handshake.dial(self._address(), self._context.identity.token, Purpose.RING)
        with connections.closed_on_error([sock]):
            connections.tune(sock, self._context.settings.timeout_s)
        await self._greet(Peer(sock, self._context.heard))

    def _address(self) -> str:
        return self._context.address(self.member_at(+1))

    async def _greet(self, peer: Peer) -> None:
        """Say HELLO on `peer`, wait for WELCOME, and open the data connection that it asks for."""
        context, grant = self._context, self.grant
        peer.member = self.member_at(+1)
        self.right = peer
        peer.listen()
        kept = peer.sender.frames if peer.sender is not None else -1
        await peer.send(hello(context.identity, grant, context.host, context.settings.offers, kept))
        answer = await self._welcome.get()
        if answer is None:
            raise ConnectionResetError("closed its connection")
        self._trying = None
        if answer.kept and peer.sender is not None:
            return
        if peer.sender is not None:
            old, peer.sender = peer.sender, None
            old.close()
            await asyncio.to_thread(old.dispose)
        if answer.transport not in context.settings.offers:
            raise ProtocolViolation(f"the right neighbour wants transport {answer.transport[:20]!r}")
        edge = self._edge(peer.member.replica, self._address(), answer.door, answer.ticket)
        peer.transport = answer.transport
        peer.sender = await KINDS[answer.transport].dial(edge, context.arena)

    def _edge(self, member: int, address: str, offered: str, ticket: str) -> Edge:
        settings, token = self._context.settings.patient, self._context.identity.token
        return Edge(self.grant.epoch, member, settings, token, address, offered, ticket)

    def heard(self, peer: Peer, message: RingWelcome | RingBarrier) -> None:
        """Take a WELCOME or a barrier message from an edge of this ring; ignore those of other epochs."""
        if message.epoch != self.grant.epoch or peer not in self.edges:
            return
        if isinstance(message, RingWelcome):
            self._welcome.put_nowait(message)
        else:
            self._laps.put_nowait(message)

    def lost(self, peer: Peer) -> bool:
        """Return whether `peer` is an edge of this ring, so that its end breaks the ring."""
        return peer in self.edges

    def retries(self, peer: Peer) -> bool:
        """Return whether `peer`, whose connection has ended, was a spare edge that is being tried.

        In that case `form` connects anew, and the ring is not broken.
        """
        if peer is not self._trying:
            return False
        self._welcome.put_nowait(None)
        return True

    async def called(self, greeting: RingHello, peer: Peer) -> None:
        """Answer the left neighbour's HELLO, and accept its edge.

        Args:
            greeting: its HELLO, which `Listener.check` has verified.
            peer: the connection on which it came.

        Raises:
            OSError: the connection failed; the caller notices it too.
            ProtocolViolation: the caller is not the left neighbour, or shows another grant for this epoch.
            TimeoutError: the data connection did not come in time.
        """
        context = self._context
        if (
            self.left is not None
            or greeting.replica != self.member_at(-1).replica
            or greeting.grant.mac != self.grant.mac
        ):
            raise ProtocolViolation("a second left neighbour, or another grant for the same epoch")
        if peer.gone:
            raise ConnectionResetError("closed its connection")
        self.left = peer
        peer.member = self.member_at(-1)
        if peer.receiver is not None and peer.receiver.frames == greeting.kept:
            await peer.send(RingWelcome(self.grant.epoch, True))
        else:
            await self._admit(greeting, peer, context)
        peer.listen()
        self._called.set()

    async def _admit(self, greeting: RingHello, peer: Peer, context: MemberContext) -> None:
        """Choose the transport of an edge, answer WELCOME, and accept the data connection."""
        if peer.receiver is not None:
            old, peer.receiver = peer.receiver, None
            old.close()
            await asyncio.to_thread(old.dispose)
        transport = choose(context.settings.offers, greeting.offers, greeting.host == context.host)
        if transport is None:
            raise ProtocolViolation(f"no transport of {', '.join(greeting.offers)} is possible here")
        kind = KINDS[transport]
        ticket, calls = context.listener.expect()
        host, _ = address.split(context.address(self.member_at(0)))
        offered = kind.offer(context.listener, host)
        edge = self._edge(greeting.replica, "", offered, ticket)
        self._admitting = asyncio.current_task()
        try:
            async with asyncio.timeout(context.settings.connect_timeout_s):
                await peer.send(RingWelcome(self.grant.epoch, False, transport, offered, ticket))
                peer.receiver = await kind.accept(edge, calls)
                peer.transport = transport
        finally:
            self._admitting = None
            context.listener.forget(ticket)

    def give_up(self) -> None:
        """Wait no longer for the left neighbour's data connection: the ring is over. Does not close the edge."""
        if self._admitting is not None:
            self._admitting.cancel()

    async def _go_round(self) -> None:
        """Pass the barrier: lap 1 tells that all members are connected, lap 2 that all of them know it."""
        assert self.right is not None
        for lap in (1, 2):
            if self.position == 0:
                await self.right.send(RingBarrier(self.grant.epoch, lap))
                if lap == 1:
                    await self._lap(lap)
            else:
                await self._lap(lap)
                await self.right.send(RingBarrier(self.grant.epoch, lap))

    async def _lap(self, lap: int) -> None:
        got = await self._laps.get()
        if got.lap != lap:
            raise ProtocolViolation(f"lap {got.lap} of the barrier instead of {lap}")


class SpareEdges:
    """The edges of a group that outlive their ring, until the next ring takes or drops them."""

    def __init__(self) -> None:
        self._edges: list[Peer] = []

    def keep(self, old: Rendezvous, new: Rendezvous, ring: Ring, error: StaleEpoch) -> bool:
        """End `ring` and keep those of its edges that have the same two members in `new`.

        `old` loses the edges that are kept.

        Returns:
            False if an all-reduce is running or the ring is broken: then no edge is kept.
        """
        receiver, sender = ring.retire(error)
        if receiver is None or sender is None:
            return False
        for peer, side in ((old.left, -1), (old.right, +1)):
            same = peer is not None and peer.member == new.member_at(side)
            if peer is not None and same and not peer.gone:
                self._edges.append(peer)
        old.left = None if old.left in self._edges else old.left
        old.right = None if old.right in self._edges else old.right
        return True

    def to(self, member: object) -> Peer | None:
        """Take and return the edge to the right that leads to `member`; None if there is none."""
        for spare in self._edges:
            if spare.sender is not None and spare.member == member and not spare.gone:
                self._edges.remove(spare)
                return spare
        return None

    def remove(self, peer: Peer) -> bool:
        """Drop `peer`; return whether it was a spare edge."""
        if peer not in self._edges:
            return False
        self._edges.remove(peer)
        return True

    def drain(self) -> list[Peer]:
        spares, self._edges = self._edges, []
        return spares
