"""The progress of a job, as it is known from the lighthouse's answers and the replicas' logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial


class Changes:
    """Base of objects whose changes tasks of one event loop wait for."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Have every waiting task evaluate its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``ready()`` is true, evaluated at every `wake`; return False after ``timeout_s`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not ready():
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return False
            try:
                async with asyncio.timeout(left):  # asyncio.wait_for may swallow a cancellation before 3.12
                    await self._changed.wait()
            except TimeoutError:
                return ready()
        return True


class Progress(Changes):
    """How far the job is."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # newest committed one
        self.finished = False
        self.halted = ""  # the lighthouse's reason why the job cannot go on; "": it can
        self._away: dict[int, int] = {}  # replica -> step before which it does not start again

    def stay_away(self, replica: int, until_step: int) -> None:
        """Have `may_start` wait before so many steps are committed."""
        self._away[replica] = max(until_step, self._away.get(replica, 0))

    async def may_start(self, replica: int, stalled_s: float, stopped: Callable[[], bool]) -> None:
        """Wait while a replica stays away, the job commits a step each ``stalled_s``, and is not stopped."""

        def over(before: int) -> bool:
            return self.step > before or self.finished or bool(self.halted) or stopped()

        while self.step < self._away.get(replica, 0) and not (self.finished or self.halted or stopped()):
            if not await self.wait_for(partial(over, self.step), stalled_s):
                break

    def saw(self, step: int, finished: bool = False, halted: str = "") -> None:
        """Take news of the job, and wake waiting tasks if something changed. Older news changes nothing.

        Args:
            halted: Why the job cannot go on; "" if it can.
        """
        before = (self.step, self.finished, self.halted)
        self.halted = self.halted or halted
        self.step = max(self.step, step)
        self.finished = self.finished or finished
        if (self.step, self.finished, self.halted) != before:
            self.wake()
