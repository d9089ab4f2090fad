"""torchft's Manager in the same situation, at its defaults and tuned."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from ft_hsdp.bench.contenders.roster import version
from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.recovery.analysis import Kill, span, stall
from ft_hsdp.bench.recovery.job_under_test import SEED, UnderTest, hunt
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.results import milliseconds
from ft_hsdp.launch.backend.processes import environment, tied
from ft_hsdp.launch.run.directory import Tailer, read_json

LIGHTHOUSE = -1  # beside the replicas' numbers


@dataclass(frozen=True, slots=True)
class Setting:
    """Times of its lighthouse in milliseconds (none: its defaults), and the part of all kills that it gets.

    timeout_s: of its process group and its manager.
    """

    times: tuple[int, ...]
    text: str
    kills: int
    timeout_s: float = 60.0


class TorchftUnderTest(UnderTest):
    """A lighthouse of torchft and replicas of a loop of its Manager.

    ``loaded`` has the time at which each incarnation had imported torch and torchft.
    """

    def __init__(self, scene: RecoveryScene, setting: Setting) -> None:
        super().__init__(scene)
        self.loaded: dict[tuple[int, str], float] = {}
        self._setting = setting
        self._lives = dict.fromkeys(self.rows, 0)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._hit: dict[int, subprocess.Popen[bytes]] = {}

    def _begin(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        stack.callback(self._end)
        self._tailers = {n: Tailer(self._file(n)) for n in self.rows}
        at = folder / "lighthouse.json"
        times = map(str, self._setting.times)
        self._spawn(LIGHTHOUSE, tied("ft_hsdp.bench.contenders.torchft_lighthouse", str(at), *times))
        self.until(lambda: read_json(at) is not None, "torchft's lighthouse listens")
        self._url = str(read_json(at)["url"])
        for n in self.rows:
            self.start(n)

    def start(self, n: int) -> None:
        """Start a replica, for the first time or again; a stopped one is killed first."""
        self._bury(n)
        seat = {
            "replica": n,
            "life": self._lives[n],
            "scene": asdict(self.scene),
            "file": str(self._file(n)),
            "lighthouse": self._url,
            "timeout_s": self._setting.timeout_s,
            "parent": os.getpid(),
        }
        # Nothing stands before the interpreter that trains: how soon it is there counts.
        self._spawn(n, [sys.executable, "-m", "ft_hsdp.bench.contenders.torchft_loop", json.dumps(seat)])

    def hit(self, n: int, number: signal.Signals) -> Kill:
        """Send a replica SIGKILL or SIGSTOP."""
        made = Kill(time.time(), n, 0, str(self._lives[n]))
        self._lives[n] += 1
        self._hit[n] = self._running.pop(n)
        self._hit[n].send_signal(number)
        return made

    def _bury(self, n: int) -> None:
        if n in self._hit:
            self._hit[n].kill()
            self._hit.pop(n).wait()

    def look(self) -> None:
        """Read what was committed since the last call."""
        for n, tailer in self._tailers.items():
            for row in tailer.poll():
                if "step" in row:  # which replicas took part is logged only by their number
                    whole = row["participants"] == len(self.rows)
                    facts = {
                        "contributors": list(self.rows) if whole else [],
                        "role": "contribute" if whole else "",
                    }
                    self.rows[n].append({**row, **facts})
                else:
                    self.loaded[n, row["incarnation"]] = row["t"]

    def _processes(self) -> list[tuple[str, subprocess.Popen[bytes], Path]]:
        return [(f"torchft's replica {n}", process, self._log(n)) for n, process in self._running.items()]

    def step_s(self) -> float:
        """The median time between two commits of one replica with everybody."""
        spans = [
            after["t"] - before["t"]
            for rows in self.rows.values()
            for before, after in pairwise(rows)
            if self.everybody(before) and self.everybody(after) and after["step"] == before["step"] + 1
        ]
        return median(spans)

    def _spawn(self, n: int, command: Sequence[str]) -> None:
        with self._log(n).open("ab") as log:
            self._running[n] = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the bench alone
            )

    def _file(self, n: int) -> Path:
        return self._folder / f"{n}.jsonl"

    def _log(self, n: int) -> Path:
        return self._folder / f"{n}.log"

    def _end(self) -> None:
        for process in (*self._running.values(), *self._hit.values()):
            process.kill()
            process.wait()


TUNED = (1000, 100)
KILLED: Mapping[str, Setting] = {
    "defaults": Setting((), "heartbeat_timeout 5 s, join_timeout 60 s", 3),
    "tuned": Setting(TUNED, "heartbeat_timeout 1 s, join_timeout 0.1 s", 10),
}

STOPPED: Mapping[str, Setting] = {
    "defaults": Setting((), "timeout 60 s, heartbeat_timeout 5 s, join_timeout 60 s", 2),
    "tuned": Setting(TUNED, "timeout 2 s, heartbeat_timeout 1 s, join_timeout 0.1 s", 10, 2.0),
}


def installed(log: ProgressLog) -> bool:
    """Whether torchft is; a note if it is not."""
    if version("torchft") is None:
        log.note("torchft is left out: not installed")
        return False
    return True


def peer(
    scene: RecoveryScene,
    most: int,
    log: ProgressLog,
    settings: Mapping[str, Setting],
    number: signal.Signals,
) -> list[ResultRow]:
    """A row for each of `settings`, with at most `most` signals; none, and a note, where it is not installed."""
    if not installed(log):
        return []
    rows = []
    for name, setting in settings.items():
        with TorchftUnderTest(scene, setting) as job:
            found = _hunt(job, min(most, setting.kills), number)
            rows.append({"setting": name, "text": setting.text, **found})
        p50_ms = rows[-1]["less_one"]["p50_ms"]
        log.say(f"torchft, {name}, {number.name}: next commit less one step, p50 {p50_ms:.4g} ms")
    return rows


def _hunt(job: TorchftUnderTest, count: int, number: signal.Signals) -> ResultRow:
    def then(kill: Kill) -> None:
        job.after(kill)
        job.start(kill.replica)

    made = list(hunt(job, count, random.Random(SEED), lambda n, _: job.hit(n, number), then))
    step_s = job.step_s()
    found = []
    for kill in made:
        others = {n: each for n, each in job.rows.items() if n != kill.replica}
        cost = stall(kill, others, step_s)
        if cost is not None:
            found.append(cost)
    return {
        "replicas": job.scene.replicas,
        "kills": len(made),
        "step_ms": milliseconds(step_s),
        "next": span([cost.next_s for cost in found]),
        "less_one": span([cost.less_one_s for cost in found]),
        "stall": span([cost.stall_s for cost in found]),
    }
