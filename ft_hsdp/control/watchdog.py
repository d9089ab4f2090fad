"""What one rank watches so that no hang lasts, whichever launcher started it: its siblings, itself, its parent.

A ring has heartbeats only with two replicas or more, and a supervisor watches only under ft_hsdp's own launcher.
So the ranks of one replica and their leader send each other signs of life. A rank that falls silent ends its
replica.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

PERIOD_S = 0.5  # between two looks, and two signs of life


@dataclass(frozen=True, slots=True)
class Limits:
    silence_s: float  # without a sign of life of a sibling
    step_s: float  # without progress of this rank's main thread
    leave_s: float  # for leaving the job once the parent is gone


class WatchedRank(Protocol):
    """What the watchdog needs of the rank that it watches: `train.runtime.RankRuntime`. On the control loop."""

    def say_alive(self) -> None: ...

    def main_progress(self) -> int | None:
        """Return how far the main thread has come; None while it waits for an order."""

    def leave(self) -> None: ...

    def end(self, reason: str) -> None: ...


class Watchdog:
    """Watches from its construction until `stop`, on the control loop.

    Siblings are watched once they are expected. Time in which this process itself stood still does not count: it
    explains the silence of others.

    Args:
        limits: how long each kind of silence may last.
        rank: the one that it watches.
        parent: the process that started this one, if it is to be watched.
    """

    def __init__(self, limits: Limits, rank: WatchedRank, parent: int | None = None) -> None:
        now = time.monotonic()
        self._limits = limits
        self._rank = rank
        self._heard: dict[int, float] = {}
        self._parent = parent
        self._orphan_until: float | None = None
        self._progress: int | None = None
        self._moved = self._before = now
        self._timer = asyncio.get_running_loop().call_soon(self._tick)

    def expect(self, siblings: Iterable[int]) -> None:
        self._heard = dict.fromkeys(siblings, time.monotonic())

    def heard(self, rank: int) -> None:
        if rank in self._heard:
            self._heard[rank] = time.monotonic()

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        now = time.monotonic()
        late_s = max(0.0, now - self._before - 2 * PERIOD_S)
        if late_s:
            self._heard = {rank: heard + late_s for rank, heard in self._heard.items()}
            self._moved += late_s
        self._before = now
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)
        self._rank.say_alive()
        why = self._silent(now) or self._stuck(now) or self._orphaned(now)
        if why is not None:
            self._rank.end(why)

    def _silent(self, now: float) -> str | None:
        for rank, heard in self._heard.items():
            if now - heard >= self._limits.silence_s:
                return f"rank {rank} of this replica has given no sign of life for {now - heard:.1f} s"
        return None

    def _stuck(self, now: float) -> str | None:
        progress = self._rank.main_progress()
        if progress is None or progress != self._progress:
            self._progress, self._moved = progress, now
        if now - self._moved < self._limits.step_s:
            return None
        return f"the trainer hangs: it has not got on for {now - self._moved:.1f} s (timeouts.step_s)"

    def _orphaned(self, now: float) -> str | None:
        """Leave, and at last end, when the process that started this one is gone.

        No other would end it, or start it again.
        """
        if self._parent is None or os.getppid() == self._parent:
            return None
        if self._orphan_until is None:
            self._orphan_until = now + self._limits.leave_s
            self._rank.leave()
        return f"its launcher, pid {self._parent}, is gone" if now >= self._orphan_until else None
