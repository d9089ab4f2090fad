"""The GPU data plane: copies and adds on the device, staged through pinned host memory (FT-HSDP §4.2).

One host buffer has two parts: a mirror of the message, and C slots for partial sums that arrive. What is sent
stays in the mirror, at its place in the message, until the all-reduce ends; final sums are received into the
mirror too and sent on from there. The buffer is registered memory, so that a neighbour on the same host reads it
in place.

This module alone imports triton and ftar_kernels, and it is imported only where a device is used.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from ft_hsdp.core.ring import ProcessChunk, RingPlan, Span, operations
from ft_hsdp.errors import (
    DeviceExpired,
    FTARError,
    InvalidArgument,
    LocalProcessError,
    LocalResourceError,
    LocalSystemError,
    ProtocolViolation,
)
from ft_hsdp.ftar.dataplane.base import Processed
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.pieces import PiecedTensor, Values
from ft_hsdp.ftar.transport.arena import Arena, pin
from ft_hsdp.ftar.transport.base import Chunk
from ftar_kernels import plane as kernels
from ftar_kernels.flags import Command
from ftar_kernels.reduce_copy import PROGRAMS, vector

ALIGN = 128  # bytes to which the parts of the buffer are aligned

# What the runtime and the driver say of hardware that is broken: CUDA errors 46, 214, 220, 226, 714, 802, 814.
BROKEN = (
    "ECC",
    "NVLink",
    "hardware stack error",
    "device(s) is/are busy or unavailable",
    "CUDA-capable device is detected",
    "GPU is lost",
    "contained",
    "system not yet initialized",
)


def fault(error: Exception) -> FTARError:
    """Return what an error of the kernels, the runtime or the driver means for this rank.

    Only an error that names broken hardware condemns the host. An error that a script's own kernels may have
    caused (an assertion on the device, an illegal access) ends the process.
    """
    text = f"GPU data plane: {error}"
    if isinstance(error, kernels.Expired):
        return DeviceExpired(text)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return LocalResourceError(text)
    if any(each.lower() in str(error).lower() for each in BROKEN):
        return LocalSystemError(text)
    return LocalProcessError(text)


class GpuPlane:
    """The data plane of one group on a GPU; its buffer grows to the largest message and is kept.

    Args:
        device: a CUDA device; a CPU device works where triton interprets its kernels.
        arena: the group's registered memory.
        timeout_s: how long the device may finish nothing after it has begun and while it has work.
        silence_s: a kernel ends by itself if the engine stands still for so long.
        staged: makes the plane of the kernels.
    """

    def __init__(
        self,
        device: torch.device,
        arena: Arena,
        timeout_s: float,
        silence_s: float = kernels.SILENCE_S,
        staged: type[kernels.StagedPlane] = kernels.StagedPlane,
    ) -> None:
        self._device = device
        self._arena = arena
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._make_staged = staged
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._staged: kernels.StagedPlane | None = None

    def reserve(self, plan: RingPlan, dtype: torch.dtype, wire: torch.dtype | None = None) -> None:
        """Allocate memory for messages of `plan` and load the kernels; with ``wire`` those for that type, too.

        Blocks; done early so that training does not wait for it.

        Raises:
            LocalSystemError: the device or its memory is at fault, or the kernels cannot be compiled here.
        """
        try:
            room = self._room(_Areas(plan, dtype).nbytes)
            for each in dict.fromkeys((None, wire)):
                room.warm_up((dtype,), each)
        except Exception as error:  # a compiler raises errors of its own
            raise fault(error) from error

    def open(
        self,
        local: Values | None,
        out: Values,
        plan: RingPlan,
        after: Any = None,
        wire: torch.dtype | None = None,
    ) -> GpuJob:
        """Begin an all-reduce of `local` (None: relay) into `out`, flat tensors on the device.

        Raises:
            InvalidArgument: the kernels cannot take the tensors.
            LocalSystemError: the device or its memory is at fault.
        """
        if isinstance(local, PiecedTensor) or isinstance(out, PiecedTensor):
            raise InvalidArgument("GPU data plane: values lie in several pieces; allowed: one tensor")
        areas = _Areas(plan, wire or out.dtype)
        count = plan.rounds * len(operations(0, plan.members))
        try:
            staged = self._room(areas.nbytes)
            job = staged.open(local, out, count, after, wire)
        except ValueError as error:
            if "cannot be accessed" in str(error):  # by Triton's launcher, of our own memory
                raise fault(error) from error
            raise InvalidArgument(f"GPU data plane: {error}") from error
        except RuntimeError as error:
            raise fault(error) from error
        return GpuJob(job, self._buffer.view(wire or out.dtype), plan, areas, staged.depth, self._timeout_s)

    def close(self) -> None:
        """End a running all-reduce and free the memory; blocks until the device has ended.

        Raises:
            LocalSystemError: the device does not end.
        """
        try:
            if self._staged is not None:
                self._staged.close()
                self._unpin()
        except RuntimeError as error:
            raise fault(error) from error
        self._staged, self._buffer = None, torch.empty(0, dtype=torch.uint8)

    def _room(self, nbytes: int) -> kernels.StagedPlane:
        """Return the staged plane on a buffer of at least `nbytes`."""
        if self._staged is not None and self._buffer.nbytes >= nbytes:
            return self._staged
        self.close()
        self._buffer = self._arena.empty(nbytes, torch.uint8)
        self._unpin = pin(self._buffer, self._device)
        self._staged = self._make_staged(
            self._device,
            self._buffer,
            self._buffer,
            programs=PROGRAMS if self._device.type == "cuda" else 1,
            silence_s=self._silence_s,
        )
        return self._staged


class _Areas:
    """Where the parts of the buffer are, in elements: the mirror at 0, then the slots.

    A chunk begins at the same offset within 16 bytes as in the message, so that the device moves 16 bytes at a
    time.
    """

    def __init__(self, plan: RingPlan, dtype: torch.dtype) -> None:
        size = dtype.itemsize
        mirror = -(-plan.elements * size // ALIGN) * ALIGN
        chunk = min(plan.chunk, -(-plan.elements // plan.members)) * size
        slot = -(-chunk // ALIGN) * ALIGN + ALIGN
        self.nbytes = mirror + plan.slots * slot
        self.slots = [(mirror + i * slot) // size for i in range(plan.slots)]
        self.vector = vector(dtype)

    def at(self, slot: int, span: Span) -> int:
        """Return the index of the first element of a chunk of `span` in a slot."""
        return slot + span.start % self.vector


class GpuJob:
    def __init__(
        self, job: kernels.StagedJob, buffer: Tensor, plan: RingPlan, areas: _Areas, depth: int, timeout_s: float
    ) -> None:
        self.depth = depth
        self._job = job
        self._plan = plan
        self._areas = areas
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # several threads may receive chunks
        self._posted: list[tuple[ProcessChunk, Chunk | None]] = []
        self._heard = 0.0  # when the device last finished a chunk, or got the first one
        self._free = list(areas.slots)
        self._taken: dict[tuple[int, int], int] = {}  # (operation, round): its slot
        self._buffer = buffer

    @property
    def dtype(self) -> torch.dtype:
        return self._buffer.dtype

    def buffer_for(self, frame: Frame) -> Tensor:
        """Return a slot for a partial sum, or the place in the mirror for a final sum.

        Receiving threads call this.
        """
        place = self._offset_for(frame)
        return self._buffer[place : place + frame.span.size]

    def _offset_for(self, frame: Frame) -> int:
        if not frame.operation.kind.reduces or not frame.span.size:
            return frame.span.start
        with self._lock:
            if not self._free:
                raise ProtocolViolation("the left neighbour sent more chunks than there are slots")
            slot = self._free.pop()
            self._taken[frame.operation.number, frame.round] = slot
        return self._areas.at(slot, frame.span)

    def post(self, process: ProcessChunk, chunk: Chunk | None) -> None:
        """Hand the chunk to the device. Does not wait for it."""
        span = self._plan.span(process.operation.shard, process.round)
        recv = None
        if chunk is not None and not process.empty and span.size:
            recv = self._place(chunk)
        kind = process.operation.kind
        send = span.start if kind.adds else None  # a received final sum is in the mirror already
        if not self._posted:
            self._heard = time.monotonic()
        try:
            self._job.post(Command(kind, span.start, span.stop, recv, send))
        except RuntimeError as error:
            raise fault(error) from error
        self._posted.append((process, chunk))

    def _place(self, chunk: Chunk) -> int:
        """Return where in the buffer a received chunk is; copy it there first if it was received elsewhere."""
        assert chunk.data is not None
        offset = chunk.data.data_ptr() - self._buffer.data_ptr()
        if 0 <= offset < self._buffer.nbytes:
            return offset // self._buffer.element_size()
        place = self._offset_for(chunk.frame)
        self._buffer[place : place + chunk.data.numel()].copy_(chunk.data)
        return place

    def completed(self) -> list[Processed]:
        """Return the chunks that the device has finished since the last call.

        Raises:
            DeviceExpired: the device has ended by itself, because this process was silent.
            LocalSystemError: the device has failed, or has finished nothing for `timeout_s` although it has begun
                and has work.
        """
        try:
            done = len(self._job.completed())
        except RuntimeError as error:
            raise fault(error) from error
        if not done:
            now = time.monotonic()
            if not self._job.begun:
                self._heard = now
            elif self._posted and now - self._heard > self._timeout_s:
                raise LocalProcessError(f"GPU data plane: nothing was finished for {now - self._heard:.1f} s")
            return []
        self._heard = time.monotonic()
        finished, self._posted = self._posted[:done], self._posted[done:]
        return [Processed(process, self._payload(process), chunk) for process, chunk in finished]

    def _payload(self, process: ProcessChunk) -> Tensor:
        span = self._plan.span(process.operation.shard, process.round)
        return self._buffer[span.start : span.stop]

    def free(self, chunk: Chunk) -> None:
        """Put the slot of `chunk` back, if it was received into a slot."""
        with self._lock:
            slot = self._taken.pop((chunk.frame.operation.number, chunk.frame.round), None)
            if slot is not None:
                self._free.append(slot)

    def close(self, failed: bool) -> None:
        """End the all-reduce on the device; block until it neither reads nor writes memory of it.

        Raises:
            LocalSystemError: the device has failed, or does not end.
        """
        try:
            self._job.close(failed=failed)
        except RuntimeError as error:
            raise fault(error) from error
