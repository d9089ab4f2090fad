"""The holder of a host: the process that `host` and `replica` are. It has no network, and decides nothing.

It is the parent of the host's agent, of the fork server and of all ranks. It starts the agent, and again if a
signal has ended that, as SIGKILL or a lack of memory does. The ranks go on meanwhile, and the holder keeps the
code of each that ends until the lighthouse knows it. So an agent can be replaced, also by that of a newer package.
If the agent ends with a code, that is the holder's, and nothing outlives the holder.

The agent's requests are lines of JSON on a socket, {"call": n, "do": "spawn", ...}; `HeldForks` is its side. The
answer is {"of": n, "value": ...} or {"of": n, "error": "one line"}. What happens by itself is told as
{"exited": pid, "code": code}, {"warm": pid} and {"lost": pid, "why": "one line"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft_hsdp.core.restart import doubled
from ft_hsdp.errors import Retryable, one_line
from ft_hsdp.launch.backend.forkserver import ENTRY, ForkServer
from ft_hsdp.launch.backend.held import LARGEST, KeptRank
from ft_hsdp.launch.backend.processes import environment, take_name, tied
from ft_hsdp.lifetime import stop_signals

LOAD_S = 15.0  # how long a signal waits for an agent that loads, while ranks run
END_S = 60.0  # for an agent that has hung up to end
# Before the agent is started again; it doubles while that lives for less than the most.
PAUSE_S, PAUSE_MAX_S = 0.1, 10.0


class Holder:
    """Starts the agent of a host, and keeps its ranks."""

    def __init__(self, command: Sequence[str], entry: str = ENTRY, load_s: float = LOAD_S) -> None:
        """Make it; nothing is started. ``command`` is that of the agent, ``entry`` is as in `ForkServer`."""
        self._command = command
        self._entry = entry
        self._load_s = load_s
        self._life = secrets.token_hex(8)
        self._agents = 0  # that were started
        self._forks: ForkServer | None = None
        self._ranks: dict[int, KeptRank] = {}  # by pid, until an agent has taken their codes
        self._names: dict[str, socket.socket] = {}  # abstract ones, that no other process gets meanwhile
        self._process: asyncio.subprocess.Process | None = None  # the agent
        self._writer: asyncio.StreamWriter | None = None  # to it
        self._ready = False  # it takes signals
        self._calls: set[asyncio.Task[None]] = set()
        self._stopped: int | None = None  # the signal that told it to end

    async def run(self) -> int:
        """Have an agent until one ends with a code, then end all ranks and return the code.

        Raises:
            Retryable: The first agent cannot be started.
        """
        loop, quick = asyncio.get_running_loop(), 0
        for number in stop_signals():
            loop.add_signal_handler(number, self._stop, number)
        try:
            while True:
                began = loop.time()
                try:
                    if (code := await self._serve()) >= 0:
                        return code
                    why = f"was ended by signal {-code}"
                except OSError as error:  # no memory, descriptors or pids
                    why = f"does not start: {error.strerror}"
                    if not self._agents:
                        raise Retryable(f"the host's agent {why}") from None
                if self._stopped is not None:
                    return 128 + self._stopped
                quick = quick + 1 if loop.time() - began < PAUSE_MAX_S else 0
                pause_s = doubled(PAUSE_S, quick, PAUSE_MAX_S)
                goes_on = f"another one is started in {pause_s:.1f} s, the ranks go on"
                print(f"the host's agent {why}: {goes_on}", file=sys.stderr)  # noqa: T201 - progress of a command
                await asyncio.sleep(pause_s)
        finally:
            for mine in self._names.values():
                mine.close()
            if self._forks is not None:
                await self._forks.close()

    def _stop(self, number: int) -> None:
        """Pass a signal on to the agent, which ends once its ranks have left; one that loads gets it later."""
        self._stopped, process = number, self._process
        if process is not None and process.returncode is None:
            if self._ready:
                process.send_signal(number)
            else:

                def give_up() -> None:
                    if not self._ready and process.returncode is None:
                        process.kill()

                asyncio.get_running_loop().call_later(self._load_s if self._ranks else 0.0, give_up)

    async def _serve(self) -> int:
        """Start an agent, do what it asks for until it ends, and return how it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = (*self._command, "--holder", str(theirs.fileno()), *(("--again",) if self._agents else ()))
            there = {**os.environ, "PYTHONPATH": environment()["PYTHONPATH"]}
            starting = asyncio.create_subprocess_exec(*command, env=there, pass_fds=(theirs.fileno(),))
            process = self._process = await starting
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=LARGEST)
        self._agents += 1
        ranks = {pid: asdict(rank) for pid, rank in self._ranks.items()}
        self._tell(life=self._life, agents=self._agents, ranks=ranks)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                call = asyncio.create_task(self._answer(request.pop("call"), request.pop("do"), request))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        except ConnectionError:
            pass
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            self._writer.close()
            self._writer, self._ready = None, False
            try:
                code = await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                process.kill()
                code = await process.wait()
            # A rank that is being forked is one of those that the next agent hears of.
            await asyncio.gather(*self._calls, return_exceptions=True)
            for pid in [pid for pid, rank in self._ranks.items() if not rank.assignment]:
                self._forget(pid)
        return code

    async def _answer(self, number: int, what: str, about: dict[str, Any]) -> None:
        """Do one thing, and say how it went."""
        try:
            value = await getattr(self, f"_do_{what}")(**about)
        except (
            Retryable,
            OSError,
            AttributeError,
            TypeError,
        ) as error:  # an agent of another version
            self._tell(of=number, error=one_line(str(error)))
        else:
            self._tell(of=number, value=value)

    def _tell(self, **what: Any) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write(json.dumps(what).encode() + b"\n")

    async def _do_name(self, name: str) -> bool:
        """Keep an abstract name until the holder ends; return whether no other process has it."""
        if name not in self._names:
            if (mine := take_name(name)) is None:
                return False
            self._names[name] = mine
        return True

    async def _do_ready(self) -> None:
        self._ready = True
        if self._stopped is not None:
            self._stop(self._stopped)

    async def _do_start(self, run: str, preload: list[str], boot_s: float, spawn_s: float) -> None:
        if self._forks is None:

            def lost(pid: int, why: str) -> None:
                self._tell(lost=pid, why=why)

            limits = {"boot_s": boot_s, "spawn_s": spawn_s}
            self._forks = ForkServer(Path(run), entry=self._entry, preload=preload, lost=lost, **limits)
        await self._forks.start()

    async def _do_spawn(
        self, env: dict[str, str], config: str, log: str, assignment: dict[str, Any] | None
    ) -> int:
        assert self._forks is not None
        kept = KeptRank(env, assignment or {}, assignment is None)

        def exited(pid: int, code: int) -> None:
            kept.code = code
            self._tell(exited=pid, code=code)
            if not kept.assignment:
                self._ranks.pop(pid, None)

        pid = await self._forks.spawn(
            env=env,
            config=Path(config),
            log=Path(log),
            on_exit=exited,
            assignment=assignment,
            on_warm=lambda pid: self._tell(warm=pid),
        )
        if kept.code is None or assignment:
            self._ranks[pid] = kept
        return pid

    async def _do_assign(self, pid: int, assignment: dict[str, Any]) -> None:
        if (rank := self._ranks.get(pid)) is not None and self._forks is not None:
            rank.assignment = assignment
            self._forks.assign(pid, assignment)

    async def _do_signal(self, pid: int, number: int) -> None:
        if (rank := self._ranks.get(pid)) is not None and self._forks is not None:
            rank.killed = rank.killed or number == signal.SIGKILL
            self._forks.signal(pid, number)

    async def _do_forget(self, pids: list[int]) -> None:
        for pid in pids:
            self._ranks.pop(pid, None)

    def _forget(self, pid: int) -> None:
        """End a spare whose agent has gone."""
        if self._ranks.pop(pid).code is None and self._forks is not None:
            self._forks.signal(pid, signal.SIGKILL)


def hold(words: Sequence[str]) -> int:
    """Run the command `host` or `replica` as an agent, and again if a signal ends it; return its exit code."""
    return asyncio.run(Holder(tied("ft_hsdp.launch.cli", *words)).run())
