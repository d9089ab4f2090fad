"""Spares: groups of ranks that are warm, and wait to be told which incarnation of which replica they are.

One is made at a time, and only while no replica starts, repeats a step or catches up: its start would take the
CPUs from them. A spare that ends is replaced, after a pause that grows while spares keep ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ft_hsdp.core.restart import doubled
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.base import ReplicaSpec, WorkerGroup, spare_log
from ft_hsdp.launch.backend.processes import last_line
from ft_hsdp.launch.progress import Changes
from ft_hsdp.launch.replica_process import named
from ft_hsdp.launch.run.directory import Row, keep_json

WARM_S = 600.0  # longest time for a spare to get warm
PAUSE_S = 1.0  # before the first spare that replaces one that ended; doubles with each in a row
PAUSE_MAX_S = 60.0
HEALTHY_S = 60.0  # a spare that was warm for so long ended for a reason of its own


Fork = Callable[[WorkerGroup], Awaitable[None]]
"""Starts all ranks of a crew. Raises Retryable; some may run then."""


class SparePool(Changes):
    """Keeps `wanted` spares, whose files are in `folder`.

    fork: starts the ranks of one; quiet_s: how long it must have been quiet before that; dropped: is told of
    each that is of no use any more.
    """

    def __init__(
        self,
        wanted: int,
        folder: Path,
        fork: Fork,
        emit: Callable[[Row], None],
        quiet_s: float = 0.0,
        dropped: Callable[[WorkerGroup], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._folder = folder
        self._fork = fork
        self._emit = emit
        self._quiet_s = quiet_s
        self._dropped = dropped
        self._busy: set[str] = set()  # incarnations that do not train yet, and whatever else holds spares back
        self._like: ReplicaSpec | None = None  # what spares are to be like
        self._crews: list[WorkerGroup] = []
        self._made = 0
        self._failed = 0  # spares that ended, in a row
        self._keeping: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether a spare waits to be called."""
        return any(crew.ready for crew in self._crews)

    @property
    def quiet(self) -> bool:
        """Whether a spare may be made."""
        return not self._busy

    @contextlib.contextmanager
    def held(self, by: str) -> Iterator[None]:
        """No new spare meanwhile."""
        self._busy.add(by)
        self.wake()
        try:
            yield
        finally:
            self._busy.discard(by)
            self.wake()

    def began(self, gang: ReplicaSpec) -> None:
        """A gang is about to be started: no new spare until it is `settled`."""
        self._busy.add(gang.name)
        self.wake()

    def settled(self, gang: ReplicaSpec) -> None:
        """It trains, or has ended."""
        self._busy.discard(gang.name)
        self._like = gang
        if self._wanted and self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        self.wake()

    def take(self, fits: Callable[[WorkerGroup], bool]) -> WorkerGroup | None:
        """A spare that fits, for good: one that is ready, else one that soon will be. None: there is none."""
        fitting = [crew for crew in self._crews if fits(crew)]
        if not fitting:
            return None
        crew = max(fitting, key=lambda crew: (crew.ready, crew.complete))
        crew.heard_by(lambda: None)
        self._crews.remove(crew)
        self._failed = 0
        self._changed_crews()
        return crew

    def log(self, crew: WorkerGroup, rank: int) -> Path:
        """stdout and stderr of one rank of a spare, until it is called."""
        return spare_log(self._folder, crew.number, rank)

    async def close(self) -> None:
        """Make no more; who started the spares ends them."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._wanted = 0
        self._crews.clear()
        if self._made:
            self._changed_crews()

    async def _keep(self) -> None:
        """Make what is missing, one spare after another."""
        while True:
            await self.wait_for(lambda: self._may_make)
            if await self.wait_for(lambda: not self._may_make, self._quiet_s + self._pause_s):
                continue
            assert self._like is not None
            self._made += 1
            crew = WorkerGroup(self._like.size, self._like.config, number=self._made)
            crew.heard_by(lambda crew=crew: self._look(crew))  # type: ignore[misc]
            self._crews.append(crew)
            await self._make(crew)

    @property
    def _may_make(self) -> bool:
        return self.quiet and len(self._crews) < self._wanted

    @property
    def _pause_s(self) -> float:
        return doubled(PAUSE_S, self._failed, PAUSE_MAX_S)

    async def _make(self, crew: WorkerGroup) -> None:
        """Start a spare, and wait until it is warm, taken or gone."""
        try:
            await self._fork(crew)
        except Retryable as error:
            self._lose(crew, str(error))
            return
        if not await self.wait_for(lambda: crew.ready or crew not in self._crews, WARM_S):
            self._lose(crew, f"it was not warm within {WARM_S:g} s")

    def _look(self, crew: WorkerGroup) -> None:
        """Something has happened to a spare."""
        if crew not in self._crews:
            crew.kill()  # it was given up while its last ranks were started
            return
        if crew.gone:
            rank, code = next(iter(crew.gone.items()))
            said = last_line(self.log(crew, rank)) if code > 0 else ""
            self._lose(crew, f"rank {rank} ended with {named(code)}" + (f": {said}" if said else ""))
            return
        if crew.ready:
            took_s = time.monotonic() - crew.began
            self._event("SpareWarmed", crew, "it waits to be called", seconds=took_s)
        self._changed_crews()

    def _lose(self, crew: WorkerGroup, why: str) -> None:
        """A spare is of no use: end the rest of it."""
        if crew not in self._crews:
            return
        self._crews.remove(crew)
        crew.kill()
        self._dropped(crew)
        lasted = crew.warm_at is not None and time.monotonic() - crew.warm_at > HEALTHY_S
        self._failed = 1 if lasted else self._failed + 1
        self._event("SpareLost", crew, why, delay_s=self._pause_s)
        self._changed_crews()

    def _changed_crews(self) -> None:
        shown = [
            {
                "spare": crew.number,
                "state": "ready" if crew.ready else "warming",
                "ranks": [{"rank": r, "pid": p.pid, "host": p.host} for r, p in sorted(crew.processes.items())],
            }
            for crew in self._crews
        ]
        keep_json(self._folder / "spares.json", {"spares": shown})
        self.wake()

    def _event(self, name: str, crew: WorkerGroup, reason: str, **fields: Any) -> None:
        pids = [process.pid for _, process in sorted(crew.processes.items())]
        head = {"t": time.time(), "event": name, "source": "supervisor", "spare": crew.number, "pids": pids}
        self._emit({**head, **fields, "reason": reason})
