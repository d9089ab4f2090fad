"""Held: the live state of one rank, and the only place that changes it.

Parameters, optimizer tensors, hyper-parameters and ledger move together from one committed state to the next.
Snapshots are copied from here without stopping training: forward and backward only read what a snapshot reads, and
an update waits for a copy that is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import blake3
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ft_hsdp.core import lineage
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.cursor import Ledger
from ft_hsdp.core.lineage import StateId
from ft_hsdp.state import layout, snapshot
from ft_hsdp.state.layout import Layout
from ft_hsdp.state.snapshot import Snapshot, Snapshots
from ft_hsdp.train.hsdp import Sharded
from ft_hsdp.train.optim import Groups, finish, tensors


class Held:
    """The committed state that this rank holds, of ``ranks``; ``state`` is set at check-in."""

    def __init__(self, sharded: Sharded, groups: Groups, shards: int, rank: int, ranks: int) -> None:
        self._sharded = sharded
        self._groups = groups
        self._rank = rank
        self._ranks = ranks
        names = {id(p): n for n, p in sharded.params.items()}
        self._optim = tensors(groups.optimizer, names)
        self._live: list[torch.Tensor] = [*sharded.params.values(), *self._optim.values()]
        self.layout = Layout.of(sharded.params, self._optim)
        self.ledger = Ledger.empty(shards)
        self.state: StateId | None = None
        self.snapshots = Snapshots()
        self._lock = threading.Lock()
        self._wanted: StateId | None = None

    def weights_digest(self) -> str:
        """xxh3-128 of this rank's packed shard."""
        array: Any = self._pack().numpy()
        return xxhash.xxh3_128_hexdigest(memoryview(array))

    def apply(
        self, record: CommitRecord, reduced: Sequence[torch.Tensor], clip: float | None, accumulate: int
    ) -> None:
        """Apply a committed step.

        Raises:
            RuntimeError: the record does not build on the state that is held.
        """
        with self._lock:
            if self.state is None or record.prev != self.state.lineage:
                raise RuntimeError(f"record of step {record.step} does not build on {self.state}")
            self._keep_wanted()
            finish(record, reduced, clip, accumulate)
            self._sharded.assign(reduced)
            self._groups.step(record)
            self._sharded.clear()
            self.ledger = record.ledger(self.ledger)
            self.state = record.state_id
            self._keep_wanted()

    def rate(self, record: CommitRecord) -> float:
        """The learning rate that ``record`` gives the first parameter group."""
        return self._groups.rates(record)[0]

    def load(self, fetched: Snapshot) -> None:
        """Swap a verified shard in."""
        with self._lock:
            self._groups.adopt(fetched.manifest.hyper)
            layout.unpack(self.layout, fetched.buffer, self._live)
            self._sharded.clear()
            self.ledger = Ledger(fetched.manifest.cursors)
            self.state = fetched.manifest.state
            self._keep_wanted()

    def want(self, state: StateId) -> None:
        """Have a snapshot of ``state`` taken, before it is left behind or as soon as it is reached."""
        self._wanted = state

    def keep_wanted(self) -> None:
        """Take the snapshot that is wanted, if its state is held now. For threads other than the main one."""
        with self._lock:
            self._keep_wanted()

    def keep(self) -> None:
        """Take a snapshot of what is held now."""
        with self._lock:
            self._wanted = self.state
            self._keep_wanted()

    def _keep_wanted(self) -> None:
        wanted = self._wanted  # another may be wanted while this one is copied
        if wanted is None or wanted != self.state or self.snapshots.get(wanted) is not None:
            return
        hyper, buffer = self._groups.hyper(), self._pack()
        self.snapshots.put(snapshot.seal(wanted, self._rank, self._ranks, self.layout, self.ledger, hyper, buffer))

    def _pack(self) -> torch.Tensor:
        buffer = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        layout.pack(self.layout, self._live, buffer)
        return buffer

    def digest(self) -> str:
        """The digest of the whole state. A collective of all ranks of the replica."""
        return state_digest(self._sharded.params, self._optim, self._groups.hyper())


def state_digest(
    params: Mapping[str, torch.Tensor], optim: Mapping[str, torch.Tensor], hyper: Sequence[dict[str, Any]]
) -> str:
    """blake3 of a state, independent of its sharding; a collective if there are DTensors.

    Over the sorted names of (name, dtype, global shape, blake3 of the full row-major bytes) of parameters,
    then of optimizer tensors, then canonical JSON of the hyper-parameters before lr_scale.
    """
    total = blake3.blake3()
    for named in (params, optim):
        for name in sorted(named):
            tensor = named[name]
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            array: Any = layout.as_bytes(full.detach().cpu()).numpy()
            content = blake3.blake3(memoryview(array)).hexdigest()
            dtype = str(full.dtype).removeprefix("torch.")
            total.update(lineage.canonical([name, dtype, list(full.shape), content]).encode())
    total.update(lineage.canonical(hyper).encode())
    return total.hexdigest()
