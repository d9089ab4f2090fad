import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ft_hsdp.launch.run.directory import read_jsonl
from tests.support import warm
from tests.support.waiting import until


class StartedJob:
    """A context that ends the process; whatever it has started dies with it."""

    deadline_s = 240.0  # longest time for what is waited for

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        run: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        inside: int | None = None,
    ) -> None:
        """Start `command` in `folder`, as `warm.start` does; it writes the job's files to `run`."""
        self.run = run
        self.log = log
        log.write_bytes(b"")
        self.process = warm.start(command, folder, log, os.environ if env is None else env, inside)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def rows(self, file: str) -> list[dict[str, Any]]:
        """The complete lines of a JSONL file of the run."""
        return read_jsonl(self.run / file)

    def events(self, name: str, **facts: object) -> list[dict[str, Any]]:
        """The events of one name with these facts."""
        named = (e for e in self.rows("events.jsonl") if e["event"] == name)
        return [e for e in named if all(e.get(k) == v for k, v in facts.items())]

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-50:])

    def until(self, condition: Callable[[], object], what: str, deadline_s: float | None = None) -> None:
        """Wait for a condition; fail if the job ends or the deadline passes first."""
        until(lambda: condition() or self._runs(what), what, deadline_s or self.deadline_s, self.tail)

    def _runs(self, what: str) -> None:
        assert self.process.poll() is None, f"the job ended before {what}:\n{self.tail()}"

    def end(self, code: int = 0, deadline_s: float | None = None) -> dict[str, Any]:
        try:
            got = self.process.wait(deadline_s or self.deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end:\n{self.tail()}") from None
        assert got == code, f"exit {got}, wanted {code}:\n{self.tail()}"
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return summary
