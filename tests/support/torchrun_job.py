"""A job under test whose replicas are started by torchrun, each in a session of its own, beside a lighthouse."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from ft_hsdp.config import dump, parse
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.run.directory import Row, RunDir, read_json, read_jsonl
from tests.support import warm
from tests.support.started_job import ROOT, overrides
from tests.support.waiting import until

DEADLINE_S = 90.0


class TorchrunJob:
    """A lighthouse and torchruns; a context that leaves no process behind.

    Its configuration is the text ``settings``, or has the values of ``dotted`` keys, where "__" may be the dot.
    """

    def __init__(self, folder: Path, settings: str = "", /, **dotted: object) -> None:
        self.folder = folder
        self.run = folder / "runs" / "job"
        self._config = folder / "config.yaml"
        given = overrides(dotted)
        whole = dump(parse({"job": {"name": "job"}}, given)) if given else f"job: {{name: job}}\n{settings}\n"
        self._config.write_text(whole)
        self._started: list[warm.Process] = []

    def __enter__(self) -> Self:
        self.lighthouse = self._start("lighthouse", [str(ROOT / "launcher.py"), "lighthouse", str(self._config)])
        self.until(lambda: (self.run / "lighthouse.json").exists(), "the lighthouse listens")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.poll() is None:
                ranks = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for rank in ranks:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.kill()
            process.wait()

    def _start(self, name: str, arguments: list[str], **variables: str) -> warm.Process:
        command, log = self._command(name, arguments), self.folder / f"{name}.log"
        process = warm.start(command, self.folder, log, {**environment(), **variables})
        self._started.append(process)
        return process

    def _command(self, name: str, arguments: list[str]) -> list[str]:
        """What runs python with ``arguments``, as the lighthouse or one of the replicas."""
        return [sys.executable, *arguments]

    def torchrun(self, replica: int, ranks: int, script: Path | None = None) -> warm.Process:
        """Start the ranks of a replica: as the launcher's, or as those of a script, by its environment."""
        options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
        if script is None:
            return self._torchrun(f"replica{replica}", *options, *self._replica(replica))
        given = {"FT_HSDP_CONFIG": str(self._config), "FT_HSDP_REPLICA": str(replica)}
        return self._torchrun(f"replica{replica}", *options, str(script), **given)

    def _torchrun(self, name: str, *arguments: str, **variables: str) -> warm.Process:
        return self._start(name, ["-m", "torch.distributed.run", *arguments], **variables)

    def replica(self, replica: int, *more: str, **variables: str) -> warm.Process:
        """Start a replica by hand, with its own supervisor, ``more`` arguments and environment ``variables``."""
        return self._start(f"replica{replica}", [*self._replica(replica), *more], **variables)

    def _replica(self, replica: int) -> list[str]:
        return [str(ROOT / "launcher.py"), "replica", str(self._config), "--replica", str(replica)]

    def lighthouse_again(self, port: int) -> None:
        """Start a lighthouse in place of one that is gone."""
        command = [str(ROOT / "launcher.py"), "lighthouse", str(self._config), f"--network.port={port}"]
        self.lighthouse = self._start("lighthouse", command)

    def folder_of(self, replica: int) -> Path:
        """Where a replica writes its files."""
        return self.run / "replicas" / str(replica)

    def rows(self, replica: int, file: str = "commits.jsonl") -> list[dict[str, Any]]:
        """The steps that a replica committed, or the lines of another file of its, as far as they are written."""
        return read_jsonl(self.folder_of(replica) / file)

    def events(self, replica: int, name: str) -> list[Row]:
        """The events of one name of a replica's ranks."""
        return [row for row in self.rows(replica, "events.jsonl") if row["event"] == name]

    def told(self, name: str) -> list[Row]:
        """The lighthouse's events of one name."""
        return [row for row in read_jsonl(RunDir(self.run).lighthouse_events) if row["event"] == name]

    def step(self, replica: int) -> int:
        rows = self.rows(replica)
        return int(rows[-1]["step"]) if rows else 0

    def kill(self, torchrun: warm.Process, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        children = psutil.Process(torchrun.pid).children()
        victim = next(c for c in children if c.environ().get("RANK") == str(rank))
        victim.send_signal(number)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(condition, what, DEADLINE_S, self.tails)

    def finals(self, torchruns: list[warm.Process]) -> list[dict[str, Any]]:
        """Wait for the end of all replicas; their final states."""
        for process in torchruns:
            self.until(lambda process=process: process.poll() is not None, "the job ends")
            assert process.returncode == 0, self.tails()
        return [read_json(self.folder_of(replica) / "final.json") for replica in range(len(torchruns))]

    def tails(self) -> str:
        texts = {str(p): p.read_text(errors="replace").splitlines()[-25:] for p in self.folder.rglob("*.log")}
        return "\n".join(f"== {name}{os.linesep}" + "\n".join(lines) for name, lines in texts.items())


def check(finals: list[dict[str, Any]], steps: int, lives: list[str]) -> None:
    """All replicas end at one state, each in the life that is expected."""
    assert {f["step"] for f in finals} == {steps}
    assert len({(f["lineage"], f["digest"]) for f in finals}) == 1, finals
    assert [f["incarnation"].rpartition("-")[2] for f in finals] == lives
