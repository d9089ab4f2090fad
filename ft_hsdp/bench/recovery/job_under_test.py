"""A running job of real processes, seen through the files of its run."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from ft_hsdp.bench.recovery.analysis import Kill
from ft_hsdp.bench.recovery.scene import FILE, RecoveryScene
from ft_hsdp.config import Config, dump, parse
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied
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


class JobUnderTest:
    """A context: on entry the job starts, on exit nothing is left of it but `events`.

    rows: of each replica, what it committed so far, as far as `look` has seen. command: the module that runs the
    job, and what it is told after the file of the configuration; env: added to its environment.
    """

    def __init__(
        self, scene: RecoveryScene, command: Sequence[str] = (JOB,), env: Mapping[str, str] | None = None
    ) -> None:
        self.scene = scene
        self._command = command
        self._env = env or {}
        self.rows: dict[int, list[Row]] = {replica: [] for replica in range(scene.replicas)}
        self.events: list[Row] = []
        self.run: RunDir

    def __enter__(self) -> JobUnderTest:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
            runs = folder / "runs"
            runs.mkdir()
            made = config(self.scene, runs)
            file = folder / "config.yaml"
            file.write_text(dump(made))
            (runs / FILE).write_text(json.dumps(asdict(self.scene)))
            self.run = RunDir(runs / made.job.name)
            self._tailers = {replica: Tailer(self.run.commits(replica)) for replica in self.rows}
            self._log = folder / "job.log"
            with self._log.open("wb") as log:
                module, *arguments = self._command
                self._process = subprocess.Popen(
                    tied(module, str(file), *arguments),
                    env={**environment(), **self._env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def look(self) -> None:
        """Read what was committed since."""
        for replica, tailer in self._tailers.items():
            self.rows[replica] += tailer.poll()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition on `rows`. Raises Retryable if the job ends or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.look()
            if condition():
                return
            if self._process.poll() is not None:
                raise Retryable(f"bench: the job ended before {what}: {last_line(self._log)}")
            if time.monotonic() > deadline:
                raise Retryable(
                    f"bench: not within {PATIENCE_S:g} s: {what}; the job says: {last_line(self._log)}"
                )
            time.sleep(TICK_S)

    def whole(self, steps: int = QUIET_STEPS) -> None:
        """Wait until all replicas have contributed to `steps` steps in a row."""
        everybody = list(self.rows)

        def there() -> bool:
            newest = [rows[-steps:] for rows in self.rows.values()]
            return all(
                len(rows) == steps and all(row["contributors"] == everybody for row in rows) for rows in newest
            )

        self.until(there, "all replicas contribute")

    def kill(self, replica: int, rank: int) -> Kill:
        """SIGKILL one rank."""
        return self._hit(replica, rank, "KILL")

    def stop(self, replica: int, rank: int) -> Kill:
        """SIGSTOP one rank."""
        return self._hit(replica, rank, "STOP")

    def _hit(self, replica: int, rank: int, name: str) -> Kill:
        made = by_hand(self.run, described(replica=replica, rank=rank, signal=name))
        return Kill(made["t"], replica, rank, made["incarnation"])

    def after(self, kill: Kill, survivors: Sequence[int]) -> None:
        """Wait until each of these has committed a step without the replica that was killed."""

        def gone(row: Row) -> bool:
            return bool(row["t"] > kill.t and kill.replica not in row["contributors"])

        self.until(lambda: all(any(map(gone, self.rows[s][-20:])) for s in survivors), "the survivors commit")

    def back(self, kill: Kill) -> None:
        """Wait until the victim, started again, has contributed to a step."""

        def there(row: Row) -> bool:
            another = row["t"] > kill.t and row["incarnation"] != kill.incarnation
            return bool(another and row["role"] == "contribute")

        self.until(lambda: any(map(there, self.rows[kill.replica][-20:])), "the replica contributes again")

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
