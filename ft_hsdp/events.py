"""Files that grow by a JSON line a call: logs that must be complete, and the journal of events with reasons."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)


class Lines:
    """A JSONL file. A line has left the process when the call returns, whole or not at all. Thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # the process before this one was killed within a line

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row.

        Raises:
            OSError: it is not in the file.
        """
        os.write(self._descriptor, json.dumps(row, separators=(",", ":"), default=str).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Journal:
    """Events: what was decided, and why. ``fixed`` facts (who writes) are in every line.

    A disk that is full costs lines, never a decision. ``tee`` hears of each row, on the thread that writes it.
    """

    def __init__(
        self, path: Path, tee: Callable[[Mapping[str, object]], None] | None = None, **fixed: object
    ) -> None:
        self._lines = Lines(path)
        self._tee = tee
        self._fixed = fixed

    def __call__(self, row: Mapping[str, object]) -> None:
        """Append one row as it is."""
        try:
            self._lines.write(row)
        except OSError as error:
            _log.warning("the journal lost %s: %s", row.get("event"), error.strerror)
        if self._tee is not None:
            self._tee(row)

    def event(self, event: str, reason: str, **facts: object) -> None:
        """Append an event (past tense) with its reason and the time, in Unix seconds."""
        self.note(time.time(), event, reason, **facts)

    def note(self, t: float, event: str, reason: str, **facts: object) -> None:
        """Append an event that happened at ``t``."""
        self({"t": t, "event": event, **self._fixed, "reason": reason, **facts})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
