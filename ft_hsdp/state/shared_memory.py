"""Memory that outlives the process that writes it, and where the snapshots in it are found.

A segment is a memfd that the state agent owns and a rank maps. GEMINI §5.1 keeps checkpoints in the memory of the
host; here the death of a trainer does not touch them.

`SnapshotSource` is where a state server finds complete snapshots: in the agent that is its `SnapshotStore`, and
`InMemorySnapshots` keeps some in this process's own memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.shape import Extent
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import HeldShard, ShardManifest

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


@dataclass(frozen=True, slots=True)
class ServedSnapshot:
    """A complete snapshot of one rank, or a part of it or a slice, borrowed from a `SnapshotSource`."""

    fd: int  # a memfd whose bytes do not change while it is borrowed
    nbytes: int
    manifest: bytes  # from `shard_manifest.encode`, with checksums
    digest: str  # of the manifest, 64 hex digits
    extents: tuple[Extent, ...] = ()  # of a part: where its bytes lie in the memfd; (): from its begin on
    room: Any = None  # the lender's: what owns the memfd


class SnapshotSource(Protocol):
    """Complete snapshots by state and rank, and slices of block stores by store and number. Thread-safe."""

    def borrow(
        self, content: StateId | str, rank: int, ranks: int | None = None, *, verify: bool = True
    ) -> ServedSnapshot | None:
        """Return the snapshot of a state and ``rank``, or None if it is not here (yet).

        Or the slice ``rank`` of a store. It is of a replica of ``ranks`` ranks; None: of any. Its bytes do not
        change until `give_back`. Blocks while its checksums are compared. Without ``verify`` they are not, because
        the reader compares them.
        """
        ...

    def give_back(self, served: ServedSnapshot) -> None:
        """End the borrow that returned ``served``. Call it once for each."""
        ...

    def drop_damaged(self, served: ServedSnapshot, content: StateId | str, error: Exception) -> None:
        """Drop what is borrowed, whose bytes changed as ``error`` says. It stays borrowed."""
        ...

    def held(self) -> Sequence[HeldShard]:
        """Return the complete snapshots that can be borrowed. Does not compare their checksums."""
        ...


class SnapshotBuffer:
    """Pre-faulted shared memory for one snapshot of ``nbytes`` bytes.

    ``fd`` is closed when the buffer is garbage-collected; arrays made of ``bytes`` stay valid.

    Attributes:
        fd: The memfd, from which sendfile reads.
        bytes: The same memory as uint8 [nbytes], writable.

    Raises:
        OSError: There is no memory or file descriptor for it.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = create(nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.bytes: Bytes = attach(self.fd, nbytes, writable=True)

    @property
    def memory(self) -> memoryview:
        array: Any = self.bytes
        return memoryview(array)


class InMemorySnapshots:
    """A `SnapshotSource` of snapshots that this process keeps itself. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[StateId, int, int], ServedSnapshot] = {}

    def put(self, manifest: ShardManifest, room: SnapshotBuffer) -> None:
        """Offer a snapshot.

        Args:
            manifest: With checksums.
            room: The bytes of the snapshot, which must not be written any more.

        Raises:
            ValueError: The encoded manifest is longer than MAX_MANIFEST bytes.
        """
        encoded = shard_manifest.encode(manifest)
        served = ServedSnapshot(room.fd, manifest.nbytes, encoded, shard_manifest.digest(encoded), room=room)
        with self._lock:
            self._held[manifest.state, manifest.rank, manifest.ranks] = served

    def drop(self, state: StateId, rank: int) -> None:
        """Stop offering the snapshot of ``state`` and ``rank``. Its memory is freed when no borrow is open."""
        with self._lock:
            for key in [key for key in self._held if key[:2] == (state, rank)]:
                del self._held[key]

    def borrow(
        self, content: StateId | str, rank: int, ranks: int | None = None, *, verify: bool = True
    ) -> ServedSnapshot | None:
        with self._lock:
            found = (
                each for key, each in self._held.items() if key[:2] == (content, rank) and ranks in (None, key[2])
            )
            return next(found, None)

    def held(self) -> Sequence[HeldShard]:
        """Return (): who fetches from here knows what is offered."""
        return ()

    def drop_damaged(self, served: ServedSnapshot, content: StateId | str, error: Exception) -> None:
        with self._lock:
            for key in [key for key, held in self._held.items() if held is served]:
                del self._held[key]

    def give_back(self, served: ServedSnapshot) -> None:
        """Do nothing: what is borrowed keeps its memory."""
