"""Host memory that a GPU reads and writes in place, private or shared between processes."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return `nbytes` zeroed bytes of host memory, aligned to 128; pinned if `device` is a GPU."""
    if device.type == "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
    skip = -memory.data_ptr() % 128
    return memory[skip : skip + nbytes]


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
