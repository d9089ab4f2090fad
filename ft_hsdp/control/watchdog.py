"""Vigil: what one rank watches so that no hang lasts, whoever started it: its siblings, itself, its parent.

Beats of a ring exist only where there are two replicas, and a supervisor only where ours was used. The ranks of
one replica say to their leader, and it to them, that they live; whoever falls silent takes the replica with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

PERIOD_S = 0.5  # between two looks, and two signs of life


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: ``silence_s`` without a sign of a sibling, ``step_s`` without a step of the own main thread, and
    ``leave_s`` for leaving the job once the parent is gone."""

    silence_s: float
    step_s: float
    leave_s: float


@dataclass(frozen=True, slots=True)
class WatchdogOutlets:
    """``say``: tell the siblings that this rank lives. ``progress``: how far its main thread has come, None while
    that waits for an order. ``leave``: leave the job at the next commit. ``end``: end this process, and why."""

    say: Callable[[], None]
    progress: Callable[[], int | None]
    leave: Callable[[], None]
    end: Callable[[str], None]


class Watchdog:
    """Watches from now until `stop`, on the control loop. ``parent`` is the process that started this one, if it
    is to be watched; siblings are watched once they are expected.

    Time in which this process itself stood still explains the silence of others: it does not count.
    """

    def __init__(self, limits: Limits, outlets: WatchdogOutlets, parent: int | None = None) -> None:
        now = time.monotonic()
        self._limits = limits
        self._outlets = outlets
        self._heard: dict[int, float] = {}
        self._parent = parent
        self._orphan_until: float | None = None
        self._progress: int | None = None
        self._moved = self._before = now
        self._timer = asyncio.get_running_loop().call_soon(self._tick)

    def expect(self, siblings: Iterable[int]) -> None:
        """These ranks are there, and are to be heard from now on."""
        self._heard = dict.fromkeys(siblings, time.monotonic())

    def heard(self, rank: int) -> None:
        """A sibling lives."""
        if rank in self._heard:
            self._heard[rank] = time.monotonic()

    def stop(self) -> None:
        """Watch nothing more."""
        self._timer.cancel()

    def _tick(self) -> None:
        now = time.monotonic()
        late_s = max(0.0, now - self._before - 2 * PERIOD_S)
        if late_s:
            self._heard = {rank: heard + late_s for rank, heard in self._heard.items()}
            self._moved += late_s
        self._before = now
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)
        self._outlets.say()
        why = self._silent(now) or self._stuck(now) or self._orphaned(now)
        if why is not None:
            self._outlets.end(why)

    def _silent(self, now: float) -> str | None:
        for rank, heard in self._heard.items():
            if now - heard >= self._limits.silence_s:
                return f"rank {rank} of this replica has given no sign of life for {now - heard:.1f} s"
        return None

    def _stuck(self, now: float) -> str | None:
        progress = self._outlets.progress()
        if progress is None or progress != self._progress:
            self._progress, self._moved = progress, now
        if now - self._moved < self._limits.step_s:
            return None
        return f"the trainer hangs: it has not got on for {now - self._moved:.1f} s (timeouts.step_s)"

    def _orphaned(self, now: float) -> str | None:
        """Whoever started this process is gone: nobody would end it, or start it again."""
        if self._parent is None or os.getppid() == self._parent:
            return None
        if self._orphan_until is None:
            self._orphan_until = now + self._limits.leave_s
            self._outlets.leave()
        return f"its launcher, pid {self._parent}, is gone" if now >= self._orphan_until else None
