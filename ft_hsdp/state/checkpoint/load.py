"""Resume: the newest valid checkpoint into the live tensors of a replica, on whatever number of ranks (S13, S14).

Every byte is verified before anything is read into a tensor; what is torn is passed over with a reason. A folder
whose checkpoints are all unusable ends the job: to begin anew in it would lose what was trained without a word.
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
from ft_hsdp.state.layout import Layout
from ft_hsdp.state.replica_group import ReplicaGroup

UNSIGNED = "a checkpoint that was signed with this job's checkpoint.key; or checkpoint.trust: true, for once"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What the tensors hold now, what belongs to it, which newer checkpoints were passed over, and the seconds."""

    state: StateId
    ledger: Ledger
    hyper: tuple[dict[str, Any], ...]
    path: Path
    skipped: tuple[SkippedCheckpoint, ...]
    seconds: float


def resume(
    folder: Path,
    config_hash: str,
    params: Mapping[str, torch.Tensor],
    optim: Mapping[str, torch.Tensor],
    ranks: ReplicaGroup,
    key: bytes | None,
) -> Resumed | None:
    """Fill the replica's live tensors from ``folder``; None if there is no checkpoint. A collective of its ranks.

    ``key`` is what checkpoints have to be signed with; None: whoever wrote them is trusted.

    Raises:
        ConfigError: checkpoints are there, but none is valid, or the newest is of another job or key.
        RuntimeError: the ranks lost each other.
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
    """Rank 0 verifies and all take what it chose: the folder's name, its manifest, and what was passed over."""
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
    answer = json.loads(ranks.hear(json.dumps(answer).encode()))
    if "refused" in answer:
        raise ConfigError(*answer["refused"])
    passed = tuple(SkippedCheckpoint(**each) for each in answer["skipped"])
    if "name" not in answer:
        return "", None, passed
    return answer["name"], checkpoint_manifest.decode(answer["manifest"].encode()), passed


def _fits(path: Path, manifest: CheckpointManifest, config_hash: str, expected: tuple[Stored, ...]) -> None:
    """Refuse the checkpoint of another job, on all ranks alike."""
    if manifest.config_hash != config_hash:
        allowed = f"checkpoints of this configuration ({config_hash[:8]}; its own is {manifest.config_hash[:8]})"
        raise ConfigError(KEY, str(path), allowed)
    differing = set(manifest.tensors) ^ set(expected)
    if differing:
        one = min(differing, key=lambda each: (each.kind, each.name))
        allowed = f"checkpoints of this model and optimizer ({one.kind} {one.name} differs)"
        raise ConfigError(KEY, str(path), allowed)


def _read(path: Path, manifest: CheckpointManifest, live: Mapping[str, torch.Tensor], ranks: ReplicaGroup) -> str:
    """Fill the live tensors; why that failed on some rank, alike on all of them, or nothing."""
    failure = ""
    try:
        dcp.load(path, live, manifest)
    except dcp.Failed as failed:
        failure = f"rank {ranks.rank}: {' '.join(str(failed).split())}"
    return "; ".join(each.decode() for each in ranks.gather(failure.encode()) if each)
