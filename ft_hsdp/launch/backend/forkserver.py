"""The supervisor's side of the fork server: it has ranks forked from a preloaded process, and reports their exits.

The ranks are children of this process, not of the one that forked them (`children`). If the fork server freezes
or dies, the start that waits for it fails, and another fork server is started; the ranks go on. The fork server
itself is `zygote`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend import children
from ft_hsdp.launch.backend.children import Child
from ft_hsdp.launch.backend.processes import environment, tied
from ft_hsdp.launch.run.directory import open_log
from ft_hsdp.lifetime import MARK_VARIABLE, UNMARKED

ENTRY = "ft_hsdp.launch.backend.entry:main"
PRELOAD = ("torch", "torch.distributed.fsdp", "torch._dynamo")
SPAWN_S = 10.0  # default of the longest time for a fork
GONE_S = 5.0  # longest time for killed ranks, and for a server that has closed its connection, to end
GONE_LOOK_S = 0.005  # between two looks whether they have
REAP_S = 10.0  # between two looks for adopted processes that have ended
_LARGEST = 1 << 16  # bytes of one answer

OnExit = Callable[[int, int], None]
"""Called with (pid, code) once the process is gone; the code is negative for a signal."""
OnWarm = Callable[[int], None]
"""Called with the pid of a process that is warm and waits for its incarnation."""
OnLost = Callable[[int, str], None]
"""Called with the pid of a fork server that was given up, and why."""
Assignment = Mapping[str, Any]
"""The message that assigns a rank: the fields of `core.restart.IncarnationId`, and `log`, for its output."""


@dataclass(slots=True)
class _Start:
    spawned: asyncio.Future[int]  # its pid
    line: socket.socket  # this process's end of the socket on which it gets its incarnation
    exited: OnExit
    warm: OnWarm
    assignment: Assignment | None  # None for a spare's rank
    mark: str = field(default_factory=lambda: secrets.token_hex(16))  # of the rank and all that it starts


class _Server:
    """One preloaded process. ``born`` is called for each forked rank, with the start that asked for it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        sock: socket.socket,
        born: Callable[[_Start | None, int], None],
    ) -> None:
        self.process = process
        self.sock = sock
        self._born = born
        self._starts: dict[int, _Start] = {}
        self._count = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    async def fork(self, request: Mapping[str, Any], line: socket.socket, start: _Start, within_s: float) -> int:
        """Fork a rank and return its pid. Raises Retryable, or TimeoutError after ``within_s`` seconds."""
        self._count += 1
        number = self._count
        self._starts[number] = start
        try:
            socket.send_fds(self.sock, [json.dumps({"spawn": number, **request}).encode()], [line.fileno()])
            async with asyncio.timeout(within_s):
                return await start.spawned
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise Retryable("the fork server died") from None
        finally:
            self._starts.pop(number, None)

    async def read(self) -> None:
        """Read its answers until it closes the connection."""
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):
                while data := await loop.sock_recv(self.sock, _LARGEST):
                    self._deliver(json.loads(data))
        finally:  # also if it is cancelled
            self.sock.close()
        for start in self._starts.values():
            if not start.spawned.done():
                start.spawned.set_exception(Retryable("the fork server died"))
                start.spawned.exception()  # the caller may have stopped waiting for it

    def kill(self) -> None:
        """Send it SIGKILL, which ends a stopped one too. Its ranks go on."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def gone(self) -> None:
        """Wait until a server that has closed its connection ends; kill it if it does not within `GONE_S` seconds.

        A server that is ending gets no signal: asyncio could lose its exit code, and warn of that on stderr.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await self.process.wait()
                return
        self.kill()
        await self.process.wait()

    def _deliver(self, message: dict[str, Any]) -> None:
        if "spawned" in message:
            self._born(self._starts.pop(message["spawned"], None), message["pid"])
        elif (start := self._starts.pop(message["failed"], None)) is not None and not start.spawned.done():
            start.spawned.set_exception(Retryable(f"the fork server cannot fork: {message['error']}"))


class ForkServer:
    """The preloaded process of a run, and the ranks that it forks; all die with this process.

    A server that dies, or does not fork in time, is given up, and another one is started at once.
    """

    def __init__(
        self,
        run: Path,
        *,
        entry: str = ENTRY,
        preload: Sequence[str] = PRELOAD,
        boot_s: float = 120.0,
        spawn_s: float = SPAWN_S,
        lost: OnLost = lambda pid, why: None,
    ) -> None:
        """Make the fork server of a run; nothing is started before `start` or `spawn`.

        Args:
            entry: "module:function" with the signature of `ft_hsdp.launch.backend.entry.main`.
            preload: Modules to import before the first fork.
            boot_s: Longest time for that, in seconds.
            spawn_s: Longest time for a fork, in seconds.
            lost: Called for each server that was given up.
        """
        self._run = run.resolve()
        self._boot_s = boot_s
        self._spawn_s = spawn_s
        self._entry = entry
        self._preload = preload
        self._lost = lost
        self._starting = asyncio.Lock()
        self._server: _Server | None = None
        self._servers: dict[int, _Server] = {}  # all that there were, by their pids, which are their sessions
        self._running: dict[int, Child] = {}  # by pid
        self._fewer = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()  # of what ranks have left behind
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the pid of the server; None if it does not run."""
        return None if self._server is None else self._server.pid

    async def start(self) -> None:
        """Start the server if it does not run. Raises Retryable with one line if it cannot load."""
        await self._ready()

    async def spawn(
        self,
        *,
        env: Mapping[str, str],
        config: Path,
        log: Path,
        on_exit: OnExit,
        assignment: Assignment | None = None,
        on_warm: OnWarm = lambda _: None,
    ) -> int:
        server = await self._ready()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise Retryable(f"no line to a rank: {error.strerror}") from None
        start = _Start(asyncio.get_running_loop().create_future(), ours, on_exit, on_warm, assignment)
        request = {
            "mark": start.mark,
            "env": dict(env),
            "run": str(self._run),
            "config": str(config),
            "log": str(log),
            "called": assignment is not None,
        }
        try:
            with theirs:
                return await server.fork(request, theirs, start, self._spawn_s)
        except TimeoutError:
            why = f"the fork server did not fork within {self._spawn_s:g} s"
            server.kill()
            self._give_up(server, why)
            raise Retryable(why) from None
        finally:
            if not start.spawned.done() or start.spawned.cancelled() or start.spawned.exception() is not None:
                ours.close()  # a rank that was forked for it nevertheless then ends

    def assign(self, pid: int, assignment: Assignment) -> None:
        if (rank := self._running.get(pid)) is not None:
            rank.assign(assignment)

    def signal(self, pid: int, number: int) -> None:
        # It is a child of this process, so no other process has its pid.
        if (rank := self._running.get(pid)) is not None:
            rank.signal(number)

    def forget(self, pids: Sequence[int]) -> None:
        """Forget ranks that have ended: nobody asks for them later."""

    async def close(self) -> None:
        """End the server. Ranks that still run are killed; `on_exit` is called for each."""
        self._closed = True
        server, self._server = self._server, None
        if server is not None:
            server.kill()
        for rank in self._running.values():
            rank.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                while self._running:
                    self._fewer.clear()
                    await self._fewer.wait()
        await asyncio.gather(*self._ends, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._servers.values():  # also one that was given up and has not ended yet
            await each.gone()
            each.sock.close()
        for _ in range(round(GONE_S / GONE_LOOK_S)):
            if children.end(self._servers):  # also a rank whose pid never arrived
                break
            await asyncio.sleep(GONE_LOOK_S)

    async def _ready(self) -> _Server:
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _execute(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start the process; our end of the connection to it. Raises OSError, or RuntimeError without a thread."""
        children.adopt()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            with theirs, await self._open_log() as log:
                args = (str(theirs.fileno()), self._entry, str(self._run), *self._preload)
                process = await asyncio.create_subprocess_exec(
                    *tied("ft_hsdp.launch.backend.zygote", *args),
                    env={**environment(), MARK_VARIABLE: UNMARKED},
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except BaseException:
            ours.close()
            raise
        return process, ours

    async def _open_log(self) -> IO[bytes]:
        """Open the server's log, on a thread because a disk may hang; if this is cancelled, it is closed then."""
        abandoned, opened = threading.Event(), list[IO[bytes]]()

        def opening() -> IO[bytes]:
            opened.append(open_log(self._run / "forkserver.log"))
            if abandoned.is_set():
                opened[0].close()  # here, because the event loop may have ended
            return opened[0]

        try:
            return await asyncio.to_thread(opening)
        except asyncio.CancelledError:
            abandoned.set()
            for log in opened:
                log.close()
            raise

    async def _start(self) -> _Server:
        try:
            process, sock = await self._execute()
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            raise Retryable(f"the fork server does not start: {why}") from None
        server = _Server(process, sock, self._born)
        try:
            async with asyncio.timeout(self._boot_s):
                data = await asyncio.get_running_loop().sock_recv(sock, _LARGEST)
            answer = json.loads(data) if data else {"error": "the fork server died while it was loading"}
            if "error" in answer:
                raise Retryable(answer["error"])
        except BaseException as error:
            sock.close()
            server.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise Retryable(f"the fork server did not load within {self._boot_s:g} s") from None
            if isinstance(error, OSError):
                raise Retryable("the fork server died while it was loading") from None
            raise
        self._servers[server.pid] = server
        self._keep(self._read(server))
        if len(self._servers) == 1:
            self._keep(self._reap())
        return server

    def _keep(self, work: Any, tasks: set[asyncio.Task[None]] | None = None) -> None:
        task = asyncio.create_task(work)
        kept = self._tasks if tasks is None else tasks
        kept.add(task)
        task.add_done_callback(kept.discard)

    async def _read(self, server: _Server) -> None:
        await server.read()
        self._give_up(server, "the fork server died")
        await server.gone()

    def _give_up(self, server: _Server, why: str) -> None:
        """Start another server in place of this one, unless that was done."""
        if self._server is not server or self._closed:
            return
        self._server = None
        self._lost(server.pid, why)
        self._keep(self._again())

    async def _again(self) -> None:
        with contextlib.suppress(Retryable):  # the next start tries it again, and says so
            await self._ready()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            children.reap(self._servers, self._running)

    def _born(self, start: _Start | None, pid: int) -> None:
        """Note that a rank runs. Its pid stays its own until this process, its parent, reaps it."""
        if start is None or start.spawned.done() or self._closed:
            os.kill(pid, signal.SIGKILL)  # the start has given up
            return

        def gone(code: int) -> None:
            del self._running[pid]
            self._keep(children.end_left(start.mark), self._ends)
            self._fewer.set()
            start.exited(pid, code)

        try:
            rank = Child(pid, start.line, gone, lambda: start.warm(pid))
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            start.spawned.set_exception(Retryable(f"a rank cannot be watched: {error.strerror}"))
            return
        self._running[pid] = rank
        if start.assignment is not None:
            rank.assign(start.assignment)
        start.spawned.set_result(pid)
