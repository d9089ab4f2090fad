"""A running contender of `bench recovery`, of real processes, seen through the rows that it logs."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench.recovery.analysis import Kill, gone
from ft_hsdp.bench.recovery.setup import FILE, RecoverySetup, job_config
from ft_hsdp.bench.scope import Process, Scope, spawn
from ft_hsdp.config import dump
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import last_line, tied
from ft_hsdp.launch.injection import inject_by_hand, parse_options
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer
from ft_hsdp.launch.run.recorder import events_of

JOB = "ft_hsdp.bench.recovery.job"
QUIET_STEPS = 5  # to which all contribute before the next signal
RECENT = 20  # rows in which a commit is looked for
SEED = 7  # of victims and moments
PATIENCE_S = 120.0  # longest wait for anything
STOP_S = 60.0  # longest time for the job to end when it is told to
TICK_S = 0.005  # between two looks at the logs


class UnderTest(Scope):
    """A context: on entry a job of one contender starts, on exit it ends."""

    def __init__(self, setup: RecoverySetup) -> None:
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
        return fault_free_step(row for rows in self.rows.values() for row in rows)

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

    def wait_for_all(self, last: int | None = None) -> bool:
        """Wait until all replicas have contributed to `QUIET_STEPS` steps in a row, or until after step ``last``.

        Returns:
            False after ``last``.
        """

        def there(rows: Sequence[Row]) -> bool:
            newest = rows[-QUIET_STEPS:]
            return len(newest) == QUIET_STEPS and all(map(self.whole, newest))

        def over() -> bool:
            return last is not None and any(rows and rows[-1]["step"] > last for rows in self.rows.values())

        self.wait(lambda: over() or all(map(there, self.rows.values())), "all replicas contribute")
        return not over()

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
    last: int | None = None,
) -> Iterator[Kill]:
    """Hit a random rank at a random moment of a step, ``count`` times, and yield each kill once ``then`` returns.

    Each time all replicas contribute first, and once more at the end.

    Args:
        job: what is hit.
        count: how often.
        chance: where victims and moments come from.
        hit: sends the signal to a rank of a replica.
        then: waits for what has to happen before the next one.
        last: the step after which nothing is hit any more; None: there is no such step.
    """
    for _ in range(count):
        if not job.wait_for_all(last):
            return
        time.sleep(chance.uniform(0, job.step_s()))
        kill = hit(chance.randrange(job.setup.replicas), chance.randrange(job.setup.ranks))
        then(kill)
        yield kill
    job.wait_for_all(last)


class JobUnderTest(UnderTest):
    """A job of this product; after it has ended, ``events`` has all that its processes logged."""

    def __init__(
        self,
        setup: RecoverySetup,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Prepare a job.

        Args:
            setup: what is trained.
            arguments: of `bench.recovery.job` after the configuration's file.
            env: added to its environment.
            python: the interpreter of all its processes.
        """
        super().__init__(setup)
        self._python = python
        self._arguments = arguments
        self._env = env
        self.events: list[Row] = []
        self.run: RunDir

    def _begin(self, folder: Path) -> None:
        runs = folder / "runs"
        runs.mkdir()
        config = job_config(self.setup, runs)
        file = folder / "config.yaml"
        file.write_text(dump(config))
        (runs / FILE).write_text(json.dumps(asdict(self.setup)))
        self.run = RunDir(runs / config.job.name)
        self._tailers = {replica: Tailer(self.run.commits(replica)) for replica in self.rows}
        self._log = folder / "job.log"
        command = [self._python, *tied(JOB, str(file), *self._arguments)[1:]]
        self._process = spawn(self.stack, command, self._log, self._env, end=self._end, cwd=folder)

    def read(self) -> None:
        """Read what was committed since the last call."""
        for replica, tailer in self._tailers.items():
            self.rows[replica] += tailer.poll()

    def _processes(self) -> list[tuple[str, Process, Path]]:
        return [("the job", self._process, self._log)]

    def kill(self, replica: int, rank: int) -> Kill:
        """Send SIGKILL to one rank."""
        return self._hit(replica, rank, "KILL")

    def stop(self, replica: int, rank: int) -> Kill:
        """Send SIGSTOP to one rank."""
        return self._hit(replica, rank, "STOP")

    def _hit(self, replica: int, rank: int, name: str) -> Kill:
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
