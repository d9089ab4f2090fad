"""The lighthouse as a process of this machine: started, waited for, and started again where it was."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ft_hsdp.config import Config, dump
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, FtHsdpError
from ft_hsdp.launch.processes import environment, last_line, tied
from ft_hsdp.launch.rundir import Row, RunDir, read_json, write_private

START_S = 30.0  # longest time until it listens
STOP_S = 3.0  # how long it has to end after SIGTERM
STEADY_S = 10.0  # after this long the next failure counts as the first again
SLOWEST_S = 5.0  # longest wait between two starts


class LighthouseFailed(FtHsdpError):
    """The lighthouse ended instead of listening; `str()` is its last line."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LighthouseProcess:
    """Keeps the lighthouse of a run alive. emit: takes each event; module: what is run."""

    def __init__(self, run: RunDir, emit: Callable[[Row], None], *, module: str = "lighthouse") -> None:
        self._run = run
        self._emit = emit
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Where it listens; stays the same over restarts."""
        assert self._url is not None, "start() comes first"
        return self._url

    async def start(self) -> None:
        """Start it and wait until it listens. Raises LighthouseFailed."""
        port = () if self._url is None else ("--port", str(urlsplit(self._url).port))
        command = tied(self._module, "--run", str(self._run.path), *port)
        with self._run.lighthouse_log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        exited = asyncio.create_task(self._process.wait())
        deadline = time.monotonic() + START_S
        try:
            while time.monotonic() < deadline:
                named = read_json(self._run.lighthouse)
                if isinstance(named, dict) and named.get("pid") == self._process.pid:
                    self._url = str(named["url"])
                    return
                await asyncio.wait([exited], timeout=0.02)
                if exited.done():
                    code = exited.result()
                    said = last_line(self._run.lighthouse_log) or f"see {self._run.lighthouse_log}"
                    raise LighthouseFailed(
                        f"the lighthouse ended with exit {code}: {said}", code if code > 0 else EXIT_RETRYABLE
                    )
            await self.stop()
            raise LighthouseFailed(f"the lighthouse does not listen after {START_S:g} s", EXIT_RETRYABLE)
        finally:
            exited.cancel()

    async def keep(self) -> None:
        """Start it again on its port whenever it ends, until cancelled."""
        failures, since = 0, time.monotonic()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            failures = 0 if time.monotonic() - since > STEADY_S else failures
            self._event("LighthouseExited", f"exit {code}; it is started again on its port", code=code)
            await asyncio.sleep(min(SLOWEST_S, 0.1 * 2.0**failures) if failures else 0)
            failures, since = failures + 1, time.monotonic()
            try:
                await self.start()
            except LighthouseFailed as error:
                self._event("LighthouseFailed", str(error))
            else:
                self._event("LighthouseRestarted", f"it listens at {self.url} again")

    async def stop(self) -> None:
        """End it."""
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
        self._emit({"t": time.time(), "event": name, "source": "supervisor", **fields, "reason": reason})


def furnish(run: RunDir, config: Config, token: str | None = None) -> None:
    """Put the configuration and a token into an empty run directory."""
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(dump(config))
    write_private(run.token, token or secrets.token_hex(32))


def check_port(config: Config) -> None:
    """Raise ConfigError on network.port where it is taken, on network.host where it is not ours."""
    host, port = config.network.host, config.network.port
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            "network.host", host, f"an address of this machine ({error.strerror or error})"
        ) from None
    try:
        with socket.socket(info[0], info[1]) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(info[4])
    except PermissionError:
        raise ConfigError("network.port", port, "0 or a port that this user may listen on") from None
    except OSError as error:
        if error.errno == 98:
            raise ConfigError("network.port", port, "0 or a free port (another process has this one)") from None
        raise ConfigError("network.host", host, f"an address of this machine ({error.strerror})") from None
