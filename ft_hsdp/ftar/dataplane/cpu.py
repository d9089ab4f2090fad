"""The CPU data plane: adds with torch on the engine's thread. Torch releases the interpreter while it adds.

Partial sums are received into slots that are reused, so that they stay in the cache. Final sums are received
directly into the output. If values travel in another type, a mirror of the message has what is sent and the final
sums in that type, each at its place; the output gets a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ft_hsdp.core.ring import OperationKind, ProcessChunk, RingPlan, Span
from ft_hsdp.ftar.dataplane.base import Processed
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.pieces import Values, pieced
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.base import Chunk


class CpuPlane:
    """The data plane of one group on the CPU. Its slots grow to the largest chunk and are kept.

    Args:
        arena: the group's registered memory, for mirrors; None: any memory.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._slots: list[Tensor] = []
        self._size = 0
        self._arena = arena
        self._mirror = torch.empty(0, dtype=torch.uint8)

    def open(
        self,
        local: Values | None,
        out: Values,
        plan: RingPlan,
        after: Any = None,
        wire: torch.dtype | None = None,
    ) -> CpuJob:
        """Begin an all-reduce of `local` (None: relay) into `out`.

        `Plane.open` explains the arguments.
        """
        size = plan.chunk * (wire or out.dtype).itemsize
        if size > self._size:
            self._slots, self._size = [], size
        mirror = None if wire is None else self._room(plan.elements * wire.itemsize).view(wire)
        return CpuJob(local, out, plan, self._slots, self._size, mirror)

    def _room(self, nbytes: int) -> Tensor:
        if self._mirror.nbytes < nbytes:
            empty = torch.empty if self._arena is None else self._arena.empty
            self._mirror = empty(nbytes, dtype=torch.uint8)
        return self._mirror[:nbytes]


class CpuJob:
    """One all-reduce on the CPU, on the engine's thread."""

    depth = 1

    def __init__(
        self,
        local: Values | None,
        out: Values,
        plan: RingPlan,
        slots: list[Tensor],
        size: int,
        mirror: Tensor | None = None,
    ) -> None:
        self._local = None if local is None else pieced(local)
        self._out = pieced(out)
        self._wide = None if mirror is None else torch.empty(plan.chunk, dtype=out.dtype)
        self._sums = self._out if mirror is None else pieced(mirror)  # where sums are made, and sent from
        self.dtype = self._sums.dtype
        self._plan = plan
        self._slots = slots  # free ones; the last used is on top
        self._size = size  # bytes of a slot
        self._done: list[Processed] = []
        self._used: dict[int, Tensor] = {}  # address of a chunk: the slot that it fills

    def buffer_for(self, frame: Frame) -> Tensor:
        """Return a slot for a partial sum, or the place of a final sum. Receiving threads call this."""
        if not frame.operation.kind.reduces or not frame.nbytes:
            return self._sums.at(frame.span)
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = torch.empty(self._size, dtype=torch.uint8)
        view = slot[: frame.nbytes].view(self.dtype)
        self._used[view.data_ptr()] = slot
        return view

    def post(self, process: ProcessChunk, chunk: Chunk | None) -> None:
        """Process the chunk at once."""
        operation = process.operation
        span = self._plan.span(operation.shard, process.round)
        place = self._sums.at(span)
        payload: Tensor | None = place
        if operation.kind is OperationKind.COPY_SEND:
            payload = None if process.empty else self._own(span)
            if self._wide is not None and payload is not None:
                payload = place.copy_(payload)
        elif operation.kind.reduces:
            self._reduce(place, span, None if process.empty or chunk is None else chunk.data, operation.kind)
        elif self._plan.members == 1:
            self._reduce(place, span, None, OperationKind.REDUCE_STORE_SEND)
        else:
            assert chunk is not None
            assert chunk.data is not None
            if chunk.data.data_ptr() != place.data_ptr():
                place.copy_(chunk.data)
        if self._wide is not None and operation.kind.stores:
            self._out.at(span).copy_(place)
        self._done.append(Processed(process, payload, chunk))

    def _reduce(self, place: Tensor, span: Span, partial: Tensor | None, kind: OperationKind) -> None:
        """Write the sum of the partial sum and the local gradient, where there are any, into `place`."""
        if self._local is None:
            if partial is not None:
                place.copy_(partial)
            elif kind is OperationKind.REDUCE_STORE_SEND:
                place.zero_()
        elif partial is None:
            own = self._own(span)
            if own.data_ptr() != place.data_ptr():  # in an all-reduce in place, they are the same
                place.copy_(own)
        elif self._wide is not None:  # three times as fast as an addition of two types
            place.copy_(self._wide[: span.size].copy_(partial).add_(self._own(span)))
        else:
            torch.add(partial, self._own(span), out=place)

    def _own(self, span: Span) -> Tensor:
        assert self._local is not None
        return self._local.at(span)

    def completed(self) -> list[Processed]:
        """Return all chunks that were posted since the last call."""
        done, self._done = self._done, []
        return done

    def free(self, chunk: Chunk) -> None:
        """Put the slot of `chunk` back, if it was received into a slot."""
        if chunk.data is not None and (slot := self._used.pop(chunk.data.data_ptr(), None)) is not None:
            self._slots.append(slot)

    def close(self, failed: bool) -> None:
        """Drop the slots of chunks that were never used: a receiving thread may still write into them."""
        self._used.clear()
