"""The two lighthouses of `bench quorum`: a process of each, and members that ask it for one step after another."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ft_hsdp import protocol
from ft_hsdp.bench.quorum.grpc import Grpc
from ft_hsdp.bench.quorum.herd import Herd
from ft_hsdp.bench.quorum.http1 import Http1
from ft_hsdp.bench.quorum.protobuf import counted, number, text
from ft_hsdp.config import config_hash, parse
from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Continue, Grant, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.run.directory import Row, RunDir, read_json

START_S = 30.0
STEPS = 10**9
TIMES_MS = (5000, 60_000)  # torchft's own: of a heartbeat, to join


class Contender:
    """A lighthouse and its members. `process` serves; `ask` has all of them ask at once."""

    def __init__(self, stack: ExitStack, command: list[str], file: Path, log: Path) -> None:
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        stack.callback(self._end)
        self.url = urlsplit(self._listening(file, log)["url"])
        self._watched = psutil.Process(self.process.pid)

    def _listening(self, file: Path, log: Path) -> Row:
        """What `file` says once the server listens. Raises Retryable."""
        deadline = time.monotonic() + START_S
        while (named := read_json(file)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Retryable(f"a lighthouse does not listen: {last_line(log) or 'it says nothing'}")
            time.sleep(0.02)
        return dict(named)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return "127.0.0.1", self.url.port or 0

    def cpu_s(self) -> float:
        """CPU seconds that the server has used."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()


class Torchft(Contender):
    """torchft's lighthouse; a round gives every member the whole quorum."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        file = folder / "torchft.json"
        module = "ft_hsdp.bench.contenders.torchft_lighthouse"
        numbers = (str(number) for number in (*TIMES_MS, members))
        super().__init__(stack, tied(module, str(file), *numbers), file, folder / "torchft.log")
        host = f"127.0.0.1:{self.address[1]}"
        self._herd = Herd(self.address, members, lambda: Grpc(host, "/torchft.LighthouseService/Quorum"))
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
        """The first quorum."""
        self.same()

    def _message(self, member: int) -> bytes:
        address = f"http://127.0.0.1:{29000 + member}"
        fields = (
            text(1, f"replica_{member}:{member:032x}"),
            text(2, address),
            text(3, f"127.0.0.1:{28000 + member}"),
        )
        requester = b"".join(fields) + number(4, self._step) + number(5, 1)
        return text(1, requester)


class Ours(Contender):
    """This project's lighthouse, as `launcher.py lighthouse` starts it: tokens, checks, SQLite."""

    def __init__(self, stack: ExitStack, folder: Path, members: int) -> None:
        run = RunDir(folder / "run")
        config = parse({"replicas": members, "ranks_per_replica": 1, "train": {"steps": STEPS}})
        furnish(run, config)
        super().__init__(
            stack, tied("lighthouse", "--run", str(run.path)), run.lighthouse, folder / "lighthouse.log"
        )
        token, host = run.token.read_text().strip(), f"127.0.0.1:{self.address[1]}"
        self._herd = Herd(self.address, members, lambda: Http1(host, "/v1/quorum", token))
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
        """The first epoch."""
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
