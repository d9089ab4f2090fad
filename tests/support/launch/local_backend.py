"""The backend of one machine: ranks are forked from a preloaded process, and start in a fraction of a second.

The ranks of a replica get their incarnation at once, those of a spare when a replica needs them. With
`hosts.per_replica` the machine stands for several hosts: each has a name, which its ranks get with their
incarnation, and a state agent, which its first rank starts. Spare hosts have one from the start.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ft_hsdp import fault_injection
from ft_hsdp.launch.backend import gpus as gpu_shares
from ft_hsdp.launch.backend.base import COLD, WARM, WARMING, ProcessWatch, ReplicaSpec, WorkerGroup, assignment
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD, SPAWN_S, ForkServer
from ft_hsdp.launch.backend.gpus import GpuShares
from ft_hsdp.launch.backend.processes import ONE_THREAD, free_port
from ft_hsdp.launch.backend.ranks import Forked
from ft_hsdp.launch.backend.spares import SparePool
from ft_hsdp.launch.run.directory import Row, RunDir, supervised
from tests.support.launch.emulated_hosts import EmulatedHosts, HostSwap


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
        emit: Callable[[Row], None] = lambda _: None,
        quiet_s: float = 0.0,
        hosts: EmulatedHosts | None = None,
        shrink_to: int | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Make the backend; nothing is started before `open`.

        Args:
            run: The run's directory.
            entry: What a rank runs, as `ForkServer` takes it; so are ``preload``, ``boot_s`` and ``spawn_s``.
            preload: Modules that the fork server imports.
            boot_s: Longest time for that, in seconds.
            spawn_s: Longest time for a fork, in seconds.
            spares: How many spares are kept warm.
            emit: Takes each event.
            quiet_s: How long no replica may have started before a spare is made, in seconds.
            hosts: For which hosts this machine stands; None: for itself.
            shrink_to: `memory.shrink_to`.
            gpus: What ranks compute on, by the names that CUDA_VISIBLE_DEVICES takes; (): on the CPU.
        """
        self._run = run
        self._emit = emit
        self._forks = ForkServer(
            run.path, entry=entry, preload=preload, boot_s=boot_s, spawn_s=spawn_s, lost=self._lost
        )
        self._machine = socket.gethostname()
        self._hosts = hosts or EmulatedHosts()
        self._shrink_to = shrink_to
        self._wait_for_host: set[int] = set()  # replicas
        self._uncalled: dict[str, int] = {}  # spare hosts that a replica has got, and the replica
        self._gpus = GpuShares(gpus)
        self._pool = SparePool(spares, run.spares, self._fork, emit, quiet_s)

    @property
    def server_pid(self) -> int | None:
        """Return the pid of the fork server; None if it does not run."""
        return self._forks.pid

    @property
    def warm(self) -> bool:
        return self._pool.ready

    async def open(self) -> None:
        """Start the fork server, which loads what ranks need. Raises Retryable."""
        await self._forks.start()

    async def place(self, replica: int) -> None:
        """Give the ranks of lost hosts to spare hosts; if there are too few, wait for hosts that come back."""
        self._wait_for_host.add(replica)
        try:
            while True:
                swaps = self._hosts.place(replica, *self._away(replica))
                if swaps is not None:
                    break
                await asyncio.sleep(fault_injection.LOOK_S)
        finally:
            self._wait_for_host.discard(replica)
        for swap in swaps:
            if swap.lender is None:
                self._uncalled[swap.spare] = replica
            else:
                reason = f"replica {swap.lender} has no host for all its ranks, and waits for {swap.lost} now, too"
                self._event("HostLent", swap.lender, swap.spare, reason, to=replica)
            self._tell_swap(replica, swap)

    def shrink(self, replica: int, least: int) -> int:
        """Place a replica on the hosts that it has left; return its ranks there, 0 if it has to wait."""
        if self._shrink_to is None:
            return 0
        return self._hosts.shrink(replica, *self._away(replica), max(least, self._shrink_to))

    def lend(self, replica: int) -> None:
        """Let other replicas have the hosts of one that waits for others."""
        self._hosts.lend(replica)

    def could_grow(self, replica: int) -> bool:
        """Return whether there is a place for all ranks of a replica that goes on with fewer."""
        return self._hosts.could_grow(replica, *self._away(replica))

    def vacancy(self, replica: int) -> str:
        """Return which hosts of a replica are down or cordoned, and how many spare hosts there are."""
        if self._hosts.per_replica is None:
            down = ", ".join(fault_injection.hosts_down(self._run.path, replica))
            return f"host {down} is down, by chaos" if down else ""
        return self._hosts.vacancy(replica, fault_injection.hosts_down(self._run.path))

    def lost_hosts(self, replica: int) -> tuple[str, ...]:
        """Return the hosts of a replica that are down at this moment; its ranks there move, if there is where."""
        return self._hosts.lose(replica, fault_injection.hosts_down(self._run.path))

    def cordon(self, replica: int, host: str, reason: str, waits: bool) -> bool:
        """Give a host no ranks any more; return False if its replica cannot do without it, and does not wait."""
        hosts, down = self._hosts, fault_injection.hosts_down(self._run.path)
        spare = hosts.spare_for(host, down) or (waits and hosts.may_wait)
        if not spare and not hosts.can_lose(replica, host, down, self._shrink_to):
            return False
        self._hosts.cordon(host, reason)
        self._event("HostCordoned", replica, host, reason)
        return True

    def vacated(self, replica: int) -> None:
        """Let other replicas have the hosts of one that is drained or given up, until it comes back."""
        self._hosts.vacate(replica)

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
        """Let the pool make spares again: this incarnation trains, has ended, or has had its time to start."""
        self._pool.settled(spec)

    def committed(self, spec: ReplicaSpec) -> None:
        """Do nothing: agents of hosts outlive ranks, so no place depends on it."""

    async def close(self) -> None:
        """End the fork server and all processes that it started, and the agents of spare hosts."""
        await self._pool.close()
        await self._forks.close()

    def _lost(self, pid: int, why: str) -> None:
        reason = f"{why}: another one is started beside it, its ranks go on"
        self._emit(supervised("ForkServerLost", reason, pid=pid))

    def _away(self, replica: int) -> tuple[list[str], set[int]]:
        """Return what `EmulatedHosts.place` asks for besides the replica."""
        down = fault_injection.hosts_down(self._run.path, replica if self._hosts.per_replica is None else None)
        return down, self._wait_for_host - {replica}

    def _tell_swap(self, replica: int, swap: HostSwap) -> None:
        ranks = ", ".join(map(str, swap.ranks))
        why = self._hosts.cordoned.get(swap.lost) or f"host {swap.lost} is lost"
        reason = (
            f"{why}; rank {ranks} starts there" if len(swap.ranks) == 1 else f"{why}; ranks {ranks} start there"
        )
        self._event("HostReplaced", replica, swap.spare, reason, before=swap.lost, ranks=list(swap.ranks))

    def _event(self, name: str, replica: int, host: str, reason: str, **fields: Any) -> None:
        self._emit(supervised(name, reason, replica=replica, host=host, **fields))

    def _assignment(self, spec: ReplicaSpec, rank: int) -> dict[str, Any]:
        hosts = self._hosts.of(spec.replica)
        return assignment(spec, rank, self._run, hosts, hosts[rank] if hosts else "")

    def _forked(self, group: WorkerGroup, rank: int, pid: int) -> Forked:
        """Return the process of a rank; that of a spare has no host of its own."""
        hosts = () if group.spec is None else self._hosts.of(group.spec.replica)
        return Forked(pid, self._forks, self._machine, hosts[rank] if hosts else self._machine)

    async def _fork(self, group: WorkerGroup) -> None:
        shared = {
            **ONE_THREAD,
            "WORLD_SIZE": str(group.size),
            "LOCAL_WORLD_SIZE": str(group.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        spec = group.spec
        chosen = list(self._gpus.take(group.size))
        shared |= gpu_shares.environment(chosen)
        left = dict(enumerate(chosen))  # of ranks that were not started
        try:
            for rank in range(group.size):
                if group.gone:
                    break

                def gone(pid: int, code: int, rank: int = rank) -> None:
                    if chosen:
                        self._gpus.leave(chosen[rank])
                    group.exited(rank, self._forked(group, rank, pid), code)

                pid = await self._forks.spawn(
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    config=group.config,
                    log=self._pool.log(group, rank) if spec is None else self._run.rank_log(spec.replica, rank),
                    on_exit=gone,
                    assignment=None if spec is None else self._assignment(spec, rank),
                    on_warm=lambda _, rank=rank: group.warm(rank),  # type: ignore[misc]
                )
                left.pop(rank, None)
                group.started(rank, self._forked(group, rank, pid))
        finally:
            for gpu in left.values():
                self._gpus.leave(gpu)
