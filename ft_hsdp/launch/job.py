"""A whole job, on this machine or a cluster: its processes, injected failures, and what the user sees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import psutil

from ft_hsdp import fault_injection, secret
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRYABLE, ConfigError
from ft_hsdp.jsonl import DISK
from ft_hsdp.launch import chaos
from ft_hsdp.launch.backend.base import WorkerProcess
from ft_hsdp.launch.injection import SIGNALS, Inflicted, inflict, injection_event
from ft_hsdp.launch.lighthouse_process import LighthouseFleet
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import JobFiles, Row, RunDir, make_run, run_of
from ft_hsdp.launch.run.recorder import Recorder
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.launch.run.terminal import Terminal
from ft_hsdp.lifetime import identity, stop_signals
from ft_hsdp.protocol import SupervisorReply
from ft_hsdp.state.checkpoint.checkpoint_manifest import MANIFEST, PUBLISHED
from lighthouse.http.access import page_link

TICK_S = 0.1  # between two reads of the logs
END_S = 30.0  # longest time from the end of the last process to the end of what runs the replicas


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How the replicas of a job have ended."""

    well: bool = False  # the job has its final state, and each replica that it needed trained to it
    wrong: str = ""  # what is wrong with the configuration or the script, in one line; "": nothing
    lost: tuple[int, ...] = ()  # replicas that were given up

    @classmethod
    def of(cls, reply: SupervisorReply | None) -> JobEnd:
        """Return how they have ended by the last answer of the lighthouse; None: there was none."""
        if reply is None:
            return cls()
        return cls(reply.finished and not reply.lost, reply.halted if reply.wrong else "", reply.lost)


class Replicas(ABC):
    """What runs the replicas of a job, on this machine or on a cluster."""

    def __init__(self, config: Config, run: RunDir, progress: Progress, emit: Callable[[Row], None]) -> None:
        """Prepare; nothing is started before `open`."""
        self._config = config
        self._run = run
        self._progress = progress
        self._emit = emit
        self._reply: SupervisorReply | None = None  # the newest one
        self._reporter: Reporter | None = None
        self._stopping = False

    @property
    def end(self) -> JobEnd:
        """Return how they have ended, after `run`."""
        return JobEnd.of(self._reply)

    @abstractmethod
    async def open(self) -> None:
        """Make ready for the first start; raise FtHsdpError if no rank can be started."""

    @abstractmethod
    async def run(self, urls: tuple[str, ...]) -> None:
        """Run all replicas until none has a part in the job any more."""

    @abstractmethod
    def running(self) -> list[int]:
        """Return the replicas of which all ranks run."""

    @abstractmethod
    def ranks(self, replica: int) -> tuple[str, Mapping[int, WorkerProcess]]:
        """Return the newest incarnation of a replica, "" if it has none, and its processes by rank."""

    @abstractmethod
    def stay_away(self, replica: int, until_step: int) -> None:
        """Do not start a replica again before so many steps are committed."""

    def note(self, event: Row) -> None:
        """Send the lighthouse an event that no rank sends."""
        if self._reporter is not None:
            self._reporter.event(event)

    @abstractmethod
    def stop(self, number: int) -> None:
        """Have all ranks leave the job because of a signal; kill them at SIGINT after that."""

    @abstractmethod
    async def close(self) -> None:
        """End all processes that were started."""

    @contextlib.asynccontextmanager
    async def _reporting(self, client: LighthouseClient) -> AsyncIterator[LighthouseClient]:
        """Have `note` send events through a client, which is closed at the end."""
        self._reporter = Reporter("supervisor", client.tell)
        self._reporter.start()
        try:
            yield client
        finally:
            await self._reporter.close()
            await client.close()

    def _take(self, reply: SupervisorReply) -> None:
        """Take an answer of the lighthouse."""
        self._reply = reply
        self._progress.saw(reply.step, reply.finished, reply.halted)


MakeReplicas = Callable[[Progress, Callable[[Row], None]], Replicas]
"""Makes what runs the replicas of a job, from its progress, and what is called with each event."""


def start_run(config: Config) -> RunDir:
    """Make the empty run directory of a job that this process will run.

    Raises:
        ConfigError: A job runs there, or the directory or checkpoint.key cannot be made.
    """
    run = run_of(config)
    run.claim = make_run(run, config, said=identity())
    return run


def run_job(config: Config, run: RunDir, replicas: MakeReplicas, stream: TextIO) -> tuple[int, Summary | None]:
    """Run a job in a directory of `start_run` until every replica is done. Blocks.

    Returns:
        The exit code of `launcher.py up`, and the summary if there is one.
    """
    with Terminal(config, stream) as terminal:
        return asyncio.run(JobRun(config, run, terminal, replicas).run())


class JobRun:
    """One job, from its first process to its last."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        terminal: Terminal,
        replicas: MakeReplicas,
        lighthouse: str = "lighthouse",
    ) -> None:
        """Make the job; nothing is started before `run`.

        Args:
            lighthouse: The module that runs as a lighthouse.
        """
        assert run.claim is not None, "start_run made the run"
        self._config = config
        self._run = run
        self._claim = run.claim
        self._terminal = terminal
        self._make_replicas = replicas
        self._module = lighthouse
        self._where = os.path.relpath(run.path)
        self._replicas: Replicas | None = None
        self._stopped_by: int | None = None  # number of the first signal
        self._written: int | None = None  # step of the newest checkpoint, as it was logged
        self._seen = False  # one that was written could be seen from here
        self._checkpoints = Path(config.checkpoint.dir or run.path / "checkpoints")
        self._over = asyncio.Event()  # the job ends
        self._background: list[asyncio.Task[Any]] = []
        self._hit: set[int | None] = set()  # rules of `chaos` that have hit something

    async def run(self) -> tuple[int, Summary | None]:
        """Run the job until every replica is done or a signal ends it; return the exit code and the summary."""
        config, run = self._config, self._run
        self._progress = Progress()
        self._recorder = Recorder(run, config, self._terminal.commit, self._on_event)
        replicas = self._make_replicas(self._progress, self._recorder.emit)
        lighthouse = LighthouseFleet(run, config, self._recorder.emit, module=self._module)
        self._planner = chaos.Planner(config.chaos, config.ranks_per_replica, config.slots)
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        main: asyncio.Task[None] | None = None
        try:
            if await self._unless_over(self._start(replicas, lighthouse)):
                self._terminal.say(f"page: {page_link(lighthouse.urls[0], secret.current(run.token))}", "dim")
                self._replicas = replicas
                keeping = JobFiles(run).keep(self._claim, self._recorder.emit)
                self._run_in_background(lighthouse.keep(), self._tick(replicas), keeping)
                main = asyncio.create_task(replicas.run(lighthouse.urls))
                main.add_done_callback(lambda _: self._over.set())
                await self._over.wait()
        finally:
            try:
                await self._end(replicas, main, lighthouse)
                end, gone = replicas.end, self._claim.lost  # gone: another job has the folder, its files stay
                summary = None if gone else self._recorder.finish(end.lost)
            finally:
                self._recorder.close()
                self._claim.release()
        self._claim.check()
        assert summary is not None, "the run is ours"
        code = self._code(end)
        unsaved = self._unsaved() if self._stopped_by is not None or code == EXIT_OK else ""
        code = EXIT_RETRYABLE if unsaved else code
        for line in self._planner.idle(self._hit):
            self._terminal.say(line, "yellow")
        self._terminal.summary(summary, code)
        if unsaved:
            self._terminal.say(unsaved, "red")
        elif self._stopped_by is not None and (kept := self._kept()):
            self._terminal.say(how_to_continue(config, run, kept[-1]))
        return code, summary

    def _unsaved(self) -> str:
        """Return in one line that the last state, which is to be kept, is not written; "" if it is."""
        newest = self._recorder.newest
        if not self._config.keeps_last or newest is None:
            return ""
        written = max(newest["step"], self._written or 0)  # the line of the newest commit may be lost
        kept = self._kept()
        if written in kept:
            return ""
        older = f"the newest one is of step {kept[-1]}" if kept else "there is none"
        was = "is gone" if written == self._written else "was not written"
        return f"the announced checkpoint of step {written} {was}: {older}"

    def _kept(self) -> list[int]:
        """Return the steps of the checkpoints that are there, the newest last, whatever was logged.

        Where this process has never seen one, because their folder is on other machines, the log counts.
        """
        whole = [file.parent.name for file in self._checkpoints.glob(f"*/{MANIFEST}") if file.is_file()]
        named = filter(None, map(PUBLISHED.fullmatch, whole))
        places = sorted((int(name[2]), int(name[1])) for name in named)
        logged = [] if self._seen or self._written is None else [self._written]
        return [*(step for _, step in places), *logged]

    async def _start(self, replicas: Replicas, lighthouse: LighthouseFleet) -> None:
        """Start the lighthouses and what runs replicas, side by side."""
        config = self._config
        most = f" (up to {config.slots})" if config.slots > config.replicas else ""
        size = f"{config.replicas} replicas{most} x {config.ranks_per_replica} ranks"
        self._terminal.say(f"{size}, {config.train.steps} steps; files in {self._where}", "dim")
        self._terminal.say(what_is_kept(config), "dim")
        async with asyncio.TaskGroup() as group:
            group.create_task(lighthouse.start())
            group.create_task(replicas.open())

    async def _unless_over(self, work: Coroutine[Any, Any, None]) -> bool:
        """Await `work`, and cancel it if the job is stopped meanwhile; return whether it was finished."""
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

    def _run_in_background(self, *work: Coroutine[Any, Any, None]) -> None:
        """Run coroutines beside the replicas; if one fails, the job ends."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._over.set()

        for coroutine in work:
            task = asyncio.create_task(coroutine)
            task.add_done_callback(ended)
            self._background.append(task)

    async def _tick(self, replicas: Replicas) -> None:
        """Merge the logs, show them, and inject the failures that are due, until cancelled."""
        while True:
            await asyncio.to_thread(self._recorder.read)
            self._recorder.merge()
            self._terminal.tick(time.time())
            newest = self._recorder.newest
            if newest is not None:
                self._progress.saw(newest["step"])
            for injection in self._planner.due(self._progress.step, time.monotonic(), replicas.running()):
                self._inject(injection)
            if self._claim.lost:
                self._over.set()
            await asyncio.sleep(TICK_S)

    def _inject(self, injection: chaos.Injection) -> None:
        """Inject a failure; one that names a host hits the ranks of the replica there, if there are any."""
        if injection.host is not None:
            assert injection.replica is not None, "a host has ranks of replicas"
            assert self._replicas is not None, "they run"
            _, ranks = self._replicas.ranks(injection.replica)
            on_host = [n for n, process in ranks.items() if process.host == injection.host]
            if injection.kind != fault_injection.HOST or not on_host:
                for rank in on_host:
                    self._inject(replace(injection, rank=rank, host=None))
                return
        if injection.kind == "signal":
            sent = self._send(injection)
            if sent is None:
                why = f"replica {injection.replica} has no rank {injection.rank} now"
                self._terminal.say(f"not injected: {injection.reason}: {why}", "yellow")
                return
            inflicted = sent
        else:
            try:
                inflicted = inflict(self._run, injection)
            except (ConfigError, OSError, psutil.Error) as error:
                self._terminal.say(f"not injected: {injection.reason}: {error}", "yellow")
                return
        self._hit.add(injection.rule)
        self._recorder.emit(inflicted.event)
        if injection.for_s > 0:
            emit, reason = self._recorder.emit, f"{injection.for_s:g} s are over"
            asyncio.get_running_loop().call_later(injection.for_s, lambda: emit(inflicted.lifted(reason)))

    def _send(self, injection: chaos.Injection) -> Inflicted | None:
        """Send a signal to a rank, on whichever machine it runs; None: its replica goes on without that rank."""
        assert injection.replica is not None
        assert injection.rank is not None, "a signal hits one rank"
        assert self._replicas is not None, "only a replica that runs is hit"
        name, ranks = self._replicas.ranks(injection.replica)
        if injection.rank not in ranks:
            return None
        process = ranks[injection.rank]
        if injection.down_steps:
            self._replicas.stay_away(injection.replica, self._progress.step + injection.down_steps)
        event = injection_event(injection, process.pid, [name], time.time())
        process.signal(SIGNALS[injection.signal])
        return Inflicted(event, lambda: process.signal(signal.SIGCONT))

    def _on_event(self, event: Row) -> None:
        """Show an event; send it to the lighthouse if no rank does."""
        self._terminal.event(event)
        if event["event"] == "CheckpointWritten":
            self._written = max(event["step"], self._written or 0)
            self._seen = self._seen or any(self._checkpoints.glob(f"step-{event['step']}-*"))
        from_no_rank = event.get("source") in ("supervisor", "chaos") or event["event"] == "RankEnded"
        if self._replicas is not None and from_no_rank:
            self._replicas.note(event)

    def _on_signal(self, number: int) -> None:
        """Have all replicas leave the job; at Ctrl-C after that, kill them. Schedulers repeat the others."""
        if self._replicas is not None and (self._stopped_by is None or number == signal.SIGINT):
            self._replicas.stop(number)
        if self._stopped_by is None:
            self._stopped_by = number
            self._over.set()
            last = ", a checkpoint is written" if self._config.keeps_last else ""
            stop_s = self._config.timeouts.stop_s
            how = f"the step is ended{last}, all leave within {stop_s:g} s"
            self._terminal.say(f"stopping: {how}; Ctrl-C once more stops at once", "yellow")
            return
        if number == signal.SIGINT:
            self._terminal.say("stopping at once", "yellow")

    async def _end(self, replicas: Replicas, main: asyncio.Task[None] | None, lighthouse: LighthouseFleet) -> None:
        """End all processes. None is left when this returns."""
        if main is not None:
            if not main.done() and self._stopped_by is None:
                replicas.stop(signal.SIGTERM)
            timeouts = self._config.timeouts
            await asyncio.wait([main], timeout=timeouts.stop_s + timeouts.gone_s + END_S)
            main.cancel()
        for task in self._background:
            task.cancel()
        ends = await asyncio.gather(*self._background, *filter(None, [main]), return_exceptions=True)
        await replicas.close()
        await lighthouse.stop()
        for error in ends:
            if isinstance(error, Exception):
                raise error

    def _code(self, end: JobEnd) -> int:
        """Return the job's exit code, once all replicas have ended."""
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        if end.wrong:
            print(end.wrong, file=sys.stderr)  # noqa: T201 - one line for the user
            return EXIT_CONFIG
        return EXIT_OK if end.well else EXIT_RETRYABLE


def prepare_data(config: Config) -> None:
    """Make the folder of runs, and in it the file of tokens for the built-in trainer, if they do not exist.

    Raises:
        ConfigError: data.path cannot be read, or job.runs_dir cannot be made.
        Retryable: The file cannot be written.
    """
    runs_dir = Path(config.job.runs_dir).resolve()
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK:
            raise
        raise ConfigError("job.runs_dir", str(runs_dir), f"a folder that can be made ({error.strerror})") from None
    if config.entry is None:
        from ft_hsdp.train import tokens  # numpy is not needed for --help

        how = config.data.tokenizer, config.data.max_bytes, runs_dir / ".cache"
        tokens.prepare(config.data.path, *how)
        if config.eval.every and config.eval.data is not None:
            with tokens.naming("eval.data"):
                tokens.prepare(config.eval.data, *how)


def what_is_kept(config: Config) -> str:
    """Return in one line which states are written to durable storage, for a start of all processes."""
    kept, where = config.checkpoint, config.checkpoint.dir or "the run's folder"
    if not config.keeps_last:
        return "no durable checkpoints: a job that is started again begins at step 1, unless checkpoint.dir is set"
    often = f"every {config.checkpoint_s:g} s and " if config.checkpoint_s else ""
    often = f"every {kept.every} steps and " if kept.every else often
    return f"durable checkpoints {often}of the last state, in {where}"


def how_to_continue(config: Config, run: RunDir, step: int) -> str:
    """Return one line on how to continue from the checkpoint of a stopped job."""
    if config.checkpoint.dir is not None:
        return f"the state of step {step} is in {config.checkpoint.dir}: the same command goes on from it"
    folder = os.path.relpath(run.path / "checkpoints")
    return f"the state of step {step} is in {folder}: another job.name with this checkpoint.dir goes on from it"
