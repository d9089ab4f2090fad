"""Spares: groups of ranks that are warm, and wait to be assigned to an incarnation of a replica.

One is made at a time, and only while no replica starts, repeats a step or catches up, because its start takes CPU
time from them. A spare that ends is replaced, after a pause that grows while spares keep ending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ft_hsdp.core.restart import doubled
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.base import ReplicaSpec, WorkerGroup, exit_line
from ft_hsdp.launch.progress import Changes
from ft_hsdp.launch.run.directory import Row, supervised, write_json_later

WARM_S = 600.0  # longest time until a spare is warm
PAUSE_S = 1.0  # before the first spare that replaces one that ended; doubles with each in a row
PAUSE_MAX_S = 60.0
HEALTHY_S = 60.0  # the end of a spare that was warm for so long does not lengthen the pause


Fork = Callable[[WorkerGroup], Awaitable[None]]
"""Starts all ranks of a group; raises Retryable, and some may run then."""


class SparePool(Changes):
    """Keeps a number of spares warm."""

    def __init__(
        self,
        wanted: int,
        folder: Path,
        fork: Fork,
        emit: Callable[[Row], None],
        quiet_s: float = 0.0,
        first: int = 0,
    ) -> None:
        """Make the pool; the first spare is made when a replica trains.

        Args:
            quiet_s: How long no replica may have started before a spare is made, in seconds.
            first: The number before that of the first one.
        """
        super().__init__()
        self._wanted = wanted
        self._folder = folder
        self._fork = fork
        self._emit = emit
        self._quiet_s = quiet_s
        self._busy: set[str] = set()  # incarnations that do not train yet
        self._like: ReplicaSpec | None = None  # the newest incarnation; spares get its size and configuration
        self._groups: list[WorkerGroup] = []
        self._made = first
        self._failed = 0  # spares that ended, in a row
        self._keeping: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Return whether a spare is warm and waits for its incarnation."""
        return any(group.ready for group in self._groups)

    @property
    def shown(self) -> list[Row]:
        """Return the spares that there are, for `status`."""
        return [
            {
                "spare": group.number,
                "state": "ready" if group.ready else "warming",
                "ranks": [{"rank": r, "pid": p.pid, "host": p.host} for r, p in sorted(group.processes.items())],
            }
            for group in self._groups
        ]

    def began(self, spec: ReplicaSpec) -> None:
        """Make no new spare until this incarnation, which is about to be started, is `settled`."""
        self._busy.add(spec.name)
        self.wake()

    def settled(self, spec: ReplicaSpec) -> None:
        """Note that an incarnation trains, or has ended."""
        self._busy.discard(spec.name)
        if self._like is None or spec.size >= self._like.size:  # a replica may go on with fewer ranks for a while
            self._like = spec
        self.want(self._wanted)

    def want(self, wanted: int) -> None:
        """Keep so many spares from now on, once there was an incarnation, and end the others."""
        self._wanted = wanted
        for group in self._groups[wanted:]:
            self._groups.remove(group)
            group.kill()
        if wanted and self._like is not None and self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        self.wake()

    def take(self, fits: Callable[[WorkerGroup], bool]) -> WorkerGroup | None:
        """Remove and return a spare that fits: a ready one if there is one. None: no spare fits."""
        fitting = [group for group in self._groups if fits(group)]
        if not fitting:
            return None
        group = max(fitting, key=lambda group: (group.ready, group.complete))
        group.taken = True
        self._groups.remove(group)
        self._failed = 0
        self._groups_changed()
        return group

    def log(self, group: WorkerGroup, rank: int) -> Path:
        """Return the path of one rank's stdout and stderr while it is a spare's."""
        return self._folder / f"{group.number}-rank{rank}.log"

    async def close(self) -> None:
        """Make no more spares; the fork server ends those that there are."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._wanted = 0
        self._groups.clear()
        self._groups_changed()

    async def _keep(self) -> None:
        """Make missing spares, one after another, until cancelled."""
        while True:
            await self.wait_for(lambda: self._may_make)
            if await self.wait_for(lambda: not self._may_make, self._quiet_s + self._pause_s):
                continue
            assert self._like is not None
            self._made += 1
            group = WorkerGroup(self._like.size, self._like.config, number=self._made, changed=self._look)
            self._groups.append(group)
            await self._make(group)

    @property
    def _may_make(self) -> bool:
        return not self._busy and len(self._groups) < self._wanted

    @property
    def _pause_s(self) -> float:
        return doubled(PAUSE_S, self._failed, PAUSE_MAX_S)

    async def _make(self, group: WorkerGroup) -> None:
        """Start a spare, and wait until it is warm, taken or gone."""
        try:
            await self._fork(group)
        except (Retryable, OSError) as error:
            self._lose(group, str(error))
            return
        if not await self.wait_for(lambda: group.ready or group not in self._groups, WARM_S):
            self._lose(group, f"it was not warm within {WARM_S:g} s")

    def _look(self, group: WorkerGroup) -> None:
        """Act on a change of a spare: it is warm, or a rank of it has ended."""
        if group not in self._groups:
            group.kill()  # it was given up while its last ranks were started
            return
        if group.gone:
            rank, code = next(iter(group.gone.items()))
            self._lose(group, exit_line(rank, code, self.log(group, rank)))
            return
        if group.ready:
            took_s = time.monotonic() - group.began
            self._event("SpareWarmed", group, "it waits to be assigned", seconds=took_s)
        self._groups_changed()

    def _lose(self, group: WorkerGroup, why: str) -> None:
        """Drop a spare that failed, and end the rest of it."""
        if group not in self._groups:
            return
        self._groups.remove(group)
        group.kill()
        lasted = group.warm_at is not None and time.monotonic() - group.warm_at > HEALTHY_S
        self._failed = 1 if lasted else self._failed + 1
        self._event("SpareLost", group, why, delay_s=self._pause_s)
        self._groups_changed()

    def _groups_changed(self) -> None:
        write_json_later(self._folder / "spares.json", {"spares": self.shown})
        self.wake()

    def _event(self, name: str, group: WorkerGroup, reason: str, **fields: Any) -> None:
        pids = [process.pid for _, process in sorted(group.processes.items())]
        self._emit(supervised(name, reason, spare=group.number, pids=pids, **fields))
