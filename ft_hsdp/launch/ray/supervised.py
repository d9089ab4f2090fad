"""The replicas of a job on a cluster: a supervisor for each, which reports to the lighthouse what runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from ft_hsdp import secret, tls
from ft_hsdp.config import Config
from ft_hsdp.launch.backend.base import Backend, WorkerProcess
from ft_hsdp.launch.failures import JobFailures, Outcome
from ft_hsdp.launch.job import JobEnd
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.supervisor import ReplicaSupervisor

LOOK_S = 0.1  # between two looks whether all replicas have ended


class SupervisedReplicas:
    """Runs the replicas of a job with a backend."""

    def __init__(
        self, config: Config, run: RunDir, progress: Progress, emit: Callable[[Row], None], backend: Backend
    ) -> None:
        """Prepare; nothing is started before `open`.

        Args:
            config: The job's configuration.
            run: The run's directory.
            progress: Of the job; it takes the lighthouse's news.
            emit: Takes each event.
            backend: Starts the ranks.
        """
        self._config = config
        self._run = run
        self._progress = progress
        self._emit = emit
        self._backend = backend
        self._link: LighthouseLink | None = None
        self._failures = JobFailures(self._active, lambda: self._progress.step > 0)
        self._supervisors: dict[int, ReplicaSupervisor] = {}  # by replica
        self._outcomes: dict[int, Outcome] = {}  # of the replicas that have ended
        self._over = asyncio.Event()

    @property
    def end(self) -> JobEnd:
        kinds = [outcome.kind for outcome in self._outcomes.values()]
        wrong = [outcome.reason for outcome in self._outcomes.values() if outcome.kind == "config"]
        ended_well = sum(map(kinds.count, ("done", "drained", "unplaced")))
        well = "done" in kinds and ended_well == self._config.slots
        lost = ("lost", "stopped") if self._progress.halted else ("lost",)
        given_up = tuple(replica for replica, outcome in self._outcomes.items() if outcome.kind in lost)
        return JobEnd(well, wrong[0] if wrong else "", given_up)

    async def open(self) -> None:
        await self._backend.open()

    async def run(self, urls: tuple[str, ...]) -> None:
        """Run all replicas. The last one ends the job, and so does one that refuses its configuration."""
        config, run, progress = self._config, self._run, self._progress
        context = tls.client(config.network)
        self._link = link = LighthouseLink(urls, secret.current(run.token), progress, self._evict, context)
        for replica in range(config.slots):
            self._supervisors[replica] = self._supervisor(replica, link)
        reports = asyncio.create_task(link.run())
        reports.add_done_callback(lambda _: self._over.set())
        tasks = [asyncio.create_task(self._replica(each)) for each in self._supervisors.values()]
        try:
            while not (self._all_ended or self._failures.halted):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._over.wait()
                        break
            await asyncio.gather(*(each.stop(config.timeouts.stop_s) for each in self._supervisors.values()))
            await asyncio.wait(tasks, timeout=config.timeouts.gone_s)
        finally:
            for task in (*tasks, reports):
                task.cancel()
            ends = await asyncio.gather(*tasks, reports, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):
                raise error

    def running(self) -> list[int]:
        return [replica for replica, each in self._supervisors.items() if each.running]

    def ranks(self, replica: int) -> tuple[str, dict[int, WorkerProcess]]:
        current = self._supervisors[replica].current
        return ("", {}) if current is None else (current.name, {n: r.process for n, r in current.ranks.items()})

    def stay_away(self, replica: int, until_step: int) -> None:
        self._supervisors[replica].stay_away(until_step)

    def note(self, event: Row) -> None:
        if self._link is not None:
            self._link.note(event)

    def stop(self, number: int) -> None:
        """Have all ranks leave the job because of a signal; kill them at SIGINT after that."""
        if self._over.is_set() and number == signal.SIGINT:
            for supervisor in self._supervisors.values():
                if supervisor.current is not None:
                    supervisor.current.kill()
        self._over.set()

    async def close(self) -> None:
        await self._backend.close()

    def _supervisor(self, replica: int, link: LighthouseLink) -> ReplicaSupervisor:
        def others() -> bool:
            return any(s.running for s in self._supervisors.values() if s.replica != replica)

        return ReplicaSupervisor(
            replica,
            self._config,
            self._run,
            backend=self._backend,
            link=link,
            progress=self._progress,
            emit=self._emit,
            survivors=others,
            proven=lambda: self._progress.step > 0 and others(),
            failures=self._failures,
        )

    async def _replica(self, supervisor: ReplicaSupervisor) -> None:
        try:
            outcome = await supervisor.run()
        except BaseException:
            self._over.set()
            raise
        self._outcomes[supervisor.replica] = outcome
        if outcome.kind == "config" or self._all_ended:
            self._over.set()

    def _active(self) -> list[int]:
        """Return the replicas that take part in the job: those that have not ended and do not rest."""
        return [n for n, s in self._supervisors.items() if n not in self._outcomes and not s.resting]

    @property
    def _all_ended(self) -> bool:
        """Return whether a replica has ended, and all others have ended or rest because they are not wanted."""
        rest = [s for n, s in self._supervisors.items() if n not in self._outcomes]
        return bool(self._outcomes) and all(s.resting for s in rest)

    def _evict(self, replica: int, incarnation: str, reason: str) -> None:
        if replica in self._supervisors:
            self._supervisors[replica].evict(incarnation, reason)
