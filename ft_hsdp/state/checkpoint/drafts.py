"""The folder of a checkpoint until it is published, and what becomes of older ones.

Everything is written into a draft, a folder whose name is not that of a checkpoint, the manifest last, and
fsynced. Then the folder is renamed. So a crash at any moment leaves a whole checkpoint, or a draft that a later
start removes. Rank 0 holds a lock on the draft's manifest while it lives: that tells a draft that is being written
from one that a dead writer left. Where the file system has no locks, it renews the time of the manifest instead.

`Draft` is the folder until it is published. `retire` removes older checkpoints then, and `sweep` the drafts of
dead writers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ft_hsdp import fault_injection
from ft_hsdp.claim import LEASE_S, RENEW_S, try_lock
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import open_regular
from ft_hsdp.mounts import sync_names
from ft_hsdp.state.checkpoint import checkpoint_manifest
from ft_hsdp.state.checkpoint.catalog import entries, manifest_of, published
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    MANIFEST,
    METADATA,
    PUBLISHED,
    CheckpointManifest,
    Unusable,
)

_WRITING, _REMOVING = ".writing-", ".removing-"


class Draft:
    """The folder of a checkpoint until it is published as ``folder / name``.

    Only rank 0 calls `begin` and `publish`; every rank calls `discard`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.path = unfinished(folder, name)
        self.final = folder / name
        self._manifest: IO[bytes] | None = None
        self._over = threading.Event()

    def begin(self) -> None:
        """Make the folder, also what is above it if that was removed, and lock it.

        Raises:
            OSError: The folder cannot be made.
        """
        shutil.rmtree(self.path, ignore_errors=True)  # left by an attempt of this incarnation that failed
        self.path.mkdir(parents=True)
        self._manifest = (self.path / MANIFEST).open("xb")
        if try_lock(self._manifest.fileno(), fcntl.LOCK_EX) is None:
            threading.Thread(target=self._renew, name="draft", daemon=True).start()

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(self.path / MANIFEST)

    def written_by(self, rank: int) -> dict[str, Any]:
        """Return {name: size and hash} of the files that DCP wrote on ``rank``. Reads all of them.

        Raises:
            OSError: A file cannot be read.
        """
        mine = list(self.path.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            mine.append(self.path / METADATA)
        return {path.name: asdict(checkpoint_manifest.describe(path)) for path in mine}

    def publish(self, manifest: CheckpointManifest, keep: int, key: bytes) -> dict[str, Any]:
        """Sign the ``manifest`` with ``key``, make all durable, rename the folder, and remove older checkpoints.

        So many as ``keep`` stay, this one included. Return the names of those that were ``removed``, and the
        ``trouble`` why one could not be.

        Raises:
            OSError: Writing failed, or the files of another rank are not in the folder.
            Unusable: The manifest could not be read back.
        """
        assert self._manifest is not None
        for name, file in manifest.files.items():
            if (self.path / name).stat().st_size != file.nbytes:
                raise OSError(f"{name} is not in {self.path} as it was written: ranks of a replica share it")
        if not os.path.samestat(os.fstat(self._manifest.fileno()), (self.path / MANIFEST).stat()):
            raise OSError(f"{self.path} is another folder than the one that was begun")
        data = checkpoint_manifest.encode(checkpoint_manifest.signed(manifest, key))
        checkpoint_manifest.decode(data)  # what cannot be read back must not be published
        self._manifest.write(data)
        self._manifest.flush()
        os.fsync(self._manifest.fileno())
        sync_names(self.path)
        fault_injection.reach("checkpoint-rename", manifest.state.step)
        self.path.rename(self.final)
        sync_names(self._folder)
        try:
            removed = retire(self._folder, keep, self.final.name, manifest.config_hash)
            return {"removed": removed, "trouble": ""}
        except (OSError, ConfigError) as error:
            return {"removed": [], "trouble": str(error)}

    def discard(self) -> None:
        """Remove the draft if it was begun here and not published, and release the lock."""
        if self._manifest is not None:
            self._over.set()
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # it writes again what could not be written, then closes
                self._manifest.close()


def unfinished(folder: Path, name: str) -> Path:
    """Return the path in ``folder`` at which checkpoint ``name`` is written before it is published."""
    return folder / f"{_WRITING}{name}"


def retire(folder: Path, keep: int, own: str, config_hash: str = "") -> list[str]:
    """Remove all but the newest ``keep`` checkpoints in ``folder``, and return the names of those removed.

    The writer of ``own`` calls it after publishing. Only checkpoints older than ``own`` are removed, so a late
    writer removes nothing new; a torn checkpoint does not count as kept. Those of another ``config_hash``, which
    this job cannot resume from, are of another job: they stay, and do not count.

    Raises:
        OSError: One could not be removed.
    """
    names = [path.name for path in published(folder) if not _of_another(path, config_hash)]
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
        (folder / name).rename(rubbish)  # atomic: a crash leaves rubbish and no torn checkpoint
        shutil.rmtree(rubbish)
        gone.append(name)
    return gone


def _of_another(path: Path, config_hash: str) -> bool:
    try:
        return bool(config_hash) and manifest_of(path).config_hash != config_hash
    except Unusable:  # it is torn
        return False


def _seems_whole(path: Path) -> bool:
    """Return whether manifest and sizes of files fit. Contents are verified when they are read."""
    try:
        files = manifest_of(path).files
        return all((path / name).stat().st_size == file.nbytes for name, file in files.items())
    except (Unusable, OSError):
        return False


def sweep(folder: Path) -> list[str]:
    """Remove the unfinished folders of dead writers in ``folder``, and return their names.

    Raises:
        ConfigError: The folder cannot be read.
    """
    gone = []
    for path in entries(folder):
        if path.name.startswith((_WRITING, _REMOVING)) and not _writing(path / MANIFEST):
            shutil.rmtree(path, ignore_errors=True)  # another replica may be removing it too
            gone.append(path.name)
    return gone


def missed(folder: Path, due: int) -> bool:
    """Return whether no checkpoint of step ``due`` or later exists or is being written by a living writer.

    Raises:
        ConfigError: The folder cannot be read.
    """
    names = [path.name for path in published(folder)]
    drafts = [path for path in entries(folder) if path.name.startswith(_WRITING)]
    names += [path.name.removeprefix(_WRITING) for path in drafts if _writing(path / MANIFEST)]
    steps = [int(match[1]) for name in names if (match := PUBLISHED.fullmatch(name))]
    return max(steps, default=0) < due


def _writing(manifest: Path) -> bool:
    """Return whether the writer of this manifest lives: it holds the lock, or has renewed the time of late."""
    try:
        with open_regular(manifest, to_lock=True) as file:
            free = try_lock(file.fileno(), fcntl.LOCK_EX)
            if free is not None:
                return not free
            with tempfile.NamedTemporaryFile(prefix=".try-", dir=manifest.parents[1]) as now:  # the server's clock
                return os.fstat(now.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime < LEASE_S
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO)  # no file
