"""A ring of members that exchange chunks through host memory, as threads or processes.

The receive slots of all members are in one piece of memory. A sender copies into its right neighbour's slots and
counts what it has sent; the neighbour counts what it has used. Each word has one writer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ft_hsdp.core.ring import RingPlan, operations
from ftar_kernels.flags import Command, host_buffer
from ftar_kernels.plane import Aborted, Expired, StagedJob, StagedPlane
from ftar_kernels.reduce_copy import vector

PAGE = 4096
WORDS = 8  # 8-byte words of a cache line
DEAD, SENT, FREED, HEADS = 0, 1, 2, 3  # lines of an edge's page; three words for each chunk from HEADS on
POLL_S = 2e-5


class Broken(RuntimeError):
    """The ring did not finish: a member is dead or silent."""


class PinnedSegment:
    """A memfd that is mapped and pinned.

    Another process opens it by its descriptor; each process pins its own mapping.

    Args:
        nbytes: size of the segment.
        fd: descriptor of an existing segment; None: make one.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.fd = os.memfd_create("ftar_kernels", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        self._pinned = False

    def pin(self) -> None:
        """Register the mapping with CUDA (cudaHostRegister).

        Raises:
            RuntimeError: CUDA refuses it.
        """
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
        self._pinned = True

    def close(self) -> None:
        """Unregister the mapping and close the descriptor. The memory is freed with the last tensor in it."""
        if self._pinned:
            self._pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr()))
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class RingMemoryLayout:
    """The memory of a ring: for each member a page of words, then its receive slots."""

    members: int
    chunk_bytes: int
    slots: int

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: a chunk, and room to begin at the same offset as in the message."""
        return -(-(self.chunk_bytes + 16) // 128) * 128

    @property
    def each(self) -> int:
        """Bytes of one member."""
        return -(-(PAGE + self.slots * self.stride) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of all members together."""
        return self.members * self.each

    def words(self, memory: Tensor, member: int) -> ctypes.Array[ctypes.c_int64]:
        """Return the words of the edge into `member`."""
        return (ctypes.c_int64 * (PAGE // 8)).from_address(memory.data_ptr() + member * self.each)

    def recv(self, memory: Tensor, member: int) -> Tensor:
        """Return the receive slots of `member`."""
        begin = member * self.each + PAGE
        return memory[begin : begin + self.slots * self.stride]


class KernelRingMember:
    """One member of a ring on `memory`, with a plane of its own. Its send buffer mirrors the largest message."""

    def __init__(
        self, memory: Tensor, layout: RingMemoryLayout, position: int, device: torch.device, message_bytes: int,
        kind: type[StagedPlane] = StagedPlane, *, programs: int = 2, timeout_s: float = 20.0,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.position = position
        self.timeout_s = timeout_s
        right = (position + 1) % layout.members
        self._in = layout.words(memory, position)
        self._out = layout.words(memory, right)
        self._recv = layout.recv(memory, position)
        self._right = layout.recv(memory, right)
        self._send = host_buffer(message_bytes, device)
        self._left_sent = self._used = self._sent = 0
        self.plane = kind(
            device, self._recv, self._send, programs=programs, depth=16, silence_s=timeout_s + 5,
            grace_s=timeout_s,
        )  # fmt: skip

    def all_reduce(self, local: Tensor | None, out: Tensor, after: torch.cuda.Event | None = None) -> None:
        """Sum the `local` of all members that have one into every `out` (FT-HSDP §4.2). Blocks.

        `after` completes `local`; None: what the caller's current stream holds.

        Raises:
            Broken: a member is marked dead, or nothing has moved for `timeout_s`.
        """
        chunk = self.layout.chunk_bytes // out.itemsize
        plan = RingPlan(out.numel(), self.layout.members, chunk, self.layout.slots)
        job = self.plane.open(local, out, plan.rounds * len(operations(self.position, plan.members)), after)
        failed = True
        try:
            self._drive(job, plan, local is not None, out.dtype)
            failed = False
        except (Aborted, Expired) as error:
            raise Broken(str(error)) from error
        finally:
            job.close(failed=failed)

    def _drive(self, job: StagedJob, plan: RingPlan, contributes: bool, dtype: torch.dtype) -> None:
        order = operations(self.position, plan.members)
        commands = plan.rounds * len(order)
        size = self.layout.stride // dtype.itemsize
        lanes = vector(dtype)
        mirror, right = self._send.view(dtype), self._right.view(dtype)
        posted: deque[tuple[int, int, bool]] = deque()  # operation, round, whether the outcome is empty
        outbox: deque[tuple[int, int, int, int, bool]] = deque()
        own = finished = 0
        last = self._left_sent + plan.rounds * (
            len(order) - 1
        )  # frames after it belong to the neighbour's next all-reduce
        may = plan.rounds if plan.members == 1 else min(plan.slots, plan.rounds)
        moved = time.monotonic()
        while finished < commands or outbox:
            before = (own, self._left_sent, finished, self._sent)
            while own < may and len(posted) < self.plane.depth:
                span = plan.span(order[0].shard, own)
                kind = order[0].kind
                job.post(Command(kind, span.start, span.stop, None, span.start if kind.sends else None))
                posted.append((0, own, not contributes))
                own += 1
            while self._left_sent < min(self._in[WORDS * SENT], last) and len(posted) < self.plane.depth:
                slot = self._left_sent % plan.slots
                number, round_, empty = self._in[WORDS * HEADS + 3 * slot : WORDS * HEADS + 3 * slot + 3]
                kind, span = order[number].kind, plan.span(order[number].shard, round_)
                place = None if empty else slot * size + span.start % lanes
                job.post(Command(kind, span.start, span.stop, place, span.start if kind.sends else None))
                posted.append((number, round_, bool(empty) and not contributes))
                self._left_sent += 1
                may = min(may + (number == 1), plan.rounds)
            for command in job.completed():
                number, round_, empty = posted.popleft()
                finished += 1
                if number:
                    self._used += 1
                    self._in[WORDS * FREED] = self._used
                if command.kind.sends:
                    nothing = empty and not command.kind.stores
                    outbox.append((number + 1, round_, command.start, command.stop, nothing))
            while outbox and self._sent - self._out[WORDS * FREED] < plan.slots:
                number, round_, start, stop, empty = outbox.popleft()
                slot = self._sent % plan.slots
                if not empty:
                    first = slot * size + start % lanes
                    right[first : first + stop - start].copy_(mirror[start:stop])
                self._out[WORDS * HEADS + 3 * slot : WORDS * HEADS + 3 * slot + 3] = [number, round_, empty]
                self._sent += 1
                self._out[WORDS * SENT] = self._sent
            if before != (own, self._left_sent, finished, self._sent):
                moved = time.monotonic()
                continue
            if self._in[WORDS * DEAD] or self._out[WORDS * DEAD]:
                raise Broken("a member is dead")
            if time.monotonic() - moved > self.timeout_s:
                raise Broken(f"nothing has moved for {self.timeout_s} s")
            time.sleep(POLL_S)

    def mark_dead(self) -> None:
        """Tell both neighbours that the ring is broken. Any thread."""
        self._in[WORDS * DEAD] = self._out[WORDS * DEAD] = 1

    def close(self) -> None:
        """Close the plane; blocks until the device has ended."""
        self.plane.close()
