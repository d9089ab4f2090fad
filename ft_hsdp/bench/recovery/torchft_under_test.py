"""torchft's Manager in the same situation, at its defaults and tuned."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from ft_hsdp.bench.contenders.base import version
from ft_hsdp.bench.recovery.analysis import Kill, costs, stalls
from ft_hsdp.bench.recovery.job_under_test import SEED, UnderTest, hit_at_random
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import ProgressLog, ResultRow
from ft_hsdp.bench.scope import Process, kill, listening, spawn
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import Row, Tailer


@dataclass(frozen=True, slots=True)
class Setting:
    """How torchft is set up."""

    times_ms: tuple[int, ...]  # of its lighthouse: heartbeat, join; () for its defaults
    text: str
    kills: int  # at most so many
    timeout_s: float = 60.0  # of its process group and its manager


TUNED = (1000, 100)
KILLED: Mapping[str, Setting] = {
    "defaults": Setting((), "heartbeat_timeout 5 s, join_timeout 60 s", 3),
    "tuned": Setting(TUNED, "heartbeat_timeout 1 s, join_timeout 0.1 s", 10),
}
STOPPED: Mapping[str, Setting] = {
    "defaults": Setting((), "timeout 60 s, heartbeat_timeout 5 s, join_timeout 60 s", 2),
    "tuned": Setting(TUNED, "timeout 2 s, heartbeat_timeout 1 s, join_timeout 0.1 s", 10, 2.0),
}


class TorchftUnderTest(UnderTest):
    """A lighthouse of torchft and replicas of a loop of its Manager."""

    def __init__(self, setup: RecoverySetup, setting: Setting) -> None:
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
        times = map(str, self._setting.times_ms)
        command = tied("ft_hsdp.bench.contenders.torchft", str(file), *times)
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
        command = [sys.executable, "-m", "ft_hsdp.bench.contenders.torchft_loop", json.dumps(spec)]
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


def installed(log: ProgressLog) -> bool:
    """Return whether torchft is installed; note if it is not."""
    if version("torchft") is None:
        log.note("torchft is left out: not installed")
        return False
    return True


def torchft(
    setup: RecoverySetup, most: int, log: ProgressLog, settings: Mapping[str, Setting], number: signal.Signals
) -> list[ResultRow]:
    """Return a row for each of ``settings``, with at most ``most`` signals; none where it is not installed."""
    if not installed(log):
        return []
    rows: list[ResultRow] = []
    for name, setting in settings.items():
        with TorchftUnderTest(setup, setting) as job:
            found = _measure(job, min(most, setting.kills), number)
        rows.append({"setting": name, "signal": number.name, "text": setting.text, **found})
        p50_ms = found["less_one"]["p50_ms"]
        log.say(f"torchft, {name}, {number.name}: next commit less one step, p50 {p50_ms:.4g} ms")
    return rows


def _measure(job: TorchftUnderTest, count: int, number: signal.Signals) -> ResultRow:
    def then(kill: Kill) -> None:
        job.wait_for_survivors(kill)
        job.start(kill.replica)

    kills = list(hit_at_random(job, count, random.Random(SEED), lambda n, _: job.hit(n, number), then))
    step_s = job.step_s()
    found = [each for each in stalls(kills, job.rows, step_s) if each is not None]
    return {"replicas": job.setup.replicas, "kills": len(kills), **costs(found, step_s)}
