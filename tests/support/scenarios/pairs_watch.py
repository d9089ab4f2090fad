"""A job as seen from outside while it is injured: its commits on our own clock."""

import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ft_hsdp.launch.run.directory import RunDir, Tailer

LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """A new step was committed: when, on the monotonic clock, and who contributed."""

    t: float
    step: int
    contributors: frozenset[int]


class Watch:
    """Looks at a run until it is closed."""

    def __init__(self, run: RunDir, replicas: int) -> None:
        self.seen: list[Seen] = []
        self._run = run
        self._logs = [Tailer(run.commits(n)) for n in range(replicas)]
        self._replicas = replicas
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

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            rows = [row for log in self._logs for row in log.poll()]
            for row in sorted(rows, key=lambda row: (row["step"], row["epoch"])):
                if row["step"] > self.step:
                    self.seen.append(Seen(now, row["step"], frozenset(row["contributors"])))
