"""One rank's membership in the rings of successive epochs, and the all-reduces that run on them (FT-HSDP §4.2).

A `Group` is made once per process. `configure` forms the ring of a grant, `all_reduce` queues work on it, `stop`
leaves it. A ring that broke stays broken until a grant with a larger epoch comes.

Two threads meet here. Everything but `all_reduce` runs on the control loop (asyncio); the all-reduces run on the
engine's thread (`executor`), which reports back through `_failed` and `_ran`. The owner of the group learns what
happens through `GroupEvents`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant
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
from ft_hsdp.ftar import lifecycle
from ft_hsdp.ftar.allreduce import AllReduceOrder, Ring
from ft_hsdp.ftar.connections import Listener, MemberIdentity, Peer
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.executor import Executor, Work
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.heartbeat import Heartbeat, HostSentinel
from ft_hsdp.ftar.lifecycle import GroupState
from ft_hsdp.ftar.rendezvous import MemberContext, Rendezvous, SpareEdges
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.shm import Arena, host_id
from ft_hsdp.protocol import RingAbort, RingBarrier, RingHello, RingWelcome


@dataclass(frozen=True, slots=True)
class GroupEvents:
    """Callbacks of a group to its owner, called on the control loop."""

    connected: Callable[[int], None]  # the ring of this epoch is formed
    broken: Callable[[RingAbort], None]  # the current ring broke; not called after `stop` or a newer grant
    shown: Callable[[Grant], None]  # a peer knows this newer grant
    token: Callable[[CommitToken], None]  # the left neighbour passed the commit token on


BLAME_S = 0.05  # how long a lost data connection waits for the control connection to name the cause


class Group:
    """The all-reduce group of one rank across the replicas (FT-HSDP §4.2).

    Args:
        identity: this member: replica, rank, layout and the secret of the job.
        settings: sizes, deadlines and transports.
        events: callbacks to the owner.
        plane: copies and adds the chunks; None: on the CPU.
        arena: registered memory that neighbours on this host can map; None: a new one.
        pause_s: returns for how many seconds this member's training loop may pause from now; 0: it does not.
    """

    def __init__(
        self,
        identity: MemberIdentity,
        settings: Settings,
        events: GroupEvents,
        plane: Plane | None = None,
        arena: Arena | None = None,
        pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.arena = arena or Arena()
        self.state = GroupState.NEW
        self._changing = threading.Lock()  # guards `state` and `_departure`, which the engine's thread changes too
        self.error: FTARError | None = None  # why the last ring ended
        self._identity = identity
        self._settings = settings
        self._events = events
        self._pause_s = pause_s
        self._listener = Listener(identity, self._arrived, self._exhausted)
        self._context = MemberContext(identity, settings, self._listener, self.arena, host_id(), self._heard)
        self._plane = plane or CpuPlane()
        self._current: Rendezvous | None = None  # of the newest epoch, also when its ring is over
        self._over = True  # no ring is formed or being formed
        self._heartbeat: Heartbeat | None = None
        self._sentinel = HostSentinel()
        self._spares = SpareEdges()
        self._last_abort: RingAbort | None = None  # what the members of the last ring were told at its end
        self._floor = 0  # callers up to this epoch are refused, except those of the current one
        self._reason = ""  # what refused callers are told
        self._parked: dict[int, list[tuple[RingHello, Peer]]] = {}  # callers of later epochs
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forming: asyncio.Task[Any] | None = None
        self._departure: tuple[Rendezvous, RingAbort] | None = None  # a peer left during an all-reduce
        self._ring: Ring | None = None
        self._executor = Executor(settings.connect_timeout_s + 1.0, self._failed, self._ran, self.crashed)

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
    def epoch(self) -> int:
        """The largest epoch that was claimed by `configure` or refused by `stop`."""
        return self._floor

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports of the edges to the right and to the left neighbour; empty without a ring."""
        current = self._current
        return tuple(n.transport for n in (current.right, current.left) if n) if current else ()

    @property
    def high_water(self) -> int:
        """The largest number of bytes that were in flight to the right neighbour at once in this epoch."""
        return self._ring.high_water if self._ring is not None else 0

    def _enter(self, state: GroupState) -> None:
        with self._changing:
            self.state = lifecycle.step(self.state, state)

    # Forming and leaving rings, on the control loop.

    def configure(self, grant: Grant) -> None:
        """Begin to form the ring of `grant`, and leave the ring before it. Return at once, on the control loop.

        `events.connected` or `events.broken` reports the outcome. A grant whose epoch is not larger than `epoch`
        is ignored, and so is any grant once the group is CLOSED or FATAL: an old grant is no error, for it may
        arrive twice.
        """
        if grant.epoch <= self._floor or self.state in (GroupState.CLOSED, GroupState.FATAL):
            return
        self._floor = grant.epoch
        rendezvous = Rendezvous(grant, self._context)
        self._leave("a newer epoch", grant, rendezvous)
        self._enter(GroupState.CONFIGURING)
        self._current, self._over, self._ring = rendezvous, False, None
        self._executor.expect(grant.epoch)
        if len(grant.members) > 1:
            self._heartbeat = Heartbeat(
                self._settings, rendezvous, self._sentinel, partial(self._break, rendezvous), self._pause_s
            )
        self._forming = self._spawn(self._form(rendezvous))
        for hello, peer in self._parked.pop(grant.epoch, []):
            self._spawn(self._called(rendezvous, hello, peer))
        self._refuse_parked(grant.epoch)

    def stop(self, epoch: int, reason: str) -> None:
        """Leave the ring of `epoch`, or of any older epoch, and refuse grants up to `epoch` from now on.

        Return at once.

        The other members are told `reason`. An all-reduce that runs fails with StaleEpoch. `events.broken` is not
        called.
        """
        self._reason = reason
        self._floor = max(self._floor, epoch)
        if self._current is not None and self._current.grant.epoch <= epoch:
            self._leave(reason, None, None)
        self._refuse_parked(self._floor)

    def _refuse_parked(self, floor: int) -> None:
        """Refuse all callers that wait for an epoch up to `floor`."""
        for epoch in [e for e in self._parked if e <= floor]:
            for hello, peer in self._parked.pop(epoch):
                self._refuse(hello, peer)

    def send_token(self, token: CommitToken) -> None:
        """Send the commit token to the right neighbour. Return at once.

        A token of another epoch than the current one is dropped. If it cannot be sent, the ring breaks.
        """
        rendezvous = self._current
        if rendezvous is None or self._over or rendezvous.grant.epoch != token.fence.epoch:
            return
        self._spawn(self._pass(rendezvous, token))

    async def _pass(self, rendezvous: Rendezvous, token: CommitToken) -> None:
        assert rendezvous.right is not None
        try:
            await rendezvous.right.send(token)
        except OSError as error:
            self._break(rendezvous, PeerDead(f"control: {error}", suspect=rendezvous.member_at(+1).replica))

    def abort(self, error: FTARError) -> None:
        """Break the current ring with `error` and tell all its members. Return at once, on the control loop."""
        if self._current is not None:
            self._break(self._current, error)

    async def close(self) -> None:
        """Leave the ring, close all connections and end the engine's thread; wait until that is done."""
        self.stop(max([self._floor, *self._parked]), "the replica ends")
        self._enter(GroupState.CLOSED)
        self._listener.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._executor.close)
        self.arena.close()

    def _spawn(self, coroutine: Coroutine[object, object, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.crashed("the group failed", error)

    async def _form(self, rendezvous: Rendezvous) -> None:
        """Connect the ring of `rendezvous`, then let the queued works run on it."""
        grant = rendezvous.grant
        receiver = sender = None
        if len(grant.members) > 1:
            try:
                await rendezvous.form(self._spares.to(rendezvous.member_at(+1)))
            except LocalResourceError as error:
                self._exhausted(error)
                return
            except FTARError as error:
                self._break(rendezvous, error)
                return
            assert rendezvous.left is not None
            assert rendezvous.right is not None
            receiver, sender = rendezvous.left.receiver, rendezvous.right.sender
        if self._over or self._current is not rendezvous:
            return
        position, settings = rendezvous.position, self._settings
        self._ring = Ring(grant.epoch, grant.ring, position, receiver, sender, self._plane, settings)
        self._enter(GroupState.READY)
        if self._heartbeat is not None:
            self._heartbeat.ring_formed(self._ring)
        self._drop_spares()
        self._executor.run_on(self._ring)
        self._events.connected(grant.epoch)

    def _drop_spares(self) -> None:
        for spare in self._spares.drain():
            self._spawn(spare.close())

    # Callers and messages of peers, on the control loop.

    def _arrived(self, hello: RingHello, sock: socket.socket) -> None:
        """Take a new control connection, whose first message is `hello`."""
        self._hello(hello, Peer(sock, self._heard))

    def _hello(self, hello: RingHello, peer: Peer) -> None:
        """Accept a caller of the current epoch, park one of a later epoch, refuse all others."""
        epoch, rendezvous = hello.grant.epoch, self._current
        if rendezvous is not None and epoch == rendezvous.grant.epoch and not self._over:
            self._spawn(self._called(rendezvous, hello, peer))
        elif epoch <= self._floor or self.state is GroupState.CLOSED:
            self._refuse(hello, peer)
        else:
            self._parked.setdefault(epoch, []).append((hello, peer))
            self._events.shown(hello.grant)

    async def _called(self, rendezvous: Rendezvous, hello: RingHello, peer: Peer) -> None:
        self._spares.remove(peer)
        if self._over or self._current is not rendezvous:  # the caller was not told yet that this epoch is over
            self._refuse(hello, peer)
            return
        try:
            await rendezvous.called(hello, peer)
        except (OSError, ProtocolViolation, TimeoutError) as error:
            if (local := exhausted(error)) is not None:
                self._exhausted(local)
            await peer.close()

    def _refuse(self, hello: RingHello, peer: Peer) -> None:
        """Tell a caller that its epoch is over, and send it the newer grant if there is one.

        A member that left this epoch, or never wanted it, has not failed: the abort is a planned one.
        """
        newer = self._current.grant if self._current and self._current.grant.epoch > hello.grant.epoch else None
        abort = RingAbort(hello.grant.epoch, self._reason or "stale", None, planned=True)
        if self._last_abort is not None and self._last_abort.epoch == abort.epoch and not self._last_abort.planned:
            abort = self._last_abort  # the caller's ring has just broken: tell it the cause and the suspect
        peer.say(replace(abort, grant=newer))
        self._spawn(peer.close())

    def _heard(self, peer: Peer, message: object) -> None:
        """Handle a message of a peer, or the end of its connection (an exception)."""
        rendezvous = self._current
        match message:
            case RingHello():
                try:
                    self._listener.check(message)
                except ProtocolViolation as error:
                    self._heard(peer, error)
                else:
                    self._hello(message, peer)
            case Exception():
                self._ended(peer, message)
            case _ if rendezvous is None:
                pass
            case RingWelcome() | RingBarrier():
                rendezvous.heard(peer, message)
            case RingAbort() if message.epoch == rendezvous.grant.epoch and rendezvous.lost(peer):
                if not self._departs(rendezvous, peer, message):
                    self._aborted(rendezvous, message)
            case CommitToken() if not self._over:
                self._events.token(message)

    def _ended(self, peer: Peer, why: Exception) -> None:
        rendezvous = self._current
        if rendezvous is None or not rendezvous.lost(peer):
            if self._spares.remove(peer):
                self._spawn(peer.close())
            return
        if peer.leaving or rendezvous.retries(peer):
            return
        who = peer.member.replica if peer.member is not None else None
        text = f"replica {who} {'broke the protocol: ' if isinstance(why, ProtocolViolation) else ''}{why}"
        self._break(rendezvous, PeerDead(text, suspect=who))

    def _departs(self, rendezvous: Rendezvous, peer: Peer, abort: RingAbort) -> bool:
        """Return whether `peer` leaves on purpose while an all-reduce runs here.

        If so, the ring ends after that all-reduce. A member leaves only after it has done its part of the
        all-reduce, so this one can still succeed. If the member left earlier, the engine sees the end of its data.
        """
        with self._changing:
            runs = self.state is GroupState.RUNNING and self._ring is not None and self._ring.error is None
            if not runs or not abort.planned or abort.grant is not None:
                return False
            self._departure = rendezvous, abort
        peer.leaving = True
        return True

    def _finish_departure(self) -> None:
        """End the ring that a peer left while an all-reduce ran; the all-reduce is over."""
        departure, self._departure = self._departure, None
        if departure is not None:
            self._aborted(*departure)

    def _aborted(self, rendezvous: Rendezvous, abort: RingAbort) -> None:
        """End the ring because a peer says that it is over. The peer may know a newer grant."""
        if abort.grant is not None and abort.grant.epoch > self._floor:
            self._events.shown(abort.grant)
        self._break(rendezvous, RemoteAbort(abort.cause, suspect=abort.suspect), replace(abort, grant=None))

    # The end of a ring.

    def _break(self, rendezvous: Rendezvous, error: FTARError, abort: RingAbort | None = None) -> None:
        """End the ring because of `error`: tell both neighbours and the owner, once.

        Later calls for the same ring do nothing.

        `abort` is the message of a peer that named the cause; it is passed on. None: this member names the cause.
        """
        if self._over or self._current is not rendezvous:
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

    def _leave(self, reason: str, newer: Grant | None, following: Rendezvous | None) -> None:
        """Leave the current ring on purpose.

        Keep the edges that `following` can use, if no all-reduce is running.
        """
        self._drop_spares()
        rendezvous = self._current
        if rendezvous is None or self._over:
            return
        planned = RingAbort(rendezvous.grant.epoch, reason, None, newer, planned=True)
        error = StaleEpoch(reason)
        if following is not None and self._ring is not None:
            idle = self._spares.keep(rendezvous, following, self._ring, error)
            self._ring = None if idle else self._ring
        self._end(rendezvous, planned, error)

    def _end(self, rendezvous: Rendezvous, abort: RingAbort, error: FTARError) -> None:
        """Send `abort` to both neighbours, stop the data connections, and close what the ring used."""
        self._over, self.error, self._last_abort = True, error, abort
        self._enter(GroupState.ABORTING)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for peer in rendezvous.edges:
            peer.say(abort)
            peer.cut()
        if self._ring is not None:
            self._ring.fail(error)
            for peer in rendezvous.edges:
                peer.release()
        self._executor.over(rendezvous.grant.epoch, error)
        if self._forming is not None and self._forming is not asyncio.current_task():
            self._forming.cancel()
        for peer in rendezvous.edges:
            self._spawn(peer.close())
        self._enter(GroupState.FATAL if isinstance(error, FatalError) else GroupState.BROKEN)

    # All-reduces, on the caller's and on the engine's thread.

    def all_reduce(self, key: Key, local: Tensor | None, out: Tensor, mine: Entry, after: Any = None) -> Work:
        """Queue the sum of `local` over the ring of `key.epoch`. Any thread; does not block.

        Works run in the order of the calls. If one fails, the works behind it with the same epoch are skipped.

        Args:
            key: names the all-reduce; it must be the same in all members, and frames with another key are refused.
            local: flat contiguous tensor [n] of this member's values; None: add nothing and relay what arrives. It
                is never written.
            out: flat contiguous tensor [n] of the same type that receives the sum; may be `local`.
            mine: what all members learn about this one's contribution.
            after: what the data plane waits for before it reads `local`; on a GPU an event.

        Returns:
            A future of the result. It fails with a RecoverableError if the ring is over or breaks.

        Raises:
            ValueError: the tensors differ in size or type, or cannot be summed.
        """
        return self._executor.queue(AllReduceOrder(key, local, out, mine, after))

    def _failed(self, epoch: int, error: FTARError) -> None:
        """Called on the engine's thread when the ring failed in an all-reduce."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._blame(epoch, error)))

    async def _blame(self, epoch: int, error: FTARError) -> None:
        """Break the ring after a failed all-reduce, unless a peer tells a better cause first."""
        rendezvous = self._current
        if rendezvous is None or rendezvous.grant.epoch != epoch:
            return
        self._finish_departure()
        if isinstance(error, PeerTimeout):
            error = PeerTimeout(
                f"{error.args[0]}, and no member could be blamed"
            )  # otherwise the heartbeat had named it
        if isinstance(error, PeerDead):
            await asyncio.sleep(BLAME_S)
        self._break(rendezvous, error)
        if isinstance(error, FatalError):
            self.crashed(f"the all-reduce of epoch {epoch} cannot go on", error)

    def _exhausted(self, error: LocalResourceError) -> None:
        """End this process: it is out of descriptors, ports or memory. Its ring is told that it is at fault."""
        if self._current is not None:
            self._break(self._current, error)
        self.crashed("this rank cannot connect", error)

    def _ran(self, epoch: int, running: bool) -> None:
        """Called on the engine's thread when an all-reduce begins or ends."""
        with self._changing:
            if self._floor == epoch and self.state in (GroupState.READY, GroupState.RUNNING):
                self.state = GroupState.RUNNING if running else GroupState.READY
            if not running and self._departure is not None:
                self._loop.call_soon_threadsafe(self._finish_departure)

    def crashed(self, message: str, error: Exception) -> None:
        """Report an error that no ring caused to the exception handler of the control loop. Any thread."""
        context = {"message": message, "exception": error}
        self._loop.call_soon_threadsafe(self._loop.call_exception_handler, context)
