"""Loads the newest valid checkpoint into the live tensors of a replica, on any number of ranks.

Every byte is verified before a tensor is written. A checkpoint that is torn is skipped, with a reason. A folder
whose checkpoints are all unusable ends the job: to start from scratch in it would silently lose what was trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.checkpoint import catalog, checkpoint_manifest, dcp
from ft_hsdp.state.checkpoint.catalog import KEY, Found, SkippedCheckpoint
from ft_hsdp.state.checkpoint.checkpoint_manifest import CheckpointManifest, Stored, Unauthentic
from ft_hsdp.state.replica_group import Failed, ReplicaGroup
from ft_hsdp.state.transfer.shard_manifest import Layout

# What the error for `Unauthentic` names as allowed.
UNSIGNED = "a checkpoint that was signed with this job's checkpoint.key; or checkpoint.trust: true, for once"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state that was loaded into the live tensors."""

    state: StateId
    ledger: Ledger
    hyper: tuple[dict[str, Any], ...]  # the optimizer's parameter groups before lr_scale
    path: Path  # of the checkpoint
    skipped: tuple[SkippedCheckpoint, ...]  # newer checkpoints that could not be used
    seconds: float


def resume(
    folder: Path,
    config_hash: str,
    params: Mapping[str, torch.Tensor],
    optim: Mapping[str, torch.Tensor],
    ranks: ReplicaGroup,
    key: bytes | None,
) -> Resumed | None:
    """Load the newest valid checkpoint in ``folder`` into the replica's live tensors. A collective. Blocks.

    Args:
        folder: Where checkpoints are.
        config_hash: That of this job; the checkpoint's must be equal.
        params: The live parameters by name, written in place.
        optim: The live optimizer tensors by name, written in place.
        ranks: All ranks of the replica.
        key: The key that checkpoints must be signed with; None to trust every writer.

    Returns:
        What was loaded, or None if the folder has no checkpoint.

    Raises:
        ConfigError: There are checkpoints, but none is valid, or the newest is of another job or key.
        RuntimeError: The ranks lost each other.
    """
    began = time.monotonic()
    expected = dcp.stored(Layout.of(params, optim))
    live = {dcp.key("param", n): t for n, t in params.items()} | {dcp.key("optim", n): t for n, t in optim.items()}
    unread: dict[str, SkippedCheckpoint] = {}
    while True:
        name, manifest, skipped = _choose(folder, unread, ranks, key)
        if manifest is None:
            if not skipped:
                return None
            said = "; ".join(f"{each.name}: {each.reason}" for each in skipped)
            raise ConfigError(KEY, str(folder), f"a folder with a valid checkpoint, or without any ({said})")
        _fits(folder / name, manifest, config_hash, expected)
        failure = _read(folder / name, manifest, live, ranks)
        if not failure:
            seconds = time.monotonic() - began
            return Resumed(manifest.state, manifest.ledger, manifest.hyper, folder / name, skipped, seconds)
        unread[name] = SkippedCheckpoint(name, failure)


def _choose(
    folder: Path, unread: Mapping[str, SkippedCheckpoint], ranks: ReplicaGroup, key: bytes | None
) -> tuple[str, CheckpointManifest | None, tuple[SkippedCheckpoint, ...]]:
    """Return the folder's name, the manifest and the skipped checkpoints that rank 0 chose, on all ranks.

    Raises:
        ConfigError: The folder cannot be read, or the newest checkpoint was not signed with ``key``.
    """
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            found: Found = catalog.newest(folder, key, but=unread)
        except ConfigError as error:
            answer = {"refused": [error.key, str(error.value), error.allowed]}
        except Unauthentic as error:
            answer = {"refused": [KEY, str(folder / str(error)), UNSIGNED]}
        else:
            skipped = [*unread.values(), *found.skipped]
            answer = {"skipped": [asdict(each) for each in skipped]}
            if found.checkpoint is not None:
                text = checkpoint_manifest.encode(found.checkpoint.manifest).decode()
                answer |= {"name": found.checkpoint.path.name, "manifest": text}
    answer = json.loads(ranks.broadcast(json.dumps(answer).encode()))
    if "refused" in answer:
        raise ConfigError(*answer["refused"])
    passed = tuple(SkippedCheckpoint(**each) for each in answer["skipped"])
    if "name" not in answer:
        return "", None, passed
    return answer["name"], checkpoint_manifest.decode(answer["manifest"].encode()), passed


def _fits(path: Path, manifest: CheckpointManifest, config_hash: str, expected: tuple[Stored, ...]) -> None:
    """Check that a checkpoint is of this job and model.

    Raises:
        ConfigError: It is not. Raised on all ranks alike.
    """
    if manifest.config_hash != config_hash:
        allowed = f"checkpoints of this configuration ({config_hash[:8]}; its own is {manifest.config_hash[:8]})"
        raise ConfigError(KEY, str(path), allowed)
    differing = set(manifest.tensors) ^ set(expected)
    if differing:
        one = min(differing, key=lambda each: (each.kind, each.name))
        allowed = f"checkpoints of this model and optimizer ({one.kind} {one.name} differs)"
        raise ConfigError(KEY, str(path), allowed)


def _read(path: Path, manifest: CheckpointManifest, live: Mapping[str, torch.Tensor], ranks: ReplicaGroup) -> str:
    """Fill the live tensors. Returns why that failed on some rank, alike on all ranks; "" if it worked."""
    failure = ""
    try:
        dcp.load(path, live, manifest)
    except Failed as failed:
        failure = f"rank {ranks.rank}: {' '.join(str(failed).split())}"
    return "; ".join(each.decode() for each in ranks.gather(failure.encode()) if each)
