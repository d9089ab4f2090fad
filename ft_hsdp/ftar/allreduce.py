"""Exchange: one all-reduce at one member: the pipeline says what is next, the plane does it, the outlet sends it.

Nothing here waits, so the same code runs on the engine's thread and in simulated time.

Engine: runs all-reduces on the ring of one epoch, one after the other, on the thread that calls it.

Receiving and sending go on in the transport's threads meanwhile: chunk k is added while chunk k+1 arrives and
chunk k-1 leaves. The local gradient is only read, unless it is the output too: a failed step is reduced again from
it. An all-reduce is over only when its own sends have drained.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_hsdp import fault_injection
from ft_hsdp.core.ring import OperationKind, OutOfOrder, Pipeline, ProcessChunk, RingPlan, Step
from ft_hsdp.errors import FTARError, PeerDead, ProtocolViolation
from ft_hsdp.ftar.dataplane.base import Plane, PlaneJob, Processed
from ft_hsdp.ftar.frame import Entry, Framing, Key
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.base import Chunk, Receiver, Sender, Transfer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
PLACE = {
    OperationKind.COPY_SEND: "reduce-copy",
    OperationKind.REDUCE_SEND: "reduce-scatter",
    OperationKind.REDUCE_STORE_SEND: "reduce-boundary",
    OperationKind.STORE_SEND: "reduce-gather",
    OperationKind.STORE: "reduce-gather",
}
SMALL = 64 * 1024  # bytes of a chunk up to which a second thread costs more than it brings


@dataclass(frozen=True, slots=True)
class AllReduceOrder:
    """An all-reduce that was asked for: flat ``local`` (None: relay) of all members into flat ``out``.

    ``after`` is what the data plane waits for before it reads ``local``: on a GPU an event.

    Raises:
        ValueError: they are not alike, or cannot be summed.
    """

    key: Key
    local: Tensor | None
    out: Tensor
    mine: Entry
    after: Any = None

    def __post_init__(self) -> None:
        for name, tensor in (("local", self.local), ("out", self.out)):
            if tensor is None:
                continue
            if (tensor.dtype, tensor.shape) != (self.out.dtype, self.out.shape):
                raise ValueError(f"{name} is {_describe(tensor)}, out is {_describe(self.out)}")
            if tensor.dtype not in DTYPES or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"{name} is {_describe(tensor)}; allowed: flat, contiguous, of {DTYPES}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


class Exchange:
    """One all-reduce of ``order`` under ``plan`` at ``position``, on ``job``, from ``inlet`` to ``outlet``."""

    def __init__(
        self,
        order: AllReduceOrder,
        plan: RingPlan,
        position: int,
        job: PlaneJob,
        receiver: Receiver | None,
        sender: Sender | None,
    ) -> None:
        self._order = order
        self._position = position
        self._members = plan.members
        self._job = job
        self._receiver = receiver
        self._sender = sender
        self._pipeline = Pipeline(plan, position, order.local is not None, job.depth)
        itemsize = order.out.element_size()
        self._framing = Framing(
            order.key, plan, self._pipeline.operations, itemsize, DTYPES.index(order.out.dtype)
        )
        self._small = plan.chunk * itemsize <= SMALL
        self._heads: dict[int, tuple[Entry, ...]] = {}
        self._chunks: dict[tuple[int, int], Chunk] = {}
        self._entries = {position: order.mine}
        self.transfer = Transfer(self._framing, job, self._pipeline.frames, self._small)

    @property
    def finished(self) -> bool:
        """Whether all has been received and added; what was sent may still be on its way."""
        return self._pipeline.finished

    @property
    def busy(self) -> bool:
        """Whether the plane still has chunks in hand."""
        return any(c.done < c.posted for c in self._pipeline.counters)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every member's entry by ring position, once finished."""
        return tuple(self._entries[i] for i in range(self._members))

    def start(self) -> None:
        """Send the first own chunks."""
        self._take(self._pipeline.start())
        self.settle()

    def arrived(self, chunk: Chunk) -> None:
        """A chunk is here: reduce or store it, and send what comes of it.

        Raises:
            ProtocolViolation: it is not the next one of its operation.
        """
        number, round_ = chunk.frame.operation.number, chunk.frame.round
        if chunk.entries:
            self._heads[number] = chunk.entries
            for k, entry in enumerate(chunk.entries):
                self._entries[(self._position - number + k) % self._members] = entry
        self._chunks[number, round_] = chunk
        try:
            steps = self._pipeline.arrived(number, round_, chunk.frame.empty)
        except OutOfOrder as error:
            raise ProtocolViolation(str(error)) from error
        self._take(steps)
        self.settle()

    def settle(self) -> None:
        """Take what the plane has finished: free its slot, send its outcome, post what waited for it."""
        while done := self._job.completed():
            for item in done:
                self._finish(item)

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            assert isinstance(step, ProcessChunk)
            fault_injection.reach(PLACE[step.operation.kind], self._order.key.step)
            self._job.post(step, self._chunks.pop((step.operation.number, step.round), None))

    def _finish(self, item: Processed) -> None:
        """First the slot goes back: that proves that what it held was whole. Only then is anything built on it."""
        if item.chunk is not None:
            assert self._receiver is not None
            self._job.free(item.chunk)
            self._receiver.release(item.chunk)
        for step in self._pipeline.processed(item.process.operation.number):
            if isinstance(step, ProcessChunk):
                self._take([step])
                continue
            assert self._sender is not None
            head = self._framing.header(step.operation, step.round, step.empty)
            self._sender.send(
                head + self._news(step.operation.number, step.round),
                None if step.empty else item.payload,
                self._small,
            )

    def _news(self, number: int, round_: int) -> bytes:
        """The entries of all members that a sum has passed, behind its first chunk in the reduce-scatter."""
        if self._framing.entries(number + 1, round_) == 0:
            return b""
        return b"".join(e.pack() for e in (*self._heads.get(number, ()), self._order.mine))


SWITCH_S = 1e-5
POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class AllReduceResult:
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
        receiver: Receiver | None,
        sender: Sender | None,
        plane: Plane,
        settings: Settings,
    ) -> None:
        self.epoch = epoch
        self.members = tuple(members)
        self._position = position
        self._receiver = receiver
        self._sender = sender
        self._plane = plane
        self._settings = settings
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
        receiver = self._receiver
        return receiver.frames if receiver is not None else 0

    @property
    def sent(self) -> int:
        """Chunks that went out on the data connection to the right, or are about to."""
        sender = self._sender
        return sender.frames if sender is not None else 0

    @property
    def high_water(self) -> int:
        """Most bytes that were ever on their way to the right neighbour at once."""
        return self._sender.high_water if self._sender is not None else 0

    def all_reduce(self, order: AllReduceOrder) -> AllReduceResult:
        """Sum the gradients of all contributors into ``order.out`` (FT-HSDP §4.2).

        Raises:
            FTARError: the ring is of no more use; nobody of it writes into ``order.out`` any longer.
        """
        self._claim()
        plan = self._settings.plan(order.out.numel(), order.out.element_size(), len(self.members))
        job = self._plane.open(order.local, order.out, plan, order.after)
        exchange = Exchange(order, plan, self._position, job, self._receiver, self._sender)
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
        return AllReduceResult(order.out, exchange.entries, sent)

    def retire(self, error: FTARError) -> tuple[Receiver | None, Sender | None]:
        """End the ring with ``error``; its edges are returned if no all-reduce is under way on them."""
        with self._lock:
            if self._busy or self._error is not None:
                return None, None
            self._error = error
            edges = self._receiver, self._sender
            self._receiver = self._sender = None
            return edges

    def _claim(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._busy = True
            self.entered += 1

    def _run(self, exchange: Exchange) -> int:
        if self._receiver is None or self._sender is None:
            exchange.start()
            _wait_for(exchange)
            return 0
        self._sender.begin(self.fail)
        self._receiver.begin(exchange.transfer)
        exchange.start()
        while not exchange.finished:
            chunk = self._receiver.next(block=not exchange.busy)
            if chunk is not None:
                exchange.arrived(chunk)
            else:
                time.sleep(POLL_S)
                exchange.settle()
        self._receiver.end()
        return self._sender.flush()

    def fail(self, error: FTARError) -> None:
        """The ring is of no more use: whoever waits on it gets an error. Any thread; the first error stays."""
        with self._lock:
            if self._error is None:
                self._error = error
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()

    def dispose(self) -> None:
        """Wait until the threads of a failed ring have let go of all memory; close its descriptors."""
        with self._lock:
            receiver, sender, self._receiver, self._sender = self._receiver, self._sender, None, None
        for end in (receiver, sender):
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
