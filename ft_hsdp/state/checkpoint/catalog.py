"""Finds and verifies the checkpoints in a folder.

A checkpoint is a folder ``step-STEP-epoch-EPOCH-INCARNATION`` with a manifest. The newest one has the largest
(epoch, step), by name and manifest, never by time: a writer that was thought dead cannot get ahead of a later
epoch. Folders that a writer left unfinished have other names and are no checkpoints.
"""

from __future__ import annotations

import os
import re
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

KEY = "checkpoint.dir"  # the configuration key that errors name
MAX_MANIFEST = 64 << 20  # bytes
MAX_READERS = 8  # files that are verified at a time
PUBLISHED = re.compile(r"step-(\d{1,19})-epoch-(\d{1,19})-([A-Za-z0-9._-]{1,128})")


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
        The checkpoint, or None for it if there is none, and those that were skipped.

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
    """Read every byte of a checkpoint and compare it with the manifest, several files at a time.

    The manifest is authenticated before any file is opened.

    Args:
        path: The checkpoint's folder.
        key: The key that it must be signed with; None to trust every writer.

    Returns:
        The checkpoint with its manifest.

    Raises:
        Unauthentic: It was not signed with ``key``.
        Unusable: Something is missing, torn or changed.
    """
    manifest = manifest_of(path)
    if key is not None:
        authenticate(path.name, manifest, key)
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as pool:
        for check in [pool.submit(check_file, path / name, file) for name, file in manifest.files.items()]:
            check.result()
    return Checkpoint(path, manifest)


def manifest_of(path: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint at ``path``. The files that it lists are not read.

    Raises:
        Unusable: There is no manifest, it is not valid, or it is of another checkpoint.
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
