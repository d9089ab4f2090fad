"""An example of examples/ under test, started by the launcher as its page says."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.started_job import StartedJob, check, overrides

MARK = "# FT"
COUNTING = "tests/integrations/counting_loop.py"  # our own loop of the examples that count; args: of which


class ExampleJob(Job):
    """A running example; a context that leaves no process behind."""

    def __init__(
        self, example: str, folder: Path, name: str, config: str = "config.yaml", **dotted: object
    ) -> None:
        """Start examples/`example` as a run called `name`, with other settings where some are given."""
        settings = {"job.name": name, "job.runs_dir": str(folder / "runs"), **dotted}
        file = ROOT / "examples" / example / config
        command = [sys.executable, str(ROOT / "launcher.py"), "up", str(file), *overrides(settings)]
        folder.mkdir(parents=True, exist_ok=True)
        StartedJob.__init__(self, command, ROOT, folder / "runs" / name, folder / f"{name}.log")

    def finish(self, steps: int) -> str:
        """Wait for the end, check it, and return the digest of the state that all replicas have."""
        summary = self.ends_at(steps)
        (digest,) = {r["digest"] for r in summary["replicas"].values()}
        return str(digest)


class Page:
    """The page of an example: its commands after the environment is made, as a user runs them.

    A block of a console, with prompts, is none of them.
    """

    def __init__(self, example: str, folder: Path, env: Mapping[str, str] = os.environ) -> None:
        """Read the page in docs/; run its commands in `folder`, which looks like a clone, with `env`."""
        self.example = example
        self.folder = folder
        self._text = (ROOT / "docs" / f"{example.replace('_', '-')}.md").read_text()
        self._activate = f". .venvs/{example}/bin/activate"
        self._env = env
        for name in ("examples", "launcher.py"):
            (folder / name).symlink_to(ROOT / name)

    def commands(self) -> list[str]:
        """The commands of its blocks of shell, in order."""
        blocks = re.findall(r"^```sh\n(.*?)^```", self._text, re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        return lines[lines.index(self._activate) + 1 :]

    def run(self, command: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        python = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**self._env, "PATH": path, "PYTHONPATH": python}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=env, capture_output=True, text=True, timeout=300
        )
        with (self.folder / "page.log").open("a") as log:
            log.write(f"$ {command}\n{done.stdout}{done.stderr}\n")
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


def check_weights(page: Page, whole: str, waits: str, loop: str, steps: int, **dotted: Any) -> None:
    """All end with the same bits: two commands of a page, and our own loop of the same model.

    Args:
        page: of the example.
        whole: its command without a failure.
        waits: its command that loses a replica, and waits for it.
        loop: the file of our own loop.
        steps: of each run.
        dotted: other settings of our own loop.
    """
    digests = [re.findall(r"digest (\w+)", page.run(command)) for command in (whole, waits)]
    events = (page.folder / "runs" / "waits" / "events.jsonl").read_text().splitlines()
    starts = [e["replica"] for e in map(json.loads, events) if e["event"] == "ReplicaStarted"]
    assert sorted(starts) == [0, 1, 1], "no replica was lost, or it did not start again"
    with ExampleJob(page.example, page.folder, "own", entry=loop, **dotted) as job:
        own = job.finish(steps)
    assert digests == [[own[:16]]] * 2, "not the weights of our own loop"


def check_kill(run: Path, victim: int, steps: int, units: int = 4) -> None:
    """One of two replicas was lost once: the other one committed without it at once, and it came back.

    Every step is there, with `units` at least, each of them once; the one in which it comes back may have more.
    """
    summary = json.loads((run / "summary.json").read_text())
    check(summary, steps)
    (failure,) = summary["failures"]
    assert failure["replica"] == victim
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in lines if "logged" not in row]
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert min(row["units"] for row in rows) == units
    assert [1 - victim] in [row["contributors"] for row in rows], "no step was committed without the lost replica"
    assert failure["rejoin_s"] is not None, "the lost replica did not contribute again"
    assert failure["stall_s"] < 0.5 * failure["rejoin_s"], "the other replica waited for it"


def changed_lines(example: str, before: str = "plain.py", after: str = "train.py") -> int:
    """How many lines of `after` are marked; all others but the docstring and the imports are in `before`, too."""
    folder = ROOT / "examples" / example
    plain, ours = (_code(folder / name) for name in (before, after))
    marked = [line for line in ours if line.endswith(MARK)]
    strange = [line for line in ours if line not in plain and not line.endswith(MARK)]
    assert not strange, f"lines without {MARK}: {strange}"
    return len(marked)


def _code(file: Path) -> list[str]:
    text = re.sub(r'\A""".*?"""\n', "", file.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]
