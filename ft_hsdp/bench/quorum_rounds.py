"""`bench quorum`: our lighthouse and torchft's are asked by the same clients, round by round in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import psutil

from ft_hsdp import protocol
from ft_hsdp.bench.contenders.base import version
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.options import QuorumOptions
from ft_hsdp.bench.quorum_client import Clients, Grpc, Http1, Wire, encoded
from ft_hsdp.bench.results import ProgressLog, ResultRow, interleave, milliseconds, spread
from ft_hsdp.bench.scope import listening, scratch, spawn
from ft_hsdp.config import config_hash, parse
from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Continue, Grant, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files

STEPS = 10**9
TIMES_MS = (5000, 60_000)  # torchft's own: of a heartbeat, to join
KINDS = {
    "torchft": "torchft's lighthouse (Rust, gRPC, no token, in memory): all members get the quorum",
    "same": "ft_hsdp's, tokens checked: the next step in the same epoch",
    "new": "ft_hsdp's, tokens checked: the ring broke: a new epoch, signed, on disk before all get it",
}


class LighthouseContender(ABC):
    """A lighthouse in a process, and its members."""

    def __init__(self, stack: ExitStack, command: list[str], file: Path, log: Path, members: int) -> None:
        process = spawn(stack, command, log)
        port = urlsplit(listening(process, file, log, "a lighthouse")["url"]).port or 0
        self._watched = psutil.Process(process.pid)
        self._members = members
        self.clients = Clients(("127.0.0.1", port), members, lambda: self.wire(f"127.0.0.1:{port}"))
        stack.callback(self.clients.close)

    @abstractmethod
    def wire(self, host: str) -> Wire:
        """Return the protocol of one client."""

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server has used."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)


class Torchft(LighthouseContender):
    """torchft's lighthouse; a round gives every member the whole quorum."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        self._step = 0
        self._names = [f"replica_{member}:{member:032x}" for member in range(members)]
        file = folder / "torchft.json"
        command = tied("ft_hsdp.bench.contenders.torchft", str(file), *map(str, (*TIMES_MS, members)))
        super().__init__(stack, command, file, folder / "torchft.log", members)
        self.same()

    def wire(self, host: str) -> Wire:
        """Return the protocol of one client."""
        return Grpc(host, "/torchft.LighthouseService/Quorum")

    def same(self) -> float:
        """Return the seconds of a round in which nothing changes."""
        self._step += 1
        seconds, answers = self.clients.round([self._message(n) for n in range(self._members)])
        if any(name.encode() not in answer for answer in answers for name in self._names):
            raise Retryable(f"torchft answered with fewer than {self._members} members")
        return seconds

    def _message(self, member: int) -> bytes:
        store, address = f"127.0.0.1:{28000 + member}", f"http://127.0.0.1:{29000 + member}"
        fields: tuple[str | int, ...] = (self._names[member], address, store, self._step, 1)
        return encoded(1, b"".join(encoded(number, value) for number, value in enumerate(fields, 1)))


class Ours(LighthouseContender):
    """This project's lighthouse, as `launcher.py lighthouse` starts it: tokens, checks, SQLite."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        run = RunDir(folder / "run")
        config = parse({"replicas": members, "ranks_per_replica": 1, "train": {"steps": STEPS}})
        write_job_files(run, config)
        self._token = run.token.read_text().strip()
        self._hash = config_hash(config)
        self._state = StateId(0, 0, state_id.digest("start"))
        self._epoch = 0
        command = tied("lighthouse", "--run", str(run.path))
        super().__init__(stack, command, run.lighthouse, folder / "lighthouse.log", members)
        self.new()

    def wire(self, host: str) -> Wire:
        """Return the protocol of one client."""
        return Http1(host, "/v1/quorum", self._token)

    def same(self) -> float:
        """Return the seconds of a round in which nothing changes: the epoch goes on."""
        step = self._state.step + 1
        self._state = StateId(self._epoch, step, state_id.digest("bench", step))
        seconds, answers = self.clients.round([self._message(n, 0) for n in range(self._members)])
        wanted = protocol.encode(Continue(self._epoch, step + 1))
        if any(answer != wanted for answer in answers):
            raise Retryable(f"the lighthouse answered {answers[0][:200]!r}")
        return seconds

    def new(self) -> float:
        """Return the seconds of a round after the ring broke: a new epoch, durable before a member hears of it."""
        seconds, answers = self.clients.round([self._message(n, self._epoch) for n in range(self._members)])
        grants = [protocol.decode(answer, Grant) for answer in answers]
        if {len(grant.members) for grant in grants} != {self._members} or grants[0].epoch <= self._epoch:
            raise Retryable(f"the lighthouse answered {answers[0][:200]!r}")
        self._epoch = grants[0].epoch
        return seconds

    def _message(self, member: int, after: int) -> bytes:
        report = Report(
            member,
            f"{member}-bench-0",
            self._state,
            self._state.step + 1,
            self._epoch,
            after,
            equal=tuple(range(self._members)) if self._epoch else (),
        )
        address = f"127.0.0.1:{29000 + member}"
        return protocol.encode(
            protocol.QuorumRequest(report, (address,), (address,), self._hash, "layout", "numerics")
        )


def run(options: QuorumOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        ConfigError: torchft is not installed.
        Retryable: A lighthouse fails.
    """
    if version("torchft") is None:
        raise ConfigError("bench", "quorum", "an installation with torchft, which it is measured beside")
    log = ProgressLog(stream)
    result, started = begin_result("quorum", log)
    result["kinds"] = KINDS
    result["rounds"] = [_measure(members, options.rounds, log) for members in options.members]
    return finish_result(result, log, started)


def _measure(members: int, rounds: int, log: ProgressLog) -> ResultRow:
    """Return a row: the times of all kinds of rounds with so many members."""
    log.say(f"{members} members")
    with scratch() as (stack, folder):
        torchft, ours = Torchft(stack, folder, members), Ours(stack, folder, members)
        kinds = {"torchft": _Watched(torchft, torchft.same)}
        kinds |= {"same": _Watched(ours, ours.same), "new": _Watched(ours, ours.new)}
        seconds = interleave(kinds, rounds)
    found = {kind: spread(values) for kind, values in seconds.items()}
    cpu = {kind: milliseconds(each.cpu_s / each.rounds) for kind, each in kinds.items()}
    for kind, each in found.items():
        log.say(f"  {kind}: {each['p50_ms']:.3g} ms, server's CPU {cpu[kind]:.2f} ms")
    return {"members": members, "rounds": found, "cpu_ms": cpu}


class _Watched:
    """Rounds of one kind, and the CPU that the server needs for them."""

    def __init__(self, server: LighthouseContender, take: Callable[[], float]) -> None:
        self.cpu_s = 0.0
        self.rounds = 0
        self._server = server
        self._take = take

    def __call__(self) -> float:
        """Ask once; return the seconds."""
        before = self._server.cpu_s()
        seconds = self._take()
        self.cpu_s += self._server.cpu_s() - before
        self.rounds += 1
        return seconds
