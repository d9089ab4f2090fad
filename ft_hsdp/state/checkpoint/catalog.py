"""Finds and verifies the checkpoints in a folder, and loads the newest valid one, on any number of ranks.

A checkpoint is a folder ``step-STEP-epoch-EPOCH-INCARNATION`` with a manifest. The newest one has the largest
(epoch, step), by name and manifest, never by time: a writer that was thought dead cannot get ahead of a later
epoch. Folders that a writer left unfinished have other names and are no checkpoints.

Every byte is verified before a tensor is written. A checkpoint that is torn is skipped, with a reason. A folder
whose checkpoints are all unusable ends the job: to start from scratch in it would silently lose what was trained.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.replica_state import CUTS, other_data
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import open_regular
from ft_hsdp.state.checkpoint import checkpoint_manifest, dcp
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    MANIFEST,
    PUBLISHED,
    CheckpointManifest,
    File,
    Frozen,
    Stored,
    Unauthentic,
    Unusable,
    authenticate,
    decode,
    describe,
    name_of,
)
from ft_hsdp.state.replica_group import Failed, ReplicaGroup
from ft_hsdp.state.transfer.shard_manifest import Layout

KEY = "checkpoint.dir"  # the configuration key that errors name
MAX_READERS = 8  # files that are verified at a time


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose bytes are all verified."""

    path: Path
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that cannot be used."""

    name: str  # of its folder
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The result of `newest`."""

    checkpoint: Checkpoint | None  # the newest valid one
    skipped: tuple[SkippedCheckpoint, ...]  # newer ones that are torn or damaged


def published(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by their names alone, newest first. Empty if there is no such folder.

    Raises:
        ConfigError: The folder cannot be read.
    """
    found = [(match, path) for path in entries(folder) if (match := PUBLISHED.fullmatch(path.name))]
    found.sort(key=lambda each: (int(each[0][2]), int(each[0][1]), each[1].name), reverse=True)
    return [path for _, path in found]


def newest(folder: Path, key: bytes | None, step: int | None = None, but: Collection[str] = ()) -> Found:
    """Find and verify the newest valid checkpoint. Reads all of its bytes.

    Args:
        folder: Where checkpoints are.
        key: The key that it must be signed with; None to trust every writer.
        step: Look only at checkpoints of this step.
        but: Names of checkpoints to leave out.

    Returns:
        The checkpoint or None, and those that were skipped.

    Raises:
        ConfigError: The folder cannot be read.
        Unauthentic: The newest one that is not torn was not signed with ``key``.
    """
    skipped: list[SkippedCheckpoint] = []
    for path in published(folder):
        if path.name in but or (step is not None and not path.name.startswith(f"step-{step}-")):
            continue
        try:
            return Found(verify(path, key), tuple(skipped))
        except Unusable as error:
            skipped.append(SkippedCheckpoint(path.name, str(error)))
    return Found(None, tuple(skipped))


def verify(path: Path, key: bytes | None) -> Checkpoint:
    """Return the checkpoint at ``path`` after every byte was compared with its manifest, several files at a time.

    The manifest is authenticated with ``key`` (None: every writer is trusted) before any file is opened.

    Raises:
        Unauthentic: It was not signed with ``key``.
        Unusable: Something is missing, torn or changed.
    """
    data = _read_manifest(path)
    manifest = _decoded(path, data)
    if key is not None:
        authenticate(path.name, data, key)
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as pool:
        for check in [pool.submit(check_file, path / name, file) for name, file in manifest.files.items()]:
            check.result()
    return Checkpoint(path, manifest)


def manifest_of(path: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint at ``path``. The files that it lists are not read.

    Raises:
        Unusable: There is no manifest, it is not valid, or it is of another checkpoint.
    """
    return _decoded(path, _read_manifest(path))


def _read_manifest(path: Path) -> bytes:
    try:
        with open_regular(path / MANIFEST) as file:
            return file.read(checkpoint_manifest.MAX_MANIFEST + 1)
    except OSError as error:
        raise Unusable(f"{MANIFEST}: {error.strerror}") from error


def _decoded(path: Path, data: bytes) -> CheckpointManifest:
    manifest = decode(data)
    if name_of(manifest.state, manifest.incarnation) != path.name:
        raise Unusable(f"{MANIFEST} is of {name_of(manifest.state, manifest.incarnation)}")
    return manifest


def check_file(path: Path, wanted: File) -> None:
    """Compare the file at ``path`` with ``wanted``, its entry in the manifest. Reads all of it.

    Raises:
        Unusable: The file is missing, or differs in size or hash.
    """
    try:
        nbytes = path.stat().st_size
        if nbytes != wanted.nbytes:
            raise Unusable(f"{path.name} has {nbytes} bytes instead of {wanted.nbytes}")
        if describe(path) != wanted:
            raise Unusable(f"{path.name} does not fit its hash")
    except OSError as error:
        raise Unusable(f"{path.name}: {error.strerror}") from error


def entries(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder; nothing if there is no such folder.

    Raises:
        ConfigError: The folder cannot be read.
    """
    try:
        yield from [Path(entry.path) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(KEY, str(folder), f"a folder that can be read ({error.strerror})") from error


# What the error for `Unauthentic` names as allowed.
UNSIGNED = "a checkpoint that was signed with this job's checkpoint.key; or checkpoint.trust: true, for once"


@dataclass(frozen=True, slots=True)
class JobData:
    """The data of a job that resumes."""

    facts: Mapping[str, str]
    section: Mapping[str, Any]  # of the configuration
    other: bool  # whether they may be others than those of the checkpoint (`data.resume`)
    # Returns the configuration's hash if its section `data` were that of the given configuration.
    hash_with: Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state that was loaded into the live tensors."""

    state: StateId
    ledger: Ledger
    batch: tuple[int, int]  # micro-batches of a data rank, and data ranks, of a batch in the job that wrote it
    hyper: tuple[dict[str, Any], ...]  # the optimizer's parameter groups before lr_scale
    user: dict[str, dict[str, Any]]  # JSON values of the user's own state, by name
    path: Path  # of the checkpoint
    skipped: tuple[SkippedCheckpoint, ...]  # newer checkpoints that could not be used
    seconds: float
    other_data: str = ""  # how the data differ from those of the checkpoint; "": they do not


def resume(
    folder: Path,
    config_hash: str,
    params: Mapping[str, torch.Tensor],
    optim: Mapping[str, torch.Tensor],
    ranks: ReplicaGroup,
    key: bytes | None,
    user: Mapping[str, torch.Tensor] | None = None,
    frozen: tuple[Frozen, ...] = (),
    step: int | None = None,
    data: JobData | None = None,
) -> Resumed | None:
    """Load the newest valid checkpoint in ``folder`` into the replica's live tensors. A collective. Blocks.

    Args:
        folder: Where checkpoints are.
        config_hash: That of this job; the checkpoint's must be equal.
        params: The live parameters by name, written in place.
        optim: The live optimizer tensors by name, written in place.
        ranks: All ranks of the replica.
        key: The key that checkpoints must be signed with; None to trust every writer.
        user: The live tensors of the user's own state by name, written in place.
        frozen: What a state dict of the model has beside the state; the checkpoint's must be equal.
        step: Look only at checkpoints of this step.
        data: Of this job; None: they are not compared.

    Returns:
        What was loaded, or None if the folder has no such checkpoint.

    Raises:
        ConfigError: There are checkpoints, but none is valid, or the newest is of another job or key.
        RuntimeError: The ranks lost each other.
    """
    began = time.monotonic()
    expected = dcp.stored(Layout.of(params, optim, user))
    kinds = {"param": params, "optim": optim, "user": user or {}}
    live = {dcp.key(kind, n): t for kind, named in kinds.items() for n, t in named.items()}
    unread: dict[str, SkippedCheckpoint] = {}
    while True:
        name, manifest, skipped = _choose(folder, unread, ranks, key, step)
        if manifest is None:
            if not skipped:
                return None
            said = "; ".join(f"{each.name}: {each.reason}" for each in skipped)
            raise ConfigError(KEY, str(folder), f"a folder with a valid checkpoint, or without any ({said})")
        _fits(folder / name, manifest, config_hash, expected, frozen, data)
        failure = _read(folder / name, manifest, live, ranks)
        if not failure:
            seconds = time.monotonic() - began
            return Resumed(
                manifest.state,
                manifest.ledger,
                (manifest.accumulate, manifest.ranks),
                manifest.hyper,
                manifest.user,
                folder / name,
                skipped,
                seconds,
                differing_data(folder / name, manifest, config_hash, data) if data else "",
            )
        unread[name] = SkippedCheckpoint(name, failure)


def _choose(
    folder: Path,
    unread: Mapping[str, SkippedCheckpoint],
    ranks: ReplicaGroup,
    key: bytes | None,
    step: int | None,
) -> tuple[str, CheckpointManifest | None, tuple[SkippedCheckpoint, ...]]:
    """Return the folder's name, the manifest and the skipped checkpoints that rank 0 chose, on all ranks.

    Raises:
        ConfigError: The folder cannot be read, or the newest checkpoint was not signed with ``key``.
    """
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            found: Found = newest(folder, key, step, unread)
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


def _fits(
    path: Path,
    manifest: CheckpointManifest,
    config_hash: str,
    expected: tuple[Stored, ...],
    frozen: tuple[Frozen, ...],
    data: JobData | None,
) -> None:
    """Check that a checkpoint is of this job and model.

    Raises:
        ConfigError: It is not. Raised on all ranks alike.
    """
    accepted = {config_hash}
    if data is not None:
        differing_data(path, manifest, config_hash, data)
        accepted.add(data.hash_with(manifest.config))
    if manifest.config_hash not in accepted:
        allowed = f"checkpoints of this configuration ({config_hash[:8]}; its own is {manifest.config_hash[:8]})"
        raise ConfigError(KEY, str(path), allowed)
    differing = set(manifest.tensors) ^ set(expected)
    if differing:
        one = min(differing, key=lambda each: (each.kind, each.name))
        allowed = f"checkpoints of this model and optimizer ({one.kind} {one.name} differs)"
        raise ConfigError(KEY, str(path), allowed)
    if others := set(manifest.frozen) ^ set(frozen):
        names = sorted({each.name for each in others})
        which = names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
        allowed = f"checkpoints of a job with the same frozen weights and buffers ({which} differs): load those"
        raise ConfigError(KEY, str(path), allowed)


def differing_data(path: Path, manifest: CheckpointManifest, config_hash: str, data: JobData) -> str:
    """Return how the ``data`` of a job differ from those in the ``manifest`` of the checkpoint at ``path``.

    "": only in how they are cut, or not at all. Where nothing is known of the data themselves, another
    ``config_hash`` of section `data` stands for other data.

    Raises:
        ConfigError: They may not differ.
    """
    # The batch of a rank may be another one, if that of a replica stays the same.
    facts = {name: value for name, value in data.facts.items() if name != "batch_size"}
    found = other_data(facts, manifest.data)
    if found is None and data.hash_with(manifest.config) == manifest.config_hash != config_hash:
        written = manifest.config["data"]
        key = next(key for key, value in data.section.items() if written.get(key, value) != value)
        found = f"data.{key}", str(data.section[key]), str(written[key])
    if found is None:
        return ""
    name, mine, theirs = found
    if not data.other:
        raise ConfigError(f"data: {name}", mine, f"{theirs}, as in {path}; or data.resume: other")
    known = name.startswith("data.") and facts.keys() & manifest.data.keys() - CUTS - {"kind"}
    return "" if name in CUTS or known else f"{name} is {mine} here, and {theirs} there"


def _read(path: Path, manifest: CheckpointManifest, live: Mapping[str, torch.Tensor], ranks: ReplicaGroup) -> str:
    """Fill the live tensors. Returns why that failed on some rank, alike on all ranks; "" if it worked."""
    failure = ""
    try:
        dcp.load(path, live, manifest)
    except Failed as failed:
        failure = f"rank {ranks.rank}: {' '.join(str(failed).split())}"
    return "; ".join(each.decode() for each in ranks.gather(failure.encode()) if each)
