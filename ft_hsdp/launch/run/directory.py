"""The run directory: the names of its files, atomic writes, and reading logs that are still growing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from ft_hsdp import secret
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import here, replace_json

MAX_POLL = 1 << 20  # bytes that one look at a log reads

QUIET_S = 300.0  # after which a job of another host that writes nothing has ended
Row = dict[str, Any]
"""One line of a JSONL file."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunDir:
    """`runs/NAME`; the properties name the files in it."""

    path: Path

    @property
    def name(self) -> str:
        """The job's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def token(self) -> Path:
        """The secret that the job's processes share; mode 0600."""
        return self.path / "token"

    @property
    def admin_token(self) -> Path:
        """The operator's secret, for evict, drain and checkpoint; mode 0600."""
        return self.path / "admin_token"

    @property
    def checkpoint_key(self) -> Path:
        """The secret that signs the job's checkpoints: a copy of the operator's; mode 0600."""
        return self.path / secret.RUN_KEY

    @property
    def lighthouse(self) -> Path:
        """{"pid", "url", "urls"}: of the lighthouse that leads, written by it; and where all of them are."""
        return self.path / "lighthouse.json"

    def seat(self, number: int) -> Path:
        """{"pid", "url"} of one of several lighthouses, written by it once it listens."""
        return self.path / "lighthouse" / f"seat-{number}.json"

    @property
    def lighthouse_log(self) -> Path:
        """stdout and stderr of the lighthouse."""
        return self.path / "lighthouse.log"

    @property
    def lighthouse_events(self) -> Path:
        """The lighthouse's own events."""
        return self.path / "lighthouse" / "events.jsonl"

    @property
    def supervisor(self) -> Path:
        """{"pid", "created"} of `up`."""
        return self.path / "supervisor.json"

    @property
    def events(self) -> Path:
        """All events, merged by the supervisor."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """A line per committed step, merged by the supervisor."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The job in figures, written at its end."""
        return self.path / "summary.json"

    @property
    def spares(self) -> Path:
        """spares.json, with the pids of the job's spares, and what each of them printed before it was called."""
        return self.path / "spares"

    def replica(self, replica: int) -> Path:
        """The folder of one replica."""
        return self.path / "replicas" / str(replica)

    def commits(self, replica: int) -> Path:
        """A line per step that the replica committed."""
        return self.replica(replica) / "commits.jsonl"

    def fed(self, replica: int) -> Path:
        """A line per batch, before its forward."""
        return self.replica(replica) / "fed.jsonl"

    def replica_events(self, replica: int) -> Path:
        """The replica's own events."""
        return self.replica(replica) / "events.jsonl"

    def injections(self, replica: int) -> Path:
        """Failures that were injected by hand."""
        return self.replica(replica) / "chaos.jsonl"

    def supervision(self, replica: int) -> Path:
        """Events of the supervisor of a replica that was started by hand."""
        return self.replica(replica) / "supervisor.jsonl"

    def final(self, replica: int) -> Path:
        """The state at which the replica ended."""
        return self.replica(replica) / "final.json"

    def processes(self, replica: int) -> Path:
        """The replica's ranks and their pids, written by its supervisor."""
        return self.replica(replica) / "processes.json"

    def rank_log(self, replica: int, rank: int) -> Path:
        """stdout and stderr of one rank, of all incarnations."""
        return self.replica(replica) / f"rank{rank}.log"

    def replicas(self) -> list[int]:
        """Ids of the replicas that have a folder, sorted."""
        folder = self.path / "replicas"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdecimal()) if folder.is_dir() else []


def identity(pid: int | None = None) -> Row:
    """What names a process for good: {"pid", "created", "host", "boot"}; its pid may be another's."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "created": process.create_time(), **here()}


def elsewhere(named: object) -> bool:
    """Whether the process in `named` is, or was, of another host, which cannot be looked up here."""
    if not isinstance(named, Mapping) or "host" not in named:
        return False
    return named["host"] != here()["host"]


def alive(named: object) -> bool:
    """Whether the process in `named` = {"pid"[, "created"]} runs; zombies do not."""
    if not isinstance(named, Mapping) or not isinstance(named.get("pid"), int) or named["pid"] <= 0:
        return False
    try:
        if named.get("boot", here()["boot"]) != here()["boot"]:  # it ended with the host, if it was this one
            return False
        process = psutil.Process(named["pid"])
        created = named.get("created")
        if isinstance(created, int | float) and abs(process.create_time() - created) > 1.0:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, OverflowError):
        return False


def another(named: object) -> bool:
    """Whether the process in `named` runs and is not this one, whose pid it has where a container starts again."""
    return isinstance(named, Mapping) and named.get("pid") != os.getpid() and alive(named)


def claim(run: RunDir, ended: bool = False) -> None:
    """Make `run` an empty folder; what stood there moves to NAME.<time it was made>. ended: its store says so.

    Raises ConfigError on job.name while a job runs there, or where the folder cannot be made.
    """
    for file in (run.supervisor, run.lighthouse):
        named = read_json(file)
        if elsewhere(named) and not ended:
            _claim_elsewhere(run, file, named)
        elif another(named):
            raise ConfigError("job.name", run.name, f"a name that no running job has (pid {named['pid']})")
    try:
        if run.path.exists():
            stamped = run.supervisor if run.supervisor.exists() else run.path
            made = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(stamped.stat().st_mtime))
            run.path.rename(_unused(run.path.with_name(f"{run.name}.{made}")))
        run.path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "job.runs_dir", str(run.path.parent), f"a folder that can be written ({error.strerror})"
        ) from None


def _claim_elsewhere(run: RunDir, file: Path, named: Row) -> None:
    """Raise ConfigError where a process of another host may still run this job: its files change."""
    if run.summary.exists():
        return
    quiet = QUIET_S
    for each in (file, run.metrics, run.events, run.lighthouse_events, *run.path.glob("lighthouse/store.sqlite*")):
        with contextlib.suppress(OSError):
            quiet = min(quiet, abs(time.time() - each.stat().st_mtime))
    if quiet < QUIET_S:
        raise ConfigError(
            "job.name",
            run.name,
            f"a name that no running job has (pid {named['pid']} on {named['host']}; its files changed "
            f"{quiet:.0f} s ago; if it has ended, wait {QUIET_S:g} s or remove {file})",
        )


def _unused(path: Path) -> Path:
    """`path`, or `path` with a number that makes it new."""
    tries = (path.with_name(f"{path.name}-{n}") for n in range(2, 10_000))
    return path if not path.exists() else next(p for p in tries if not p.exists())


def newest_live(runs_dir: Path) -> RunDir | None:
    """The running job under `runs_dir` that was started last."""
    found = []
    for file in [*runs_dir.glob("*/supervisor.json"), *runs_dir.glob("*/lighthouse.json")]:
        with contextlib.suppress(OSError):
            found.append((file.stat().st_mtime, file))
    newest = next((file for _, file in sorted(found, reverse=True) if alive(read_json(file))), None)
    return RunDir(newest.parent) if newest else None


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON; see `events.replace_json`. Raises OSError."""
    replace_json(path, value)


def keep_json(path: Path, value: object) -> None:
    """`write_json` of a file on which no process depends: a disk that does not take it costs no process."""
    try:
        replace_json(path, value)
    except OSError as error:
        _log.warning("%s is not written: %s", path, error.strerror)


def open_log(path: Path) -> BinaryIO:
    """The end of `path`, for the output of a process; nowhere on a disk that does not take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        _log.warning("%s is not written: %s", path, error.strerror)
        return open(os.devnull, "ab")


def read_json(path: Path) -> Any:
    """The JSON in `path`; None where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_jsonl(path: Path) -> list[Row]:
    """All whole lines of a JSONL file; none where it does not exist."""
    return list(Tailer(path).all())


class Tailer:
    """The new lines of a JSONL file that others append to; a line that is not whole yet waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad = 0  # lines that were no JSON objects: the writer was killed inside one, or its disk was full
        self.line = 0  # how many lines were read
        self._offset = 0

    def skip(self) -> None:
        """Pass over what is there by now."""
        with contextlib.suppress(OSError):
            self._offset = self.path.stat().st_size

    def poll(self, most: int = MAX_POLL) -> list[Row]:
        """The rows that were added since the last call, of at most `most` bytes, or of one line."""
        rows = []
        for line in self._lines(most):
            self.line += 1
            if (row := self._row(line)) is not None:
                rows.append(row)
        return rows

    def newest(self, most: int = MAX_POLL) -> list[Row]:
        """The rows that were added since the last call, of the last `most` bytes alone where there are more."""
        with contextlib.suppress(OSError):
            ahead = self.path.stat().st_size - self._offset - most
            if ahead > 0:
                self._offset += ahead  # within a line: what is left of it is no row
        return self.poll(most)

    def all(self) -> Iterator[Row]:
        """The rows from here to the end, a piece in memory at a time; `line` is the number of each."""
        while lines := self._lines(MAX_POLL):
            for line in lines:
                self.line += 1
                if (row := self._row(line)) is not None:
                    yield row

    def _lines(self, most: int) -> list[bytes]:
        """The next whole lines. What comes after them is read again: its writer may have taken it back."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(most)
                while data and b"\n" not in data and (more := file.read(most)):
                    data += more
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].split(b"\n")[:-1]

    def _row(self, line: bytes) -> Row | None:
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "torn" not in row and row:
            return row
        self.bad += 1
        return None
