"""Where a state server finds complete snapshots: the protocol, and an implementation in this process's memory.

The other implementation is the state agent's `SnapshotStore`.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state import shared_memory
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest


@dataclass(frozen=True, slots=True)
class ServedSnapshot:
    """A complete snapshot of one rank, borrowed from a `SnapshotSource`."""

    fd: int  # a memfd of at least ``nbytes`` bytes, which do not change while it is borrowed
    nbytes: int
    manifest: bytes  # from `shard_manifest.encode`, with checksums
    digest: str  # of the manifest, 64 hex digits


class SnapshotSource(Protocol):
    """Complete snapshots by state and rank. Thread-safe."""

    def borrow(self, state: StateId, rank: int) -> ServedSnapshot | None:
        """Return the snapshot of ``state`` and ``rank``, or None if it is not here (yet).

        Blocks while its checksums are being computed. Its bytes do not change until `give_back`.
        """
        ...

    def give_back(self, served: ServedSnapshot) -> None:
        """End the borrow that returned ``served``. Call it once for each."""
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
        self.fd = shared_memory.create(nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.bytes: Bytes = shared_memory.attach(self.fd, nbytes, writable=True)

    @property
    def memory(self) -> memoryview:
        """The bytes as a memoryview."""
        array: Any = self.bytes
        return memoryview(array)


class InMemorySnapshots:
    """A `SnapshotSource` of snapshots that this process keeps itself. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[StateId, int], tuple[ServedSnapshot, SnapshotBuffer]] = {}
        self._lent: list[tuple[ServedSnapshot, SnapshotBuffer]] = []

    def put(self, manifest: ShardManifest, room: SnapshotBuffer) -> None:
        """Offer a snapshot.

        Args:
            manifest: With checksums.
            room: The bytes of the snapshot, which must not be written any more.

        Raises:
            ValueError: The encoded manifest is longer than MAX_MANIFEST bytes.
        """
        encoded = shard_manifest.encode(manifest)
        served = ServedSnapshot(room.fd, manifest.nbytes, encoded, shard_manifest.digest(encoded))
        with self._lock:
            self._held[manifest.state, manifest.rank] = served, room

    def drop(self, state: StateId, rank: int) -> None:
        """Stop offering the snapshot of ``state`` and ``rank``. Its memory is freed when no borrow is open."""
        with self._lock:
            self._held.pop((state, rank), None)

    def borrow(self, state: StateId, rank: int) -> ServedSnapshot | None:
        """Return the snapshot of ``state`` and ``rank``, or None if it is not offered. Does not block."""
        with self._lock:
            held = self._held.get((state, rank))
            if held is None:
                return None
            self._lent.append(held)
            return held[0]

    def give_back(self, served: ServedSnapshot) -> None:
        """End the borrow that returned ``served``. Call it once for each."""
        with self._lock:
            place = next(i for i, (lent, _) in enumerate(self._lent) if lent is served)
            self._lent.pop(place)
