"""The state agents of spare emulated hosts: they run from the start, and listen once a replica calls their host.

Such an agent has loaded everything and waits for a line on its stdin. So a swap does not wait for the start of a
process. An agent that was called is like any other: its ranks replace it if it fails, and it ends with the
supervisor. One that was not called ends when its stdin does. One that ends before is started again, after a pause
that doubles: what ended it may end the next one, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ft_hsdp import secret
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import own_address, urls_of_run
from ft_hsdp.core.restart import doubled
from ft_hsdp.launch.backend.base import exit_in_words
from ft_hsdp.launch.run.directory import Row, RunDir, open_log, read_json, supervised
from ft_hsdp.secret import TOKEN_VARIABLE

CALL_S = 10.0  # longest wait for an agent that was called; the ranks start another one then
PAUSE_S = 1.0  # before an agent that ended is started again; twice as long after each further one
PAUSE_MAX_S = 60.0
HEALTHY_S = 60.0  # an agent that ran for so long did not end because of its start


@dataclass(slots=True)
class _Starts:
    at: float  # the newest start, monotonic
    failed: int = 0  # agents in a row that ended soon

    @property
    def due(self) -> float:
        """Return when the next one is started, monotonic."""
        return self.at + doubled(PAUSE_S, self.failed, PAUSE_MAX_S)


class SpareAgents:
    """The agents of the spare hosts of one job. Belongs to one event loop."""

    def __init__(self, config: Config, run: RunDir, emit: Callable[[Row], None] = lambda _: None) -> None:
        """Make the collection; nothing is started.

        Args:
            config: The job's configuration.
            run: Its run directory. There must be a lighthouse when the first agent is started.
            emit: Takes each event.
        """
        self._config = config
        self._run = run
        self._waiting: dict[str, Process] = {}  # by host: not called yet
        self._called: list[Process] = []
        self._starts: dict[str, _Starts] = {}  # by host
        self._emit = emit

    @property
    def pids(self) -> dict[str, int]:
        """Return the pid of the agent of each host that was not called yet."""
        return {name: process.pid for name, process in self._waiting.items() if process.returncode is None}

    async def ensure(self, names: Collection[str]) -> None:
        """Start the agents of these hosts that do not run and are due. Does not wait until they are ready.

        The first agent of a host that ends soon is an event (`SpareLost`).

        Raises:
            ConfigError: This machine has no address for them.
            OSError: No process can be started.
        """
        for name in names:
            if name in self.pids:
                continue
            process = self._waiting.pop(name, None)
            if process is not None:
                self._ended(name, process)
            starts = self._starts.setdefault(name, _Starts(-math.inf))
            if time.monotonic() >= starts.due:
                starts.at = time.monotonic()
                self._waiting[name] = await self._start(name)

    async def call(self, name: str, replica: int) -> None:
        """Have the agent of a spare host serve a replica from now on, and wait until it listens.

        A host whose agent does not run, or does not answer within `CALL_S` seconds, is left to its ranks: they
        start another one.
        """
        process = self._waiting.pop(name, None)
        if process is None:
            return
        self._called.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(CALL_S):
                process.stdin.write(f"{replica}\n".encode())
                await process.stdin.drain()
                ready = await process.stdout.readline()
        except (TimeoutError, ConnectionError):
            ready = b""
        if not ready:
            _kill(process)
            await process.wait()
            return
        with await asyncio.to_thread(open_log, self._run.replica(replica) / f"agent-{name}.log") as log:
            log.write(ready)

    async def close(self) -> None:
        """End all agents, called ones too, and wait until they are gone."""
        all_of_them = [*self._waiting.values(), *self._called]
        for process in all_of_them:
            _kill(process)
        await asyncio.gather(*(process.wait() for process in all_of_them))
        self._waiting.clear()
        self._called.clear()

    def _ended(self, name: str, process: Process) -> None:
        starts = self._starts[name]
        starts.failed = 1 if time.monotonic() - starts.at > HEALTHY_S else starts.failed + 1
        if starts.failed == 1:
            why = f"{exit_in_words(process.returncode or 0)}; it is started again after a pause that doubles"
            log = f"hosts/agent-{name}.log"
            self._emit(supervised("SpareLost", f"{why}, its log is {log}", host=name, pid=process.pid))

    async def _start(self, name: str) -> Process:
        config, urls = self._config, urls_of_run(read_json(self._run.lighthouse))
        if not urls:
            raise OSError(f"{self._run.lighthouse} cannot be read")
        host = own_address(config.network.state_interface or config.network.host, urls[0])
        options = {
            "host": host,
            "name": name,
            "guard": str(os.getpid()),
            "linger": str(config.timeouts.linger_s),
            "tls": config.network.tls,
            "hello": str(config.timeouts.hello_s),
        }
        with await asyncio.to_thread(open_log, self._run.path / "hosts" / f"agent-{name}.log") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ft_hsdp.state.agent.server"),
                *(part for key, value in options.items() for part in (f"--{key}", value)),
                env={**os.environ, TOKEN_VARIABLE: secret.current(self._run.token)},
                stdin=PIPE,
                stdout=PIPE,
                stderr=log if log.name != os.devnull else DEVNULL,
                start_new_session=True,
            )


def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
