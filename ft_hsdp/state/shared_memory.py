"""Memory that outlives the process that writes it: a memfd that the state agent owns and a rank maps.

GEMINI §5.1 keeps checkpoints in the memory of the host; here the death of a trainer does not touch them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

# A process that reads a segment which shrinks gets a SIGBUS, so its size is sealed.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_ZEROS = memoryview(bytes(4 << 20))

Bytes = npt.NDArray[np.uint8]


def create(nbytes: int) -> int:
    """Return the file descriptor of a new segment of at least ``nbytes`` bytes, all of it allocated already.

    Raises:
        OSError: There is no memory or descriptor for it, or RLIMIT_FSIZE is below its size.
    """
    fd = os.memfd_create("ft_hsdp-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Pages are written by pwrite: without memory it returns an error, while touching a mapping would kill the
        # process. And no other thread waits meanwhile, as it would for MAP_POPULATE.
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
    """Map the first ``nbytes`` bytes of a segment.

    The caller keeps ``fd``. The mapping ends with the last array that views it; do not close it by hand.

    Returns:
        uint8 [nbytes].

    Raises:
        ValueError: The segment is smaller, or could shrink under a reader.
        OSError: It cannot be mapped.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("a segment is not sealed")
    if os.fstat(fd).st_size < max(1, nbytes):
        raise ValueError(f"a segment has {os.fstat(fd).st_size} bytes, wanted {nbytes}")
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    memory = mmap.mmap(fd, max(1, nbytes), prot=access)
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def protect(data: Bytes, *, writable: bool) -> None:
    """Make a whole mapping that `attach` made writable read-only, or writable again.

    A process that writes into a read-only mapping dies of SIGSEGV, and the bytes stay as they are.

    Raises:
        OSError: The kernel refused.
    """
    if not len(data):
        return
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    length = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    if _libc.mprotect(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(length), access) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
