"""The ranks of a machine: those of each incarnation that a host was assigned, and spares that are warm.

`HeldRanks` is what one host has of an incarnation. `LocalRanks` starts ranks: it has the fork server, the GPUs
and the spares of a machine, which the hosts share for which the machine stands.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp import address
from ft_hsdp.config import Config
from ft_hsdp.core.host_report import AssignedRanks, EndedRank, HostRanks
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import LEAVING, Cause, IncarnationId, exit_in_words, own_fault
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_USAGE, LighthouseUnreachable
from ft_hsdp.launch.backend import gpus as gpu_shares
from ft_hsdp.launch.backend import rank_end
from ft_hsdp.launch.backend.base import (
    COLD,
    WARM,
    WARMING,
    Forks,
    RankProcess,
    ReplicaSpec,
    WorkerGroup,
    WorkerProcess,
    assignment,
    exit_line,
)
from ft_hsdp.launch.backend.forkserver import OnExit
from ft_hsdp.launch.backend.gpus import GpuShares
from ft_hsdp.launch.backend.held import KeptRank
from ft_hsdp.launch.backend.processes import ONE_THREAD, free_port, stands_still
from ft_hsdp.launch.backend.rank_end import KernelLog
from ft_hsdp.launch.backend.spares import SparePool
from ft_hsdp.launch.progress import Changes
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer, read_json, supervised, write_json_later

WHY = 400  # characters of a reason in a report
Watch = Callable[[int, OnExit], None]
FED_BYTES = 4096  # of the end of a log of what was fed


@dataclass(frozen=True, slots=True)
class Forked:
    """A rank that the fork server started; a `WorkerProcess`."""

    pid: int
    server: Forks
    machine: str
    host: str

    def signal(self, number: int) -> None:
        self.server.signal(self.pid, number)


class HeldRanks(Changes):
    """The ranks of an incarnation that a host was assigned; it keeps them in mind after their end.

    Tasks wait for changes with `wait_for`.
    """

    def __init__(
        self,
        assigned: AssignedRanks,
        config: Path,
        run: RunDir,
        changed: Callable[[], None] = lambda: None,
        emit: Callable[[Row], None] = lambda _: None,
        evidence: Callable[[], str] = lambda: "",
    ) -> None:
        """Begin without processes.

        Args:
            config: The YAML file that the ranks load.
            changed: Called after each end.
            emit: Takes the event of a rank that ended by itself.
            evidence: Says in one line that this machine's hardware is broken; "": nothing says so.

        Raises:
            LighthouseUnreachable: It is no incarnation.
        """
        who = IncarnationId.parse(assigned.incarnation)
        if who is None:
            raise LighthouseUnreachable(f"the lighthouse assigns {assigned.incarnation!r}")
        super().__init__()
        spec = ReplicaSpec(who.replica, len(assigned.hosts), who.run_id, who.restarts, config, assigned.fatal)
        self.spec = spec
        self.assigned = assigned
        self.ranks: dict[int, RankProcess] = {}
        self.began = time.monotonic()
        self.wanted = True  # the newest assignment has it
        self.reported = False  # the lighthouse knows how all its ranks have ended
        self.kept = True  # so does the holder, for another agent of this host
        self.starting = set(assigned.ranks)  # ranks without a process, until all are started
        self.how = ""  # they were started; "": not all of them are
        self.failed = ""
        self.leaving = False  # its ranks were told to leave
        self.dropped = False  # its ranks were killed
        self.ends: list[EndedRank] = []
        self.fed: tuple[Run | None, bool] = None, False  # as `last_fed` has it
        self.beside: list[HeldRanks] = [self]  # of all hosts on this machine that have ranks of the incarnation
        self._stopped: dict[int, float] = {}  # rank -> since when it is seen to be stopped
        self._killed: dict[int, float] = {}  # rank -> since when it ought to be gone
        self._why: dict[int, str] = {}  # rank -> why it was killed
        self._run = run
        self._report_end = changed
        self._emit = emit
        self._evidence = evidence

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def replica(self) -> int:
        return self.spec.replica

    @property
    def living(self) -> list[RankProcess]:
        """Return the ranks that have not exited."""
        return [rank for rank in self.ranks.values() if rank.state == "running"]

    @property
    def over(self) -> bool:
        """Return whether no rank runs, and none is started."""
        return not self.starting and not self.living

    def final(self) -> dict[str, Any]:
        """Return what it has written here of its last state, of the job or of the replica; {}: nothing yet."""
        found = read_json(self._run.final(self.replica)) or {}
        return found if found.get("incarnation") == self.name else {}

    def report(self) -> HostRanks:
        living = {*self.starting, *(rank.rank for rank in self.living)}
        final = self.final()
        done = self.over and bool(final) and (not self.leaving or bool(final.get("of_job")))
        ends, pids = tuple(self.ends), tuple(rank.pid for _, rank in sorted(self.ranks.items()))
        return HostRanks(self.name, tuple(sorted(living)), ends, self.failed, done, *self.fed, self.how, pids)

    def started(self, rank: int, process: WorkerProcess) -> None:
        self.ranks[rank] = RankProcess(rank, process)
        self.wake()
        self.starting.discard(rank)
        if self.dropped:  # since the fork was ordered
            self.kill()
        elif self.leaving:
            process.signal(signal.SIGTERM)

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        gone = self.ranks[rank]
        if gone.state == "exited":
            return  # it was given up before
        gone.state, gone.code = "exited", code
        # With another code it had ended by itself, and is only heard of now.
        gone.killed = gone.killed and code == -signal.SIGKILL
        self.wake()
        # One that a signal ended says nothing.
        said = rank_end.told(self._run, self.replica, rank, self.name) if code > 0 else None
        line = exit_line(rank, code, self._run.rank_log(self.replica, rank))
        why = said.error if said else self._why.get(rank) or line.partition(": ")[2]
        cause = said.cause if said else ""
        first = not any(not each.killed for each in self.ends) and not gone.killed
        if own_fault(code) and code not in (EXIT_CONFIG, EXIT_USAGE) and (broken := self._evidence()):
            why, cause = f"{broken}; {why}", Cause.HARDWARE
        self.ends.append(EndedRank(rank, code, gone.killed, cause, why[:WHY]))
        if first:
            facts = {"replica": self.replica, "incarnation": self.name, "rank": rank, "pid": gone.pid}
            self._emit(supervised("ProcessExited", self._why.get(rank, line), kind=exit_in_words(code), **facts))
        if code not in LEAVING and not self.leaving:
            self.kill()  # a replica without one of its ranks commits nothing
        if self.over and 0 in self.assigned.ranks:
            self.fed = last_fed(self._run, self.replica, self.name)
        self.write()
        self._report_end()

    def leave(self, within_s: float) -> None:
        """Tell the ranks to leave the job, once; kill them if they have not within ``within_s`` seconds."""
        if not self.leaving:
            self.leaving = True
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)  # a stopped process does not handle SIGTERM
            asyncio.get_running_loop().call_later(within_s, self.kill)

    def end_stopped(self, longest_s: float) -> None:
        """Kill a rank that has been stopped (SIGSTOP) for ``longest_s`` seconds."""
        now = time.monotonic()
        for rank in self.living:
            if not stands_still(rank.pid, rank.process.machine):
                self._stopped.pop(rank.rank, None)
            elif now - self._stopped.setdefault(rank.rank, now) >= longest_s:
                why = f"rank {rank.rank} has been stopped for {now - self._stopped.pop(rank.rank):.1f} s"
                self._why[rank.rank] = why
                facts = {"replica": self.replica, "incarnation": self.name}
                self._emit(supervised("EvictionOrdered", why, **facts))
                self._killed.setdefault(rank.rank, now)
                rank.process.signal(signal.SIGKILL)

    def give_up(self, longest_s: float) -> None:
        """Count a rank as ended by broken hardware that SIGKILL has not ended for ``longest_s`` seconds.

        It does nothing more, but the kernel keeps it: it waits for a device or a disk.
        """
        now = time.monotonic()
        for rank in self.living:
            if now - self._killed.get(rank.rank, math.inf) >= longest_s:
                self._why[rank.rank] = f"SIGKILL does not end process {rank.pid}; a device or a disk hangs"
                self.exited(rank.rank, rank.process, EXIT_HARDWARE)

    async def gone(self, longest_s: float | None = None) -> None:
        await self.wait_for(lambda: self.over, longest_s)

    def kill(self) -> None:
        """Send SIGKILL to all ranks, and start no other one."""
        self.dropped = True
        for rank in self.living:
            rank.killed = True
            self._killed.setdefault(rank.rank, time.monotonic())
        self.send(signal.SIGKILL)  # it also ends stopped ones

    def send(self, number: int) -> None:
        """Send a signal to every rank that has not exited."""
        for rank in self.living:
            rank.process.signal(number)

    def write(self) -> None:
        """Write processes.json for `status`, with all ranks on this machine, which may stand for several hosts."""
        ranks = [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "host": rank.process.host,
                "machine": rank.process.machine,
                "state": rank.state,
            }
            for rank in sorted(
                (r for held in self.beside for r in held.ranks.values()), key=lambda rank: rank.rank
            )
        ]
        document = {
            "replica": self.replica,
            "incarnation": self.name,
            "restarts": self.spec.restarts,
            "ranks": ranks,
        }
        write_json_later(self._run.processes(self.replica), document)


class LocalRanks:
    """Starts ranks on this machine: from spares that are warm, or else from the fork server."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        forks: Forks,
        *,
        gpus: Sequence[str] = (),
        file: Path | None = None,
        spares: Path | None = None,
        whole: bool = True,
        lone: int | None = None,
        emit: Callable[[Row], None] = lambda _: None,
    ) -> None:
        """Make it; nothing is started.

        Args:
            forks: From which ranks are forked; `close` closes it.
            gpus: On which ranks compute; (): on the CPU.
            file: The YAML file that ranks load; None: that of the run.
            spares: The folder of the spares' files; None: that of the run.
            whole: All hosts of a replica may be on this machine: a spare may be any replica.
            lone: It is one host for all ranks of a replica, which keeps a spare only while it has none of another
                (`HostAgent`): the number before that of its first one.
            emit: Takes each event of a spare.
        """
        self.file = file or run.config
        self.forks = forks
        self._run = run
        self._ranks = config.ranks_per_replica
        self._each = config.ranks_per_replica // (config.hosts.per_replica or 1)  # on one host
        self._gpus = GpuShares(gpus)
        wanted = config.spares // config.ranks_per_replica if whole and lone is None else 0
        self.kernel_log = KernelLog()
        self.lone = lone is not None and config.spares > 0
        self.pool = SparePool(
            *(wanted, spares or run.spares, self._fork_spare, emit, config.timeouts.hold_s), first=lone or 0
        )
        # By replica: the spare that its newest incarnation is, if it is one, and what the hosts have of it.
        self._newest: dict[int, tuple[WorkerGroup | None, list[HeldRanks]]] = {}

    def keep_spares(self) -> None:
        """Make spares from now on, if there are to be some."""
        self.pool.settled(ReplicaSpec(0, self._ranks, "", 0, self.file))

    async def start(self, held: HeldRanks, host: str, named: bool) -> None:
        """Assign the ranks of a spare, or else fork all of them.

        Args:
            held: What a host was assigned. It hears of each start and end, and says how that was done.
            named: The ranks are told the names of the replica's hosts.

        Raises:
            Retryable: A rank cannot be started; others may run then.
            OSError: No port is free.
        """
        spec, assigned = held.spec, held.assigned
        hosts = (assigned.hosts, host) if named else ()
        group, beside = self._newest.get(held.replica, (None, []))
        if not any(each.name == held.name for each in beside):
            group, beside = self.pool.take(lambda group: group.complete and group.size == spec.size), []
            self._newest[held.replica] = group, beside
            if self.lone:
                self.pool.want(0)
        beside.append(held)
        held.beside = beside
        if group is None:
            group = WorkerGroup(spec.size, spec.config, spec)
            group.given(held)
            await self._fork(group, assigned.ranks, assigned.master, hosts, host, held)
            held.how = COLD
            return
        held.how = WARM if group.ready else WARMING
        group.spec = spec
        for rank in assigned.ranks:
            process = group.processes[rank]
            self.forks.assign(process.pid, assignment(spec, rank, self._run, *hosts))
            group.processes[rank] = self._forked(process.pid, host)
        group.given(held, assigned.ranks)

    def resume(self, held: HeldRanks, host: str, kept: Mapping[int, KeptRank], watch: Watch) -> None:
        """Take over the ranks of an incarnation that an earlier agent of this host has started.

        ``held`` hears of them, and how they ended, also before. They are killed if some were not started.
        """
        group = WorkerGroup(held.spec.size, held.spec.config, held.spec)
        group.given(held)
        self._newest[held.replica] = group, [held]
        for pid, rank in kept.items():
            number, process = int(rank.env["RANK"]), self._forked(pid, host)
            held.how = WARM if rank.spare else COLD
            group.started(number, process)
            held.ranks[number].killed = rank.killed
            if rank.code is None:
                gpu = self._gpus.hold(rank.env)
                watch(pid, self._ended(group, number, host, gpu))
        if held.starting:
            held.failed = "the agent of its host ended while it started them"
            held.starting.clear()
            held.kill()
        for pid, rank in kept.items():
            if rank.code is not None:
                group.exited(int(rank.env["RANK"]), self._forked(pid, host), rank.code)
        held.write()

    async def close(self) -> None:
        """End all ranks and spares."""
        await self.pool.close()
        await self.forks.close()
        self.kernel_log.close()

    async def _fork_spare(self, group: WorkerGroup) -> None:
        """Start the ranks of a spare, each as on a host of its own where a replica has several."""
        master = f"127.0.0.1:{free_port()}"
        for first in range(0, group.size, self._each):
            await self._fork(group, range(first, first + self._each), master, (), socket.gethostname())

    async def _fork(
        self,
        group: WorkerGroup,
        ranks: Sequence[int],
        master: str,
        hosts: Sequence[Any],
        name: str,
        held: HeldRanks | None = None,
    ) -> None:
        """Start ranks of a group, of an incarnation or of a spare, until one ends or has to."""
        chosen = self._gpus.take(len(ranks))
        left = dict(enumerate(chosen))  # of ranks that were not started
        host, port = address.split(master)
        shared = {
            **ONE_THREAD,
            "WORLD_SIZE": str(group.size),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            **gpu_shares.environment(chosen),
        }
        spec = group.spec
        try:
            for local, rank in enumerate(ranks):
                if group.gone or (held is not None and (held.dropped or held.leaving)):
                    break
                gpu = chosen[local] if chosen else ""
                pid = await self.forks.spawn(
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(local)},
                    config=group.config,
                    log=self.pool.log(group, rank) if spec is None else self._run.rank_log(spec.replica, rank),
                    on_exit=self._ended(group, rank, name, gpu),
                    assignment=None if spec is None else assignment(spec, rank, self._run, *hosts),
                    on_warm=lambda _, rank=rank: group.warm(rank),  # type: ignore[misc]
                )
                left.pop(local, None)
                group.started(rank, self._forked(pid, name))
        finally:
            for gpu in left.values():
                self._gpus.leave(gpu)

    def _ended(self, group: WorkerGroup, rank: int, host: str, gpu: str) -> OnExit:
        """Return what takes the exit of a rank, which has used a GPU."""

        def exited(pid: int, code: int) -> None:
            self._gpus.leave(gpu)
            group.exited(rank, self._forked(pid, host), code)

        return exited

    def _forked(self, pid: int, host: str) -> Forked:
        return Forked(pid, self.forks, socket.gethostname(), host)


def in_flight(run: RunDir, replica: int, incarnation: str, committed: int) -> Run | None:
    """Return the units that an incarnation has fed last, unless they are of a step that is ``committed``."""
    fed = [row for row in Tailer(run.fed(replica)).newest(FED_BYTES) if row.get("incarnation") == incarnation]
    if not fed or int(fed[-1].get("step", 0)) <= committed:
        return None
    return int(fed[-1]["shard"]), int(fed[-1]["index"]), int(fed[-1]["units"])


def last_fed(run: RunDir, replica: int, incarnation: str) -> tuple[Run | None, bool]:
    """Return the units that an incarnation had in flight, and whether its gradients have changed the weights."""
    newest = Tailer(run.commits(replica)).newest(4 * FED_BYTES)
    rows = [row for row in newest if row.get("incarnation") == incarnation]
    usable = any(row.get("role") == "contribute" and replica not in row.get("poisoned", ()) for row in rows)
    return in_flight(run, replica, incarnation, max((row.get("step", 0) for row in rows), default=0)), usable
