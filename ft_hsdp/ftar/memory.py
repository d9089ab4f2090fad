"""Memory: tensors in memfd segments, which a neighbour on the same host maps and reads in place.

NCCL calls this user buffer registration. Tensors are cut one after the other from large segments (a page of a
memfd costs nothing until it is touched), and a segment lives as long as one of its tensors does.
"""

from __future__ import annotations

import bisect
import fcntl
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEGMENT = 64 * 2**20
ALIGN = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True, slots=True)
class Segment:
    """``size`` bytes of shared memory at ``address``, known to a neighbour by ``number`` and by its descriptor."""

    number: int
    fd: int
    address: int
    size: int


class Arena:
    """The registered memory of one process's group."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._segments: dict[int, Segment] = {}
        self._count = 0
        self._open: tuple[mmap.mmap, int] | None = None

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A new registered tensor; its content is undefined.

        Raises:
            OSError: there is no memory or descriptor for it.
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
        """The segments that there are."""
        with self._lock:
            return {s.number for s in self._segments.values()}

    def close(self) -> None:
        """Cut no more from the newest segment: it goes with its last tensor, as all others do."""
        with self._lock:
            self._open = None

    def find(self, tensor: Tensor) -> tuple[Segment, int] | None:
        """The segment that holds ``tensor`` and its offset there; None if it is not registered."""
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            segment = self._segments[self._starts[index]]
        offset = address - segment.address
        return (segment, offset) if offset + tensor.nbytes <= segment.size else None


def _forget(lock: Any, starts: list[int], segments: dict[int, Segment], address: int) -> None:
    """A segment is gone. (Not a method: that would keep its arena, and with it the newest segment, for ever.)"""
    with lock:
        starts.remove(address)
        os.close(segments.pop(address).fd)


class Mapped:
    """A neighbour's segments, mapped for reading."""

    def __init__(self) -> None:
        self._maps: dict[int, Tensor] = {}

    def add(self, number: int, fd: int) -> None:
        """Map the segment behind ``fd``, and close ``fd``.

        Raises:
            ValueError: it could shrink under us.
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
        """The neighbour has no use for a segment any more: unmap it."""
        self._maps.pop(number, None)

    def view(self, number: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """``nbytes`` of a segment as a flat tensor.

        Raises:
            ValueError: it is not mapped, or not that large.
        """
        whole = self._maps.get(number)
        if whole is None or not 0 <= offset <= offset + nbytes <= whole.numel() or offset % dtype.itemsize:
            raise ValueError(f"no {nbytes} bytes at {offset} of segment {number}")
        return whole[offset : offset + nbytes].view(dtype)

    def close(self) -> None:
        """Unmap all."""
        self._maps.clear()
