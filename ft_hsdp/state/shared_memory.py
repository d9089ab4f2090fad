"""Segment: memory that outlives the process that writes it: a memfd, owned by the state agent, mapped by a rank.

GEMINI §5.1 keeps checkpoints in the memory of the host; here a trainer's death does not touch them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A segment that shrinks is a SIGBUS for whoever reads it."""

_libc = ctypes.CDLL(None, use_errno=True)
_ZEROS = memoryview(bytes(4 << 20))

Bytes = npt.NDArray[np.uint8]


def create(nbytes: int) -> int:
    """The descriptor of a new segment of at least ``nbytes`` bytes, all of it in memory already.

    Raises:
        OSError: there is no memory or descriptor for it, or RLIMIT_FSIZE is below its size.
    """
    fd = os.memfd_create("ft_hsdp-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Written, not touched: where there is no memory this fails, while a touch would kill; and no other thread
        # waits meanwhile, as it would for MAP_POPULATE.
        size = max(1, nbytes)
        written = 0
        while written < size:
            written += os.pwrite(fd, _ZEROS[: size - written], written)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, nbytes: int, *, writable: bool) -> Bytes:
    """The first ``nbytes`` bytes of a segment, uint8 [nbytes], mapped as long as a view of them lives.

    ``fd`` stays the caller's. Nobody may close the mapping: it goes with the last array.

    Raises:
        ValueError: the segment is smaller, or could shrink under a reader.
        OSError: it cannot be mapped.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("a segment is not sealed")
    if os.fstat(fd).st_size < max(1, nbytes):
        raise ValueError(f"a segment has {os.fstat(fd).st_size} bytes, wanted {nbytes}")
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    memory = mmap.mmap(fd, max(1, nbytes), prot=access)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def protect(data: Bytes, *, writable: bool) -> None:
    """Have the kernel refuse writes to a whole mapping that `attach` made writable, or allow them again.

    Who writes there nevertheless gets a SIGSEGV: it ends, and the bytes stay as they are.

    Raises:
        OSError: the kernel does not do it.
    """
    if not len(data):
        return
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    length = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    if _libc.mprotect(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(length), access) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
