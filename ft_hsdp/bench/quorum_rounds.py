"""What the user asked `bench quorum` for.

The goals of `bench quorum`, and how what was seen stands to them.

The result of `bench quorum` as tables.

The two lighthouses of `bench quorum`: a process of each, and members that ask it for one step after another.

`bench quorum`: both lighthouses are asked by the same clients, round by round in turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import psutil

from ft_hsdp import protocol
from ft_hsdp.bench import tables
from ft_hsdp.bench.contenders.roster import version
from ft_hsdp.bench.goals import GoalVerdict, begin_result, finish_result, most
from ft_hsdp.bench.options import ProgressLog, ResultRow, count_of
from ft_hsdp.bench.quorum_client import ClientHerd, Grpc, Http1, counted, encoded_text, number
from ft_hsdp.bench.results import interleave, milliseconds, ratio, spread
from ft_hsdp.bench.scope import listening, spawn
from ft_hsdp.config import config_hash, parse
from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Continue, Grant, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files

MEMBERS = (3, 12, 64)


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """members: how many clients ask at once; rounds: of each kind."""

    members: tuple[int, ...]
    rounds: int


def quorum_options(*, members: str | None, rounds: int) -> QuorumOptions:
    """Options from the words of a command line. Raises ConfigError."""
    return QuorumOptions(_members(members) if members else MEMBERS, count_of("--rounds", rounds))


def _members(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MAX_REPLICAS for word in words):
        raise ConfigError("--members", text, f"numbers from 1 to {MAX_REPLICAS}, e.g. 12,64")
    return tuple(int(word) for word in words)


TIMES = 1.25
AT = (12, 64)
GOAL_KINDS = {"same": "a round", "new": "a round that makes an epoch durable"}


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[GoalVerdict]:
    """Every goal for which there is a figure."""
    return [
        most(f"{text}, times torchft's", {"members": row["members"]}, TIMES, times(row, kind))
        for row in rows
        for kind, text in GOAL_KINDS.items()
        if row["members"] in AT
    ]


def times(row: Mapping[str, Any], kind: str) -> float:
    """How many times as long as torchft's a round takes, by medians."""
    return ratio(row["rounds"][kind]["p50_ms"], row["rounds"]["torchft"]["p50_ms"])


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = tables.begin_tables(result, stream)
    for name, text in result["kinds"].items():
        console.print(f"  {name:<8} {text}")
    for row in result["rounds"]:
        title = f"{row['members']} members ask at once: {row['rounds']['torchft']['count']} rounds of each"
        grid = tables.columns(title, "", "p50, ms", "min", "max", "times torchft", "server's CPU, ms")
        for kind, each in row["rounds"].items():
            figures = (f"{each[key]:.3g}" for key in ("p50_ms", "min_ms", "max_ms"))
            ratio = "" if kind == "torchft" else f"{times(row, kind):.2f}"
            grid.add_row(kind, *figures, ratio, f"{row['cpu_ms'][kind]:.2f}")
        console.print(grid)
    tables.end_tables(result, verdicts(result["rounds"]), console)


STEPS = 10**9
TIMES_MS = (5000, 60_000)  # torchft's own: of a heartbeat, to join


class QuorumContender:
    """A lighthouse and its members. `process` serves; `ask` has all of them ask at once."""

    def __init__(self, stack: ExitStack, command: list[str], file: Path, log: Path) -> None:
        self.process = spawn(stack, command, log)
        self.url = urlsplit(listening(self.process, file, log, "a lighthouse")["url"])
        self._watched = psutil.Process(self.process.pid)

    @property
    def address(self) -> tuple[str, int]:
        """Return the server's (host, port)."""
        return "127.0.0.1", self.url.port or 0

    def cpu_s(self) -> float:
        """CPU seconds that the server has used."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)


class Torchft(QuorumContender):
    """torchft's lighthouse; a round gives every member the whole quorum."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        file = folder / "torchft.json"
        module = "ft_hsdp.bench.contenders.torchft_lighthouse"
        numbers = (str(number) for number in (*TIMES_MS, members))
        super().__init__(stack, tied(module, str(file), *numbers), file, folder / "torchft.log")
        host = f"127.0.0.1:{self.address[1]}"
        self._herd = ClientHerd(self.address, members, lambda: Grpc(host, "/torchft.LighthouseService/Quorum"))
        stack.callback(self._herd.close)
        self._members = members
        self._step = 0

    def same(self) -> float:
        """Seconds of a round in which nothing changes."""
        self._step += 1
        seconds, answers = self._herd.round([self._message(n) for n in range(self._members)])
        if any(counted(answer, 1, 2) != self._members for answer in answers):
            raise Retryable(f"torchft answered with fewer than {self._members} members")
        return seconds

    def settle(self) -> None:
        """Form the first quorum."""
        self.same()

    def _message(self, member: int) -> bytes:
        address = f"http://127.0.0.1:{29000 + member}"
        fields = (
            encoded_text(1, f"replica_{member}:{member:032x}"),
            encoded_text(2, address),
            encoded_text(3, f"127.0.0.1:{28000 + member}"),
        )
        requester = b"".join(fields) + number(4, self._step) + number(5, 1)
        return encoded_text(1, requester)


class Ours(QuorumContender):
    """This project's lighthouse, as `launcher.py lighthouse` starts it: tokens, checks, SQLite."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        run = RunDir(folder / "run")
        config = parse({"replicas": members, "ranks_per_replica": 1, "train": {"steps": STEPS}})
        write_job_files(run, config)
        super().__init__(
            stack, tied("lighthouse", "--run", str(run.path)), run.lighthouse, folder / "lighthouse.log"
        )
        token, host = run.token.read_text().strip(), f"127.0.0.1:{self.address[1]}"
        self._herd = ClientHerd(self.address, members, lambda: Http1(host, "/v1/quorum", token))
        stack.callback(self._herd.close)
        self._members = members
        self._hash = config_hash(config)
        self._state = StateId(0, 0, state_id.digest("start"))
        self._epoch = 0

    def same(self) -> float:
        """Seconds of a round in which nothing changes: the epoch goes on."""
        step = self._state.step + 1
        self._state = StateId(self._epoch, step, state_id.digest("bench", step))
        seconds, answers = self._herd.round([self._message(n, 0) for n in range(self._members)])
        wanted = protocol.encode(Continue(self._epoch, step + 1))
        if any(answer != wanted for answer in answers):
            raise Retryable(f"the lighthouse answered {answers[0][:200]!r}")
        return seconds

    def new(self) -> float:
        """Seconds of a round after the ring broke: a new epoch of all members, durable before it is told."""
        seconds, answers = self._herd.round([self._message(n, self._epoch) for n in range(self._members)])
        grants = [protocol.decode(answer, Grant) for answer in answers]
        if {len(grant.members) for grant in grants} != {self._members} or grants[0].epoch <= self._epoch:
            raise Retryable(f"the lighthouse answered {answers[0][:200]!r}")
        self._epoch = grants[0].epoch
        return seconds

    def settle(self) -> None:
        """Form the first epoch."""
        self.new()

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


KINDS = {
    "torchft": "torchft's lighthouse (Rust, gRPC, no token, in memory): all members get the quorum",
    "same": "ft_hsdp's, tokens checked: the next step in the same epoch",
    "new": "ft_hsdp's, tokens checked: the ring broke: a new epoch, signed, on disk before all get it",
}


def run(options: QuorumOptions, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`.

    Raises ConfigError without torchft, Retryable where a lighthouse fails.
    """
    if version("torchft") is None:
        raise ConfigError("bench", "quorum", "an installation with torchft, which it is measured beside")
    log = ProgressLog(stream)
    result, started = begin_result("quorum", log)
    result["kinds"] = KINDS
    result["rounds"] = [_measure(members, options.rounds, log) for members in options.members]
    return finish_result(result, verdicts(result["rounds"]), log, started)


def _measure(members: int, rounds: int, log: ProgressLog) -> ResultRow:
    """A row: the times of all kinds of rounds with so many members."""
    log.say(f"{members} members")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        torchft, ours = Torchft(stack, folder, members), Ours(stack, folder, members)
        torchft.settle()
        ours.settle()
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

    def __init__(self, server: QuorumContender, take: Callable[[], float]) -> None:
        self.cpu_s = 0.0
        self.rounds = 0
        self._server = server
        self._take = take

    def __call__(self) -> float:
        """One round, in seconds."""
        before = self._server.cpu_s()
        seconds = self._take()
        self.cpu_s += self._server.cpu_s() - before
        self.rounds += 1
        return seconds
