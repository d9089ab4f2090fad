"""The replicas of a job on a cluster: hosts for them, and what the lighthouse says of the job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from ft_hsdp import secret, tls
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import REPLY_S, LighthouseClient
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.errors import EXIT_RETRYABLE, FtHsdpError, LighthouseUnreachable
from ft_hsdp.launch import admin
from ft_hsdp.launch.backend.base import WorkerProcess
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.job import JobEnd
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.ray.actor import ActorSetup
from ft_hsdp.launch.ray.cluster import Cluster
from ft_hsdp.launch.ray.hosts import RayHosts
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.protocol import ProcessReport, SupervisorReply

PERIOD_S = 0.25  # between two looks at how far the job is
TELL_S = 1.0  # before the lighthouse is told again that a host is lost


class RayReplicas:
    """Runs the replicas of a job on a cluster. All methods belong to the driver's event loop."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        progress: Progress,
        emit: Callable[[Row], None],
        cluster: Cluster,
        entry: str = ENTRY,
        preload: tuple[str, ...] = PRELOAD,
    ) -> None:
        """Prepare; nothing is started before `run`.

        Args:
            config: The job's configuration.
            run: The run's directory on this node.
            progress: Of the job; it takes the lighthouse's news.
            emit: Takes each event.
            cluster: Where this process is connected.
            entry: What runs in a rank, as in `ForkServer`.
            preload: As in `ForkServer`.
        """
        self._config = config
        self._run = run
        self._progress = progress
        waits = config.timeouts
        setup = ActorSetup(config.job.name, config.ray, cluster.cwd, entry, preload, waits.boot_s, waits.spawn_s)
        self._hosts = RayHosts(config, run, cluster, setup, emit, self._lost)
        self._reply: SupervisorReply | None = None  # the newest one
        self._reporter: Reporter | None = None
        self._stopping = False

    @property
    def end(self) -> JobEnd:
        end = JobEnd.of(self._reply)
        return replace(end, wrong=self._hosts.wrong or end.wrong)

    async def open(self) -> None:
        """Do nothing: actors are made once the lighthouse says which replicas are wanted."""

    async def run(self, urls: tuple[str, ...]) -> None:
        """Provide hosts until none has a part in the job any more."""
        config, run, hosts = self._config, self._run, self._hosts
        hosts.urls = urls
        token, proof = secret.current(run.token), tls.client(config.network)
        client = LighthouseClient(urls, token, proof, run.lighthouse, REPLY_S)
        self._reporter = reporter = Reporter("supervisor", client.tell)
        reporter.start()
        waits = config.timeouts
        until: float | None = None
        try:
            while not hosts.failed:
                with contextlib.suppress(LighthouseUnreachable):
                    self._take(await client.report(ProcessReport({})))
                if self._ending:
                    until = until or time.monotonic() + waits.stop_s + waits.save_s + waits.gone_s
                    if hosts.end() or time.monotonic() > until:
                        return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await hosts.woken.wait()
                hosts.woken.clear()
            raise hosts.failed[0]
        finally:
            await reporter.close()
            await client.close()

    def running(self) -> list[int]:
        return [n for n in range(self._config.slots) if len(self.ranks(n)[1]) == self._hosts.newest(n)[1]]

    def ranks(self, replica: int) -> tuple[str, dict[int, WorkerProcess]]:
        return self._hosts.ranks(replica)

    def stay_away(self, replica: int, until_step: int) -> None:
        self._hosts.stay_away(replica, until_step)

    def note(self, event: Row) -> None:
        if self._reporter is not None:
            self._reporter.event(event)

    def stop(self, number: int) -> None:
        self._stopping = True
        for host in self._hosts.hosts:
            host.actor.stop.remote(number)
        self._hosts.woken.set()

    async def close(self) -> None:
        await self._hosts.close()

    @property
    def _ending(self) -> bool:
        reply = self._reply
        over = reply is not None and (reply.finished or bool(reply.halted))
        return over or self._stopping or bool(self._hosts.wrong)

    def _take(self, reply: SupervisorReply) -> None:
        self._reply = reply
        self._progress.saw(reply.step, reply.finished, reply.halted)
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
