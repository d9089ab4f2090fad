"""World: a whole ring in virtual time: members that do what `engine` does, step by step, on simulated edges."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ft_hsdp.core.ring import RingPlan
from ft_hsdp.errors import FTARError, PeerDead, RemoteAbort, Skipped
from ft_hsdp.ftar.allreduce import AllReduceOrder, AllReduceResult, Exchange
from ft_hsdp.ftar.dataplane.base import Plane, PlaneJob
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.pieces import pieced
from tests.support.ftar.sim_transport import Clock, Delay, Line, Nature, SimEdge, SimReceiver, SimSender

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
        plan = self._plan(order.out.numel(), order.out.element_size())
        plan = replace(plan, edges=pieced(order.out).edges)
        self._job = self._plane.open(order.local, order.out, plan)
        exchange = Exchange(order, plan, self._position, self._job, self._receiver, self._sender)
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
