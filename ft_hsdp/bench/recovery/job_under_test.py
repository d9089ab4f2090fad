"""A running contender of `bench recovery`, of real processes, seen through the rows that it logs; and ours."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench.recovery.analysis import Kill, contributes, gone
from ft_hsdp.bench.recovery.scene import FILE, RecoveryScene
from ft_hsdp.bench.scope import Scope, spawn
from ft_hsdp.config import Config, dump, parse
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import last_line, tied
from ft_hsdp.launch.injection import by_hand, described
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer, read_json
from ft_hsdp.launch.run.recorder import events_of

JOB = "ft_hsdp.bench.recovery.job"
ENDLESS = 10**6  # steps and restarts: the job is ended when the bench has enough
SHARE = 0.05  # of a CPU that a cluster sets aside for a rank: many share those that there are
QUIET_STEPS = 5  # to which all contribute before the next signal
SEED = 7  # of victims and moments
PATIENCE_S = 120.0  # longest wait for anything
STOP_S = 60.0  # longest time for the job to end when it is told to
AFTER_CHANGE = 2  # steps at the begin of a window that do not count
TICK_S = 0.005  # between two looks at the logs


def config(scene: RecoveryScene, runs: Path) -> Config:
    """The configuration of a scene's job; all that belongs to it is under `runs`."""
    return parse(
        {
            "job": {"name": "recovery", "runs_dir": str(runs)},
            "replicas": scene.replicas,
            "ranks_per_replica": scene.ranks,
            "train": {"steps": ENDLESS, "threads": 1},
            "optim": {"clip": None},
            "restart": {"budget": ENDLESS},
            "ray": {"folder": str(runs), "cpus_per_rank": SHARE},
            **scene.sections,
        }
    )


class UnderTest(Scope):
    """A context: on entry a job of one contender starts, on exit it ends.

    ``rows`` has the commits of each replica, as far as `look` has read them, with the keys of commits.jsonl.
    """

    def __init__(self, scene: RecoveryScene) -> None:
        self.scene = scene
        self.rows: dict[int, list[Row]] = {replica: [] for replica in range(scene.replicas)}

    @abstractmethod
    def look(self) -> None:
        """Read what was committed since the last call."""

    @abstractmethod
    def _processes(self) -> list[tuple[str, subprocess.Popen[bytes], Path]]:
        """Return the processes that have to run: what each is, and its log."""

    def step_s(self) -> float:
        """Return the median fault-free step so far, in seconds."""
        return fault_free_step(row for rows in self.rows.values() for row in rows)

    def everybody(self, row: Row) -> bool:
        """Return whether all replicas contributed to a commit."""
        return len(row["contributors"]) == len(self.rows)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition on `rows`. Raises Retryable if the job ends or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.look()
            if condition():
                return
            for who, process, log in self._processes():
                if process.poll() is not None:
                    raise Retryable(f"bench: {who} ended before {what}: {last_line(log)}")
            if time.monotonic() > deadline:
                words = "".join(f"; {who} says: {last_line(log)}" for who, _, log in self._processes())
                raise Retryable(f"bench: not within {PATIENCE_S:g} s: {what}{words}")
            time.sleep(TICK_S)

    def whole(self) -> None:
        """Wait until all replicas have contributed to `QUIET_STEPS` steps in a row."""

        def there(rows: Sequence[Row]) -> bool:
            newest = rows[-QUIET_STEPS:]
            return len(newest) == QUIET_STEPS and all(map(self.everybody, newest))

        self.until(lambda: all(map(there, self.rows.values())), "all replicas contribute")

    def after(self, kill: Kill) -> None:
        """Wait until each survivor has committed a step without the victim."""
        others = [rows for replica, rows in self.rows.items() if replica != kill.replica]

        def without(row: Row) -> bool:
            return bool(row["t"] > kill.t and gone(row, kill))

        self.until(lambda: all(any(map(without, rows[-20:])) for rows in others), "the survivors commit")

    def back(self, kill: Kill) -> None:
        """Wait until the victim, started again, has contributed to a step."""

        def there(row: Row) -> bool:
            return row["t"] > kill.t and row["incarnation"] != kill.incarnation and contributes(row)

        self.until(lambda: any(map(there, self.rows[kill.replica][-20:])), "the replica contributes again")


def hunt(
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
        job.whole()
        time.sleep(chance.uniform(0, job.step_s()))
        kill = hit(chance.randrange(job.scene.replicas), chance.randrange(job.scene.ranks))
        then(kill)
        yield kill
    job.whole()


class JobUnderTest(UnderTest):
    """A job of this product; after it has ended, ``events`` has all that its processes logged."""

    def __init__(
        self, scene: RecoveryScene, command: Sequence[str] = (JOB,), env: Mapping[str, str] | None = None
    ) -> None:
        """Prepare a job.

        Args:
            scene: what is trained.
            command: the module that runs the job, and its arguments after the configuration's file.
            env: added to its environment.
        """
        super().__init__(scene)
        self._command = command
        self._env = env or {}
        self.events: list[Row] = []
        self.run: RunDir

    def _begin(self, stack: ExitStack, folder: Path) -> None:
        runs = folder / "runs"
        runs.mkdir()
        made = config(self.scene, runs)
        file = folder / "config.yaml"
        file.write_text(dump(made))
        (runs / FILE).write_text(json.dumps(asdict(self.scene)))
        self.run = RunDir(runs / made.job.name)
        self._tailers = {replica: Tailer(self.run.commits(replica)) for replica in self.rows}
        self._log = folder / "job.log"
        module, *arguments = self._command
        self._process = spawn(stack, tied(module, str(file), *arguments), self._log, self._env)
        stack.callback(self._end)

    def look(self) -> None:
        """Read what was committed since the last call."""
        for replica, tailer in self._tailers.items():
            self.rows[replica] += tailer.poll()

    def window(self, steps: int) -> list[float]:
        """Wait for some steps more; return the seconds that each of them took replica 0."""
        self.look()
        begin = len(self.rows[0]) + AFTER_CHANGE
        self.until(lambda: len(self.rows[0]) >= begin + steps, f"{steps} more steps")
        return [row["step_s"] for row in self.rows[0][begin : begin + steps]]

    def _processes(self) -> list[tuple[str, subprocess.Popen[bytes], Path]]:
        return [("the job", self._process, self._log)]

    def kill(self, replica: int, rank: int) -> Kill:
        """Send SIGKILL to one rank."""
        return self._hit(replica, rank, "KILL")

    def stop(self, replica: int, rank: int) -> Kill:
        """Send SIGSTOP to one rank."""
        return self._hit(replica, rank, "STOP")

    def _hit(self, replica: int, rank: int, name: str) -> Kill:
        made = by_hand(self.run, described(replica=replica, rank=rank, signal=name))
        return Kill(made["t"], replica, rank, made["incarnation"])

    def spared(self, spares: int) -> None:
        """Wait until so many spares are ready; each is as many processes as a replica has."""

        def ready() -> bool:
            shown = (read_json(self.run.spares / "spares.json") or {}).get("spares", [])
            return sum(spare["state"] == "ready" for spare in shown) >= spares

        self.until(lambda: not spares or ready(), f"{spares} spares are ready")

    def _end(self) -> None:
        """Have the job end by itself; what its processes logged is kept."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # everything below it dies with it
        self._process.wait()
        self.look()
        self.events = events_of(self.run)
