"""Files that every replica writes alike: each appears as a whole, so replicas may write them at the same time."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def placed_in(folder: Path) -> Iterator[str]:
    """Put what a ``with`` block writes into a new folder into ``folder``, file by file.

    Args:
        folder: Is made if need be. Files of the same names are replaced, the others stay.

    Yields:
        The path of the new folder, which is removed at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as made:
        yield made
        for file in [path for path in Path(made).rglob("*") if path.is_file()]:
            place = folder / file.relative_to(made)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)


@contextmanager
def placed_at(file: Path) -> Iterator[Path]:
    """Put the file that a ``with`` block writes, if it does, at ``file``.

    Yields:
        The path that it has until then.
    """
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        if part.exists():
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)
