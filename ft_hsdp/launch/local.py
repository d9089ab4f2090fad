"""`up`: a whole job on this machine; and what must be right here before a job starts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from ft_hsdp import fault_injection
from ft_hsdp.config import Config
from ft_hsdp.config.entry import stamped
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.agent import HostAgent, agent_path
from ft_hsdp.launch.backend.base import WorkerProcess
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD, ForkServer
from ft_hsdp.launch.backend.gpus import check_device, gpus_here
from ft_hsdp.launch.backend.ranks import HeldRanks, LocalRanks
from ft_hsdp.launch.job import Replicas, prepare_data, run_job, start_run
from ft_hsdp.launch.lighthouse_process import check_port, reach
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir, supervised
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.memory.copies import MemberHosts, unmet
from ft_hsdp.memory.hosts import DOMAINS_VARIABLE, SLURM_VARIABLE, Host
from ft_hsdp.protocol import ProcessReport, SupervisorReply
from ft_hsdp.train.identity import HOST_VARIABLE, host_path


def up(config: Config, *, stream: TextIO | None = None) -> tuple[int, Summary | None]:
    """Run a job on this machine until every replica is done. Blocks.

    Args:
        stream: Where the progress is shown; None: stdout.

    Returns:
        The exit code, and the summary if there is one. The code is 0; 75 if replicas were lost; 64 if a rank
        refused its configuration; 130 or 143 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: The job cannot run here; nothing was started.
    """
    config = stamped(config)
    check_port(config)
    check_device(config)
    check_copies(config)
    prepare_data(config)
    run = start_run(config)
    return run_job(config, run, partial(LocalReplicas, config, run), stream or sys.stdout)


@dataclass(frozen=True, slots=True)
class LocalHost:
    """A host for which this machine stands, or what it has of one replica."""

    path: str
    replica: int | None = None  # it is of this replica alone
    home: tuple[int, int] | None = None  # as `HostAgent` takes it

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def local_hosts(config: Config, environment: Mapping[str, str]) -> list[LocalHost]:
    """Return the hosts for which this machine stands: those of replicas, then the spare ones.

    Spare replicas have hosts, too, if the configuration says how many hosts a replica has: they come last.

    Raises:
        ConfigError: `hosts.labels` or the environment cannot be used.
    """
    hosts, per_replica = config.hosts, hosts_of_a_replica(config, environment)
    if per_replica is None:
        return [LocalHost(agent_path(config, environment, n), n, (n, 0)) for n in range(config.slots)]

    def path(name: str) -> str:
        return agent_path(config, {**environment, HOST_VARIABLE: name})

    homes = [(replica, place) for replica in range(config.slots) for place in range(per_replica)]
    spare = hosts.spare + config.spares // config.ranks_per_replica * (hosts.per_replica or 0)
    named = [LocalHost(path(f"r{replica}h{place}"), home=(replica, place)) for replica, place in homes]
    return named + [LocalHost(path(f"s{n}")) for n in range(spare)]


class _HostDown(Exception):
    """The host is down, by chaos: its agent ends at once, with its ranks."""


class _HostClient(LighthouseClient):
    """A host's connection to the lighthouse: one that is down, by chaos, says nothing."""

    def __init__(self, down: Callable[[], bool], *about: Any) -> None:
        super().__init__(*about)
        self._down = down

    async def report(self, processes: ProcessReport) -> SupervisorReply:
        if self._down():
            raise _HostDown
        return await super().report(processes)


class LocalReplicas(Replicas):
    """Runs the replicas of a job on this machine: an agent for each host for which it stands."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        progress: Progress,
        emit: Callable[[Row], None],
        entry: str = ENTRY,
        preload: tuple[str, ...] = PRELOAD,
    ) -> None:
        """Prepare, as `Replicas` does.

        Args:
            entry: What runs in a rank, as in `ForkServer`.
            preload: The modules that the fork server imports before those of the configuration.
        """
        super().__init__(config, run, progress, emit)
        self._forks = ForkServer(
            run.path,
            entry=entry,
            preload=(*preload, *config.preload),
            boot_s=config.timeouts.boot_s,
            spawn_s=config.timeouts.spawn_s,
            lost=self._fork_server_lost,
        )
        self._ranks = LocalRanks(config, run, self._forks, gpus=gpus_here(config), emit=emit)
        self._agents: dict[str, HostAgent] = {}  # by host
        self._heard: set[str] = set()  # hosts that a lighthouse has answered
        self._live: set[str] = set()  # hosts whose agents run
        self._ended = False  # an agent has no part in the job any more

    async def open(self) -> None:
        await self._forks.start()

    async def run(self, urls: tuple[str, ...]) -> None:
        """Run the agents of all hosts until none has a part in the job any more."""
        hosts, client = local_hosts(self._config, os.environ), LighthouseClient(*self._reach(urls))
        try:
            async with self._reporting(client), asyncio.TaskGroup() as group:
                for host in hosts:
                    before = {each.name for each in hosts if each.home} if host.home is None else set[str]()
                    group.create_task(self._host(host, urls, before))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def running(self) -> list[int]:
        newest = {replica: self._newest(replica) for replica in range(self._config.slots)}
        return [n for n, held in newest.items() if held and sum(len(e.living) for e in held) == held[0].spec.size]

    def ranks(self, replica: int) -> tuple[str, dict[int, WorkerProcess]]:
        held = self._newest(replica)
        return held[0].name if held else "", {rank.rank: rank.process for each in held for rank in each.living}

    def stay_away(self, replica: int, until_step: int) -> None:
        self._progress.stay_away(replica, until_step)

    def stop(self, number: int) -> None:
        self._stopping = True
        for agent in self._agents.values():
            agent.stop(number)
        self._progress.wake()

    async def close(self) -> None:
        await self._ranks.close()

    async def _host(self, host: LocalHost, urls: tuple[str, ...], before: Collection[str]) -> None:
        """Run the agent of a host, as long as chaos leaves that there, until it ends."""
        await self._progress.wait_for(lambda: self._heard >= {*before} or self._stopping)
        while True:
            await self._while(host, down=True)
            if self._over:
                return
            client = _HostClient(partial(self._is_down, host), *self._reach(urls))
            agent = self._agents[host.name] = HostAgent(
                self._config,
                self._run,
                self._ranks,
                client,
                host.path,
                replica=host.replica,
                home=host.home,
                emit=self._emit,
                news=lambda reply: self._news(host, reply),
                may_start=self._may_start,
            )
            self._live.add(host.name)
            tasks = asyncio.create_task(agent.run()), asyncio.create_task(self._while(host, down=False))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(held.gone(self._config.timeouts.gone_s) for held in agent.held.values()))
                await client.close()
                self._live.discard(host.name)
            if isinstance(found[0], Exception) and not isinstance(found[0], _HostDown):
                raise found[0]
            if not isinstance(found[0], BaseException):
                self._ended = True
                self._progress.wake()
                return

    async def _while(self, host: LocalHost, *, down: bool) -> None:
        """Wait while a host is down, by chaos, or while it is not."""
        while self._is_down(host) is down:
            if await self._progress.wait_for(lambda: self._over, fault_injection.LOOK_S):
                break
        if self._over and not down:
            await asyncio.Event().wait()  # its agent ends by itself

    @property
    def _over(self) -> bool:
        """Return whether no agent is started any more: one has ended by itself, and none runs."""
        return self._stopping or (self._ended and not self._live)

    def _is_down(self, host: LocalHost) -> bool:
        """Return whether a host is down, by chaos; that of one replica is if any of the replica's is."""
        down = fault_injection.hosts_down(self._run.path, host.replica)
        return bool(down) if host.replica is not None else host.name in down

    async def _may_start(self, replica: int) -> None:
        """Wait for the steps of `stay_away`, while others commit any."""

        def over() -> bool:
            return self._stopping or not any(other != replica for other in self.running())

        await self._progress.may_start(replica, self._config.timeouts.stalled_s, over)

    def _news(self, host: LocalHost, reply: SupervisorReply) -> None:
        self._heard.add(host.name)
        self._take(reply)
        self._progress.wake()

    def _reach(self, urls: tuple[str, ...]) -> tuple[Any, ...]:
        return reach(self._config, self._run, urls, self._config.timeouts.evict_s / 3)

    def _newest(self, replica: int) -> list[HeldRanks]:
        """Return what all hosts have of the newest incarnation of a replica."""
        held = [each for agent in self._agents.values() for each in agent.held.values() if each.replica == replica]
        newest = max((each.began, each.name) for each in held)[1] if held else ""
        return [each for each in held if each.name == newest]

    def _fork_server_lost(self, pid: int, why: str) -> None:
        reason = f"{why}: another one is started beside it, its ranks go on"
        self._emit(supervised("ForkServerLost", reason, pid=pid))


def hosts_of_a_replica(config: Config, environment: Mapping[str, str]) -> int | None:
    """Return for how many hosts of each replica this machine stands: one, if nothing says otherwise.

    Args:
        config: The job's configuration, whose `hosts.per_replica` comes first.
        environment: Of this process.

    Returns:
        None if the machine stands for itself alone, because a variable says which host it is, or where it stands.
    """
    said = any(environment.get(name) for name in (HOST_VARIABLE, DOMAINS_VARIABLE, SLURM_VARIABLE))
    return config.hosts.per_replica or (None if said else 1)


def check_copies(config: Config) -> None:
    """Compare `memory.copies` with the hosts for which this machine stands.

    Raises:
        ConfigError: They cannot hold so many copies.
    """
    memory, ranks, per_replica = config.memory, config.ranks_per_replica, hosts_of_a_replica(config, os.environ)
    if memory.copies is None or memory.copies == 1:
        return

    def host(replica: int, rank: int) -> Host:
        named = {} if per_replica is None else {HOST_VARIABLE: f"r{replica}h{rank // (ranks // per_replica)}"}
        return Host.parse(host_path(config.hosts.labels, {**os.environ, **named}))

    members = [MemberHosts(r, tuple(host(r, k) for k in range(ranks)), True) for r in range(config.replicas)]
    if allowed := unmet(members, memory.copies, memory.apart):
        raise ConfigError("memory.copies", memory.copies, allowed)
