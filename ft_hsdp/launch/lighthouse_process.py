"""The lighthouses of a job as processes of this machine. One that ends is started again on its port.

The port is never free meanwhile: this process holds the listening socket, and gives it to each lighthouse.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from ft_hsdp import address, secret, tls
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import REPLY_S, urls_of_run
from ft_hsdp.core.restart import doubled
from ft_hsdp.errors import EXIT_RETRYABLE, EXIT_UNREACHABLE, ConfigError, FtHsdpError
from ft_hsdp.launch.backend.processes import environment, last_line, tied
from ft_hsdp.launch.run.directory import Row, RunDir, alive, open_log, read_json, supervised

STOP_S = 3.0  # from SIGTERM to SIGKILL
STEADY_S = 10.0  # a lighthouse that ran for so long resets the pause before the next start
SLOWEST_S = 5.0  # longest pause between two starts
LOOK_S = 1.0  # between two health checks, and the longest wait for a beat


class LighthouseFailed(FtHsdpError):
    """The lighthouse ended, or did not listen in time; the message has the last line of its log."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LighthouseProcess:
    """Keeps one lighthouse of a run alive."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        emit: Callable[[Row], None],
        *,
        module: str = "lighthouse",
        seat: int | None = None,
    ) -> None:
        """Make the keeper of a lighthouse; `start` starts the process.

        Args:
            config: The job's configuration: where it listens, and how long it may take and be silent.
            module: The module that runs as the lighthouse.
            seat: Its number among several lighthouses; None for the only one.
        """
        self._run = run
        self._silent_s = config.timeouts.lighthouse_s
        self._emit = emit
        self._listen_s = config.timeouts.listen_s
        self._module = module
        self._seat: tuple[str, ...] = () if seat is None else ("--seat", str(seat))
        self._file = run.lighthouse if seat is None else run.seat(seat)  # written once it listens
        first = config.network.port
        self._host, self._port = config.network.host, first and first + (seat or 0)
        self._listening: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Return its address, which stays the same over restarts."""
        assert self._url is not None, "start() comes first"
        return self._url

    async def start(self) -> None:
        """Start it, and wait until it listens.

        Raises:
            LighthouseFailed: It could not be started, ended, or did not listen in time.
        """
        if self._listening is None:
            try:
                self._listening = address.listen(self._host, self._port, known=True)
            except ConfigError as error:
                raise LighthouseFailed(str(error), error.exit_code) from None
        try:
            self._process = await self._spawn(tied(self._module, *self._arguments))
        except (OSError, RuntimeError) as error:  # no process, descriptor or thread is left: some may be later
            why = getattr(error, "strerror", None) or error
            raise LighthouseFailed(f"the lighthouse does not start: {why}", EXIT_RETRYABLE) from None
        exited = asyncio.create_task(self._process.wait())
        deadline = time.monotonic() + self._listen_s
        try:
            while time.monotonic() < deadline:
                listening = read_json(self._file)
                if isinstance(listening, dict) and listening.get("pid") == self._process.pid:
                    self._url = str(listening["url"])
                    return
                await asyncio.wait([exited], timeout=0.02)
                if exited.done():
                    code = exited.result()
                    why = last_line(self._run.lighthouse_log) or f"see {self._run.lighthouse_log}"
                    raise LighthouseFailed(
                        f"the lighthouse ended with exit {code}: {why}", code if code > 0 else EXIT_RETRYABLE
                    )
            await self._end()
            raise LighthouseFailed(f"the lighthouse does not listen after {self._listen_s:g} s", EXIT_RETRYABLE)
        finally:
            exited.cancel()

    async def keep(self) -> None:
        """Start the lighthouse again on its port whenever it ends, until cancelled."""
        failures, since = 0, time.monotonic()
        while True:
            assert self._process is not None
            code = await self._ended(self._process)
            failures = 0 if time.monotonic() - since > STEADY_S else failures
            self._event("LighthouseExited", f"exit {code}; it is started again on its port", code=code)
            await asyncio.sleep(doubled(0.2, failures, SLOWEST_S))
            failures, since = failures + 1, time.monotonic()
            try:
                await self.start()
            except LighthouseFailed as error:
                self._event("LighthouseFailed", str(error))
            else:
                self._event("LighthouseExited", f"it listens at {self.url} again", over=True)

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Wait until a lighthouse ends, and return its exit code."""
        checking = asyncio.create_task(self._check_health(process))
        try:
            return await process.wait()
        finally:
            checking.cancel()

    async def _check_health(self, process: asyncio.subprocess.Process) -> None:
        """Kill a lighthouse whose beats end, because its event loop hangs or it is stopped.

        They come on its standard output, which clients cannot keep busy. A time in which this process itself was
        stopped does not count as silence.
        """
        assert process.stdout is not None
        silent_s = 0.0
        while silent_s <= self._silent_s:
            began = time.monotonic()
            await asyncio.sleep(LOOK_S)
            try:
                async with asyncio.timeout(LOOK_S):
                    if not await process.stdout.read(4096):
                        return  # it has ended
                silent_s = 0.0
            except TimeoutError:
                silent_s += min(time.monotonic() - began, 3 * LOOK_S)
        self._event("LighthouseSilent", f"it has given no sign of life for {silent_s:.1f} s and is killed")
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    @property
    def _arguments(self) -> tuple[str, ...]:
        assert self._listening is not None, "start() comes first"
        return ("--run", str(self._run.path), "--fd", str(self._listening.fileno()), *self._seat)

    async def _spawn(self, command: list[str]) -> asyncio.subprocess.Process:
        """Start a process with the listening socket; if this is cancelled, kill it."""
        assert self._listening is not None, "start() comes first"
        with await asyncio.to_thread(open_log, self._run.lighthouse_log) as log:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *command,
                    env=environment(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    pass_fds=(self._listening.fileno(),),
                )
            )
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                process = await starting
                process.kill()
                await process.wait()
                raise

    async def stop(self) -> None:
        """End the process, and free the port."""
        try:
            await self._end()
        finally:
            if self._listening is not None:
                self._listening.close()
                self._listening = None

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
                    return
            process.kill()
        await process.wait()

    def _event(self, name: str, reason: str, **fields: Any) -> None:
        self._emit(supervised(name, reason, **fields))


class LighthouseFleet:
    """All lighthouses of a job on this machine: one, or several of which etcd elects the leader."""

    def __init__(
        self, run: RunDir, config: Config, emit: Callable[[Row], None], *, module: str = "lighthouse"
    ) -> None:
        """Make the lighthouses; `start` starts their processes.

        Args:
            module: The module that runs as a lighthouse.
        """
        seats = range(config.lighthouse.count) if config.lighthouse.etcd else (None,)
        self._run = run
        self._etcd = config.lighthouse.etcd
        self._listen_s = config.timeouts.listen_s
        self._all = [LighthouseProcess(run, config, emit, module=module, seat=seat) for seat in seats]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(each.url for each in self._all)

    async def start(self) -> None:
        """Start them, and wait until one leads and knows all of them.

        Raises:
            LighthouseFailed: One of them ended or did not listen in time, or none leads.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for each in self._all:
                    group.create_task(each.start())
        except BaseExceptionGroup as failed:
            await self.stop()
            raise failed.exceptions[0] from None
        deadline = time.monotonic() + self._listen_s
        while not self._leads(read_json(self._run.lighthouse)):
            if time.monotonic() > deadline:
                await self.stop()
                etcd = ", ".join(self._etcd)
                why = f"no lighthouse leads after {self._listen_s:g} s: does etcd at {etcd} answer?"
                raise LighthouseFailed(why, EXIT_UNREACHABLE)
            await asyncio.sleep(0.02)

    def _leads(self, leader: object) -> bool:
        """Return whether lighthouse.json names a running leader that knows all lighthouses."""
        return alive(leader) and set(self.urls) <= set(urls_of_run(leader))

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            for each in self._all:
                group.create_task(each.keep())

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop() for each in self._all))


def reach(config: Config, run: RunDir, urls: tuple[str, ...], open_s: float) -> tuple[Any, ...]:
    """Return what `LighthouseClient` takes, for lighthouses that keep a report open for `open_s`."""
    return urls, secret.current(run.token), tls.client(config.network), run.lighthouse, open_s + REPLY_S


def check_port(config: Config) -> None:
    """Check that the lighthouses can listen. Those of one machine take ports that follow each other.

    Raises:
        ConfigError: network.host is not an address of this machine, or network.port is not free.
    """
    for number in range(config.lighthouse.count if config.network.port else 1):
        port = config.network.port and config.network.port + number
        address.listen(config.network.host, port, known=True).close()
