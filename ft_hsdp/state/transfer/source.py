"""Shelf: where the state server finds complete snapshots; the agent and the in-memory shelf are two of them.

InMemorySnapshots: snapshots that a process keeps for itself, where no state agent does.
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
    """A complete snapshot of one rank, borrowed.

    ``fd`` is a memfd of at least ``nbytes`` bytes that keep their content while it is borrowed; ``manifest`` is
    wire.encode of its manifest, checksums and digest included; ``digest`` is the manifest's, 64 hex digits.
    """

    fd: int
    nbytes: int
    manifest: bytes
    digest: str


class SnapshotSource(Protocol):
    """Complete snapshots by state and rank. Thread-safe."""

    def borrow(self, state: StateId, rank: int) -> ServedSnapshot | None:
        """The snapshot of ``state`` and ``rank``, until it is given back; None: it is not here (yet).

        Waits for checksums that are being computed at most.
        """
        ...

    def give_back(self, served: ServedSnapshot) -> None:
        """End a borrow; once for each."""
        ...


class SnapshotBuffer:
    """Pre-faulted memory for one snapshot: ``bytes`` is uint8 [nbytes], ``fd`` what sendfile reads.

    ``fd`` is closed when the room is dropped; arrays made of ``bytes`` stay valid.

    Raises:
        OSError: there is no memory or descriptor for it.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = shared_memory.create(nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.bytes: Bytes = shared_memory.attach(self.fd, nbytes, writable=True)

    @property
    def memory(self) -> memoryview:
        """The same bytes."""
        array: Any = self.bytes
        return memoryview(array)


class InMemorySnapshots:
    """A Shelf of complete snapshots in rooms. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[StateId, int], tuple[ServedSnapshot, SnapshotBuffer]] = {}
        self._lent: list[tuple[ServedSnapshot, SnapshotBuffer]] = []

    def put(self, manifest: ShardManifest, room: SnapshotBuffer) -> None:
        """Offer a snapshot; nobody may write into its room any more."""
        encoded = shard_manifest.encode(manifest)
        served = ServedSnapshot(room.fd, manifest.nbytes, encoded, shard_manifest.digest(encoded))
        with self._lock:
            self._held[manifest.state, manifest.rank] = served, room

    def drop(self, state: StateId, rank: int) -> None:
        """Offer it no longer; who has borrowed it keeps it."""
        with self._lock:
            self._held.pop((state, rank), None)

    def borrow(self, state: StateId, rank: int) -> ServedSnapshot | None:
        """See Shelf."""
        with self._lock:
            held = self._held.get((state, rank))
            if held is None:
                return None
            self._lent.append(held)
            return held[0]

    def give_back(self, served: ServedSnapshot) -> None:
        """See Shelf."""
        with self._lock:
            place = next(i for i, (lent, _) in enumerate(self._lent) if lent is served)
            self._lent.pop(place)
