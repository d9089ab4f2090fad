"""The run directory: the names of its files, which runs there are, and reading logs that still grow."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ft_hsdp import secret
from ft_hsdp.claim import Claim, FolderOwner, Record, judge, read, turn
from ft_hsdp.config import Config, dump, load, public
from ft_hsdp.errors import ConfigError, LighthouseUnreachable
from ft_hsdp.jsonl import (
    Queued,
    clear_way,
    here,
    open_regular,
    open_to_append,
    parsed,
    read_regular,
    replace_json,
    set_aside,
    unused,
)
from ft_hsdp.lifetime import process_stat
from ft_hsdp.mounts import Ability, need

MAX_POLL = 1 << 20  # bytes of a log that are read at once
KEEP_S = 1.0  # between two looks at the files that a job needs

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What a reader raises that is given a row, or a file of JSON, with odd values."""

Row = dict[str, Any]
"""One line of a JSONL file."""

_log = logging.getLogger(__name__)


def supervised(event: str, reason: str, **fields: Any) -> Row:
    """Return an event of a supervisor, which happens now."""
    return {"t": time.time(), "event": event, "source": "supervisor", **fields, "reason": reason}


class RunDir:
    """The directory of a run, `runs/NAME`, and the paths of its files. Nothing is read or made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name  # the job's name
        self.claim: Claim | None = None  # of the process that made the run
        self.config = path / "config.yaml"  # the resolved configuration
        self.token = path / "token"  # the secret that the job's processes share; mode 0600
        # The operator's secret, for evict, drain and checkpoint; mode 0600.
        self.admin_token = path / "admin_token"
        self.checkpoint_key = path / secret.RUN_KEY  # a copy of the key that signs the checkpoints; mode 0600
        # {"pid", "url", "urls"}: the leading lighthouse, which writes the file, and the addresses of all of them.
        self.lighthouse = path / "lighthouse.json"
        self.lighthouse_log = path / "lighthouse.log"  # stdout and stderr of the lighthouse
        self.lighthouse_events = path / "lighthouse" / "events.jsonl"  # events that the lighthouse logs
        self.supervisor = path / "supervisor.json"  # the `identity` of `up`
        self.events = path / "events.jsonl"  # all events, merged by the supervisor
        self.metrics = path / "metrics.jsonl"  # a line for each step, and for logged values; merged
        self.summary = path / "summary.json"  # the job in figures, written at its end
        self.spares = path / "spares"  # spares.json with the spares' pids, and their logs until they are assigned

    def seat(self, number: int) -> Path:
        """Return the path of {"pid", "url"} of one of several lighthouses, which writes it once it listens."""
        return self.path / "lighthouse" / f"seat-{number}.json"

    def replica(self, replica: int) -> Path:
        return self.path / "replicas" / str(replica)

    def commits(self, replica: int) -> Path:
        """Return the path of a log with a line for each step that the replica committed."""
        return self.replica(replica) / "commits.jsonl"

    def fed(self, replica: int) -> Path:
        """Return the path of a log with a line for each micro-batch, written before its forward pass."""
        return self.replica(replica) / "fed.jsonl"

    def logged(self, replica: int) -> Path:
        """Return the path of a log with a line for each call of `Job.log` that counts."""
        return self.replica(replica) / "logged.jsonl"

    def replica_events(self, replica: int) -> Path:
        """Return the path of the events that the replica's ranks log."""
        return self.replica(replica) / "events.jsonl"

    def injections(self, replica: int) -> Path:
        """Return the path of the events of failures that were injected by hand."""
        return self.replica(replica) / "chaos.jsonl"

    def final(self, replica: int) -> Path:
        return self.replica(replica) / "final.json"

    def processes(self, replica: int) -> Path:
        """Return the path of the replica's ranks and their pids, written by its supervisor."""
        return self.replica(replica) / "processes.json"

    def rank_end(self, replica: int, rank: int) -> Path:
        """Return the path of what a rank says about its end, unless a signal ended it."""
        return self.replica(replica) / f"rank{rank}.end.json"

    def rank_log(self, replica: int, rank: int) -> Path:
        """Return the path of stdout and stderr of a rank, for all incarnations."""
        return self.replica(replica) / f"rank{rank}.log"

    def replicas(self) -> list[int]:
        """Return the sorted ids of the replicas that have a folder."""
        folder = self.path / "replicas"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdecimal()) if folder.is_dir() else []


def run_of(config: Config) -> RunDir:
    return RunDir(Path(config.job.runs_dir).resolve() / config.job.name)


def alive(recorded: object) -> bool:
    """Return whether the process that {"pid"[, "start_ticks", "boot"]} names runs here; a zombie does not."""
    if not isinstance(recorded, Mapping) or not isinstance(recorded.get("pid"), int) or recorded["pid"] <= 0:
        return False
    try:
        state, *_, ticks = process_stat(recorded["pid"])[:20]
    except OSError:
        return False
    # A boot that differs: this host has been restarted since, and another process may have the pid and the ticks.
    now = {"start_ticks": int(ticks), "boot": here()["boot"]}
    return state != b"Z" and all(recorded.get(key, value) == value for key, value in now.items())


def another(recorded: object) -> bool:
    """Return whether a process as in `alive` runs and is not this one.

    A container that starts again may give this process the recorded pid.
    """
    return isinstance(recorded, Mapping) and recorded.get("pid") != os.getpid() and alive(recorded)


def runs_here(run: RunDir) -> bool:
    """Return whether a supervisor or a lighthouse of a run runs on this machine."""
    return alive(read_json(run.supervisor)) or alive(read_json(run.lighthouse))


def _may_run(run: RunDir) -> bool:
    """Return whether a lighthouse of another host, or of another start of this one, is named: it can be asked."""
    recorded = read_json(run.lighthouse) or {}
    other = any(recorded.get(key, value) != value for key, value in here().items())
    return "url" in recorded and (other or recorded.get("pid") == 0)  # 0: it was given by its URL alone


def make_run(
    run: RunDir, config: Config, token: str | None = None, said: object = None, *, ended: bool = False
) -> Claim:
    """Make the run directory of a job beside `run`, whole, and rename it into place.

    An earlier run there is moved to NAME.<time at which it was made>. If another process of this job has made the
    run meanwhile, it is taken as it is.

    Args:
        token: The secret that the job's processes share; None: a new one.
        said: For supervisor.json; None: there is none.
        ended: The store of the earlier run says that its job has ended.

    Returns:
        The claim of the job on its run.

    Raises:
        ConfigError: A job runs there, the folder cannot be made, or checkpoint.key cannot be read or made.
    """
    token = token or secrets.token_hex(32)
    owner = FolderOwner.of(run.name, token)
    part = RunDir(run.path.with_name(f".{run.name}.{secrets.token_hex(6)}"))
    claim = Claim(part.path, owner)
    try:
        judged = _check_vacant(run, owner, ended)
        part.path.mkdir(parents=True)
        need(run.path.parent, "job.runs_dir", Ability.LOCKS, Ability.RENAME)
        write_job_files(part, config, token)
        if said is not None:
            replace_json(part.supervisor, said)
        claim.made()
        while not (shared := not ended and run.config.exists() and owner.has(run.path)):
            if _put_in_place(part, run, judged):
                break
            judged = _check_vacant(run, owner, ended)
        if shared:
            claim.drop()
        claim.folder = run.path
        claim.begin()
    except OSError as error:
        allowed = f"a folder that can be written ({error.strerror})"
        raise ConfigError("job.runs_dir", str(run.path.parent), allowed) from None
    finally:
        shutil.rmtree(part.path, ignore_errors=True)
    return claim


def _put_in_place(part: RunDir, run: RunDir, judged: Record) -> bool:
    """Move what stands at `run` aside if its claim is the one that was `judged`, and `part` to its place.

    Return False if another process was quicker.
    """
    with turn(run.path):
        if read(run.path) != judged:
            return False
        if run.path.exists():
            stamped = run.supervisor if run.supervisor.exists() else run.path
            made = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(stamped.stat().st_mtime))
            run.path.rename(unused(run.path.with_name(f"{run.name}.{made}")))
        try:
            part.path.rename(run.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
    return True


def _check_vacant(run: RunDir, owner: FolderOwner, ended: bool) -> Record:
    """Return the record of the last owner of `run`. Raises ConfigError if a job runs there."""
    who, judged = ("", read(run.path)) if ended else judge(run.path, owner)
    for file in (run.supervisor, run.lighthouse):
        recorded = read_json(file)
        if another(recorded):  # also one that has lost its claim, and does not know it yet
            who = who or f"pid {recorded['pid']}"
    if who:
        raise ConfigError("job.name", run.name, f"a name that no running job has ({who})")
    return judged


def write_job_files(run: RunDir, config: Config, token: str | None = None) -> None:
    """Write the configuration and the secrets of a job into its run directory.

    Args:
        run: The directory; it is made if it does not exist.
        token: The secret that the job's processes share; None: a new one.

    Raises:
        ConfigError: The file checkpoint.key cannot be read or made, or is missing where there are checkpoints.
    """
    options = config.checkpoint
    key = secret.make_checkpoint_key(options.key, Path(options.dir) if options.dir and not options.trust else None)
    run.path.mkdir(parents=True, exist_ok=True)
    if config != public(config):
        secret.write_private(run.config, dump(config))
    else:
        run.config.write_text(dump(config), encoding="utf-8")
    secret.write_private(run.token, token or secrets.token_hex(32))
    secret.write_private(run.admin_token, secrets.token_hex(32))
    secret.write_private(run.checkpoint_key, key.decode())


def write_config(file: Path, config: Config) -> None:
    """Replace a run's configuration; a reader sees the old one or the new one, whole. Raises OSError."""
    text = dump(config)
    with contextlib.suppress(OSError, ValueError):
        if read_regular(file).decode() == text:
            return
    clear_way(file)
    secret.write_private(file, text)


class JobFiles:
    """The files without which the processes of a job cannot start again; its supervisor puts lost ones back."""

    def __init__(self, run: RunDir) -> None:
        files = (run.config, run.token, run.admin_token, run.checkpoint_key)
        self._config = run.config
        self._kept = {file: (_mark(file), read_regular(file).decode()) for file in files if file.exists()}

    async def keep(self, claim: Claim, emit: Callable[[Row], None]) -> None:
        """Put back each file that is gone or cannot be used, until cancelled or the run is of another job."""
        while not claim.lost:
            for event in await asyncio.to_thread(self._look):
                emit(event)
            await asyncio.sleep(KEEP_S)

    def _look(self) -> list[Row]:
        """Put back what is missing, and return what is to be told of it. Blocks on the disk."""
        told = []
        for file, (mark, text) in list(self._kept.items()):
            now = _mark(file)
            if now == mark or not file.parent.is_dir():
                continue
            if good := self._good(file):
                self._kept[file] = (now, good)
            else:
                told += self._put_back(file, text)
        return told

    def _good(self, file: Path) -> str:
        """Return what the file has; "" if it is not what belongs there."""
        try:
            text = read_regular(file).decode()
            if file == self._config:
                load(file)
            elif not secret.read(file, ""):
                return ""
            return text
        except (OSError, ValueError, ConfigError):
            return ""

    def _put_back(self, file: Path, text: str) -> list[Row]:
        try:
            aside = set_aside(file).name if os.path.lexists(file) else ""
            secret.write_private(file, text)
        except OSError as error:
            _log.warning("%s is not put back: %s", file, error.strerror)
            return []
        self._kept[file] = (_mark(file), text)
        how = f"could not be used, and is in {aside}" if aside else "was gone"
        reason = f"{file.name} {how}: it is written again as it was"
        return [supervised("JobFilePutBack", reason)]


def _mark(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def find_run(runs_dir: Path, name: str) -> RunDir:
    """Return the directory of a run, finished or not; `name` is a path, or a name under `runs_dir`.

    Raises:
        ConfigError: There is no such run.
    """
    for path in (Path(name), runs_dir / name):
        if (path / "config.yaml").is_file():
            return RunDir(path.resolve())
    raise ConfigError("run", name, f"a run directory, or the name of one under {runs_dir}")


def find_running(runs_dir: Path, name: str | None) -> RunDir:
    """Return the run called `name`, as `find_run` takes it; without a name the running one that is newest.

    Whether a job runs whose lighthouse is on another machine, that alone knows: it is for the caller to ask it.

    Raises:
        ConfigError: There is no such run.
        LighthouseUnreachable: It does not run, or nothing under `runs_dir` does.
    """
    if name is None:
        newest = newest_live(runs_dir)
        if newest is None:
            raise LighthouseUnreachable(f"no job runs under {runs_dir}")
        return newest
    run = find_run(runs_dir, name)
    if not (runs_here(run) or _may_run(run)):
        raise LighthouseUnreachable(f"the job in {run.path} does not run")
    return run


def newest_live(runs_dir: Path) -> RunDir | None:
    """Return the running job under `runs_dir` that was started last; None if no job runs.

    A job of this machine comes before one of which only another host knows whether it runs.
    """
    found = []
    for file in [*runs_dir.glob("*/supervisor.json"), *runs_dir.glob("*/lighthouse.json")]:
        with contextlib.suppress(OSError):
            found.append((file.stat().st_mtime, file))
    runs = [RunDir(file.parent) for _, file in sorted(found, reverse=True)]
    return next((run for runs_now in (runs_here, _may_run) for run in runs if runs_now(run)), None)


def try_write_json(path: Path, value: object) -> None:
    """Write JSON as `replace_json` does, but only log it if the disk fails: no process depends on this file."""
    try:
        replace_json(path, value)
    except OSError as error:
        _log.warning("%s is not written: %s", path, error.strerror)


class _JsonFiles:
    """Takes [path, value] as a line, and writes the value there."""

    def append(self, line: bytes, /) -> bool:
        path, value = json.loads(line)
        try_write_json(Path(path), value)
        return True

    def missed(self, lines: int, why: str) -> None:
        """Forget what found no place: no process depends on these files."""

    def close(self) -> None: ...


_later = Queued(_JsonFiles())


def write_json_later(path: Path, value: object) -> None:
    """Write as `try_write_json` does, for a control loop: waits at most `jsonl.WAIT_S` for the disk."""
    _later.append(json.dumps([str(path), value]).encode())


def open_log(path: Path) -> BinaryIO:
    """Return the file at `path`, open for appending a process's output; /dev/null if the disk fails."""
    try:
        return open_to_append(path)
    except OSError as error:
        _log.warning("%s is not written: %s", path, error.strerror)
        return open(os.devnull, "ab")


def read_json(path: Path) -> Any:
    """Return the JSON object in `path`; None if there is no file, or no object in it, which is told once."""
    try:
        found = parsed(read_regular(path))
        if isinstance(found, dict):
            return found
        complain(path, "no JSON object")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        complain(path, error.strerror or str(error))
    except ValueError as error:
        complain(path, f"no JSON ({error})")
    return None


@lru_cache(maxsize=256)
def complain(path: Path, why: str) -> None:
    """Say in one line, once in this process, that a file cannot be read."""
    _log.warning("%s: %s", path, why)


def read_jsonl(path: Path) -> list[Row]:
    """Return all complete rows of a JSONL file; none if it does not exist."""
    return list(Tailer(path).all())


class Tailer:
    """Reads the new lines of a JSONL file to which other processes append; it waits for the end of a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad = 0  # lines that are no JSON objects: the writer was killed while it wrote, or its disk was full
        self.line = 0  # number of lines that were read
        self.unreadable = ""  # why the file cannot be read, though it is there
        self.lacks = False  # lines of it are gone or cannot be read: it was replaced, removed or cut
        self._offset = 0

    def poll(self, most: int = MAX_POLL) -> list[Row]:
        """Return the rows that were added since the last call, of at most `most` bytes or one longer line."""
        rows = []
        for line in self._lines(most):
            self.line += 1
            if (row := self._row(line)) is not None:
                rows.append(row)
        return rows

    def newest(self, most: int = MAX_POLL) -> list[Row]:
        """Return the rows that were added since the last call; of more than `most` bytes, only the last ones."""
        with contextlib.suppress(OSError):
            ahead = self.path.stat().st_size - self._offset - most
            if ahead > 0:
                self._offset += ahead  # in the middle of a line, whose rest is not a row
        return self.poll(most)

    def all(self) -> Iterator[Row]:
        """Yield the rows up to the end, with a piece of the file in memory; `line` is the number of each.

        What cannot be read is told in one line.
        """
        first = 0
        while lines := self._lines(MAX_POLL):
            for line in lines:
                self.line += 1
                if (row := self._row(line)) is not None:
                    yield row
                elif self.bad and not first:
                    first = self.line
        if self.bad:
            complain(self.path, f"line {first} is no row; {self.bad} such lines")

    def _lines(self, most: int) -> list[bytes]:
        """Return the next complete lines. An incomplete one is read again: its writer may remove it."""
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                self.lacks = size < self._offset
                self._offset = min(size, self._offset)
                file.seek(self._offset)
                data = file.read(most)
                while data and b"\n" not in data and (more := file.read(most)):
                    data += more
        except (FileNotFoundError, NotADirectoryError):
            self.lacks = self._offset > 0
            return []
        except OSError as error:
            self.lacks = True
            self.unreadable = error.strerror or str(error)
            complain(self.path, self.unreadable)
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].split(b"\n")[:-1]

    def _row(self, line: bytes) -> Row | None:
        if not line.strip():
            return None
        try:
            row = parsed(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "torn" not in row and row:
            return row
        self.bad += 1
        return None
