"""Registered memory: tensors that a neighbour on the same host can map (NCCL calls this user buffer registration).

`Arena` cuts them one after the other from large memfd segments, and a page of a memfd costs no memory until it is
touched. A segment lives as long as one of its tensors does. `MappedSegments` is the neighbour's view.
"""

from __future__ import annotations

import bisect
import fcntl
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEGMENT = 64 * 2**20  # bytes of a segment, unless one tensor needs more
ALIGN = 4096  # bytes to which tensors are aligned
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of shared memory of this process."""

    number: int  # by which peers know it
    fd: int
    address: int
    size: int  # bytes


class Arena:
    """The registered memory of one process's group. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []  # addresses of the segments, sorted
        self._segments: dict[int, Segment] = {}
        self._count = 0
        self._open: tuple[mmap.mmap, int] | None = None  # the newest segment, and its first free byte

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized registered tensor.

        Args:
            shape: number of elements, or the sizes of all dimensions.
            dtype: type of the elements.

        Raises:
            OSError: no memory or descriptor is left.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        nbytes = numel * torch.empty(0, dtype=dtype).element_size()
        with self._lock:
            memory, offset = self._room(nbytes)
            self._open = memory, offset + -(-nbytes // ALIGN) * ALIGN
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)

    def _room(self, nbytes: int) -> tuple[mmap.mmap, int]:
        if self._open is not None and len(self._open[0]) - self._open[1] >= nbytes:
            return self._open
        size = max(SEGMENT, -(-nbytes // ALIGN) * ALIGN)
        fd = os.memfd_create("ftar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._count += 1
        self._segments[address] = Segment(self._count, fd, address, size)
        bisect.insort(self._starts, address)
        weakref.finalize(memory, _forget, self._lock, self._starts, self._segments, address)
        return memory, 0

    @property
    def numbers(self) -> set[int]:
        """The numbers of all segments that exist now."""
        with self._lock:
            return {s.number for s in self._segments.values()}

    def close(self) -> None:
        """Cut no more tensors from the newest segment, which is freed with its last tensor like all others."""
        with self._lock:
            self._open = None

    def find(self, tensor: Tensor) -> tuple[Segment, int] | None:
        """Return the segment that contains `tensor`, and its offset there in bytes.

        None: the tensor is not registered.
        """
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            segment = self._segments[self._starts[index]]
        offset = address - segment.address
        return (segment, offset) if offset + tensor.nbytes <= segment.size else None


def pin(memory: Tensor, device: torch.device) -> Callable[[], None]:
    """Have a CUDA device reach host memory; on another device nothing happens. Any thread.

    Returns:
        What ends that; to be called before the memory is freed.

    Raises:
        RuntimeError: the driver refuses.
    """
    if device.type != "cuda":
        return lambda: None
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))

    def unpin() -> None:
        with torch.cuda.device(device):
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

    return unpin


def _forget(lock: Any, starts: list[int], segments: dict[int, Segment], address: int) -> None:
    """Close a segment whose last tensor is gone.

    This is no method: a method would keep its arena alive, and with it the newest segment.
    """
    with lock:
        starts.remove(address)
        os.close(segments.pop(address).fd)


class MappedSegments:
    """The segments of a neighbour, mapped into this process."""

    def __init__(self) -> None:
        self._maps: dict[int, Tensor] = {}

    def add(self, number: int, fd: int) -> None:
        """Map the segment behind `fd`, and close `fd`.

        Raises:
            ValueError: the segment is not sealed, so it could shrink while it is read.
            OSError: it cannot be mapped.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("a segment is not sealed")
            memory = mmap.mmap(
                fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(fd)
        self._maps[number] = torch.frombuffer(memory, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._maps)

    def forget(self, number: int) -> None:
        """Unmap a segment that the neighbour has freed."""
        self._maps.pop(number, None)

    def view(self, number: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return `nbytes` at `offset` of a segment as a flat tensor, without a copy.

        Raises:
            ValueError: the segment is not mapped, or not that large, or the offset does not suit the type.
        """
        whole = self._maps.get(number)
        if whole is None or not 0 <= offset <= offset + nbytes <= whole.numel() or offset % dtype.itemsize:
            raise ValueError(f"no {nbytes} bytes at {offset} of segment {number}")
        return whole[offset : offset + nbytes].view(dtype)

    def close(self) -> None:
        self._maps.clear()
