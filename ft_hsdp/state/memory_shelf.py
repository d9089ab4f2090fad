"""MemoryShelf: snapshots that a process keeps for itself, where no state agent does."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state import segment, wire
from ft_hsdp.state.segment import Bytes
from ft_hsdp.state.shelf import Served
from ft_hsdp.state.wire import Manifest


class Room:
    """Pre-faulted memory for one snapshot: ``bytes`` is uint8 [nbytes], ``fd`` what sendfile reads.

    ``fd`` is closed when the room is dropped; arrays made of ``bytes`` stay valid.

    Raises:
        OSError: there is no memory or descriptor for it.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = segment.create(nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.bytes: Bytes = segment.attach(self.fd, nbytes, writable=True)

    @property
    def memory(self) -> memoryview:
        """The same bytes."""
        array: Any = self.bytes
        return memoryview(array)


class MemoryShelf:
    """A Shelf of complete snapshots in rooms. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[StateId, int], tuple[Served, Room]] = {}
        self._lent: list[tuple[Served, Room]] = []

    def put(self, manifest: Manifest, room: Room) -> None:
        """Offer a snapshot; nobody may write into its room any more."""
        encoded = wire.encode(manifest)
        served = Served(room.fd, manifest.nbytes, encoded, wire.digest(encoded))
        with self._lock:
            self._held[manifest.state, manifest.rank] = served, room

    def drop(self, state: StateId, rank: int) -> None:
        """Offer it no longer; who has borrowed it keeps it."""
        with self._lock:
            self._held.pop((state, rank), None)

    def borrow(self, state: StateId, rank: int) -> Served | None:
        """See Shelf."""
        with self._lock:
            held = self._held.get((state, rank))
            if held is None:
                return None
            self._lent.append(held)
            return held[0]

    def give_back(self, served: Served) -> None:
        """See Shelf."""
        with self._lock:
            place = next(i for i, (lent, _) in enumerate(self._lent) if lent is served)
            self._lent.pop(place)
