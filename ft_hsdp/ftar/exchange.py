"""Exchange: one all-reduce at one member: the pipeline says what is next, the plane does it, the outlet sends it.

Nothing here waits, so the same code runs on the engine's thread and in simulated time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_hsdp import failpoints
from ft_hsdp.core.ring import Kind, OutOfOrder, Pipeline, Plan, Process, Step
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.ftar.dataplane.base import Job, Processed
from ft_hsdp.ftar.frame import Entry, Framing, Key
from ft_hsdp.ftar.link import Arrival, Inlet, Outlet, Transfer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
PLACE = {
    Kind.COPY_SEND: "reduce-copy",
    Kind.REDUCE_SEND: "reduce-scatter",
    Kind.REDUCE_STORE_SEND: "reduce-boundary",
    Kind.STORE_SEND: "reduce-gather",
    Kind.STORE: "reduce-gather",
}
SMALL = 64 * 1024  # bytes of a chunk up to which a second thread costs more than it brings


@dataclass(frozen=True, slots=True)
class Order:
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
        self, order: Order, plan: Plan, position: int, job: Job, inlet: Inlet | None, outlet: Outlet | None
    ) -> None:
        self._order = order
        self._position = position
        self._members = plan.members
        self._job = job
        self._inlet = inlet
        self._outlet = outlet
        self._pipeline = Pipeline(plan, position, order.local is not None, job.depth)
        itemsize = order.out.element_size()
        self._framing = Framing(
            order.key, plan, self._pipeline.operations, itemsize, DTYPES.index(order.out.dtype)
        )
        self._small = plan.chunk * itemsize <= SMALL
        self._heads: dict[int, tuple[Entry, ...]] = {}
        self._arrivals: dict[tuple[int, int], Arrival] = {}
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

    def arrived(self, arrival: Arrival) -> None:
        """A chunk is here: reduce or store it, and send what comes of it.

        Raises:
            ProtocolViolation: it is not the next one of its operation.
        """
        number, round_ = arrival.frame.operation.number, arrival.frame.round
        if arrival.entries:
            self._heads[number] = arrival.entries
            for k, entry in enumerate(arrival.entries):
                self._entries[(self._position - number + k) % self._members] = entry
        self._arrivals[number, round_] = arrival
        try:
            steps = self._pipeline.arrived(number, round_, arrival.frame.empty)
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
            assert isinstance(step, Process)
            failpoints.reach(PLACE[step.operation.kind], self._order.key.step)
            self._job.post(step, self._arrivals.pop((step.operation.number, step.round), None))

    def _finish(self, item: Processed) -> None:
        """First the slot goes back: that proves that what it held was whole. Only then is anything built on it."""
        if item.arrival is not None:
            assert self._inlet is not None
            self._job.free(item.arrival)
            self._inlet.release(item.arrival)
        for step in self._pipeline.processed(item.process.operation.number):
            if isinstance(step, Process):
                self._take([step])
                continue
            assert self._outlet is not None
            head = self._framing.header(step.operation, step.round, step.empty)
            self._outlet.send(
                head + self._news(step.operation.number, step.round),
                None if step.empty else item.payload,
                self._small,
            )

    def _news(self, number: int, round_: int) -> bytes:
        """The entries of all members that a sum has passed, behind its first chunk in the reduce-scatter."""
        if self._framing.entries(number + 1, round_) == 0:
            return b""
        return b"".join(e.pack() for e in (*self._heads.get(number, ()), self._order.mine))
