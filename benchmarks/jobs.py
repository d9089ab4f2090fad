"""A running job of each contender of `bench recovery`, of real processes, seen through the rows that it logs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import Process, Scope, kill, listening, spawn
from ft_hsdp.analysis.goodput import StepTimes
from ft_hsdp.config import Config, dump, parse
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import last_line, tied
from ft_hsdp.launch.injection import inject_by_hand, parse_options
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer
from ft_hsdp.launch.run.recorder import events_of

TRAINING = "benchmarks.training"
WAITING, TRANSFORMER = f"{TRAINING}:waiting", f"{TRAINING}:transformer"
ENDLESS = 10**6  # steps and restarts: the job is ended when the bench has enough
TRAIN: Mapping[str, Any] = {"steps": ENDLESS, "threads": 1}
QUIET_STEPS = 5  # to which all contribute before the next signal
RECENT = 20  # rows in which a commit is looked for
SEED = 7  # of victims and moments
PRODUCT = "ft_hsdp"  # the kind of rank that needs a lighthouse and state agents
PATIENCE_S = 120.0  # longest wait for anything
STOP_S = 60.0  # longest time for the job to end when it is told to
TICK_S = 0.005  # between two looks at the logs


@dataclass(frozen=True, slots=True)
class Setup:
    """A job of ``replicas`` x ``ranks``, and what it trains.

    Nothing is computed in a step that waits: with more processes than cores, a step would be faster for each that
    is dead.
    """

    replicas: int = 4
    ranks: int = 1
    model: str = WAITING  # "module:function" that makes it; "": what `sections` say is trained, as `up` does
    layers: int = 2
    elements: int = 1 << 17  # parameters of a layer that waits
    wait_s: float = 0.03  # how long a step waits over all layers
    sections: Mapping[str, Any] = field(default_factory=dict)  # more of the configuration
    steps: int = 1  # of a block, where several contenders train in turns


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Which rank a worker of `bench overhead` is."""

    kind: str  # hsdp or ft_hsdp
    setup: Mapping[str, Any]
    replica: int
    rank: int
    port: int  # of a store
    config: str  # the YAML file
    run: str


def job_config(setup: Setup, runs: Path, **sections: Any) -> Config:
    """Return the configuration of a job of ft_hsdp; all that belongs to the job is under ``runs``."""
    return parse(
        {
            "job": {"name": "bench", "runs_dir": str(runs)},
            "replicas": setup.replicas,
            "ranks_per_replica": setup.ranks,
            "train": TRAIN,
            "optim": {"clip": None},
            "restart": {"budget": ENDLESS},
            **setup.sections,
            **sections,
        }
    )


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank of a replica's incarnation got SIGKILL or SIGSTOP at ``t``, in Unix seconds."""

    t: float
    replica: int
    rank: int
    incarnation: str = ""


def gone(row: Mapping[str, Any], kill: Kill) -> bool:
    """Return whether a commit is one without the victim of ``kill``."""
    return kill.replica not in row["contributors"]


class UnderTest(Scope):
    """A context: on entry a job of one contender starts, on exit it ends."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        # The commits of each replica, as far as `read` has read them, with the keys of commits.jsonl.
        self.rows: dict[int, list[Row]] = {replica: [] for replica in range(setup.replicas)}

    @abstractmethod
    def read(self) -> None:
        """Read what was committed since the last call."""

    @abstractmethod
    def _processes(self) -> list[tuple[str, Process, Path]]:
        """Return the processes that have to run: what each is, and its log."""

    def step_s(self) -> float:
        """Return the median fault-free step so far, in seconds."""
        steps = StepTimes()
        for row in (row for rows in self.rows.values() for row in rows):
            steps.add(row)
        return steps.median

    def whole(self, row: Row) -> bool:
        """Return whether all replicas contributed to a commit."""
        return len(row["contributors"]) == len(self.rows)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Read the logs until a condition holds.

        Raises:
            Retryable: A process ended, or it takes longer than `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.read()
            if condition():
                return
            for who, process, log in self._processes():
                if process.poll() is not None:
                    raise Retryable(f"bench: {who} ended before {what}: {last_line(log)}")
            if time.monotonic() > deadline:
                words = "".join(f"; {who} says: {last_line(log)}" for who, _, log in self._processes())
                raise Retryable(f"bench: not within {PATIENCE_S:g} s: {what}{words}")
            time.sleep(TICK_S)

    def wait_for_all(self) -> None:
        """Wait until all replicas have contributed to `QUIET_STEPS` steps in a row."""

        def there(rows: Sequence[Row]) -> bool:
            newest = rows[-QUIET_STEPS:]
            return len(newest) == QUIET_STEPS and all(map(self.whole, newest))

        self.wait(lambda: all(map(there, self.rows.values())), "all replicas contribute")

    def wait_for_survivors(self, kill: Kill) -> None:
        """Wait until each survivor has committed a step without the victim."""
        others = [rows for replica, rows in self.rows.items() if replica != kill.replica]

        def without(row: Row) -> bool:
            return bool(row["t"] > kill.t and gone(row, kill))

        self.wait(lambda: all(any(map(without, rows[-RECENT:])) for rows in others), "the survivors commit")


def hit_at_random(
    job: UnderTest,
    count: int,
    chance: random.Random,
    hit: Callable[[int, int], Kill],
    then: Callable[[Kill], None],
) -> Iterator[Kill]:
    """Hit a random rank at a random moment of a step, ``count`` times, and yield each kill once ``then`` returns.

    Each time all replicas contribute first, and once more at the end.

    Args:
        job: what is hit.
        count: how often.
        chance: where victims and moments come from.
        hit: sends the signal to a rank of a replica.
        then: waits for what has to happen before the next one.
    """
    for _ in range(count):
        job.wait_for_all()
        time.sleep(chance.uniform(0, job.step_s()))
        kill = hit(chance.randrange(job.setup.replicas), chance.randrange(job.setup.ranks))
        then(kill)
        yield kill
    job.wait_for_all()


class JobUnderTest(UnderTest):
    """A job of this product under `up`; after it has ended, ``events`` has all that its processes logged."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.events: list[Row] = []
        self.run: RunDir

    def _begin(self, folder: Path) -> None:
        runs = folder / "runs"
        runs.mkdir()
        trainee = {"entry": f"{TRAINING}:main", "args": [json.dumps(asdict(self.setup))], "preload": [TRAINING]}
        config = job_config(self.setup, runs, **(trainee if self.setup.model else {}))
        file = folder / "config.yaml"
        file.write_text(dump(config))
        self.run = RunDir(runs / config.job.name)
        self._tailers = {replica: Tailer(self.run.commits(replica)) for replica in self.rows}
        self._log = folder / "job.log"
        line = tied("ft_hsdp.launch.cli", "up", str(file))
        self._process = spawn(self.stack, line, self._log, end=self._end, cwd=folder)

    def read(self) -> None:
        """Read what was committed since the last call."""
        for replica, tailer in self._tailers.items():
            self.rows[replica] += tailer.poll()

    def _processes(self) -> list[tuple[str, Process, Path]]:
        return [("the job", self._process, self._log)]

    def kill(self, replica: int, rank: int, name: str = "KILL") -> Kill:
        """Send one rank SIGKILL, or SIGSTOP."""
        event = inject_by_hand(self.run, parse_options(replica=replica, rank=rank, signal=name))
        return Kill(event["t"], replica, rank, event["incarnation"])

    def _end(self, process: Process) -> None:
        """Have the job end by itself; what its processes logged is kept."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # everything below it dies with it
        process.wait()
        self.read()
        self.events = events_of(self.run)


@dataclass(frozen=True, slots=True)
class Setting:
    """How torchft is set up."""

    times_ms: tuple[int, ...]  # of its lighthouse: heartbeat, join; () for its defaults
    text: str
    kills: int  # at most so many
    timeout_s: float = 60.0  # of its process group and its manager


class TorchftUnderTest(UnderTest):
    """A lighthouse of torchft and replicas of a loop of its Manager."""

    def __init__(self, setup: Setup, setting: Setting) -> None:
        super().__init__(setup)
        self.loaded: dict[tuple[int, str], float] = {}  # when each incarnation had imported torch and torchft
        self._setting = setting
        self._incarnations = dict.fromkeys(self.rows, 0)
        self._running: dict[str, tuple[Process, Path]] = {}
        self._hit: dict[int, Process] = {}

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        self._tailers = {n: Tailer(self._file(n)) for n in self.rows}
        file, log = folder / "lighthouse.json", folder / "lighthouse.log"
        command = tied("benchmarks.torchft", str(file), *map(str, self._setting.times_ms))
        process = spawn(self.stack, command, log)
        self._running["torchft's lighthouse"] = process, log
        self._url = str(listening(process, file, log, "torchft's lighthouse")["url"])
        for n in self.rows:
            self.start(n)

    def start(self, n: int) -> None:
        """Start a replica, for the first time or again; a stopped one is killed first."""
        if n in self._hit:
            kill(self._hit.pop(n))
        spec = {
            "replica": n,
            "incarnation": str(self._incarnations[n]),
            "setup": asdict(self.setup),
            "file": str(self._file(n)),
            "lighthouse": self._url,
            "timeout_s": self._setting.timeout_s,
            "parent": os.getpid(),
        }
        # Nothing stands before the interpreter that trains: how soon it is there counts.
        command = [sys.executable, "-m", TRAINING, "torchft", json.dumps(spec)]
        log = self._folder / f"{n}.log"
        self._running[f"torchft's replica {n}"] = spawn(self.stack, command, log), log

    def hit(self, n: int, number: signal.Signals) -> Kill:
        """Send a replica SIGKILL or SIGSTOP."""
        self._hit[n], _ = self._running.pop(f"torchft's replica {n}")
        found = Kill(time.time(), n, 0, str(self._incarnations[n]))
        self._incarnations[n] += 1
        self._hit[n].send_signal(number)
        return found

    def read(self) -> None:
        """Read what was committed since the last call."""
        for n, tailer in self._tailers.items():
            for row in tailer.poll():
                if "step" in row:
                    self.rows[n].append(self._commit(row))
                else:
                    self.loaded[n, row["incarnation"]] = row["t"]

    def _commit(self, row: Row) -> Row:
        """Return a row with our keys. torchft tells how many replicas took part, but not which."""
        whole = row["participants"] == len(self.rows)
        return {**row, "contributors": list(self.rows) if whole else [], "role": "contribute" if whole else ""}

    def _processes(self) -> list[tuple[str, Process, Path]]:
        return [(name, process, log) for name, (process, log) in self._running.items()]

    def step_s(self) -> float:
        """Return the median time between two commits of one replica with all others."""
        spans = [
            after["t"] - before["t"]
            for rows in self.rows.values()
            for before, after in pairwise(rows)
            if self.whole(before) and self.whole(after) and after["step"] == before["step"] + 1
        ]
        return median(spans)

    def _file(self, n: int) -> Path:
        return self._folder / f"{n}.jsonl"
