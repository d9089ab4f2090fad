"""Draft: a checkpoint's folder until it is published.

Its name says that it is none yet. Rank 0 holds a lock on its manifest for as long as it lives: that tells a draft
that is being written from what a dead writer left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ft_hsdp import failpoints
from ft_hsdp.errors import ConfigError
from ft_hsdp.state import catalogue, contents
from ft_hsdp.state.contents import MANIFEST, METADATA, Manifest


class Draft:
    """What will be ``folder / name``. Only rank 0 begins and publishes it; ``discard`` is for all."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.path = catalogue.unfinished(folder, name)
        self.final = folder / name
        self._manifest: IO[bytes] | None = None

    def begin(self) -> None:
        """Make the folder and lock it.

        Raises:
            OSError: the disk refused.
        """
        shutil.rmtree(self.path, ignore_errors=True)  # of this incarnation, from an attempt that failed
        self.path.mkdir()
        self._manifest = (self.path / MANIFEST).open("xb")
        fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def written_by(self, rank: int) -> dict[str, Any]:
        """Size and hash of each file that DCP wrote on this rank, read back.

        Raises:
            OSError: one cannot be read.
        """
        mine = list(self.path.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            mine.append(self.path / METADATA)
        return {path.name: asdict(contents.describe(path)) for path in mine}

    def publish(self, manifest: Manifest, keep: int, key: bytes) -> dict[str, Any]:
        """Sign and write the manifest, make everything durable, name the folder, let older checkpoints go.

        Raises:
            OSError: the disk refused, or the files of another rank are not here.
            Unusable: the manifest could not be read back.
        """
        assert self._manifest is not None
        for name, file in manifest.files.items():
            if (self.path / name).stat().st_size != file.nbytes:
                raise OSError(f"{name} is not in {self.path} as it was written: ranks of a replica share it")
        if not os.path.samestat(os.fstat(self._manifest.fileno()), (self.path / MANIFEST).stat()):
            raise OSError(f"{self.path} is another folder than the one that was begun")
        data = contents.encode(contents.signed(manifest, key))
        contents.decode(data)  # what cannot be read back must not be published
        self._manifest.write(data)
        self._manifest.flush()
        os.fsync(self._manifest.fileno())
        _sync(self.path)
        failpoints.reach("checkpoint-rename", manifest.state.step)
        self.path.rename(self.final)
        _sync(self._folder)
        try:
            return {"removed": catalogue.retire(self._folder, keep, self.final.name), "trouble": ""}
        except (OSError, ConfigError) as error:
            return {"removed": [], "trouble": str(error)}

    def discard(self) -> None:
        """Remove what was begun here and not published, and let the lock go."""
        if self._manifest is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._manifest.close()


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
