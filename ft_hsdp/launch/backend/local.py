"""The backend of one machine: ranks are forked from a preloaded process, and start in a fraction of a second.

The ranks of a replica get their incarnation at once, those of a spare when a replica needs them. With
`hosts.per_replica` the machine stands for several hosts: each has a name, which its ranks get with their
incarnation, and a state agent, which its first rank starts.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp import fault_injection
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ProcessWatch, ReplicaSpec, WorkerGroup, assignment
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD, SPAWN_S, ForkServer
from ft_hsdp.launch.backend.processes import ONE_THREAD, free_port
from ft_hsdp.launch.backend.spares import SparePool
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.train.identity import HOST_RANK_VARIABLE


@dataclass(frozen=True, slots=True)
class EmulatedHosts:
    """The hosts for which one machine stands: so many of each replica, with equal numbers of ranks."""

    per_replica: int | None  # None: it stands for no host but itself

    def name(self, replica: int, rank: int, size: int) -> str:
        """Return the name of a rank's host, of a replica with ``size`` ranks; "": the machine itself."""
        return "" if self.per_replica is None else f"r{replica}h{rank // (size // self.per_replica)}"

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Return the variables that a rank has because its machine stands for several hosts."""
        return {} if self.per_replica is None else {HOST_RANK_VARIABLE: str(rank % (size // self.per_replica))}


@dataclass(frozen=True, slots=True)
class Forked:
    """A rank that the fork server started; a `WorkerProcess`."""

    pid: int
    server: ForkServer
    machine: str
    host: str

    def signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        self.server.signal(self.pid, number)


class LocalBackend:
    """The backend of this machine: a fork server and its spares."""

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
        hosts: int | None = None,
    ) -> None:
        """Make the backend; nothing is started before `open`.

        Args:
            run: The run's directory.
            entry: What a rank runs, as `ForkServer` takes it; so are ``preload``, ``boot_s`` and ``spawn_s``.
            preload: Modules that the fork server imports.
            boot_s: Longest time for that, in seconds.
            spawn_s: Longest time for a fork, in seconds.
            spares: How many spares are kept warm.
            folder: Of the spares' files; None: the run's own.
            emit: Takes each event.
            quiet_s: How long no replica may have started before a spare is made, in seconds.
            hosts: For how many hosts of each replica this machine stands; it divides the number of ranks. None:
                the machine is the host of all.
        """
        self._run = run
        self._emit = emit
        self._forks = ForkServer(
            run.path, entry=entry, preload=preload, boot_s=boot_s, spawn_s=spawn_s, lost=self._lost
        )
        self._machine = socket.gethostname()
        self._hosts = EmulatedHosts(hosts)
        self._pool = SparePool(spares, folder or run.spares, self._fork, emit, quiet_s)

    @property
    def server_pid(self) -> int | None:
        """Return the pid of the fork server; None if it does not run."""
        return self._forks.pid

    @property
    def warm(self) -> bool:
        """Return whether a spare is ready."""
        return self._pool.ready

    async def open(self) -> None:
        """Start the fork server, which loads what ranks need. Raises Retryable."""
        await self._forks.start()

    async def place(self, replica: int) -> None:
        """Wait while a host of the replica is down by an injected failure; else there is always a place."""
        while True:
            if not fault_injection.hosts_down(self._run.path, replica):
                return
            await asyncio.sleep(fault_injection.LOOK_S)

    def vacancy(self, replica: int) -> str:
        """Return which hosts of a replica are down."""
        down = ", ".join(fault_injection.hosts_down(self._run.path, replica))
        return f"host {down} is down, by chaos" if down else ""

    def vacated(self, replica: int) -> None:
        """Do nothing: on one machine a place costs nothing."""

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        """Assign a spare, or else fork all ranks. Raises Retryable; some may run then."""
        self._pool.began(spec)
        group = self._pool.take(lambda c: c.complete and (c.size, c.config) == (spec.size, spec.config))
        if group is None:
            group = WorkerGroup(spec.size, spec.config, spec)
            group.given(watch)
            await self._fork(group)
            return COLD
        how = WARM if group.ready else WARMING
        group.spec = spec
        for rank, process in group.processes.items():
            self._forks.assign(process.pid, self._assignment(spec, rank))
            group.processes[rank] = self._forked(group, rank, process.pid)
        group.given(watch)
        return how

    def settled(self, spec: ReplicaSpec) -> None:
        """Let the pool make spares again: this incarnation trains, or has ended."""
        self._pool.settled(spec)

    async def close(self) -> None:
        """End the fork server and all processes that it started."""
        await self._pool.close()
        await self._forks.close()

    def _lost(self, pid: int, why: str) -> None:
        reason = f"{why}: another one is started beside it, its ranks go on"
        event = {"t": time.time(), "event": "ForkServerLost", "source": "supervisor", "pid": pid}
        self._emit({**event, "reason": reason})

    def _assignment(self, spec: ReplicaSpec, rank: int) -> dict[str, Any]:
        return assignment(spec, rank, self._run, self._hosts.name(spec.replica, rank, spec.size))

    def _forked(self, group: WorkerGroup, rank: int, pid: int) -> Forked:
        """Return the process of a rank; that of a spare has no host of its own."""
        emulated = "" if group.spec is None else self._hosts.name(group.spec.replica, rank, group.size)
        return Forked(pid, self._forks, self._machine, emulated or self._machine)

    async def _fork(self, group: WorkerGroup) -> None:
        shared = {
            **ONE_THREAD,
            "WORLD_SIZE": str(group.size),
            "LOCAL_WORLD_SIZE": str(group.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        spec = group.spec
        for rank in range(group.size):
            if group.gone:
                break

            hosted = self._hosts.environment(rank, group.size)

            def gone(pid: int, code: int, rank: int = rank) -> None:
                group.exited(rank, self._forked(group, rank, pid), code)

            pid = await self._forks.spawn(
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **hosted},
                config=group.config,
                log=self._pool.log(group, rank) if spec is None else self._run.rank_log(spec.replica, rank),
                on_exit=gone,
                assignment=None if spec is None else self._assignment(spec, rank),
                on_warm=lambda _, rank=rank: group.warm(rank),  # type: ignore[misc]
            )
            group.started(rank, self._forked(group, rank, pid))
