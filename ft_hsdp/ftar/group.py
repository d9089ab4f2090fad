"""One rank's membership in the rings of successive epochs, and the all-reduces that run on them (FT-HSDP §4.2).

A `Group` is made once per process. `configure` forms the ring of a grant, `all_reduce` queues work on it, `stop`
leaves it. A ring that broke stays broken until a grant with a larger epoch comes.

With replicas of equal width a rank has one ring. With replicas of unequal width it has one for each of its lanes
(`lane`, `memory.lanes`). All lanes share the listener, and they end together: what breaks one breaks the others,
and the owner hears of one cause. The owner of the group learns what happens through `GroupEvents`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant
from ft_hsdp.core.traces import GroupTrace
from ft_hsdp.errors import FTARError, LocalResourceError, StaleEpoch
from ft_hsdp.ftar.allreduce import AllReduceOrder
from ft_hsdp.ftar.connections import LaneRing, LanesOf, Listener, MemberIdentity, Peer
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.heartbeat import HostSentinel
from ft_hsdp.ftar.lane import GroupState, LaneEvents, LaneMember, OwnTasks
from ft_hsdp.ftar.pieces import Values
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.protocol import RingAbort, RingHello


@dataclass(frozen=True, slots=True)
class GroupEvents:
    """Callbacks of a group to its owner, called on the control loop."""

    connected: Callable[[int], None]  # the ring of this epoch is formed, in all lanes
    broken: Callable[[RingAbort], None]  # the current ring broke; not called after `stop` or a newer grant
    shown: Callable[[Grant], None]  # a peer knows this newer grant
    token: Callable[[CommitToken], None]  # the left neighbour passed the commit token on


class Group:
    """The all-reduce group of one rank across the replicas (FT-HSDP §4.2).

    Args:
        identity: this member: replica, rank, layout and the secret of the job.
        settings: sizes, deadlines and transports.
        events: callbacks to the owner.
        plane: copies and adds the chunks of the ring of replicas of equal width; None: on the CPU. Other lanes are
            summed on the CPU.
        arena: registered memory that neighbours on this host can map; None: a new one.
        pause_s: returns for how many seconds a training loop of this replica may pause from now; 0: none does.
        lanes: returns the lanes of a grant in which this rank takes part, at least one, by ascending number; None:
            always that of `identity`.
    """

    def __init__(
        self,
        identity: MemberIdentity,
        settings: Settings,
        events: GroupEvents,
        plane: Plane | None = None,
        arena: Arena | None = None,
        pause_s: Callable[[], float] = lambda: 0.0,
        lanes: LanesOf | None = None,
    ) -> None:
        self.arena = arena or Arena()
        self._identity = identity
        self._settings = settings
        self._events = events
        self._pause_s = pause_s
        self._lanes_of = lanes or identity.lanes
        self._listener = Listener(identity, self._arrived, self._exhausted, self._lanes_of)
        self._plane = plane or CpuPlane(self.arena)
        self._sentinel = HostSentinel()
        self._closed = False
        self._lanes: dict[int, LaneMember] = {}  # of the newest epoch, by number; replaced as a whole
        self._grant: Grant | None = None  # of the newest epoch, also when its ring is over
        self._verdict: RingAbort | None = None  # what ended it; None: it stands, or was left on purpose
        self._told = True  # the owner knows that it is over, or has ended it
        # The largest epoch that was claimed by `configure` or refused by `stop`: callers up to it are refused,
        # except those of the current one.
        self.epoch = 0
        self._reason = ""  # what refused callers are told
        self._parked: dict[int, list[tuple[RingHello, Peer]]] = {}  # callers of later epochs
        self._tasks = OwnTasks(self.crashed)
        self._ending: set[asyncio.Task[Any]] = set()  # of these: lanes of earlier widths that end

    def listen(self, host: str) -> str:
        """Begin to accept connections on a free port of `host`.

        Call it once, on the control loop, before all else.

        Returns:
            "host:port", the address that the grant must name for this member.

        Raises:
            OSError: `host` is not an address of this machine, or no port is left.
        """
        self._loop = asyncio.get_running_loop()
        return self._listener.open(host)

    @property
    def state(self) -> GroupState:
        """The state of the rings of the newest epoch: that of the lane that is farthest from an all-reduce."""
        if self._closed:
            return GroupState.CLOSED
        states = {lane.state for lane in self._lanes.values()}
        return next((s for s in _BY_DISTANCE if s in states), GroupState.NEW)

    @property
    def error(self) -> FTARError | None:
        """Why the last ring ended."""
        return next((lane.error for lane in self._lanes.values() if lane.error is not None), None)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports of the edges to the right and the left neighbour, lane by lane; empty without a ring."""
        rings = [lane.current for lane in self._lanes.values() if lane.current is not None]
        return tuple(n.transport for ring in rings for n in (ring.right, ring.left) if n)

    @property
    def high_water(self) -> int:
        """The largest number of bytes that were in flight to a right neighbour at once in this epoch."""
        return max((lane.ring.high_water for lane in self._lanes.values() if lane.ring is not None), default=0)

    def traces(self) -> tuple[GroupTrace, ...]:
        """Return how far this rank is in its current rings, lane by lane. On the control loop."""
        return tuple(trace for lane in self._lanes.values() if (trace := lane.trace()) is not None)

    # Forming and leaving rings, on the control loop.

    def configure(self, grant: Grant) -> None:
        """Begin to form the ring of `grant`, and leave the ring before it. Return at once, on the control loop.

        `events.connected` or `events.broken` reports the outcome. A grant whose epoch is not larger than `epoch`
        is ignored, and so is any grant once the group is CLOSED or FATAL: an old grant is no error, for it may
        arrive twice.

        Raises:
            ProtocolViolation: a member of the grant has no rank with a lane of this one.
        """
        if grant.epoch <= self.epoch or self.state in (GroupState.CLOSED, GroupState.FATAL):
            return
        self.epoch = grant.epoch
        rings = self._lanes_of(grant)
        self._grant, self._verdict, self._told = grant, None, False
        if [lane.place for lane in self._lanes.values()] != list(rings):  # the widths are others than before
            for lane in self._lanes.values():
                lane.leave("a newer epoch", grant)
                self._ending.add(self._tasks.start(lane.close()))
            self._lanes = {ring.number: self._lane(ring) for ring in rings}
        self._ending = {task for task in self._ending if not task.done()}
        for lane in self._lanes.values():
            lane.configure(grant, self._ending)
        for hello, peer in self._parked.pop(grant.epoch, []):
            self._hello(hello, peer)
        self._refuse_parked(grant.epoch)

    def _lane(self, ring: LaneRing) -> LaneMember:
        events = LaneEvents(
            self._formed,
            partial(self._broken, ring.number),
            self._shown,
            self._events.token,
            self._hello,
            self._refuse,
            self.crashed,
            self._exhausted,
        )
        plane = self._plane if ring.usual else CpuPlane(self.arena)
        shared = self._identity, self._settings, self._listener
        return LaneMember(ring, *shared, events, plane, self.arena, self._sentinel, self._pause_s)

    def stop(self, epoch: int, reason: str) -> None:
        """Leave the ring of `epoch`, or of any older epoch, and refuse grants up to `epoch` from now on.

        Return at once.

        The other members are told `reason`. An all-reduce that runs fails with StaleEpoch. `events.broken` is not
        called.
        """
        self._reason = reason
        self.epoch = max(self.epoch, epoch)
        if self._grant is not None and self._grant.epoch <= epoch:
            self._told = True
            for lane in self._lanes.values():
                lane.leave(reason)
        self._refuse_parked(self.epoch)

    def _refuse_parked(self, floor: int) -> None:
        """Refuse all callers that wait for an epoch up to `floor`."""
        for epoch in [e for e in self._parked if e <= floor]:
            for hello, peer in self._parked.pop(epoch):
                self._refuse(hello, peer)

    def send_token(self, token: CommitToken) -> None:
        """Send the commit token to the right neighbour in the first lane. Return at once.

        A token of another epoch than the current one is dropped. If it cannot be sent, the ring breaks.
        """
        for lane in list(self._lanes.values())[:1]:
            lane.send_token(token)

    def abort(self, error: FTARError) -> None:
        """Break the current ring with `error` and tell all its members. Return at once, on the control loop."""
        for lane in self._lanes.values():
            lane.abort(error)

    async def close(self) -> None:
        """Leave the ring, close all connections and end the engine's threads; wait until that is done."""
        self.stop(max([self.epoch, *self._parked]), "the replica ends")
        self._closed = True
        self._listener.close()
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))
        await self._tasks.ended()
        self.arena.close()

    # Callers, on the control loop.

    def _arrived(self, hello: RingHello, sock: socket.socket) -> None:
        """Take a new control connection, whose first message is `hello`."""
        self._hello(hello, Peer(sock, lambda peer, message: None))

    def _hello(self, hello: RingHello, peer: Peer) -> None:
        """Accept a caller of the current epoch, park one of a later epoch, refuse all others."""
        epoch, lane = hello.grant.epoch, self._lanes.get(hello.rank)
        if self._grant is not None and epoch == self._grant.epoch and lane is not None and not lane.over:
            lane.called(hello, peer)
        elif epoch <= self.epoch or self._closed:
            self._refuse(hello, peer)
        else:
            self._parked.setdefault(epoch, []).append((hello, peer))
            self._events.shown(hello.grant)

    def _refuse(self, hello: RingHello, peer: Peer) -> None:
        """Tell a caller that its epoch is over, and send it the newer grant if there is one.

        A member that left this epoch, or never wanted it, has not failed: the abort is a planned one.
        """
        newer = self._grant if self._grant and self._grant.epoch > hello.grant.epoch else None
        abort = RingAbort(hello.grant.epoch, self._reason or "stale", None, planned=True)
        if self._verdict is not None and self._verdict.epoch == abort.epoch and not self._verdict.planned:
            abort = self._verdict  # the caller's ring has just broken: tell it the cause and the suspect
        peer.say(replace(abort, grant=newer))
        self._tasks.start(peer.close())

    # What the lanes report, on the control loop.

    def _formed(self, epoch: int) -> None:
        """Tell the owner once the last of the lanes is formed."""
        lanes = self._lanes.values()
        if all(lane.ring is not None and lane.ring.epoch == epoch and not lane.over for lane in lanes):
            self._events.connected(epoch)

    def _broken(self, number: int, abort: RingAbort) -> None:
        """End all other lanes with what ended one, and tell the owner when all are over: once, and one cause.

        After a failure that is at once. When a member leaves on purpose, a lane in which an all-reduce runs ends
        after it.
        """
        if self._verdict is None:
            self._verdict = abort
            for other in self._lanes:
                if other != number:
                    self._lanes[other].follow(abort)
        if not self._told and all(lane.over for lane in self._lanes.values()):
            self._told = True
            self._events.broken(self._verdict)

    def _shown(self, grant: Grant) -> None:
        if grant.epoch > self.epoch:
            self._events.shown(grant)

    def _exhausted(self, error: LocalResourceError) -> None:
        """End this process: it is out of descriptors, ports or memory. Its ring is told that it is at fault."""
        self.abort(error)
        self.crashed("this rank cannot connect", error)

    def crashed(self, message: str, error: Exception) -> None:
        """Report an error that no ring caused to the exception handler of the control loop. Any thread."""
        context = {"message": message, "exception": error}
        self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)

    # All-reduces, on any thread.

    def all_reduce(
        self,
        key: Key,
        local: Values | None,
        out: Values,
        mine: Entry | Callable[[], Entry],
        after: Any = None,
        lane: int | None = None,
        wire: torch.dtype | None = None,
    ) -> Work:
        """Queue the sum of `local` over the ring of `key.epoch`. Any thread; does not block.

        Works of one lane run in the order of the calls, those of several lanes side by side. If one fails, the
        works behind it with the same epoch are skipped.

        Args:
            key: names the all-reduce; it must be the same in all members, and frames with another key are refused.
            local: flat and contiguous, [n]: this member's values; None: add nothing and relay what arrives. It is
                never written.
            out: flat and contiguous, [n], of the same type: receives the sum; may be `local`. Its pieces, if there
                are several, have the same sizes in all members.
            mine: what all members learn about this one's contribution. A function is called on the engine's
                thread, when some of `local` has been read.
            after: what the data plane waits for before it reads `local`; on a GPU an event.
            lane: number of the lane; None: the only one.
            wire: type in which values travel (`AllReduceOrder.wire`), the same in all members; None: as they are.

        Returns:
            A future of the result. It fails with a RecoverableError if the ring is over or breaks.

        Raises:
            ValueError: the tensors differ in size or type, or cannot be summed.
        """
        order, lanes = AllReduceOrder(key, local, out, mine, after, wire), self._lanes
        number = next(iter(lanes), None) if lane is None else lane
        if number not in lanes:
            work = Work()
            work.set_exception(StaleEpoch(f"epoch {key.epoch} is over"))
            return work
        return lanes[number].all_reduce(order)


_BY_DISTANCE = (
    GroupState.CLOSED,
    GroupState.FATAL,
    GroupState.ABORTING,
    GroupState.BROKEN,
    GroupState.NEW,
    GroupState.CONFIGURING,
    GroupState.RUNNING,
    GroupState.READY,
)
