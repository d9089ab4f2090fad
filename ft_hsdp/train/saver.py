"""Saver: has a state that was just reached written to durable storage, beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.protocol import RankCheckpointed, RankCheckpointFailed
from ft_hsdp.state.checkpoint.writer import Checkpointer, CheckpointFailed, Header, Outcome
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer.shard_manifest import Manifest
from ft_hsdp.train.keeper import Keeper


class Saver:
    """One rank's part in the checkpoints that its replica writes; ``tell`` reports the outcome to the leader."""

    def __init__(
        self, checkpointer: Checkpointer, keeper: Keeper, rank: int, tell: Callable[[object], None]
    ) -> None:
        self._checkpointer = checkpointer
        self._keeper = keeper
        self._rank = rank
        self._tell = tell

    def save(self, state: StateId) -> None:
        """Copy ``state``, which is held now, and have it written; all ranks save the same states in order."""
        self._keeper.save(state, lambda manifest, packed: self._write(state, manifest, packed))

    def close(self, deadline_s: float) -> None:
        """Finish what was begun, within ``deadline_s`` seconds."""
        until = time.monotonic() + deadline_s
        copied = threading.Event()
        self._keeper.after(copied.set)
        copied.wait(deadline_s)
        self._checkpointer.close(max(0.0, until - time.monotonic()))

    def _write(self, state: StateId, manifest: Manifest | None, packed: Bytes | None) -> None:
        if manifest is None or packed is None:  # the other ranks have to hear of it
            written = self._checkpointer.write(None, Header(state, Ledger(()), ()))
        else:
            header = Header(state, manifest.ledger, manifest.hyper)
            written = self._checkpointer.write(torch.from_numpy(packed), header)
        written.add_done_callback(self._done)

    def _done(self, future: Future[Outcome]) -> None:
        outcome = future.result()
        if isinstance(outcome, CheckpointFailed):
            self._tell(RankCheckpointFailed(self._rank, outcome.state, outcome.reason))
        else:
            self._tell(RankCheckpointed(self._rank, outcome.state))
