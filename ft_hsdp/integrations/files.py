"""Files that every replica writes alike: each appears as a whole, so replicas may write them at the same time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ft_hsdp.claim import try_lock

_SAVING = ".saving-"


@contextmanager
def placed_in(folder: Path) -> Iterator[str]:
    """Put what a ``with`` block writes into a new folder into ``folder``, file by file.

    What a writer left that was killed is removed, where the file system has locks.

    Args:
        folder: Is made if need be. Files of the same names are replaced, the others stay.

    Yields:
        The path of the new folder, which is removed at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in list(folder.glob(f"{_SAVING}*")):
        with suppress(OSError), _locked(left) as free:
            if free:
                shutil.rmtree(left)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    with _locked(new):
        made = new.rename(folder / f"{_SAVING}{new.name}")  # others look at it when it is locked
        try:
            yield str(made)
            for file in [path for path in made.rglob("*") if path.is_file()]:
                place = folder / file.relative_to(made)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Yield whether this process has locked ``folder`` until the end; None: the file system has no locks."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(held, fcntl.LOCK_EX)
    finally:
        os.close(held)


@contextmanager
def placed_at(file: Path) -> Iterator[Path]:
    """Put the file that a ``with`` block writes, if it does, at ``file``.

    Yields:
        The path that it has until then.
    """
    with placed_in(file.parent) as made:
        yield Path(made) / file.name
