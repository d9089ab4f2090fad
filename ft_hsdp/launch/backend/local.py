"""The backend of one machine: ranks are forked from a preloaded process, and start in a fraction of a second.

All start alike: ranks of a replica are told at once which incarnation they are, those of a spare when needed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ProcessWatch, ReplicaSpec, WorkerGroup, call
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD, SPAWN_S, ForkServer
from ft_hsdp.launch.backend.processes import ONE_THREAD, free_port
from ft_hsdp.launch.backend.spares import SparePool
from ft_hsdp.launch.run.directory import Row, RunDir


@dataclass(frozen=True, slots=True)
class Forked:
    """A rank that a fork server started."""

    pid: int
    server: ForkServer
    host: str

    def signal(self, number: int) -> None:
        """Signal it, if it still runs."""
        self.server.signal(self.pid, number)


class LocalBackend:
    """Starts gangs on this machine. entry, preload, boot_s, spawn_s: what runs in a rank; see `ForkServer`.

    spares: how many gangs are kept warm; folder, emit, quiet_s: see `SparePool`.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        entry: str = ENTRY,
        preload: Sequence[str] = PRELOAD,
        boot_s: float = 120.0,
        spawn_s: float = SPAWN_S,
        spares: int = 0,
        folder: Path | None = None,
        emit: Callable[[Row], None] = lambda _: None,
        quiet_s: float = 0.0,
    ) -> None:
        self._run = run
        self._emit = emit
        self._forks = ForkServer(
            run.path, entry=entry, preload=preload, boot_s=boot_s, spawn_s=spawn_s, lost=self._lost
        )
        self._host = socket.gethostname()
        self._pool = SparePool(spares, folder or run.spares, self._fork, emit, quiet_s)

    @property
    def server_pid(self) -> int | None:
        """Pid of the fork server, if it runs."""
        return self._forks.pid

    @property
    def warm(self) -> bool:
        """Whether a spare is ready."""
        return self._pool.ready

    async def open(self) -> None:
        """Load what ranks need. Raises Retryable."""
        await self._forks.start()

    async def place(self, replica: int) -> None:
        """There is always a place."""

    def vacancy(self, replica: int) -> str:
        """There is always a place."""
        return ""

    def vacated(self, replica: int) -> None:
        """On one machine a place costs nothing."""

    async def start(self, gang: ReplicaSpec, watch: ProcessWatch) -> str:
        """Call a spare, or else fork all ranks. Raises Retryable; some may run then."""
        self._pool.began(gang)
        crew = self._pool.take(lambda c: c.complete and (c.size, c.config) == (gang.size, gang.config))
        if crew is None:
            crew = WorkerGroup(gang.size, gang.config, gang)
            crew.given(watch)
            await self._fork(crew)
            return COLD
        how = WARM if crew.ready else WARMING
        crew.called = gang
        for rank, process in crew.processes.items():
            self._forks.call(process.pid, call(gang, rank, self._run))
        crew.given(watch)
        return how

    def settled(self, gang: ReplicaSpec) -> None:
        """A gang trains, or has ended."""
        self._pool.settled(gang)

    async def close(self) -> None:
        """End the fork server and whatever it started."""
        await self._pool.close()
        await self._forks.close()

    def _lost(self, pid: int, why: str) -> None:
        reason = f"{why}: another one is started beside it, its ranks go on"
        event = {"t": time.time(), "event": "ForkServerLost", "source": "supervisor", "pid": pid}
        self._emit({**event, "reason": reason})

    async def _fork(self, crew: WorkerGroup) -> None:
        shared = {
            **ONE_THREAD,
            "WORLD_SIZE": str(crew.size),
            "LOCAL_WORLD_SIZE": str(crew.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        gang = crew.called
        for rank in range(crew.size):
            if crew.gone:
                break

            def gone(pid: int, code: int, rank: int = rank) -> None:
                crew.exited(rank, Forked(pid, self._forks, self._host), code)

            pid = await self._forks.spawn(
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                config=crew.config,
                log=self._pool.log(crew, rank) if gang is None else self._run.rank_log(gang.replica, rank),
                on_exit=gone,
                call=None if gang is None else call(gang, rank, self._run),
                on_warm=lambda _, rank=rank: crew.warm(rank),  # type: ignore[misc]
            )
            crew.started(rank, Forked(pid, self._forks, self._host))
