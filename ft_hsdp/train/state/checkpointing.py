"""How a rank takes part in a checkpoint, and loads one.

`CheckpointSaver` copies a state that was just reached and has it written to durable storage beside training; the
files are those of `state.checkpoint`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ft_hsdp import secret
from ft_hsdp.claim import FolderOwner
from ft_hsdp.config import Config, public, resume_hash
from ft_hsdp.core import checkpoint, state_id
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankCheckpointed, RankCheckpointFailed
from ft_hsdp.state.checkpoint import checkpoint_manifest, dcp, drafts
from ft_hsdp.state.checkpoint.catalog import JobData, Resumed, resume
from ft_hsdp.state.checkpoint.writer import (
    Checkpointer,
    CheckpointNotPublished,
    CheckpointOrigin,
    Header,
    Outcome,
)
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import CHUNK_BYTES, Layout, ShardManifest
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.snapshots import SnapshotWriter

ONE_TENSOR = "keep the experts of a layer in one tensor"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    folder: Path
    config_hash: str  # of the keys of the configuration that a checkpoint must have been made with
    replicas: int
    shards: int  # data shards of the job; a checkpoint may be of another number of them
    batch: tuple[int, int]  # micro-batches of a data rank, and data ranks, of a batch of the job
    key: bytes | None  # with which they have to be signed; None: any are trusted
    data: JobData | None = None  # None: those of the checkpoint are not compared


def check_manifests(
    config: Config, layout: Layout, hyper: tuple[dict[str, Any], ...], rank: int, ranks: int
) -> None:
    """Refuse a state of so many tensors that nobody would accept its manifests, before it is trained.

    Args:
        layout: Of this rank's shard.
        hyper: The optimizers' parameter groups.
        rank: This rank.
        ranks: Those of its replica.

    Raises:
        ConfigError: It has too many.
    """
    nobody, count = state_id.initial("", ""), len(layout.tensors)
    sums = ("0" * 16,) * -(-layout.nbytes // CHUNK_BYTES)
    shape = layout.fingerprint, layout.nbytes, layout.tensors
    try:
        shard_manifest.encode(ShardManifest(nobody, rank, ranks, *shape, (), hyper, (), sums))
    except ValueError as error:
        raise ConfigError("job.shard", f"{count} tensors", f"fewer: {ONE_TENSOR} ({error})") from None
    nbytes, most = dcp.manifest_bytes(layout, ranks), checkpoint_manifest.MAX_MANIFEST
    if config.keeps_last and nbytes > most:
        key = "every" if config.checkpoint.every else "dir"
        given = getattr(config.checkpoint, key)
        why = f"the manifest of {count} tensors on {ranks} ranks has {nbytes} bytes, {most} can be read"
        raise ConfigError(f"checkpoint.{key}", given, f"no checkpoints, or fewer tensors: {ONE_TENSOR} ({why})")


def open_checkpoints(
    config: Config,
    run: Path,
    incarnation: str,
    live_state: LiveState,
    ranks: ReplicaGroup,
    data: Mapping[str, str],
    token: str = "",
) -> tuple[Checkpoints, Checkpointer]:
    """Return the job's checkpoints, and what writes them: any rank may be asked to write.

    Args:
        incarnation: Of this replica; names its checkpoints.
        token: Of the job, which must have the folder alone; "": no other job can use it.
    """
    key = _key(config, run, ranks)
    checkpoints = checkpoints_of(config, run, ranks, data)
    origin = CheckpointOrigin(
        incarnation,
        config.slots,
        checkpoints.config_hash,
        public(config).model_dump(mode="json"),
        config.train.accumulate,
        live_state.frozen,
        live_state.aliases,
        config.data_ranks,
        data,
        live_state.given,
        FolderOwner.of(config.job.name, token) if token else None,
    )
    checkpointer = Checkpointer(
        checkpoints.folder,
        config.checkpoint.keep,
        key,
        origin,
        live_state.layout,
        live_state.params,
        live_state.optim,
        ranks,
        live_state.user,
    )
    return checkpoints, checkpointer


def checkpoints_of(config: Config, run: Path, ranks: ReplicaGroup, data: Mapping[str, str]) -> Checkpoints:
    """Return where the checkpoints of a job are, and which of them it can use."""
    folder = Path(config.checkpoint.dir) if config.checkpoint.dir else run / "checkpoints"
    required = None if config.checkpoint.trust else _key(config, run, ranks)
    batch = config.train.accumulate, config.data_ranks
    about = job_data(config, data)
    return Checkpoints(folder, resume_hash(config), config.slots, config.data_shards, batch, required, about)


def job_data(config: Config, facts: Mapping[str, str]) -> JobData:
    """Return what a resume compares of the data of a job, about which ``facts`` are known."""

    def hash_with(written: Mapping[str, Any]) -> str:
        return resume_hash(config, written.get("data"))

    section = config.data.model_dump(include={"path", "tokenizer", "max_bytes"})
    return JobData(facts, section, config.data.resume == "other", hash_with)


def _key(config: Config, run: Path, ranks: ReplicaGroup) -> bytes:
    """Return the key of checkpoints on rank 0, which alone signs and authenticates and tells the others."""
    return secret.run_key(run, config.checkpoint.key) if ranks.rank == 0 else b""


def missed(config: Config, folder: Path, step: int, journal: Journal) -> int:
    """Return from which step on this replica, which begins at ``step``, demands a checkpoint; 0: it demands none.

    It demands one if no replica has written the newest one that was due, and none writes it now. For rank 0.
    """
    due = checkpoint.newest_due(step, config.checkpoint.every, config.train.steps)
    if not due or not drafts.missed(folder, due):
        return 0
    reason = f"the checkpoint of step {due} is missing and no replica writes it: the next state is written"
    journal.event("CheckpointFailed", reason, step=due)
    return step + 1


def load_checkpoint(
    live_state: LiveState, ranks: ReplicaGroup, checkpoints: Checkpoints, step: int | None = None
) -> Resumed | None:
    """Load the newest valid checkpoint into the live state. A collective of all ranks. Blocks.

    Returns:
        What was loaded; None if there is no such checkpoint.

    Raises:
        ConfigError: There are checkpoints, but none that can be used.
    """
    with live_state.here():
        found = resume(
            checkpoints.folder,
            checkpoints.config_hash,
            live_state.params,
            live_state.optim,
            ranks,
            checkpoints.key,
            live_state.user,
            live_state.frozen,
            step,
            checkpoints.data,
        )
    if found is None:
        return None
    if found.other_data:
        live_state.resumed(found.state, Ledger.empty(checkpoints.shards), found.hyper, found.user)
        return found
    try:
        ledger = found.ledger.rescaled(found.batch, checkpoints.batch)
    except ValueError as error:
        was, ranks_then = found.batch
        allowed = f"{was} with {ranks_then} data ranks in each replica, as in the checkpoint ({error})"
        raise ConfigError("train.accumulate", checkpoints.batch[0], allowed) from None
    try:
        ledger = ledger.resharded(checkpoints.shards, math.prod(checkpoints.batch))
    except ValueError as error:
        raise ConfigError(
            "replicas", checkpoints.replicas, f"the number that the checkpoint has ({error})"
        ) from None
    live_state.resumed(found.state, ledger, found.hyper, found.user)
    return found


@dataclass(eq=False)
class CheckpointSaver:
    """One rank's part in the checkpoints that its replica writes."""

    _checkpointer: Checkpointer
    _snapshots: SnapshotWriter
    _rank: int
    _report: Callable[[object], None]  # takes the outcome to the leader, from any thread

    def save(self, state: StateId) -> None:
        """Copy the live state, which is ``state``, and have it written; does not block. Called on all ranks."""
        self._snapshots.save(state, partial(self._write, state))

    def close(self, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        self._snapshots.wait(deadline_s)
        self._checkpointer.close(max(0.0, until - time.monotonic()))

    def _write(self, state: StateId, manifest: ShardManifest | None, packed: Bytes | None) -> None:
        if manifest is None or packed is None:  # the other ranks have to hear of it
            written = self._checkpointer.write(None, Header(state, Ledger(()), ()))
        else:
            header = Header(state, manifest.ledger, manifest.hyper, manifest.user)
            written = self._checkpointer.write(torch.from_numpy(packed), header)
        written.add_done_callback(self._done)

    def _done(self, future: Future[Outcome]) -> None:
        outcome = future.result()
        if isinstance(outcome, CheckpointNotPublished):
            self._report(RankCheckpointFailed(self._rank, outcome.state, outcome.reason))
        else:
            self._report(RankCheckpointed(self._rank, outcome.state))
