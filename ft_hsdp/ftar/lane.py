"""One rank's membership in the rings of one lane, from epoch to epoch (FT-HSDP §4.2).

Usually a rank has one lane: the ranks with its number in all replicas. In a membership of replicas of unequal
width it has several, each with a ring, heartbeats and an engine's thread of its own. So no lane waits for
another: they cannot wait in a circle, and who waits in one is not blamed in another. `Group` makes the lanes,
gives them the grants, takes callers in for them, and ends all of them when one breaks.

Two threads meet here. Everything but `all_reduce` runs on the control loop (asyncio); the all-reduces run on the
engine's thread (`executor`), which reports back through `_failed` and `_ran`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant
from ft_hsdp.core.traces import GroupTrace, RankId
from ft_hsdp.errors import (
    FatalError,
    FTARError,
    LocalResourceError,
    PeerDead,
    PeerTimeout,
    ProtocolViolation,
    RemoteAbort,
    StaleEpoch,
    exhausted,
)
from ft_hsdp.ftar.allreduce import AllReduceOrder, Ring
from ft_hsdp.ftar.connections import LaneRing, Listener, MemberIdentity, Peer
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.executor import Executor, Work
from ft_hsdp.ftar.heartbeat import Heartbeat, HostSentinel
from ft_hsdp.ftar.rendezvous import MemberContext, Rendezvous, SpareEdges
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.shm import host_id
from ft_hsdp.protocol import RingAbort, RingBarrier, RingHello, RingWelcome

BLAME_S = 0.05  # how long a lost data connection waits for the control connection to name the cause


class GroupState(Enum):
    """The state of a group. FATAL and CLOSED are final; only a larger epoch leads out of BROKEN."""

    NEW = "no epoch yet"
    CONFIGURING = "forming the ring of an epoch"
    READY = "the ring stands, nothing to do"
    RUNNING = "an all-reduce is under way"
    ABORTING = "the ring is over, the others are being told"
    BROKEN = "the ring is over"
    FATAL = "this process must stop"
    CLOSED = "closed"


_END = {GroupState.FATAL, GroupState.CLOSED}
TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.NEW: frozenset({GroupState.CONFIGURING, GroupState.BROKEN, *_END}),
    GroupState.CONFIGURING: frozenset({GroupState.READY, GroupState.ABORTING, GroupState.CONFIGURING, *_END}),
    GroupState.READY: frozenset({GroupState.RUNNING, GroupState.ABORTING, GroupState.CONFIGURING, *_END}),
    GroupState.RUNNING: frozenset({GroupState.READY, GroupState.ABORTING, GroupState.CONFIGURING, *_END}),
    GroupState.ABORTING: frozenset({GroupState.BROKEN, GroupState.CONFIGURING, *_END}),
    GroupState.BROKEN: frozenset({GroupState.CONFIGURING, GroupState.BROKEN, *_END}),
    GroupState.FATAL: frozenset({GroupState.CLOSED}),
    GroupState.CLOSED: frozenset(),
}


def changed(old: GroupState, new: GroupState) -> GroupState:
    """Return `new` if a group may change to it from `old`.

    Raises:
        ValueError: there is no such transition.
    """
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a group cannot go from {old.name} to {new.name}")
    return new


@dataclass(frozen=True, slots=True)
class LaneEvents:
    """Callbacks of a lane to its group, called on the control loop unless it says otherwise."""

    formed: Callable[[int], None]  # the ring of this epoch stands
    broken: Callable[[RingAbort], None]  # the ring broke, or a member left it on purpose; once for each ring
    shown: Callable[[Grant], None]  # a peer knows this newer grant
    token: Callable[[CommitToken], None]  # the left neighbour passed the commit token on
    hello: Callable[[RingHello, Peer], None]  # a neighbour uses an edge again that both have kept
    refused: Callable[[RingHello, Peer], None]  # a caller whose epoch is over here
    crashed: Callable[[str, Exception], None]  # an error that no ring caused; any thread
    exhausted: Callable[[LocalResourceError], None]  # this process is out of descriptors, ports or memory


class OwnTasks:
    """Tasks on the control loop that their owner waits for before it is closed.

    Args:
        crashed: Takes the error of each task that fails.
    """

    def __init__(self, crashed: Callable[[str, Exception], None]) -> None:
        self._crashed = crashed
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task, which begins later. Called on the control loop."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def ended(self) -> None:
        """Wait until no task runs, also of those that a task starts."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._crashed("the group failed", error)


class LaneMember:
    """The ring of one lane in successive epochs. Made and used on the control loop.

    Args:
        place: which lane.
        identity: this member; number and layout are those of the lane.
        settings: sizes, deadlines and transports.
        listener: accepts data connections; one for all lanes of the rank.
        events: callbacks to the group.
        plane: copies and adds the chunks; of this lane alone.
        arena: registered memory that neighbours on this host can map.
        sentinel: how long this host may stall.
        pause_s: returns for how many seconds a training loop of this replica may pause from now; 0: none does.
    """

    def __init__(
        self,
        place: LaneRing,
        identity: MemberIdentity,
        settings: Settings,
        listener: Listener,
        events: LaneEvents,
        plane: Plane,
        arena: Arena,
        sentinel: HostSentinel,
        pause_s: Callable[[], float],
    ) -> None:
        self.state = GroupState.NEW
        self.error: FTARError | None = None  # why the last ring ended
        self.current: Rendezvous | None = None  # of the newest epoch, also when its ring is over
        self.over = True  # no ring is formed or being formed
        self.ring: Ring | None = None
        self.heartbeat: Heartbeat | None = None
        self.place = place
        self._changing = threading.Lock()  # guards `state` and `_departure`, which the engine's thread changes too
        self._identity = replace(identity, rank=place.number, layout=place.layout)
        self._settings = settings
        self._listener = listener
        self._events = events
        self._sentinel = sentinel
        self._pause_s = pause_s
        self._context = MemberContext(
            self._identity, settings, listener, arena, host_id(), self.heard, place.address
        )
        self._plane = plane
        self._spares = SpareEdges()
        self._loop = asyncio.get_running_loop()
        self._tasks = OwnTasks(events.crashed)
        self._forming: asyncio.Task[Any] | None = None
        self._departure: tuple[Rendezvous, RingAbort] | None = None  # a peer left during an all-reduce
        self._executor = Executor(settings.connect_timeout_s + 1.0, self._failed, self._ran, events.crashed)

    def _enter(self, state: GroupState) -> None:
        with self._changing:
            self.state = changed(self.state, state)

    # Forming and leaving rings, on the control loop.

    def configure(self, grant: Grant, freed: Collection[asyncio.Future[Any]] = ()) -> None:
        """Begin to form the ring of `grant`, which is newer than all before, and leave the ring before it.

        Returns at once.

        Args:
            freed: what is waited for first: until then lanes that ended may write into the tensors of their works.

        Raises:
            ProtocolViolation: a member of the grant has no rank with this lane.
        """
        rendezvous = Rendezvous(grant, self._context)
        self.leave("a newer epoch", grant, rendezvous)
        self._enter(GroupState.CONFIGURING)
        self.current, self.over, self.ring = rendezvous, False, None
        self._executor.expect(grant.epoch)
        if len(grant.members) > 1:
            self.heartbeat = Heartbeat(
                self._settings, rendezvous, self._sentinel, partial(self._break, rendezvous), self._pause_s
            )
        self._forming = self._tasks.start(self._form(rendezvous, freed))

    def leave(self, reason: str, newer: Grant | None = None, following: Rendezvous | None = None) -> None:
        """Leave the current ring on purpose, if it is not over. Returns at once.

        Args:
            reason: what the other members are told.
            newer: the grant of the epoch that follows, if it is known.
            following: the ring that follows: edges that it can use are kept, if no all-reduce is running.
        """
        self._drop_spares()
        rendezvous = self.current
        if rendezvous is None or self.over:
            return
        planned = RingAbort(rendezvous.grant.epoch, reason, None, newer, planned=True)
        error = StaleEpoch(reason)
        if following is not None and self.ring is not None:
            idle = self._spares.keep(rendezvous, following, self.ring, error)
            self.ring = None if idle else self.ring
        self._end(rendezvous, planned, error)

    def send_token(self, token: CommitToken) -> None:
        """Send the commit token to the right neighbour. Return at once.

        A token of another epoch than the current one is dropped. If it cannot be sent, the ring breaks.
        """
        rendezvous = self.current
        if rendezvous is None or self.over or rendezvous.grant.epoch != token.fence.epoch:
            return
        self._tasks.start(self._pass(rendezvous, token))

    async def _pass(self, rendezvous: Rendezvous, token: CommitToken) -> None:
        assert rendezvous.right is not None
        try:
            await rendezvous.right.send(token)
        except OSError as error:
            self._break(rendezvous, PeerDead(f"control: {error}", suspect=rendezvous.member_at(+1).replica))

    def trace(self) -> GroupTrace | None:
        """Return how far this member is in the current ring; None if there is none."""
        ring, rendezvous = self.ring, self.current
        if ring is None or rendezvous is None or self.over:
            return None
        left = rendezvous.member_at(-1)
        neighbour = RankId(left.replica, self.place.rank_of(left)) if len(ring.members) > 1 else None
        return GroupTrace(
            f"ring {self.place.number} of epoch {ring.epoch}",
            *ring.counts,
            "" if ring.newest is None else f"bucket {ring.newest.bucket}",
            neighbour,
            ring.received,
            ring.sent,
            ring.awaits,
            ring.inside.seconds,
            ring.blocked_s,
            ring.marks,
        )

    def abort(self, error: FTARError) -> None:
        """Break the current ring with `error` and tell all its members. Return at once."""
        if self.current is not None:
            self._break(self.current, error)

    def follow(self, abort: RingAbort) -> None:
        """End the current ring because another lane of this rank ended with `abort`. Return at once.

        If a member leaves on purpose while an all-reduce runs here, the ring ends after that all-reduce.
        """
        if self.current is None or self.over:
            return
        if not self._departs(self.current, abort):
            self._aborted(self.current, abort)

    async def close(self) -> None:
        """Leave the ring, close its connections and end the engine's thread; wait until that is done."""
        self.leave("the replica ends")
        self._enter(GroupState.CLOSED)
        await self._tasks.ended()
        await asyncio.to_thread(self._executor.close)

    async def _form(self, rendezvous: Rendezvous, freed: Collection[asyncio.Future[Any]]) -> None:
        """Connect the ring of `rendezvous`, then let the queued works run on it."""
        if freed:
            await asyncio.wait(freed)
        grant = rendezvous.grant
        receiver = sender = None
        if len(grant.members) > 1:
            try:
                await rendezvous.form(self._spares.to(rendezvous.member_at(+1)))
            except LocalResourceError as error:
                self._events.exhausted(error)
                return
            except FTARError as error:
                self._break(rendezvous, error)
                return
            assert rendezvous.left is not None
            assert rendezvous.right is not None
            receiver, sender = rendezvous.left.receiver, rendezvous.right.sender
        if self.over or self.current is not rendezvous:
            return
        position, settings = rendezvous.position, self._settings
        self.ring = Ring(grant.epoch, grant.ring, position, receiver, sender, self._plane, settings)
        self._enter(GroupState.READY)
        if self.heartbeat is not None:
            self.heartbeat.ring_formed(self.ring)
        self._drop_spares()
        self._executor.run_on(self.ring)
        self._events.formed(grant.epoch)

    def _drop_spares(self) -> None:
        for spare in self._spares.drain():
            self._tasks.start(spare.close())

    # Callers and messages of peers, on the control loop.

    def called(self, hello: RingHello, peer: Peer) -> None:
        """Take a caller of the current epoch in, whose HELLO was checked. Return at once."""
        assert self.current is not None
        peer.belongs_to(self.heard)
        self._tasks.start(self._take_in(self.current, hello, peer))

    async def _take_in(self, rendezvous: Rendezvous, hello: RingHello, peer: Peer) -> None:
        self._spares.remove(peer)
        if self.over or self.current is not rendezvous:  # the caller was not told yet that this epoch is over
            self._events.refused(hello, peer)
            return
        try:
            await rendezvous.called(hello, peer)
        except (OSError, ProtocolViolation, TimeoutError) as error:
            if (local := exhausted(error)) is not None:
                self._events.exhausted(local)
            await peer.close()

    def heard(self, peer: Peer, message: object) -> None:
        """Handle a message of a peer, or the end of its connection (an exception)."""
        rendezvous = self.current
        match message:
            case RingHello():
                try:
                    self._listener.check(message)
                    if (message.rank, message.layout) != (self._identity.rank, self._identity.layout):
                        raise ProtocolViolation("HELLO of another lane")
                except ProtocolViolation as error:
                    self.heard(peer, error)
                else:
                    self._events.hello(message, peer)
            case Exception():
                self._ended(peer, message)
            case _ if rendezvous is None:
                pass
            case RingWelcome() | RingBarrier():
                rendezvous.heard(peer, message)
            case RingAbort() if message.epoch == rendezvous.grant.epoch and rendezvous.lost(peer):
                if self._departs(rendezvous, message):
                    peer.leaving = True
                else:
                    self._aborted(rendezvous, message)
            case CommitToken() if not self.over:
                self._events.token(message)

    def _ended(self, peer: Peer, why: Exception) -> None:
        rendezvous = self.current
        if rendezvous is None or not rendezvous.lost(peer):
            if self._spares.remove(peer):
                self._tasks.start(peer.close())
            return
        if peer.leaving or rendezvous.retries(peer):
            return
        who = peer.member.replica if peer.member is not None else None
        text = f"replica {who} {'broke the protocol: ' if isinstance(why, ProtocolViolation) else ''}{why}"
        self._break(rendezvous, PeerDead(text, suspect=who))

    def _departs(self, rendezvous: Rendezvous, abort: RingAbort) -> bool:
        """Return whether a member leaves on purpose while an all-reduce runs here.

        If so, the ring ends after that all-reduce. A member leaves only after it has done its part of the
        all-reduce, so this one can still succeed. If the member left earlier, the engine sees the end of its data.
        """
        with self._changing:
            runs = self.state is GroupState.RUNNING and self.ring is not None and self.ring.error is None
            if not runs or not abort.planned or abort.grant is not None:
                return False
            self._departure = rendezvous, abort
        return True

    def _finish_departure(self) -> None:
        """End the ring that a peer left while an all-reduce ran; the all-reduce is over."""
        departure, self._departure = self._departure, None
        if departure is not None:
            self._aborted(*departure)

    def _aborted(self, rendezvous: Rendezvous, abort: RingAbort) -> None:
        """End the ring because a peer says that it is over. The peer may know a newer grant."""
        if abort.grant is not None:
            self._events.shown(abort.grant)
        self._break(rendezvous, RemoteAbort(abort.cause, suspect=abort.suspect), replace(abort, grant=None))

    # The end of a ring.

    def _break(self, rendezvous: Rendezvous, error: FTARError, abort: RingAbort | None = None) -> None:
        """End the ring because of `error`: tell both neighbours and the group, once.

        Later calls for the same ring do nothing.

        `abort` is the message of a peer that named the cause; it is passed on. None: this member names the cause.
        """
        if self.over or self.current is not rendezvous:
            return
        if abort is None:
            cause = error.args[0] if error.args else type(error).__name__
            stuck = isinstance(error, PeerTimeout) and error.suspect is not None
            suspect = self._identity.replica if isinstance(error, LocalResourceError) else error.suspect
            accuser = None if suspect is None else self._identity.replica
            abort = RingAbort(rendezvous.grant.epoch, str(cause), suspect, stuck=stuck, accuser=accuser)
        self._end(rendezvous, abort, error)
        self._drop_spares()
        self._events.broken(abort)

    def _end(self, rendezvous: Rendezvous, abort: RingAbort, error: FTARError) -> None:
        """Send `abort` to both neighbours, stop the data connections, and close what the ring used."""
        self.over, self.error = True, error
        self._enter(GroupState.ABORTING)
        if self.heartbeat is not None:
            self.heartbeat.stop()
        for peer in rendezvous.edges:
            peer.say(abort)
            peer.cut()
        if self.ring is not None:
            self.ring.fail(error)
            for peer in rendezvous.edges:
                peer.release()
        self._executor.over(rendezvous.grant.epoch, error)
        if self._forming is not None and self._forming is not asyncio.current_task():
            self._forming.cancel()
        rendezvous.give_up()
        for peer in rendezvous.edges:
            self._tasks.start(peer.close())
        self._enter(GroupState.FATAL if isinstance(error, FatalError) else GroupState.BROKEN)

    # All-reduces, on the caller's and on the engine's thread.

    def all_reduce(self, order: AllReduceOrder) -> Work:
        """Queue an all-reduce over the ring of its epoch. Any thread; does not block."""
        return self._executor.queue(order)

    def _failed(self, epoch: int, error: FTARError) -> None:
        """Called on the engine's thread when the ring failed in an all-reduce."""
        self._loop.call_soon_threadsafe(lambda: self._tasks.start(self._blame(epoch, error)))

    async def _blame(self, epoch: int, error: FTARError) -> None:
        """Break the ring after a failed all-reduce, unless a peer tells a better cause first."""
        rendezvous = self.current
        if rendezvous is None or rendezvous.grant.epoch != epoch:
            return
        self._finish_departure()
        if isinstance(error, PeerTimeout):
            # The heartbeat has named nobody.
            error = PeerTimeout(f"{error.args[0]}, and no member could be blamed")
        if isinstance(error, PeerDead):
            await asyncio.sleep(BLAME_S)
        self._break(rendezvous, error)
        if isinstance(error, FatalError):
            self._events.crashed(f"the all-reduce of epoch {epoch} cannot go on", error)

    def _ran(self, epoch: int, running: bool) -> None:
        """Called on the engine's thread when an all-reduce begins or ends."""
        current = self.current
        with self._changing:
            known = current is not None and current.grant.epoch == epoch
            if known and self.state in (GroupState.READY, GroupState.RUNNING):
                self.state = GroupState.RUNNING if running else GroupState.READY
            if not running and self._departure is not None:
                self._loop.call_soon_threadsafe(self._finish_departure)
