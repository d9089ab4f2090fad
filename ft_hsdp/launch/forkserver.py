"""Starts rank processes by forking a preloaded one (`zygote`), and hears of their exits at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp.errors import Retryable
from ft_hsdp.launch.processes import environment, tied
from ft_hsdp.launch.rundir import alive

ENTRY = "ft_hsdp.train.trainer:main"
PRELOAD = ("torch", "torch.distributed.fsdp", "torch._dynamo")
SPAWN_S = 10.0  # longest time for a fork
GONE_S = 5.0  # longest time for the children of a dead server to go

OnExit = Callable[[int, int], None]
"""Called with (pid, code) once the process is gone; the code is negative for a signal."""
OnWarm = Callable[[int], None]
"""Called with the pid of a process that has got all ready, and waits to be called."""
Called = Mapping[str, Any]
"""Who a rank is to be: the fields of `ft_hsdp.train.calling.Call`, and `log`, which takes its output."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whom to tell of a rank: when it is gone, and when it is warm and waits to be called."""

    exited: OnExit
    warm: OnWarm


class ForkServer:
    """One preloaded process of a run. It dies with this process, and its children with it.

    entry: "module:function" with the signature of `ft_hsdp.train.trainer.main`; preload: modules to import
    before the fork; boot_s: longest time for that. `spawn` starts the server where it does not run, and again
    after it died.
    """

    def __init__(
        self, run: Path, *, entry: str = ENTRY, preload: Sequence[str] = PRELOAD, boot_s: float = 120.0
    ) -> None:
        self._run = run.resolve()
        self._boot_s = boot_s
        self._entry = entry
        self._preload = preload
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._requests = 0
        self._spawning: dict[int, tuple[asyncio.Future[int], _Owner]] = {}
        self._running: dict[int, _Owner] = {}  # by pid

    @property
    def pid(self) -> int | None:
        """Pid of the server, if it runs."""
        return self._process.pid if self._writer is not None and self._process is not None else None

    async def start(self) -> None:
        """Start the server, if it does not run. Raises Retryable with one line where it cannot load."""
        async with self._starting:
            if self._writer is None:
                await self._start()

    async def spawn(
        self,
        *,
        env: Mapping[str, str],
        config: Path,
        log: Path,
        on_exit: OnExit,
        call: Called | None = None,
        on_warm: OnWarm = lambda _: None,
    ) -> int:
        """Fork a rank; its pid. Raises Retryable where the server cannot, or dies over it.

        env: added to the environment; config: the YAML file it loads; log: takes its stdout and stderr. Without
        `call` it gets all ready, has `on_warm` called, and waits for a `call`.
        """
        await self.start()
        self._requests += 1
        number = self._requests
        spawned: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawning[number] = (spawned, _Owner(on_exit, on_warm))
        request = {
            "spawn": number,
            "env": dict(env),
            "run": str(self._run),
            "config": str(config),
            "log": str(log),
            "call": None if call is None else dict(call),
        }
        self._send(request)
        try:
            async with asyncio.timeout(SPAWN_S):
                return await spawned
        except TimeoutError:
            await self.kill()  # it may fork yet: only its death settles that
            raise Retryable(f"the fork server did not fork within {SPAWN_S:g} s") from None

    def call(self, pid: int, call: Called) -> None:
        """Tell a rank that was not told yet who it is."""
        if pid in self._running:
            self._send({"call": dict(call), "pid": pid})

    def signal(self, pid: int, number: int) -> None:
        """Signal a rank. The server is its parent, so the pid cannot have become somebody else's."""
        if pid in self._running and self._writer is not None:
            self._send({"signal": int(number), "pid": pid})

    async def kill(self) -> None:
        """SIGKILL the server and so all its children; `on_exit` is called for each."""
        reading = self._reading
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if reading is not None:
            await asyncio.wait([reading], timeout=2 * GONE_S)

    async def close(self) -> None:
        """End the server. Ranks that still run are killed."""
        await self.kill()
        if self._process is not None:
            await self._process.wait()

    async def _execute(self) -> socket.socket:
        """Start its process; our end of the connection to it. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, (self._run / "forkserver.log").open("ab") as log:
                args = (str(theirs.fileno()), self._entry, str(self._run), *self._preload)
                self._process = await asyncio.create_subprocess_exec(
                    *tied("ft_hsdp.launch.zygote", *args),
                    env=environment(),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except BaseException:
            ours.close()
            raise
        return ours

    async def _start(self) -> None:
        try:
            ours = await self._execute()
        except OSError as error:
            raise Retryable(f"the fork server does not start: {error.strerror or error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(self._boot_s):
                line = await reader.readline()
            answer = json.loads(line) if line else {"error": "the fork server died while it was loading"}
            if "error" in answer:
                raise Retryable(answer["error"])
        except TimeoutError:
            await self._discard(writer)
            raise Retryable(f"the fork server did not load within {self._boot_s:g} s") from None
        except BaseException:
            await self._discard(writer)
            raise
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer))

    async def _discard(self, writer: asyncio.StreamWriter) -> None:
        """End a server that did not come up."""
        writer.close()
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Deliver what the server says until it is gone."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break
                self._deliver(json.loads(line))
        writer.close()
        self._writer = None
        assert self._process is not None
        await self._process.wait()
        await self._mourn()

    def _deliver(self, message: dict[str, Any]) -> None:
        if "spawned" in message:
            spawned, owner = self._spawning.pop(message["spawned"])
            self._running[message["pid"]] = owner
            if not spawned.done():
                spawned.set_result(message["pid"])
        elif "failed" in message:
            spawned, _ = self._spawning.pop(message["failed"])
            if not spawned.done():
                spawned.set_exception(Retryable(f"the fork server cannot fork: {message['error']}"))
        elif "warm" in message:
            if (warm := self._running.get(message["pid"])) is not None:
                warm.warm(message["pid"])
        elif (gone := self._running.pop(message["pid"], None)) is not None:
            gone.exited(message["pid"], message["code"])

    async def _mourn(self) -> None:
        """The server died: the kernel kills its children; tell their owners when they are gone."""
        for spawned, _ in self._spawning.values():
            if not spawned.done():
                spawned.set_exception(Retryable("the fork server died"))
                spawned.exception()  # whoever waited for it may have given up
        self._spawning.clear()
        orphans, self._running = self._running, {}
        deadline = time.monotonic() + GONE_S
        for pid, owner in orphans.items():
            while alive({"pid": pid}) and time.monotonic() < deadline:  # noqa: ASYNC110 - no parent of theirs
                await asyncio.sleep(0.005)
            owner.exited(pid, -signal.SIGKILL)
