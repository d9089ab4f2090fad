"""Catalogue: which durable checkpoints a folder holds, and which of them are what they say.

A checkpoint is a folder ``step-STEP-epoch-EPOCH-INCARNATION`` with a manifest. The newest is the one of the
largest (epoch, step), by name and manifest and never by time: a writer that was thought dead cannot come before a
later epoch. Whatever a writer left unfinished has another kind of name and is no checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ft_hsdp.errors import ConfigError
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
    File,
    Unusable,
    authenticate,
    decode,
    describe,
    name_of,
)

KEY = "checkpoint.dir"
MAX_MANIFEST = 64 << 20
MAX_READERS = 8
_PUBLISHED = re.compile(r"step-(\d{1,19})-epoch-(\d{1,19})-([A-Za-z0-9._-]{1,128})")
_WRITING, _REMOVING = ".writing-", ".removing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every byte was verified."""

    path: Path
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The newest valid checkpoint, if there is one, and the newer ones that were passed over."""

    checkpoint: Checkpoint | None
    skipped: tuple[SkippedCheckpoint, ...]


def unfinished(folder: Path, name: str) -> Path:
    """Where ``name`` is written before it is published."""
    return folder / f"{_WRITING}{name}"


def published(folder: Path) -> list[Path]:
    """The checkpoints of a folder by their names alone, newest first; none if there is no such folder.

    Raises:
        ConfigError: it cannot be read, or is no folder.
    """
    found = [(match, path) for path in _entries(folder) if (match := _PUBLISHED.fullmatch(path.name))]
    found.sort(key=lambda each: (int(each[0][2]), int(each[0][1]), each[1].name), reverse=True)
    return [path for _, path in found]


def newest(folder: Path, key: bytes | None, step: int | None = None, but: Collection[str] = ()) -> Found:
    """The newest checkpoint that is valid, of ``step`` if that is given, leaving out the names in ``but``.

    Raises:
        ConfigError: the folder cannot be read.
        Unauthentic: the newest that is not torn was not signed with ``key``; None: whoever wrote it is trusted.
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
    """Read every byte of a checkpoint and compare it with the manifest, several files at a time.

    The manifest is authenticated by ``key`` before any file is opened; None: whoever wrote it is trusted.

    Raises:
        Unauthentic: it was not signed with ``key``.
        Unusable: something is missing, torn or changed.
    """
    manifest = manifest_of(path)
    if key is not None:
        authenticate(path.name, manifest, key)
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as pool:
        for check in [pool.submit(check_file, path / name, file) for name, file in manifest.files.items()]:
            check.result()
    return Checkpoint(path, manifest)


def manifest_of(path: Path) -> CheckpointManifest:
    """The manifest of a checkpoint, whose files may be damaged.

    Raises:
        Unusable: there is none, or it is not valid, or it is of another checkpoint.
    """
    try:
        with (path / MANIFEST).open("rb") as file:
            data = file.read(MAX_MANIFEST + 1)
    except OSError as error:
        raise Unusable(f"{MANIFEST}: {error.strerror}") from error
    if len(data) > MAX_MANIFEST:
        raise Unusable(f"{MANIFEST} has more than {MAX_MANIFEST} bytes")
    manifest = decode(data)
    if name_of(manifest.state, manifest.incarnation) != path.name:
        raise Unusable(f"{MANIFEST} is of {name_of(manifest.state, manifest.incarnation)}")
    return manifest


def check_file(path: Path, wanted: File) -> None:
    """Compare a file with what the manifest says.

    Raises:
        Unusable: it is not that file.
    """
    try:
        nbytes = path.stat().st_size
        if nbytes != wanted.nbytes:
            raise Unusable(f"{path.name} has {nbytes} bytes instead of {wanted.nbytes}")
        if describe(path) != wanted:
            raise Unusable(f"{path.name} does not fit its hash")
    except OSError as error:
        raise Unusable(f"{path.name}: {error.strerror}") from error


def retire(folder: Path, keep: int, own: str) -> list[str]:
    """Remove the checkpoints behind the newest ``keep``; the names of those that went.

    Called by the writer of ``own`` after it was published. Only what is older than ``own`` goes, so a late writer
    takes nothing away, and what is torn does not count as kept.

    Raises:
        OSError: one could not be removed.
    """
    names = [path.name for path in published(folder)]
    if own not in names:
        return []
    newer, older = names[: names.index(own)], names[names.index(own) + 1 :]
    left = keep - 1 - sum(_seems_whole(folder / name) for name in newer)
    gone = []
    for name in older:
        if left > 0 and _seems_whole(folder / name):
            left -= 1
            continue
        rubbish = folder / f"{_REMOVING}{name}"
        (folder / name).rename(rubbish)  # at once: a crash leaves rubbish and no torn checkpoint
        shutil.rmtree(rubbish)
        gone.append(name)
    return gone


def _seems_whole(path: Path) -> bool:
    """Whether manifest and sizes fit; contents are verified when they are read."""
    try:
        files = manifest_of(path).files
        return all((path / name).stat().st_size == file.nbytes for name, file in files.items())
    except (Unusable, OSError):
        return False


def sweep(folder: Path) -> list[str]:
    """Remove what dead writers left; the names. A writer that lives holds a lock on its manifest.

    Raises:
        ConfigError: the folder cannot be read.
    """
    gone = []
    for path in _entries(folder):
        if path.name.startswith((_WRITING, _REMOVING)) and not _locked(path / MANIFEST):
            shutil.rmtree(path, ignore_errors=True)  # another replica may be removing it too
            gone.append(path.name)
    return gone


def missed(folder: Path, due: int) -> bool:
    """Whether no checkpoint of step ``due`` or a later one is in ``folder``, nor written there by a living writer.

    Raises:
        ConfigError: the folder cannot be read.
    """
    names = [path.name for path in published(folder)]
    drafts = [path for path in _entries(folder) if path.name.startswith(_WRITING)]
    names += [path.name.removeprefix(_WRITING) for path in drafts if _locked(path / MANIFEST)]
    steps = [int(match[1]) for name in names if (match := _PUBLISHED.fullmatch(name))]
    return max(steps, default=0) < due


def _locked(manifest: Path) -> bool:
    try:
        with manifest.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from [Path(entry.path) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(KEY, str(folder), f"a folder that can be read ({error.strerror})") from error
