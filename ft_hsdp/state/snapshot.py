"""Snapshot: an immutable copy of a rank's committed shard, and the few that are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch

from ft_hsdp.core.cursor import Ledger
from ft_hsdp.core.lineage import StateId
from ft_hsdp.state import wire
from ft_hsdp.state.layout import Layout
from ft_hsdp.state.wire import Manifest


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A packed shard (uint8) and its manifest."""

    manifest: Manifest
    buffer: torch.Tensor

    @property
    def data(self) -> memoryview:
        """The packed bytes."""
        array: Any = self.buffer.numpy()
        return memoryview(array)


def seal(
    state: StateId,
    rank: int,
    ranks: int,
    layout: Layout,
    ledger: Ledger,
    hyper: tuple[dict[str, Any], ...],
    buffer: torch.Tensor,
) -> Snapshot:
    """Make a snapshot of a packed buffer, which nobody may write from now on."""
    array: Any = buffer.numpy()
    sums = wire.checksums(memoryview(array))
    manifest = Manifest(state, rank, ranks, layout.fingerprint, layout.nbytes, sums, "", ledger.cursors, hyper)
    return Snapshot(replace(manifest, digest=wire.digest(manifest)), buffer)


class Snapshots:
    """The newest ``keep`` snapshots; older ones go when their readers are done. Thread-safe."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._held: OrderedDict[StateId, Snapshot] = OrderedDict()

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the oldest beyond ``keep`` is dropped."""
        with self._lock:
            self._held[snapshot.manifest.state] = snapshot
            while len(self._held) > self._keep:
                self._held.popitem(last=False)

    def get(self, state: StateId) -> Snapshot | None:
        """The snapshot of ``state``, if it is held."""
        with self._lock:
            return self._held.get(state)
