"""The replicas of a job on a cluster: hosts for them, and what the lighthouse says of the job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, FtHsdpError, LighthouseUnreachable
from ft_hsdp.launch import admin
from ft_hsdp.launch.backend.base import WorkerProcess
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.job import JobEnd, Replicas
from ft_hsdp.launch.lighthouse_process import reach
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.ray.actor import ActorSetup
from ft_hsdp.launch.ray.cluster import Cluster
from ft_hsdp.launch.ray.hosts import RayHosts
from ft_hsdp.launch.ray.placement import prefix
from ft_hsdp.launch.run import status
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.protocol import ProcessReport, SupervisorReply

PERIOD_S = 0.25  # between two looks at how far the job is
TELL_S = 1.0  # before the lighthouse is told again that a host is lost


def actor_name(job: str) -> str:
    """Return the name of the `StatusActor` of a job, which no two running jobs of a cluster share."""
    return f"{prefix(job)}-status"


class StatusActor:
    """Says on the driver's node, to all nodes, how a job is doing."""

    def __init__(self, run: str) -> None:
        """Open the run directory `run`."""
        self._run = RunDir(Path(run))

    def status(self) -> tuple[status.Status, list[str]]:
        """Return the job's status, and the lines that show it to people."""
        picture = status.status(self._run)
        return picture, status.lines(self._run, picture)


class RayReplicas(Replicas):
    """Runs the replicas of a job on a cluster. All methods belong to the driver's event loop."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        progress: Progress,
        emit: Callable[[Row], None],
        cluster: Cluster,
        entry: str = ENTRY,
    ) -> None:
        """Prepare, as `Replicas` does.

        Args:
            cluster: Where this process is connected.
            entry: What runs in a rank, as in `ForkServer`.
        """
        super().__init__(config, run, progress, emit)
        waits, modules = config.timeouts, (*PRELOAD, *config.preload)
        setup = ActorSetup(config.job.name, config.ray, cluster.cwd, entry, modules, waits.boot_s, waits.spawn_s)
        self._node = cluster.node
        self._status: Any = None  # the actor
        self._hosts = RayHosts(config, run, cluster, setup, emit, self._lost)

    @property
    def end(self) -> JobEnd:
        return replace(super().end, wrong=self._hosts.wrong or super().end.wrong)

    async def open(self) -> None:
        """Take the job's name in the cluster; hosts follow once the lighthouse says which replicas are wanted.

        Raises:
            ConfigError: A running job of the cluster has this name.
        """
        options = {
            "name": actor_name(self._run.name),
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node, soft=False),
            "enable_task_events": False,
        }
        try:
            self._status = ray.remote(StatusActor).options(**options).remote(str(self._run.path))
        except ValueError:
            allowed = "a name that no running job of this cluster has"
            raise ConfigError("job.name", self._run.name, allowed) from None

    async def run(self, urls: tuple[str, ...]) -> None:
        """Provide hosts until none has a part in the job any more."""
        waits, hosts = self._config.timeouts, self._hosts
        hosts.urls = urls
        until: float | None = None
        async with self._reporting(LighthouseClient(*reach(self._config, self._run, urls, 0.0))) as client:
            while not hosts.failed:
                with contextlib.suppress(LighthouseUnreachable):
                    self._take(await client.report(ProcessReport()))
                if self._ending:
                    until = until or time.monotonic() + waits.stop_s + waits.save_s + waits.gone_s
                    if hosts.end() or time.monotonic() > until:
                        return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await hosts.woken.wait()
                hosts.woken.clear()
            raise hosts.failed[0]

    def running(self) -> list[int]:
        return [n for n in range(self._config.slots) if len(self.ranks(n)[1]) == self._hosts.newest(n)[1]]

    def ranks(self, replica: int) -> tuple[str, dict[int, WorkerProcess]]:
        return self._hosts.ranks(replica)

    def stay_away(self, replica: int, until_step: int) -> None:
        self._hosts.stay_away(replica, until_step)

    def stop(self, number: int) -> None:
        self._stopping = True
        for host in self._hosts.hosts:
            host.actor.stop.remote(number)
        self._hosts.woken.set()

    async def close(self) -> None:
        await self._hosts.close()
        if self._status is not None:
            ray.kill(self._status)

    @property
    def _ending(self) -> bool:
        reply = self._reply
        over = reply is not None and (reply.finished or bool(reply.halted))
        return over or self._stopping or bool(self._hosts.wrong)

    def _take(self, reply: SupervisorReply) -> None:
        super()._take(reply)
        if not self._ending:
            self._hosts.provide(reply)

    async def _lost(self, host: str, why: str) -> None:
        """Tell the lighthouse that a host is lost, with all that ran there: Ray knows that."""
        while not self._ending:
            try:
                await asyncio.to_thread(admin.order, self._run, "host-lost", reason=why, host=host)
                return
            except FtHsdpError as error:
                if error.exit_code != EXIT_RETRYABLE and not isinstance(error, LighthouseUnreachable):
                    return  # the lighthouse does not know it
                await asyncio.sleep(TELL_S)
