"""A whole job on this machine: the lighthouse, all replicas, their failures, and what the user sees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO

from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRYABLE
from ft_hsdp.launch import chaos
from ft_hsdp.launch.forkserver import ENTRY, PRELOAD, ForkServer
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.lighthouse_process import LighthouseProcess, check_port, furnish
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.recorder import Recorder
from ft_hsdp.launch.rundir import RunDir, claim, identity, write_json
from ft_hsdp.launch.summary import Summary
from ft_hsdp.launch.supervisor import Outcome, ReplicaSupervisor
from ft_hsdp.launch.terminal import Terminal

TICK_S = 0.1  # between two looks at the logs
STOP_GRACE_S = 10.0  # from SIGTERM to SIGKILL
END_S = 30.0  # from SIGKILL of the last replica to the end of its supervisor


def up(config: Config, *, stream: TextIO | None = None) -> tuple[int, Summary | None]:
    """Run a job until every replica is done; the exit code and the summary.

    stream takes the progress, stdout by default. Codes: 0, 75 with lost replicas, 64 where a rank refused its
    configuration, 130 and 143 after Ctrl-C and SIGTERM. Raises ConfigError before anything is started.
    """
    check_port(config)
    check_device(config)
    prepare_data(config)
    run = RunDir(Path(config.job.runs_dir).resolve() / config.job.name)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, stream or sys.stdout) as terminal:
        return asyncio.run(Job(config, run, terminal).run())


def check_device(config: Config) -> str:
    """The GPUs that ranks get, or "cpu". Raises ConfigError on train.device."""
    if config.train.device == "cpu":
        return config.train.device
    # Who only counts GPUs must not initialize CUDA: ranks are forked, from a process that inherits this.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from ft_hsdp.train.device import describe  # a job on CPUs starts without torch in this process

    return describe(config.train.device, config.ranks_per_replica)


def prepare_data(config: Config) -> Path:
    """Make the file of tokens, if it is not there. Raises ConfigError on data.path."""
    from ft_hsdp.train import tokens  # numpy is not needed for --help

    cache = Path(config.job.runs_dir).resolve() / ".cache"
    return tokens.prepare(config.data.path, config.data.tokenizer, config.data.max_bytes, cache)


class Job:
    """One job, from its first process to its last. entry, preload, lighthouse: what runs in them."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        terminal: Terminal,
        *,
        entry: str = ENTRY,
        preload: tuple[str, ...] = PRELOAD,
        lighthouse: str = "lighthouse",
    ) -> None:
        self._config = config
        self._run = run
        self._terminal = terminal
        self._entry = entry
        self._preload = preload
        self._lighthouse_module = lighthouse
        self._where = os.path.relpath(run.path)
        self._supervisors: dict[int, ReplicaSupervisor] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._stopped_by: int | None = None
        self._over = asyncio.Event()
        self._helpers: list[asyncio.Task[Any]] = []

    async def run(self) -> tuple[int, Summary | None]:
        """Run it; see `up`."""
        config, run = self._config, self._run
        self._progress = Progress()
        self._recorder = Recorder(run, config, self._terminal.commit, self._terminal.event)
        self._forks = ForkServer(run.path, entry=self._entry, preload=self._preload)
        self._planner = chaos.Planner(config.chaos, config.ranks_per_replica)
        lighthouse = LighthouseProcess(run, self._recorder.emit, module=self._lighthouse_module)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        replicas: list[asyncio.Task[None]] = []
        try:
            if await self._unless_over(self._start(lighthouse)):
                link = LighthouseLink(lighthouse.url, run.token.read_text().strip(), self._progress, self._evict)
                for replica in range(config.replicas):
                    self._supervisors[replica] = self._supervisor(replica, link)
                self._help(link.run(), lighthouse.keep(), self._tick())
                replicas = [asyncio.create_task(self._replica(s)) for s in self._supervisors.values()]
                await self._over.wait()
        finally:
            try:
                await self._end(replicas, lighthouse)
                lost = [n for n, outcome in self._outcomes.items() if outcome.kind == "lost"]
                summary = self._recorder.finish(lost)
            finally:
                self._recorder.close()
        code = self._code(lost)
        self._terminal.summary(summary, code)
        return code, summary

    async def _start(self, lighthouse: LighthouseProcess) -> None:
        size = f"{self._config.replicas} replicas x {self._config.ranks_per_replica} ranks"
        self._terminal.say(f"{size}, {self._config.train.steps} steps; files in {self._where}", "dim")
        async with asyncio.TaskGroup() as group:
            group.create_task(lighthouse.start())
            group.create_task(self._forks.start())

    async def _unless_over(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do `work`, unless the job is stopped meanwhile. Raises what `work` raises."""
        task, over = asyncio.create_task(work), asyncio.create_task(self._over.wait())
        await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return False
        try:
            task.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return True

    def _supervisor(self, replica: int, link: LighthouseLink) -> ReplicaSupervisor:
        return ReplicaSupervisor(
            replica,
            self._config,
            self._run,
            forks=self._forks,
            link=link,
            progress=self._progress,
            emit=self._recorder.emit,
            survivors=lambda: any(s.running for s in self._supervisors.values() if s.replica != replica),
        )

    async def _replica(self, supervisor: ReplicaSupervisor) -> None:
        """Run one replica; the last one ends the job, and so does one that refuses its configuration."""
        try:
            outcome = await supervisor.run()
        except BaseException:
            self._over.set()
            raise
        self._outcomes[supervisor.replica] = outcome
        if outcome.kind == "config" or len(self._outcomes) == self._config.replicas:
            self._over.set()

    def _help(self, *work: Coroutine[Any, Any, None]) -> None:
        """Do `work` beside the replicas; where it fails, the job ends."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._over.set()

        for coroutine in work:
            task = asyncio.create_task(coroutine)
            task.add_done_callback(ended)
            self._helpers.append(task)

    async def _tick(self) -> None:
        """Read the logs and inject what is due."""
        while True:
            self._recorder.poll()
            self._terminal.tick(time.time())
            newest = self._recorder.newest
            if newest is not None:
                self._progress.saw(newest["step"], newest["epoch"])
            running = [n for n, s in self._supervisors.items() if s.running]
            for injection in self._planner.due(self._progress.step, time.monotonic(), running):
                self._inject(injection)
            await asyncio.sleep(TICK_S)

    def _inject(self, injection: chaos.Injection) -> None:
        supervisor = self._supervisors[injection.replica]
        current = supervisor.current
        assert current is not None, "only a replica that runs is hit"
        pid = current.ranks[injection.rank].pid
        if injection.down_steps:
            supervisor.stay_away(self._progress.step + injection.down_steps)
        injected = chaos.event(injection, pid, current.name, time.time())
        self._recorder.emit(injected)
        self._forks.signal(pid, chaos.SIGNALS[injection.signal])
        if injection.signal == "STOP" and injection.for_s > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(injection.for_s, self._lift, pid, injected)

    def _lift(self, pid: int, injected: dict[str, Any]) -> None:
        self._forks.signal(pid, signal.SIGCONT)
        after = f"{injected['for_s']:g} s are over"
        self._recorder.emit({**injected, "t": time.time(), "event": "FailureLifted", "reason": after})

    def _evict(self, replica: int, incarnation: str, reason: str) -> None:
        if replica in self._supervisors:
            self._supervisors[replica].evict(incarnation, reason)

    def _on_signal(self, number: int) -> None:
        """Ctrl-C and SIGTERM stop the job; a second one does not wait for the ranks."""
        if self._stopped_by is None:
            self._stopped_by = number
            self._over.set()
            self._terminal.say("stopping: the ranks have 10 s; once more stops at once", "yellow")
            return
        for supervisor in self._supervisors.values():
            if supervisor.current is not None:
                supervisor.current.kill()

    async def _end(self, replicas: list[asyncio.Task[None]], lighthouse: LighthouseProcess) -> None:
        """End whatever runs; nothing is left when this returns."""
        await asyncio.gather(*(s.stop(STOP_GRACE_S) for s in self._supervisors.values()))
        if replicas:
            _, late = await asyncio.wait(replicas, timeout=END_S)
            for task in late:
                task.cancel()
        for task in self._helpers:
            task.cancel()
        ends = await asyncio.gather(*self._helpers, *replicas, return_exceptions=True)
        await self._forks.close()
        await lighthouse.stop()
        for error in ends:
            if isinstance(error, Exception):
                raise error

    def _code(self, lost: list[int]) -> int:
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        refused = [outcome for outcome in self._outcomes.values() if outcome.kind == "config"]
        if refused:
            print(refused[0].reason, file=sys.stderr)  # noqa: T201 - the one line that says why
            return EXIT_CONFIG
        done = [outcome for outcome in self._outcomes.values() if outcome.kind == "done"]
        return EXIT_RETRYABLE if lost or len(done) < self._config.replicas else EXIT_OK
