"""How far the job is, as its supervisor knows it: from the lighthouse's answers and the replicas' logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Something that changes, and on which tasks of one event loop wait."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Have every waiting task evaluate its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``ready()`` is true; False after ``timeout_s`` seconds. Evaluated at every `wake`."""
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
    """The newest committed step and epoch of the job."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.epoch = 0
        self.finished = False
        self.halted = ""  # why the lighthouse says that the job cannot go on
        self.drained: frozenset[int] = frozenset()  # the replicas that are to stay away
        self.heard = False  # whether the lighthouse has said which ones
        self.dismissed: set[int] = set()  # those that it has sent away, until they are started again

    def saw(
        self,
        step: int,
        epoch: int = 0,
        finished: bool = False,
        halted: str = "",
        drained: frozenset[int] | None = None,
    ) -> None:
        """Take news; what is older than what is known changes nothing. None: nothing new of ``drained``."""
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
