"""One all-reduce on a ring: `Ring` is the data plane of one epoch, `Exchange` one all-reduce on it (FT-HSDP §4.2).

`Ring.all_reduce` runs on the thread that calls it and blocks until the sum is complete. Meanwhile the transport's
threads receive and send: chunk k is added while chunk k+1 arrives and chunk k-1 leaves. The local gradient is only
read, unless it is the output too, so that a failed step can be reduced again from it. An all-reduce is over only
when its own sends have drained.

`Exchange` never waits. It asks `core.ring.Pipeline` what comes next, hands chunks to the data plane, and sends
what the data plane has finished; the tests drive the same class in simulated time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

from ft_hsdp import fault_injection
from ft_hsdp.core.ring import OperationKind, OutOfOrder, Pipeline, ProcessChunk, RingPlan, Step
from ft_hsdp.core.traces import MARKED, Mark
from ft_hsdp.errors import FTARError, PeerDead, ProtocolViolation
from ft_hsdp.ftar.dataplane.base import Plane, PlaneJob, Processed
from ft_hsdp.ftar.frame import Entry, Framing, Key
from ft_hsdp.ftar.pieces import PiecedTensor, Values, pieced
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.base import Chunk, Transfer, WaitClock
from ft_hsdp.ftar.transport.receiver import StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
NARROW = torch.bfloat16, torch.float32  # what values may travel as, and what they are then
FAILPOINT = {  # names of the failpoints in each kind of operation
    OperationKind.COPY_SEND: "reduce-copy",
    OperationKind.REDUCE_SEND: "reduce-scatter",
    OperationKind.REDUCE_STORE_SEND: "reduce-boundary",
    OperationKind.STORE_SEND: "reduce-gather",
    OperationKind.STORE: "reduce-gather",
}
SMALL = 64 * 1024  # bytes; the engine receives and sends chunks up to this size: a second thread costs more


@dataclass(frozen=True, slots=True)
class AllReduceOrder:
    """A request for one all-reduce.

    Raises:
        ValueError: the tensors differ in size or type, or cannot be summed.
    """

    key: Key
    local: Values | None  # flat [n] of this member's values; None: relay what arrives
    out: Values  # flat [n] of the same type; receives the sum; in the same pieces in all members
    # What all members learn about this one's contribution; a function is called when some of `local` was read.
    mine: Entry | Callable[[], Entry]
    after: Any = None  # what the data plane waits for before it reads `local`; on a GPU an event
    # Type in which values travel; None: as they are. With bfloat16 each member adds in fp32 and rounds the sum, so
    # all have the same bits.
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, values in (("local", self.local), ("out", self.out)):
            if values is None:
                continue
            if (values.dtype, values.shape) != (self.out.dtype, self.out.shape):
                raise ValueError(f"{name} is {_describe(values)}, out is {_describe(self.out)}")
            flat = isinstance(values, PiecedTensor) or (values.dim() == 1 and values.is_contiguous())
            if values.dtype not in DTYPES or not flat:
                raise ValueError(f"{name} is {_describe(values)}; allowed: flat, contiguous, of {DTYPES}")
        if self.wire is not None and (self.wire, self.out.dtype) != NARROW:
            raise ValueError(f"{self.out.dtype} as {self.wire}; allowed: {NARROW[1]} as {NARROW[0]}")
        if self.local is not None and (cut := pieced(self.local).edges) and cut != pieced(self.out).edges:
            raise ValueError("local and out lie in other pieces")

    @property
    def travels(self) -> torch.dtype:
        """Return the type of what is sent."""
        return self.wire or self.out.dtype


def _describe(values: Values) -> str:
    if isinstance(values, PiecedTensor):
        return f"{values.dtype} {tuple(values.shape)} in {len(values.pieces)} pieces"
    return f"{values.dtype} {tuple(values.shape)} with strides {values.stride()}"


class Exchange:
    """One all-reduce of `order`, cut by `plan`, at `position` of the ring, from `receiver` to `sender`.

    It never waits.

    Args:
        plan: how the message is cut into chunks.
        position: index of this member in the ring.
        job: the data plane's part: copies and adds the chunks.
        receiver: chunks from the left neighbour; None in a ring of one.
        sender: chunks to the right neighbour; None in a ring of one.
    """

    def __init__(
        self,
        order: AllReduceOrder,
        plan: RingPlan,
        position: int,
        job: PlaneJob,
        receiver: StreamReceiver | None,
        sender: StreamSender | None,
    ) -> None:
        self._order = order
        self._position = position
        self._members = plan.members
        self._job = job
        self._receiver = receiver
        self._sender = sender
        self._pipeline = Pipeline(plan, position, order.local is not None, job.depth)
        itemsize = order.travels.itemsize
        self._framing = Framing(order.key, plan, self._pipeline.operations, itemsize, DTYPES.index(order.travels))
        self._small = plan.chunk * itemsize <= SMALL
        self._heads: dict[int, tuple[Entry, ...]] = {}  # operation: the entries that its first chunk brought
        self._chunks: dict[tuple[int, int], Chunk] = {}  # (operation, round): received, not yet posted
        self._entries: dict[int, Entry] = {}  # of the others
        self.transfer = Transfer(self._framing, job, self._pipeline.frames, self._small)

    @property
    def finished(self) -> bool:
        """Whether all chunks are received and added. Sends may still be in flight."""
        return self._pipeline.finished

    @property
    def busy(self) -> bool:
        """Whether the data plane still works on chunks."""
        return any(c.done < c.posted for c in self._pipeline.counters)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Each member's entry in ring order; complete once `finished`."""
        return tuple(self._mine if i == self._position else self._entries[i] for i in range(self._members))

    @cached_property
    def _mine(self) -> Entry:
        mine = self._order.mine
        return mine() if callable(mine) else mine

    def start(self) -> None:
        """Post this member's first chunks, as many as there are slots."""
        self._take(self._pipeline.start())
        self.settle()

    def arrived(self, chunk: Chunk) -> None:
        """Handle a received chunk: reduce or store it, and send the outcome.

        Raises:
            ProtocolViolation: it is not the next chunk of its operation.
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
        """Handle the chunks that the data plane has finished.

        Their slots are freed, their outcomes are sent, and chunks that waited for the data plane are posted.
        """
        while done := self._job.completed():
            for item in done:
                self._finish(item)

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            assert isinstance(step, ProcessChunk)
            fault_injection.reach(FAILPOINT[step.operation.kind], self._order.key.step)
            self._job.post(step, self._chunks.pop((step.operation.number, step.round), None))

    def _finish(self, item: Processed) -> None:
        """Release the received chunk first, and send the outcome only after that.

        `StreamReceiver.release` proves that the chunk was whole: the peer still lived when its memory had been
        read.
        """
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
                head + self._packed_entries(step.operation.number, step.round),
                None if step.empty else item.payload,
                self._small,
            )

    def _packed_entries(self, number: int, round_: int) -> bytes:
        """Return the packed entries that go with the chunk that operation `number` sends.

        They are those of all members that the sum has passed, and travel with the first chunk of each operation of
        the reduce-scatter.
        """
        if self._framing.entries(number + 1, round_) == 0:
            return b""
        return b"".join(e.pack() for e in (*self._heads.get(number, ()), self._mine))


MARKS = 4  # that are kept
SWITCH_S = 1e-5  # the interpreter's switch interval during an all-reduce
POLL_S = 2e-5  # how often a data plane that works is asked what it has finished


@dataclass(frozen=True, slots=True)
class AllReduceResult:
    out: Values  # the sum, in what was given for it
    entries: tuple[Entry, ...]  # of each member, in ring order
    bytes_sent: int  # with headers


class Ring:
    """The data plane of one epoch: this member's position and its two edges.

    One thread, the engine's, calls `all_reduce`; `fail` and `retire` may come from other threads. Only the first
    error counts.

    Args:
        epoch: number of the ring.
        members: replicas in ring order.
        position: index of this member.
        receiver: edge from the left neighbour; None in a ring of one.
        sender: edge to the right neighbour; None in a ring of one.
        settings: sizes by which messages are cut.
    """

    def __init__(
        self,
        epoch: int,
        members: Sequence[int],
        position: int,
        receiver: StreamReceiver | None,
        sender: StreamSender | None,
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
        self.error: FTARError | None = None  # why the ring is broken; None while it can be used
        self.busy = False
        self.entered = 0  # number of all-reduces that were begun
        self.newest: Key | None = None  # of these
        self.marks: tuple[Mark, ...] = ()  # replaced as a whole
        self._begun: list[float] = []  # all-reduces since the newest mark, in Unix seconds
        self.awaits = ""  # as in `GroupTrace`
        self.inside = WaitClock()  # an all-reduce
        self._blocked_before = self._blocked_s()

    def _blocked_s(self) -> float:
        sender = self._sender
        return sender.blocked_s if sender is not None else 0.0

    @property
    def blocked_s(self) -> float:
        """Seconds since the ring was formed in which it waited until the right neighbour took what was sent."""
        return self._blocked_s() - self._blocked_before

    @property
    def counts(self) -> tuple[int, int]:
        """Number of all-reduces that were begun, and of these that have ended."""
        with self._lock:
            return self.entered, self.entered - self.busy

    @property
    def received(self) -> int:
        """Number of chunks received from the left neighbour since the connection was made."""
        receiver = self._receiver
        return receiver.frames if receiver is not None else 0

    @property
    def sent(self) -> int:
        """Number of chunks sent, or queued to be sent, to the right neighbour since the connection was made."""
        sender = self._sender
        return sender.frames if sender is not None else 0

    @property
    def high_water(self) -> int:
        """The largest number of bytes that were in flight to the right neighbour at once."""
        return self._sender.high_water if self._sender is not None else 0

    def all_reduce(self, order: AllReduceOrder) -> AllReduceResult:
        """Sum the values of all contributors into `order.out`; block until the sum is complete (FT-HSDP §4.2).

        Returns:
            The sum, each member's entry and the bytes sent.

        Raises:
            FTARError: the ring is broken. No thread of it writes into `order.out` any longer.
        """
        self._claim(order.key)
        out, cut = order.out, self._settings
        edges, members = pieced(out).edges, len(self.members)
        size = order.travels.itemsize
        plan = RingPlan.cut(out.numel(), size, members, cut.slots, cut.chunk_bytes, edges)
        job = self._plane.open(order.local, out, plan, order.after, order.wire)
        exchange = Exchange(order, plan, self._position, job, self._receiver, self._sender)
        try:
            with _quick_switching(), self.inside:
                sent = self._run(exchange)
        except FTARError as error:
            self.fail(error)
            self.dispose()
            job.close(failed=True)
            assert self.error is not None
            raise self.error from error
        except BaseException:
            self.fail(PeerDead("the engine failed"))
            self.dispose()
            job.close(failed=True)
            raise
        job.close(failed=False)
        self.busy = False
        return AllReduceResult(out, exchange.entries, sent)

    def retire(self, error: FTARError) -> tuple[StreamReceiver | None, StreamSender | None]:
        """End the ring with `error` and return its two edges for the next ring; any thread.

        Returns:
            The receiver and the sender; (None, None) if an all-reduce is running or the ring is broken already.
        """
        with self._lock:
            if self.busy or self.error is not None:
                return None, None
            self.error = error
            edges = self._receiver, self._sender
            self._receiver = self._sender = None
            return edges

    def _claim(self, key: Key) -> None:
        with self._lock:
            if self.error is not None:
                raise self.error
            self.busy = True
            self.entered += 1
        self.newest = key
        self._begun.append(time.time())
        if len(self._begun) == MARKED:
            self.marks = (*self.marks, Mark(self.entered, fmean(self._begun)))[-MARKS:]
            self._begun.clear()

    def _run(self, exchange: Exchange) -> int:
        if self._receiver is None or self._sender is None:
            exchange.start()
            _wait_for(exchange)
            return 0
        self._sender.begin(self.fail)
        self._receiver.begin(exchange.transfer)
        exchange.start()
        while not exchange.finished:
            busy = exchange.busy
            if busy:
                chunk = self._receiver.next(block=False)
            else:
                self.awaits = "left"
                chunk = self._receiver.next(block=True)
                self.awaits = ""
            if chunk is not None:
                exchange.arrived(chunk)
                continue
            if busy:
                time.sleep(POLL_S)
            exchange.settle()
        self._receiver.end()
        self.awaits = "right"
        sent = self._sender.flush()
        self.awaits = ""
        return sent

    def fail(self, error: FTARError) -> None:
        """Break the ring: all pending and future waits raise `error`. Any thread; only the first error is kept."""
        with self._lock:
            if self.error is None:
                self.error = error
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()

    def dispose(self) -> None:
        """Wait until the transport's threads no longer use any tensor; end them and close the connections."""
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
_switchers = 0  # engines of this process that are in an all-reduce
_usual = 0.0  # the switch interval outside of all-reduces


@contextmanager
def _quick_switching() -> Iterator[None]:
    """Shorten the interpreter's switch interval, so that Python threads yield quickly while chunks wait."""
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
