"""A job as seen from outside while it is injured: its commits on our own clock, and what its processes take."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from ft_hsdp.launch.run.directory import RunDir, Tailer, read_json

LOOK_S = 0.05
SAMPLE_S = 1.0
SETTLED_S = 5.0  # a process that is younger is still loading
NAMES = {
    "ft_hsdp.launch.backend.zygote": "fork server",
    "ft_hsdp.state.agent.server": "agent",
    "lighthouse": "lighthouse",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A new step was committed: when, on the monotonic clock, and who contributed."""

    t: float
    step: int
    contributors: frozenset[int]


@dataclass(slots=True)
class Taken:
    """What one process took when it was first and last looked at."""

    who: str
    first_t: float
    first: dict[str, float]
    last_t: float
    last: dict[str, float] = field(default_factory=dict)


class Watch:
    """Looks at a run until it is closed."""

    def __init__(self, run: RunDir, replicas: int) -> None:
        self.seen: list[Seen] = []
        self._run = run
        self._logs = [Tailer(run.commits(n)) for n in range(replicas)]
        self._replicas = replicas
        self._taken: dict[tuple[int, float], Taken] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    @property
    def useful_s(self) -> float:
        """The time in which was trained: each step up to twice the median one, by the share that contributed."""
        gaps = [(b.t - a.t, len(b.contributors)) for a, b in pairwise(self.seen)]
        most = 2 * median([gap for gap, count in gaps if count == self._replicas] or [0.0])
        return sum(min(gap, most) * count / self._replicas for gap, count in gaps)

    @property
    def step(self) -> int:
        return self.seen[-1].step if self.seen else 0

    def since(self, t: float) -> list[Seen]:
        return [s for s in self.seen if s.t > t]

    def stalled_s(self, since: float, until: float) -> float:
        """The longest time without a commit between two times."""
        times = [since, *(s.t for s in self.seen if since < s.t < until), until]
        return max(b - a for a, b in pairwise(times))

    def grown(self) -> dict[str, dict[str, float]]:
        """By kind of process: how long they lived, and by how much they have grown."""
        sums: dict[str, dict[str, float]] = {}
        for taken in self._taken.values():
            if taken.last_t <= taken.first_t:
                continue
            into = sums.setdefault(taken.who, dict.fromkeys(("lived_s", *taken.first), 0.0))
            into["lived_s"] += taken.last_t - taken.first_t
            for what, value in taken.last.items():
                into[what] += value - taken.first[what]
        return sums

    def _look(self) -> None:
        sampled = 0.0
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            rows = [row for log in self._logs for row in log.poll()]
            for row in sorted(rows, key=lambda row: (row["step"], row["epoch"])):
                if row["step"] > self.step:
                    self.seen.append(Seen(now, row["step"], frozenset(row["contributors"])))
            if now - sampled > SAMPLE_S:
                sampled = now
                with contextlib.suppress(psutil.Error, TypeError):
                    self._sample(now)

    def _sample(self, now: float) -> None:
        top = psutil.Process(read_json(self._run.supervisor)["pid"])
        below = top.children(recursive=True)
        for process in [top, *below]:
            with contextlib.suppress(psutil.Error):
                born = process.create_time()
                if time.time() - born < SETTLED_S:
                    continue
                took = {
                    "MiB": process.memory_info().rss / 2**20,
                    "descriptors": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                }
                key = (process.pid, born)
                if key not in self._taken:
                    who = "supervisor" if process.pid == top.pid else self._who(process)
                    self._taken[key] = Taken(who, now, took, now)
                self._taken[key].last_t, self._taken[key].last = now, took

    def _who(self, process: psutil.Process) -> str:
        """What kind of process it is, by its command; ranks have their fork server's, and print elsewhere."""
        with contextlib.suppress(psutil.Error, OSError):
            line = process.cmdline()
            who = next((name for module, name in NAMES.items() if module in line), "other")
            prints = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
            return "rank" if who == "fork server" and prints.parent != self._run.path else who
        return "other"
