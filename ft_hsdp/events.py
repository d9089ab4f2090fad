"""Journal: every decision with its reason, a JSON line each."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path


class Journal:
    """Appends lines to one file. ``fixed`` facts (who writes) are in every line. Thread-safe, unbuffered."""

    def __init__(self, path: Path, **fixed: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._fixed = fixed
        self._lock = threading.Lock()

    def write(self, **facts: object) -> None:
        """Append one line of ``facts``."""
        line = json.dumps(facts, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            self._file.write(line)

    def event(self, event: str, reason: str, **facts: object) -> None:
        """Append an event (past tense) with its reason and the time, in Unix seconds."""
        self.write(t=time.time(), event=event, **self._fixed, reason=reason, **facts)
