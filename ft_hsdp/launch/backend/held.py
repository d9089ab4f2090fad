"""The ranks of a holder, as the agent of a host sees them (`launch.holder`).

`HeldForks` has the methods of `ForkServer` that an agent needs. What an earlier agent has left is in `kept`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.forkserver import Assignment, OnExit, OnLost, OnWarm

LARGEST = 1 << 24  # bytes of one line


@dataclass(slots=True)
class KeptRank:
    """A rank, as an agent that comes after the one which started it has to know it."""

    env: dict[str, str]
    assignment: dict[str, Any]  # {}: of a spare that waits, which ends with its agent
    spare: bool
    code: int | None = None  # with which it has ended
    killed: bool = False  # by an agent

    @property
    def incarnation(self) -> str:
        number = {name: self.assignment[name] for name in ("replica", "run_id", "restarts")}
        return str(IncarnationId(**number))


@dataclass(frozen=True, slots=True)
class Told:
    """What a holder says first."""

    life: str  # of its ranks: they end with the holder
    agents: int  # that it has started, this one included
    ranks: Mapping[int, KeptRank]  # by pid


class HeldForks:
    """Has a holder fork ranks, and hears of their ends."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Told, lost: OnLost
    ) -> None:
        """Take a connection that `connect` has made."""
        self._reader = reader
        self._writer = writer
        self.told = told
        self._lost = lost
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._watched: dict[int, tuple[OnExit, OnWarm]] = {}  # by pid
        self._early: dict[int, list[dict[str, Any]]] = {}  # what is told of a rank before its pid is known here
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, descriptor: int, lost: OnLost) -> HeldForks:
        """Connect to the holder over an inherited socket."""
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor), limit=LARGEST)
        first = json.loads(await reader.readline())
        ranks = {int(pid): KeptRank(**rank) for pid, rank in first["ranks"].items()}
        return cls(reader, writer, Told(first["life"], first["agents"], ranks), lost)

    async def take_name(self, name: str) -> bool:
        """Have the holder keep an abstract name; return whether no other process has it."""
        return bool(await self.order("name", name=name))

    async def start(self, run: Path, preload: Sequence[str], boot_s: float, spawn_s: float) -> None:
        """Start the fork server if the holder has none; as `ForkServer` takes it. Raises Retryable."""
        about = {"run": str(run), "preload": [*preload], "boot_s": boot_s, "spawn_s": spawn_s}
        await self.order("start", **about)

    async def ready(self) -> None:
        """Have the holder pass on the signals that it gets."""
        await self.order("ready")

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
        about = {"env": dict(env), "config": str(config), "log": str(log), "assignment": assignment}
        pid = int(await self.order("spawn", **about))
        self.watch(pid, on_exit, on_warm)
        return pid

    def watch(self, pid: int, on_exit: OnExit, on_warm: OnWarm = lambda _: None) -> None:
        """Hear of a rank from now on."""
        self._watched[pid] = on_exit, on_warm
        for message in self._early.pop(pid, ()):
            self._deliver(pid, message)

    def assign(self, pid: int, assignment: Assignment) -> None:
        self.order("assign", pid=pid, assignment=dict(assignment))

    def signal(self, pid: int, number: int) -> None:
        self.order("signal", pid=pid, number=int(number))

    def forget(self, pids: Sequence[int]) -> None:
        self.order("forget", pids=[*pids])

    async def close(self) -> None:
        """Hang up; the holder ends the ranks once this process has ended with a code."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    def order(self, what: str, **about: Any) -> asyncio.Future[Any]:
        """Send a request of `launch.holder`, and return its answer, for which nobody has to wait."""
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps({"call": number, "do": what, **about}).encode() + b"\n")
        return answer

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while line := await self._reader.readline():
                self._take(json.loads(line))
        # The holder is gone, and the kernel ends this process.

    def _take(self, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._lost(message["lost"], message["why"])
        elif "of" not in message:
            pid: int = message["exited" if "exited" in message else "warm"]
            if pid in self._watched:
                self._deliver(pid, message)
            else:
                self._early.setdefault(pid, []).append(message)
        elif not (call := self._calls.pop(message["of"])).done():
            if "error" in message:
                call.set_exception(Retryable(message["error"]))
            else:
                call.set_result(message["value"])

    def _deliver(self, pid: int, message: Mapping[str, Any]) -> None:
        on_exit, on_warm = self._watched[pid]
        if "exited" not in message:
            on_warm(pid)
            return
        del self._watched[pid]
        on_exit(pid, message["code"])
