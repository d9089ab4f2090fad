"""World: a whole ring in virtual time: members that do what `engine` does, step by step, on simulated edges.

An edge delivers in order, each chunk after a delay of its own, so that edges overtake each other but never
themselves. It can be lost, or fall silent. The window is that of the real transports: a sender has at most its
slots of chunks unanswered, and answers are held back and come together.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ft_hsdp.core.ring import RingPlan
from ft_hsdp.errors import FTARError, PeerDead, PeerTimeout, RemoteAbort, Skipped
from ft_hsdp.ftar import frame as wire
from ft_hsdp.ftar.allreduce import AllReduceOrder, AllReduceResult, Exchange
from ft_hsdp.ftar.dataplane.base import Plane, PlaneJob
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.pieces import pieced
from ft_hsdp.ftar.transport.base import Chunk, Transfer

Delay = Callable[[], float]


class Clock:
    """Virtual seconds: what is to happen happens in order of time, then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._count), what))

    def run(self, until_s: float) -> None:
        """Go on until nothing is left to happen before ``until_s``."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, what = heapq.heappop(self._events)
            what()


class Line:
    def __init__(self, clock: Clock, delay: Delay) -> None:
        self._clock = clock
        self._delay = delay
        self._last = 0.0
        self.silent = False

    def carry(self, what: Callable[[], None]) -> None:
        """Let ``what`` happen at the other end, after all that was carried before."""
        self._last = max(self._last, self._clock.now + self._delay())
        self._clock.at(self._last, lambda: None if self.silent else what())


class Watch:
    """Says when something that is ``due`` has made no progress for ``timeout_s``."""

    def __init__(
        self, clock: Clock, timeout_s: float, due: Callable[[], bool], expired: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._due = due
        self._expired = expired
        self._since = 0.0
        self._armed = False

    def touch(self) -> None:
        """There was progress, or the waiting begins."""
        self._since = self._clock.now
        if not self._armed:
            self._armed = True
            self._clock.at(self._since + self._timeout_s, self._look)

    def _look(self) -> None:
        self._armed = False
        if not self._due():
            return
        if self._clock.now >= self._since + self._timeout_s:
            self._expired()
        else:
            self._armed = True
            self._clock.at(self._since + self._timeout_s, self._look)


@dataclass(frozen=True, slots=True)
class Nature:
    """What the edges of a world are like: ``slots`` and ``timeout_s`` as in the settings of a group.

    ``by_reference``: the receiver reads the sender's own memory, as `shm` does, instead of a copy of it.
    """

    slots: int
    delay: Delay
    timeout_s: float = 1.0
    by_reference: bool = False


class SimEdge:
    """The data connection from ``sender`` to ``receiver``, and its two ends."""

    def __init__(self, clock: Clock, nature: Nature, sending_member: int, receiving_member: int) -> None:
        self.nature = nature
        self.there, self.back = Line(clock, nature.delay), Line(clock, nature.delay)
        self.sender = SimSender(clock, self, receiving_member)
        self.receiver = SimReceiver(clock, self, sending_member)

    def fall_silent(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        self.there.silent = self.back.silent = True

    def lose(self) -> None:
        """The connection is reset: what is on its way is lost, both ends see the end."""
        self.fall_silent()
        self.receiver.ended()
        self.sender.ended()


class SimSender:
    """Chunks to the right neighbour, ``member``."""

    def __init__(self, clock: Clock, edge: SimEdge, member: int) -> None:
        self._edge = edge
        self._member = member
        self._queue: deque[tuple[bytes, Tensor | None]] = deque()
        self._unanswered: deque[int] = deque()
        self._under_way = 0
        self._sent = 0
        self._error: FTARError | None = None
        self._failed: Callable[[FTARError], None] = lambda error: None
        self._watch = Watch(clock, edge.nature.timeout_s, lambda: not self.drained, self._expired)
        self.wake: Callable[[], None] = lambda: None
        self.closed = False
        self.high_water = 0
        self.frames = 0

    def begin(self, failed: Callable[[FTARError], None]) -> None:
        """Count the bytes from 0."""
        self._failed, self._sent = failed, 0

    def send(self, head: bytes, payload: Tensor | None, small: bool) -> None:
        """Queue one chunk; it leaves as soon as there is a slot for it."""
        self._queue.append((head, payload))
        self.frames += 1
        self._watch.touch()
        self._pump()

    def _pump(self) -> None:
        while self._queue and len(self._unanswered) < self._edge.nature.slots and not self.closed:
            head, payload = self._queue.popleft()
            nbytes = payload.nbytes if payload is not None else 0
            self._unanswered.append(nbytes)
            self._under_way += nbytes
            self.high_water = max(self.high_water, self._under_way)
            self._sent += len(head) + nbytes
            if payload is not None and not self._edge.nature.by_reference:
                payload = payload.clone()
            self._edge.there.carry(partial(self._edge.receiver.deliver, head, payload))

    def answered(self, count: int) -> None:
        """The neighbour is done with ``count`` chunks."""
        for _ in range(count):
            self._under_way -= self._unanswered.popleft()
        self._watch.touch()
        self._pump()
        self.wake()

    def ended(self) -> None:
        self._fail(PeerDead("right neighbour closed its connection", suspect=self._member))

    def _expired(self) -> None:
        self._fail(PeerTimeout("the right neighbour takes no chunks", suspect=self._member))

    def _fail(self, error: FTARError) -> None:
        if self._error is None and not self.closed:
            self._error = error
            self._failed(error)

    @property
    def drained(self) -> bool:
        """Whether no payload is needed any more."""
        return not self._queue and not self._unanswered

    def flush(self) -> int:
        """The bytes of this all-reduce, once ``drained``: nobody waits in virtual time.

        Raises:
            PeerDead, PeerTimeout
        """
        if self._error is not None:
            raise self._error
        assert self.drained
        return self._sent

    def close(self) -> None:
        """Send nothing more; the neighbour will see it, and at once if it reads our memory."""
        if not self.closed:
            self.closed = True
            self._edge.there.carry(self._edge.receiver.ended)

    def dispose(self) -> None:
        self._queue.clear()


class SimReceiver:
    """Chunks from the left neighbour, ``member``; answers wait for each other as on a stream."""

    def __init__(self, clock: Clock, edge: SimEdge, member: int) -> None:
        self._edge = edge
        self._member = member
        self._batch = 1 if edge.nature.by_reference else max(1, edge.nature.slots // 2)
        self._raw: deque[tuple[bytes, Tensor | None]] = deque()
        self._inbox: deque[Chunk | FTARError] = deque()
        self._transfer: Transfer | None = None
        self._course = wire.FrameOrder()
        self._left = 0
        self._owed = 0
        self._due = 0
        self._end: FTARError | None = None
        self._closed = False
        self._watch = Watch(clock, edge.nature.timeout_s, lambda: self._owed > 0, self._expired)
        self.wake: Callable[[], None] = lambda: None
        self.frames = 0

    def begin(self, transfer: Transfer) -> None:
        """Expect this all-reduce's frames."""
        self._transfer = transfer
        self._left = self._owed = transfer.frames
        self._course = wire.FrameOrder()
        self._watch.touch()
        self._receive()

    def deliver(self, head: bytes, payload: Tensor | None) -> None:
        if not self._closed:
            self._raw.append((head, payload))
            self._watch.touch()
            self._receive()
            self.wake()

    def ended(self) -> None:
        self._stop(PeerDead("left neighbour closed its connection", suspect=self._member))

    def _expired(self) -> None:
        self._stop(PeerTimeout("no byte from the left neighbour in time", suspect=self._member))

    def _stop(self, error: FTARError) -> None:
        if self._end is None and not self._closed:
            self._end = error
            self.wake()

    def _receive(self) -> None:
        """Look at what has come; only frames of this all-reduce, the others are not expected yet."""
        while self._raw and self._left and self._transfer is not None:
            head, payload = self._raw.popleft()
            self._left -= 1
            try:
                self._inbox.append(self._unpack(self._transfer, head, payload))
            except FTARError as error:
                self._inbox.append(error)
                self._left = 0

    def _unpack(self, transfer: Transfer, head: bytes, payload: Tensor | None) -> Chunk:
        frame = transfer.framing.check(head[: wire.HEADER.size])
        self._course.check(frame)
        entries = wire.unpack_entries(head[wire.HEADER.size :])
        data: Tensor | None = None
        if not frame.empty:
            assert payload is not None
            data = payload
            if not self._edge.nature.by_reference:
                data = transfer.buffers.buffer_for(frame)
                data.copy_(payload)
        return Chunk(frame, entries, data, 0)

    def next(self, block: bool) -> Chunk | None:
        """The next chunk that is here; nobody waits in virtual time, ``wake`` says when to look again.

        Raises:
            PeerDead, PeerTimeout, StaleEpoch, ProtocolViolation
        """
        if not self._inbox:
            if self._end is not None:
                raise self._end
            return None
        item = self._inbox.popleft()
        if isinstance(item, FTARError):
            raise item
        self.frames += 1
        self._owed -= 1
        return item

    def release(self, arrival: Chunk) -> None:
        """Give a slot back, now or with the next ones.

        Raises:
            PeerDead: the neighbour is gone, so what its memory held may not be what it sent.
        """
        if self._edge.nature.by_reference and self._edge.sender.closed:
            raise PeerDead("left neighbour closed its connection", suspect=self._member)
        self._due += 1
        if self._due >= self._batch:
            self._answer()

    def _answer(self) -> None:
        if self._due:
            self._edge.back.carry(partial(self._edge.sender.answered, self._due))
        self._due = 0

    def end(self) -> None:
        """Give back what is still due."""
        self._answer()

    def close(self) -> None:
        """Let nothing more in; the neighbour will see it."""
        if not self._closed:
            self._closed, self._owed = True, 0
            self._edge.back.carry(self._edge.sender.ended)

    def dispose(self) -> None:
        self._raw.clear()
        self._inbox.clear()
        self._transfer = None


Sizes = Callable[[int, int], RingPlan]
BLAME_S = 0.01


class Actor:
    """One member: its works in order, its ends of two edges (None in a ring of one).

    ``told`` hears of its failure; ``mortal`` is after how many chunks from the left it dies (None: never).
    """

    def __init__(
        self,
        clock: Clock,
        position: int,
        ends: tuple[SimReceiver, SimSender] | None,
        plane: Plane,
        plan: Sizes,
        told: Callable[[FTARError], None],
    ) -> None:
        self._clock = clock
        self._position = position
        self._receiver: SimReceiver | None = None
        self._sender: SimSender | None = None
        self._plane = plane
        self._plan = plan
        self._told = told
        self._works: deque[tuple[AllReduceOrder, Work]] = deque()
        self._exchange: Exchange | None = None
        self._job: PlaneJob | None = None
        self._received = False
        self._broken = False
        self.error: FTARError | None = None
        self.dead = self.stalled = False
        self.mortal: int | None = None
        self.taken = 0
        if ends is not None:
            self._receiver, self._sender = ends
            self._receiver.wake = self._sender.wake = self.progress

    def all_reduce(self, order: AllReduceOrder) -> Work:
        """Queue a sum, as a group does."""
        work = Work()
        self._works.append((order, work))
        self.progress()
        return work

    def progress(self) -> None:
        """Do what can be done now."""
        while self._works and not (self._broken or self.dead or self.stalled):
            try:
                if not self._step(self._works[0][0]):
                    return
            except FTARError as error:
                self.fail(error)
        self._cancel()

    def _step(self, order: AllReduceOrder) -> bool:
        """Go on with the first work; whether it is over."""
        exchange = self._exchange or self._begin(order)
        while self._receiver is not None and not exchange.finished:
            if self.mortal is not None and self.taken >= self.mortal:
                self.die()
                return False
            arrival = self._receiver.next(block=False)
            if arrival is None:
                break
            self.taken += 1
            exchange.arrived(arrival)
        exchange.settle()
        if not exchange.finished:
            return False
        return self._end(order, exchange)

    def _begin(self, order: AllReduceOrder) -> Exchange:
        plan = self._plan(order.out.numel(), order.travels.itemsize)
        plan = replace(plan, edges=pieced(order.out).edges)
        self._job = self._plane.open(order.local, order.out, plan, None, order.wire)
        ends: Any = self._receiver, self._sender
        exchange = Exchange(order, plan, self._position, self._job, *ends)
        self._exchange, self._received = exchange, False
        if self._receiver is not None and self._sender is not None:
            self._sender.begin(self.fail)
            self._receiver.begin(exchange.transfer)
        exchange.start()
        return exchange

    def _end(self, order: AllReduceOrder, exchange: Exchange) -> bool:
        """All has been received: over when all has been sent."""
        sent = 0
        if self._receiver is not None and self._sender is not None:
            if not self._received:
                self._received = True
                self._receiver.end()
            if not self._sender.drained:
                return False
            sent = self._sender.flush()
        assert self._job is not None
        self._job.close(failed=False)
        self._exchange = None
        _, work = self._works.popleft()
        work.set_result(AllReduceResult(order.out, exchange.entries, sent))
        return True

    def fail(self, error: FTARError) -> None:
        """The ring is of no more use here. A neighbour that closes may still say why."""
        self._shut()
        wait_s = BLAME_S if isinstance(error, PeerDead) else 0.0
        self._clock.at(self._clock.now + wait_s, partial(self.hear, error))

    def hear(self, error: FTARError) -> None:
        """What is known of the end of the ring; the first error counts."""
        if self.dead or self.stalled or self.error is not None:
            return
        self.error = error
        self._shut()
        if self._job is not None and self._exchange is not None:
            self._job.close(failed=True)
            self._works.popleft()[1].set_exception(error)
        self._told(error)
        self._cancel()

    def _cancel(self) -> None:
        """What stands behind a failure is skipped."""
        while self.error is not None and self._works:
            self._works.popleft()[1].set_exception(Skipped(str(self.error), suspect=self.error.suspect))

    def _shut(self) -> None:
        self._broken = True
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()
                end.dispose()

    def die(self) -> None:
        """Its process ends: nothing is said, the kernel closes its connections."""
        self.dead = True
        self._shut()
        self._told(PeerDead("died"))


class World:
    """A ring of ``names`` with one plane for each; ``plan`` as in `engine.Ring`; aborts take ``control`` s."""

    def __init__(
        self, names: Sequence[int], nature: Nature, planes: Sequence[Plane], plan: Sizes, control: Delay
    ) -> None:
        self.clock = Clock()
        self.names = tuple(names)
        n = len(self.names)
        self.edges = [
            SimEdge(self.clock, nature, self.names[i], self.names[(i + 1) % n]) for i in range(n if n > 1 else 0)
        ]
        self._lines = {(i, side): Line(self.clock, control) for i in range(n) for side in (-1, +1)}
        self.actors: list[Actor] = []
        for i, plane in enumerate(planes):
            ends = (self.edges[i - 1].receiver, self.edges[i].sender) if n > 1 else None
            self.actors.append(Actor(self.clock, i, ends, plane, plan, partial(self._told, i)))

    def _told(self, position: int, error: FTARError) -> None:
        """A member has failed, or is dead: both its neighbours hear of it on their control connections."""
        actor, n = self.actors[position], len(self.names)
        heard: FTARError = RemoteAbort(error.args[0], suspect=error.suspect)
        if actor.dead:
            heard = PeerDead("control: closed its connection", suspect=self.names[position])
        for side in (-1, +1):
            peer = self.actors[(position + side) % n]
            if peer is not actor:
                self._lines[position, side].carry(partial(peer.hear, heard))

    def run(self, until_s: float = 1e9) -> None:
        """Let everything happen that is going to."""
        self.clock.run(until_s)
