"""Choose: which transport an edge gets, from what both ends can do.

Formation: how the ring of one grant comes about at one member.

It calls its right neighbour and is called by its left one; each edge gets a transport; then a token goes round
twice, so that nobody begins before all are connected. Edges that both ends have kept are not made again.

Spares: edges that outlive their ring, until the next one has taken them or does not want them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ft_hsdp import address, fault_injection, handshake
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.errors import ConnectFailed, ProtocolViolation, StaleEpoch, exhausted
from ft_hsdp.ftar import wire
from ft_hsdp.ftar.allreduce import Ring
from ft_hsdp.ftar.listener import Listener, MemberIdentity, hello
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.peer import Heard, Peer
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.gloo import C10d
from ft_hsdp.ftar.transport.kind import Edge, TransportKind
from ft_hsdp.ftar.transport.shm import Shm
from ft_hsdp.ftar.transport.tcp import Tcp
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingAbort, RingBarrier, RingHello, RingWelcome

KINDS: dict[str, TransportKind] = {"tcp": Tcp(), "shm": Shm(), "c10d": C10d()}


def choose(mine: Sequence[str], theirs: Sequence[str], same_host: bool) -> str | None:
    """The first of the caller's offers that this end has too; shared memory only on one host. None: none fits."""
    return next((o for o in theirs if o in mine and (o != "shm" or same_host)), None)


ROUND = 1.5  # x the longest time to connect: until the others are, too


class Refusal(StaleEpoch):
    """The neighbour refused the grant; ``abort`` says why and may hold a newer one."""

    def __init__(self, abort: RingAbort) -> None:
        super().__init__(abort.cause)
        self.abort = abort


@dataclass(frozen=True, slots=True)
class MemberContext:
    """What a member brings to every formation. ``host`` names the machine; ``heard`` gets neighbours' messages."""

    identity: MemberIdentity
    settings: Settings
    listener: Listener
    arena: Arena
    host: str
    heard: Heard


class Rendezvous:
    """The ring of ``grant`` at one member: first its edges, then in use, then over."""

    def __init__(self, grant: Grant, context: MemberContext) -> None:
        self.grant = grant
        self.position = grant.ring.index(context.identity.replica)
        self.right: Peer | None = None
        self.left: Peer | None = None
        self._context = context
        self._trying: Peer | None = None
        self._welcome: asyncio.Queue[RingWelcome | None] = asyncio.Queue()
        self._laps: asyncio.Queue[RingBarrier] = asyncio.Queue()
        self._called = asyncio.Event()

    def member_at(self, side: int) -> Member:
        """The member to the left (-1) or right (+1)."""
        members = self.grant.members
        return members[(self.position + side) % len(members)]

    @property
    def edges(self) -> tuple[Peer, ...]:
        """The edges that stand."""
        return tuple(n for n in (self.left, self.right) if n is not None)

    async def form(self, spare: Peer | None) -> None:
        """Connect both ways and go round; ``spare`` is an edge to the right neighbour of the epoch before.

        Raises:
            Refusal: the right neighbour knows better.
            ConnectFailed: not within the deadline; ``suspect`` is the neighbour that we waited for, if it is one.
            LocalResourceError: this process has no descriptor, port or memory left for it.
        """
        wait_s = self._context.settings.connect_timeout_s
        suspect: int | None = self.member_at(+1).replica
        try:
            async with asyncio.timeout(wait_s) as limit:
                await self._call(spare)
                suspect = self.member_at(-1).replica
                await self._called.wait()
                # Whoever has both edges blames nobody, and lets those speak first that lack one.
                suspect = None
                limit.reschedule(asyncio.get_running_loop().time() + ROUND * wait_s)
                await self._go_round()
        except (OSError, ProtocolViolation, TimeoutError) as error:
            if (local := exhausted(error)) is not None:
                raise local from error
            cause = str(error) or f"not connected within {wait_s} s"
            raise ConnectFailed(cause, suspect=suspect) from error

    async def _call(self, spare: Peer | None) -> None:
        """Get the edge to the right: the spare one, or a new one if the neighbour has not kept it."""
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
        try:
            wire.tune(sock, self._context.settings.timeout_s)
        except BaseException:
            sock.close()
            raise
        await self._greet(Peer(sock, self._context.heard))

    def _address(self) -> str:
        return self.member_at(+1).ring[self._context.identity.rank]

    async def _greet(self, peer: Peer) -> None:
        """HELLO, and what the answer asks for."""
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
        edge = Edge(
            grant.epoch,
            peer.member.replica,
            context.settings.patient,
            context.identity.token,
            self._address(),
            answer.door,
            answer.ticket,
        )
        peer.transport = answer.transport
        peer.sender = await KINDS[answer.transport].dial(edge, context.arena)

    def heard(self, peer: Peer, message: RingWelcome | RingBarrier) -> None:
        """An answer to what this formation sent, from one of its edges."""
        if message.epoch != self.grant.epoch or peer not in self.edges:
            return
        if isinstance(message, RingWelcome):
            self._welcome.put_nowait(message)
        else:
            self._laps.put_nowait(message)

    def lost(self, peer: Peer) -> bool:
        """A connection ended: whether this ring needed it."""
        return peer in self.edges

    def retries(self, peer: Peer) -> bool:
        """A connection ended: whether it was only a spare one, and a new one is made in its place."""
        if peer is not self._trying:
            return False
        self._welcome.put_nowait(None)
        return True

    async def called(self, said: RingHello, peer: Peer) -> None:
        """The left neighbour calls for this grant: answer, and get the edge from it.

        Raises:
            OSError, ProtocolViolation: it did not work out; the caller will see.
        """
        context = self._context
        if self.left is not None or said.replica != self.member_at(-1).replica or said.grant.mac != self.grant.mac:
            raise ProtocolViolation("a second left neighbour, or another grant for the same epoch")
        if peer.gone:
            raise ConnectionResetError("closed its connection")
        self.left = peer
        peer.member = self.member_at(-1)
        if peer.receiver is not None and peer.receiver.frames == said.kept:
            await peer.send(RingWelcome(self.grant.epoch, True))
        else:
            await self._admit(said, peer, context)
        peer.listen()
        self._called.set()

    async def _admit(self, said: RingHello, peer: Peer, context: MemberContext) -> None:
        """Make the data connection of an edge that calls."""
        if peer.receiver is not None:
            old, peer.receiver = peer.receiver, None
            old.close()
            await asyncio.to_thread(old.dispose)
        transport = choose(context.settings.offers, said.offers, said.host == context.host)
        if transport is None:
            raise ProtocolViolation(f"no transport of {', '.join(said.offers)} is possible here")
        kind = KINDS[transport]
        ticket, calls = context.listener.expect()
        host, _ = address.split(self.grant.members[self.position].ring[context.identity.rank])
        offered = kind.offer(context.listener, host)
        edge = Edge(
            self.grant.epoch, said.replica, context.settings.patient, context.identity.token, "", offered, ticket
        )
        try:
            async with asyncio.timeout(context.settings.connect_timeout_s):
                await peer.send(RingWelcome(self.grant.epoch, False, transport, offered, ticket))
                peer.receiver = await kind.accept(edge, calls)
                peer.transport = transport
        finally:
            context.listener.forget(ticket)

    async def _go_round(self) -> None:
        """A token twice round the ring: the first lap says that all are connected, the second that all know."""
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
    """The spare edges of one group; on the control loop."""

    def __init__(self) -> None:
        self._edges: list[Peer] = []

    def keep(self, old: Rendezvous, new: Rendezvous, ring: Ring, error: StaleEpoch) -> bool:
        """End ``ring`` and keep those of its edges that have the same members in ``new``; whether it was idle.

        ``old`` has them no more.
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
        """Take the edge to the right that leads to ``member``."""
        for spare in self._edges:
            if spare.sender is not None and spare.member == member and not spare.gone:
                self._edges.remove(spare)
                return spare
        return None

    def remove(self, peer: Peer) -> bool:
        """Take this edge; whether it was one of them."""
        if peer not in self._edges:
            return False
        self._edges.remove(peer)
        return True

    def drain(self) -> list[Peer]:
        """Take all that are left."""
        spares, self._edges = self._edges, []
        return spares
