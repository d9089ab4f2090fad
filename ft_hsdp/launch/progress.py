"""The progress of a job, which its supervisors know from the lighthouse's answers and the replicas' logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
    """How far the job is, and which replicas must stay away."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # newest committed one
        self.epoch = 0
        self.finished = False
        self.halted = ""  # the lighthouse's reason why the job cannot go on; "": it can
        self.drained: frozenset[int] = frozenset()  # replicas that must stay away
        self.heard = False  # the lighthouse has sent `drained` at least once
        self.dismissed: set[int] = set()  # replicas that were drained since they were started last

    def saw(
        self,
        step: int,
        epoch: int = 0,
        finished: bool = False,
        halted: str = "",
        drained: frozenset[int] | None = None,
    ) -> None:
        """Take news of the job, and wake waiting tasks if something changed. Older news changes nothing.

        Args:
            step: A committed step.
            epoch: An epoch that was granted.
            finished: The job has its final state.
            halted: Why the job cannot go on; "" if it can.
            drained: The replicas that must stay away; None if the news does not say.
        """
        before = (self.step, self.epoch, self.finished, self.halted, self.drained)
        self.halted = self.halted or halted
        self.step = max(self.step, step)
        self.epoch = max(self.epoch, epoch)
        self.finished = self.finished or finished
        self.drained = self.drained if drained is None else drained
        self.dismissed |= self.drained
        news, self.heard = drained is not None and not self.heard, self.heard or drained is not None
        if news or (self.step, self.epoch, self.finished, self.halted, self.drained) != before:
            self.wake()
