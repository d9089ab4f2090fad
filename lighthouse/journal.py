"""The journal: every decision of the lighthouse with its reason, a JSON line each, on disk at once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)


class Journal:
    """An events.jsonl that grows by one line a call. A disk that is full costs lines, never a decision."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # the process before this one was killed within a line

    def __call__(self, row: Mapping[str, object]) -> None:
        """Append one row."""
        try:
            os.write(self._descriptor, json.dumps(row, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            _log.warning("the journal lost %s: %s", row.get("event"), error.strerror)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
