"""Engine: runs all-reduces on the ring of one epoch, one after the other, on the thread that calls it.

Receiving and sending go on in the transport's threads meanwhile: chunk k is added while chunk k+1 arrives and
chunk k-1 leaves. The local gradient is only read, unless it is the output too: a failed step is reduced again from
it. An all-reduce is over only when its own sends have drained.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ft_hsdp.core.ring import Plan
from ft_hsdp.errors import FTARError, PeerDead
from ft_hsdp.ftar.dataplane.base import Plane
from ft_hsdp.ftar.exchange import Exchange, Order
from ft_hsdp.ftar.frame import Entry
from ft_hsdp.ftar.link import Inlet, Outlet

SWITCH_S = 1e-5
POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class Result:
    """What is known after an all-reduce: the sum, every member's entry by ring position, the bytes sent."""

    out: Tensor
    entries: tuple[Entry, ...]
    bytes_sent: int


class Ring:
    """The data plane of one epoch: this member's position and its two edges (None in a ring of one).

    ``plan`` says how a message of (elements, itemsize) is cut. The first error is the one that counts.
    """

    def __init__(
        self,
        epoch: int,
        members: Sequence[int],
        position: int,
        inlet: Inlet | None,
        outlet: Outlet | None,
        plane: Plane,
        plan: Callable[[int, int], Plan],
    ) -> None:
        self.epoch = epoch
        self.members = tuple(members)
        self._position = position
        self._inlet = inlet
        self._outlet = outlet
        self._plane = plane
        self._plan = plan
        self._lock = threading.Lock()
        self._error: FTARError | None = None
        self._busy = False
        self.entered = 0  # all-reduces that were begun

    @property
    def error(self) -> FTARError | None:
        """Why the ring is of no more use."""
        return self._error

    @property
    def busy(self) -> bool:
        """Whether an all-reduce is under way."""
        return self._busy

    @property
    def received(self) -> int:
        """Chunks that came on the data connection from the left."""
        inlet = self._inlet
        return inlet.frames if inlet is not None else 0

    @property
    def sent(self) -> int:
        """Chunks that went out on the data connection to the right, or are about to."""
        outlet = self._outlet
        return outlet.frames if outlet is not None else 0

    @property
    def high_water(self) -> int:
        """Most bytes that were ever on their way to the right neighbour at once."""
        return self._outlet.high_water if self._outlet is not None else 0

    def all_reduce(self, order: Order) -> Result:
        """Sum the gradients of all contributors into ``order.out`` (FT-HSDP §4.2).

        Raises:
            FTARError: the ring is of no more use; nobody of it writes into ``order.out`` any longer.
        """
        self._claim()
        plan = self._plan(order.out.numel(), order.out.element_size())
        job = self._plane.open(order.local, order.out, plan, order.after)
        exchange = Exchange(order, plan, self._position, job, self._inlet, self._outlet)
        try:
            with _quick_switching():
                sent = self._run(exchange)
        except FTARError as error:
            self.fail(error)
            self.dispose()
            job.close(failed=True)
            assert self._error is not None
            raise self._error from error
        except BaseException:
            self.fail(PeerDead("the engine failed"))
            self.dispose()
            raise
        job.close(failed=False)
        self._busy = False
        return Result(order.out, exchange.entries, sent)

    def retire(self, error: FTARError) -> tuple[Inlet | None, Outlet | None]:
        """End the ring with ``error``; its edges are returned if no all-reduce is under way on them."""
        with self._lock:
            if self._busy or self._error is not None:
                return None, None
            self._error = error
            edges = self._inlet, self._outlet
            self._inlet = self._outlet = None
            return edges

    def _claim(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._busy = True
            self.entered += 1

    def _run(self, exchange: Exchange) -> int:
        if self._inlet is None or self._outlet is None:
            exchange.start()
            _wait_for(exchange)
            return 0
        self._outlet.begin(self.fail)
        self._inlet.begin(exchange.transfer)
        exchange.start()
        while not exchange.finished:
            arrival = self._inlet.next(block=not exchange.busy)
            if arrival is not None:
                exchange.arrived(arrival)
            else:
                time.sleep(POLL_S)
                exchange.settle()
        self._inlet.end()
        return self._outlet.flush()

    def fail(self, error: FTARError) -> None:
        """The ring is of no more use: whoever waits on it gets an error. Any thread; the first error stays."""
        with self._lock:
            if self._error is None:
                self._error = error
        for end in (self._inlet, self._outlet):
            if end is not None:
                end.close()

    def dispose(self) -> None:
        """Wait until the threads of a failed ring have let go of all memory; close its descriptors."""
        with self._lock:
            inlet, outlet, self._inlet, self._outlet = self._inlet, self._outlet, None, None
        for end in (inlet, outlet):
            if end is not None:
                end.dispose()


def _wait_for(exchange: Exchange) -> None:
    while not exchange.finished:
        time.sleep(POLL_S)
        exchange.settle()


_switching = threading.Lock()
_switchers = 0
_usual = 0.0


@contextmanager
def _quick_switching() -> Iterator[None]:
    """Let threads that compute in Python give way quickly while chunks are waiting for us."""
    global _switchers, _usual
    with _switching:
        _switchers += 1
        if _switchers == 1:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        with _switching:
            _switchers -= 1
            if _switchers == 0:
                sys.setswitchinterval(_usual)
