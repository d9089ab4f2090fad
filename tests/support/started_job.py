"""A job under test that a command of the launcher runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class StartedJob:
    """A context that ends the process; whatever it has started dies with it."""

    def __init__(
        self, command: Sequence[str], folder: Path, run: Path, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Start `command` in `folder`; it writes to `log`, and the job's files to `run`."""
        self.run = run
        self.log = log
        self._out = log.open("wb")
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()

    def rows(self, file: str) -> list[dict[str, Any]]:
        """The complete lines of a JSONL file of the run."""
        try:
            text = (self.run / file).read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]

    def events(self, name: str, **facts: object) -> list[dict[str, Any]]:
        """The events of one name with these facts."""
        named = (e for e in self.rows("events.jsonl") if e["event"] == name)
        return [e for e in named if all(e.get(k) == v for k, v in facts.items())]
