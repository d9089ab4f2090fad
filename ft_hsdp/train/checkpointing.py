"""Restore: with which state a replica comes to its job: what its agents kept, a checkpoint, or its initial one.

The ranks choose together, so that all of them hold one state.

Saver: has a state that was just reached written to durable storage, beside training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankCheckpointed, RankCheckpointFailed
from ft_hsdp.state.agent.slots import CompleteSnapshot as Kept
from ft_hsdp.state.agent.slots import newest_common
from ft_hsdp.state.checkpoint.load import resume
from ft_hsdp.state.checkpoint.writer import Checkpointer, CheckpointNotPublished, Header, Outcome
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from ft_hsdp.train.live_state import LiveState
from ft_hsdp.train.snapshots import SnapshotWriter


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where durable checkpoints are, of which configuration they have to be, and how their ledgers are read.

    ``key``: what they have to be signed with; None: whoever wrote them is trusted.
    """

    folder: Path
    config_hash: str
    replicas: int
    resharded: Callable[[Ledger], Ledger]
    key: bytes | None


def restore(
    held: LiveState,
    keeper: SnapshotWriter,
    ranks: ReplicaGroup,
    checkpoints: Checkpoints,
    current: bool,
    journal: Journal,
) -> None:
    """Bring ``held``, which has its initial state, to the newest that is found. A collective of all ranks.

    ``current``: the agents keep every step, so what they have is never older than a checkpoint. A copy that is
    damaged on one rank, or gone with its agent since, is passed over by all of them: the next older one is taken,
    and when there is none, a checkpoint.

    Raises:
        ConfigError: there are checkpoints, but none that can be used.
    """
    tried: set[StateId] = set()
    kept = _newest(keeper, ranks, tried)
    resumed = kept is None or not current
    if resumed:
        _resume(held, ranks, checkpoints, journal)
    while kept is not None and _newer(kept, held):
        if _load(held, keeper, ranks, kept):
            if ranks.rank == 0:
                reason = "the state agent of this host kept it"
                journal.event("StateRestored", reason, step=kept.step, origin="agent")
            return
        tried.add(kept)
        kept = _newest(keeper, ranks, tried)
    if not resumed:
        _resume(held, ranks, checkpoints, journal)


def _newest(keeper: SnapshotWriter, ranks: ReplicaGroup, tried: set[StateId]) -> StateId | None:
    """The newest state that every rank's agent holds, and that was not tried before."""
    recalls = [_decode(each) for each in ranks.gather(_encode(keeper.list()))]
    return newest_common([[kept for kept in recall if kept.state not in tried] for recall in recalls])


def _newer(kept: StateId, held: LiveState) -> bool:
    assert held.state is not None
    return (kept.commit_epoch, kept.step) > (held.state.commit_epoch, held.state.step)


def _load(held: LiveState, keeper: SnapshotWriter, ranks: ReplicaGroup, kept: StateId) -> bool:
    """Take ``kept`` over, if every rank's copy of it is whole and fits."""
    found = keeper.acquire(kept)
    fits = found is not None and found[0].layout == held.layout.fingerprint
    everywhere = min(ranks.gather(b"\1" if fits else b"\0")) == b"\1"
    if everywhere:
        assert found is not None
        held.load(*found)
    keeper.release_taken()
    return everywhere


def _resume(held: LiveState, ranks: ReplicaGroup, checkpoints: Checkpoints, journal: Journal) -> None:
    with held.here():
        found = resume(
            checkpoints.folder, checkpoints.config_hash, held.params, held.optim, ranks, checkpoints.key
        )
    if found is None:
        return
    try:
        ledger = checkpoints.resharded(found.ledger)
    except ValueError as error:
        raise ConfigError(
            "replicas", checkpoints.replicas, f"the number that the checkpoint has ({error})"
        ) from None
    held.resumed(found.state, ledger, found.hyper)
    if ranks.rank == 0:
        for passed in found.skipped:
            journal.event("CheckpointPassedOver", passed.reason, checkpoint=passed.name)
        facts = {"step": found.state.step, "origin": str(found.path), "seconds": found.seconds}
        journal.event("StateRestored", "newest valid checkpoint", **facts)


def _encode(kept: tuple[Kept, ...]) -> bytes:
    return json.dumps([asdict(each.state) for each in kept]).encode()


def _decode(said: bytes) -> list[Kept]:
    return [Kept(StateId(**each), settled=False) for each in json.loads(said)]


class CheckpointSaver:
    """One rank's part in the checkpoints that its replica writes; ``tell`` reports the outcome to the leader."""

    def __init__(
        self, checkpointer: Checkpointer, keeper: SnapshotWriter, rank: int, tell: Callable[[object], None]
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

    def _write(self, state: StateId, manifest: ShardManifest | None, packed: Bytes | None) -> None:
        if manifest is None or packed is None:  # the other ranks have to hear of it
            written = self._checkpointer.write(None, Header(state, Ledger(()), ()))
        else:
            header = Header(state, manifest.ledger, manifest.hyper)
            written = self._checkpointer.write(torch.from_numpy(packed), header)
        written.add_done_callback(self._done)

    def _done(self, future: Future[Outcome]) -> None:
        outcome = future.result()
        if isinstance(outcome, CheckpointNotPublished):
            self._tell(RankCheckpointFailed(self._rank, outcome.state, outcome.reason))
        else:
            self._tell(RankCheckpointed(self._rank, outcome.state))
