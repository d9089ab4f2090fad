"""A command of the launcher under test, in a process of its own, and what its run's files say."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ft_hsdp.launch.run.directory import read_json, read_jsonl
from tests.support import warm
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
MODEL = {"train.micro_batch": 2, "train.seq_len": 32, "model.dim": 64, "model.layers": 2, "model.heads": 2}


def overrides(settings: Mapping[str, object]) -> list[str]:
    """The arguments for values of dotted keys, where "__" may be the dot."""
    return [f"--{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]


def config_of_text(folder: Path) -> str:
    """The path of a configuration in `folder` whose data are little."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text("data: {path: stdlib, max_bytes: 1048576}\n")
    return str(file)


def launcher(
    *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, deadline_s: float = 90.0
) -> subprocess.CompletedProcess[str]:
    """Run a command of the launcher to its end; its code and what it said."""
    command = [sys.executable, str(ROOT / "launcher.py"), *words]
    given: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
    return subprocess.run(command, cwd=cwd, env=env, timeout=deadline_s, **given)


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

    def newest(self) -> dict[str, Any]:
        """The newest commit of any replica."""
        logs = [self.rows(f"replicas/{path.name}/commits.jsonl") for path in self.run.glob("replicas/*")]
        return max(
            (log[-1] for log in logs if log), key=lambda r: r["step"], default={"step": 0, "contributors": []}
        )

    def step(self) -> int:
        """The newest step that any replica committed."""
        return int(self.newest()["step"])

    def contributing(self) -> set[int]:
        """The replicas that contributed to the newest commit."""
        return set(self.newest()["contributors"])

    def ranks(self, replica: int) -> list[dict[str, Any]]:
        """The ranks of a replica, as processes.json has them."""
        return list((read_json(self.run / "replicas" / str(replica) / "processes.json") or {"ranks": []})["ranks"])

    def more(self, steps: int, deadline_s: float | None = None) -> None:
        """Wait for so many more steps."""
        goal = self.step() + steps
        self.until(lambda: self.step() >= goal, f"step {goal}", deadline_s)

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

    def ends_at(self, steps: int, deadline_s: float | None = None) -> dict[str, Any]:
        """Wait for the end after a last step, and check it; the summary."""
        summary = self.end(deadline_s=deadline_s)
        check(summary, steps)
        return summary


def check(summary: dict[str, Any], steps: int) -> None:
    """What must hold at the end of every run, whatever happened on the way."""
    assert summary["steps"] == steps
    assert not summary.get("lost")
    ends = {(r["step"], r["lineage"], r["digest"]) for r in summary["replicas"].values()}
    assert len(ends) == 1, ends
    assert ends.pop()[0] == steps
    assert summary["batches"]["duplicated"] == 0
    assert summary["batches"]["skipped"] == 0
