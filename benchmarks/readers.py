"""`bench readers`: what bad readers of state cost the steps of a healthy job.

They are slow, talk garbage, or do not know the token. All readers are on one thread of the bench, so that their
own work stays small.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, Self, TextIO

import psutil

from ft_hsdp import address, handshake
from ft_hsdp.bench.command import rounds_of
from ft_hsdp.bench.jobs import JobUnderTest, Setup
from ft_hsdp.bench.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    milliseconds,
    most,
    ratio_interval,
    spread,
)
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.launch.run.directory import read_json
from ft_hsdp.launch.run.recorder import events_of

SETUP = Setup(replicas=2, elements=1 << 20)  # a state of 25 MB, which no kernel's buffer swallows
STEPS = 40  # of each window
PROBE_S = 0.5
READERS = {"slow": 24, "garbage": 8, "stranger": 8}  # connections of each kind
BEAT_S = 1.0  # a slow reader takes a byte; a reader that was hung up on comes back
WINDOW = 4096  # bytes that the kernel takes for a slow reader
CONNECT_S = 0.5
TEXT = 64  # bytes of garbage
STATUS = len("HTTP/1.1 200")
AFTER_CHANGE = 2  # steps at the begin of a window that do not count
READERS_TIMES = 1.0  # the goal


def options(args: Namespace) -> int:
    """Return how many windows of each kind `bench readers` takes."""
    return rounds_of(args, 5)


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench readers`."""
    for row in result["readers"]:
        yield most("a step beside bad readers, times, at least", row, READERS_TIMES, row["times"]["low"])


def run(rounds: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where the job fails."""
    log = ProgressLog(stream)
    result, started = begin_result("readers", log)
    result["readers"] = readers(rounds, log)
    return finish_result(result, goals(result), log, started)


def readers(rounds: int, log: ProgressLog, setup: Setup = SETUP, steps: int = STEPS) -> list[ResultRow]:
    """Return a row: so many windows of ``steps`` steps each, with and without readers in turn.

    None, and a note, where no state is served. Raises Retryable where the job fails.
    """
    took: dict[str, list[float]] = {"without": [], "with": []}
    seen: Counter[str] = Counter()
    with JobUnderTest(setup) as job:
        job.wait_for_all()
        victim = setup.replicas - 1
        job.wait_for_survivors(job.kill(victim, 0))  # so that a replica fetches a state
        job.wait_for_all()
        token = job.run.token.read_text().strip()
        if not (servers := _servers(job, token)):
            log.note("readers are left out: no process serves a state")
            return []
        wanted = _worth_reading(job)
        for number in range(rounds):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                if name == "without":
                    took[name] += _window(job, steps)
                    continue
                with BadReaders(servers, token, wanted) as crowd:
                    took[name] += _window(job, steps)
                seen += crowd.seen
    found = {name: spread(seconds) for name, seconds in took.items()}
    log.say(f"readers: a step takes {found['with']['p50_ms']:.4g} ms, {found['without']['p50_ms']:.4g} without")
    if not seen["slow 200"]:
        log.note("the slow readers found no state that they were given")
    return [
        {
            "replicas": setup.replicas,
            "servers": len(servers),
            "readers": dict(READERS),
            "seen": dict(seen),
            "steps": found,
            "delay_ms": milliseconds((found["with"]["p50_ms"] - found["without"]["p50_ms"]) / 1e3),
            "times": ratio_interval(took["with"], took["without"]),
        }
    ]


def _window(job: JobUnderTest, steps: int) -> list[float]:
    """Wait for some steps more; return the seconds that each of them took replica 0."""
    job.read()
    begin = len(job.rows[0]) + AFTER_CHANGE
    job.wait(lambda: len(job.rows[0]) >= begin + steps, f"{steps} more steps")
    return [row["step_s"] for row in job.rows[0][begin : begin + steps]]


def _processes(job: JobUnderTest) -> list[psutil.Process]:
    """Return all processes of the job but its supervisor: lighthouse, fork server, ranks, state agents."""
    below = psutil.Process(read_json(job.run.supervisor)["pid"]).children(recursive=True)
    return below + [process for process in psutil.process_iter() if _outlives(process, below)]


def _outlives(process: psutil.Process, job: Sequence[psutil.Process]) -> bool:
    """Return whether its parent is gone and its command line names a process of the job: so does a state agent."""
    try:
        return process.ppid() == 1 and not {str(p.pid) for p in job}.isdisjoint(process.cmdline())
    except psutil.Error:
        return False


def _worth_reading(job: JobUnderTest) -> Callable[[], str]:
    """Return what chooses paths of states that may be served: what was fetched last, and the newest ones."""
    fetched = [e["step"] for e in events_of(job.run) if e["event"] == "FetchStarted"]
    base = [row for row in job.rows[0] if row["step"] in fetched[-1:]]
    chance = random.Random(0)

    def path() -> str:
        row = chance.choice([*base, *job.rows[0][-3:]])
        return f"/v1/state/{row['epoch']}/{row['step']}/{row['lineage']}/0/data"

    return path


def _listening(process: psutil.Process) -> list[str]:
    """Return where a process listens for TCP."""
    found = process.net_connections("tcp")
    return [address.join(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def _servers(job: JobUnderTest, token: str) -> list[str]:
    """Return where states are served: listeners that let in a reader that knows the token."""
    listening = {where for process in _processes(job) for where in _listening(process)}
    return [where for where in sorted(listening) if _lets_in(where, token)]


def _lets_in(where: str, token: str) -> bool:
    errors = OSError, ProtocolViolation
    with contextlib.suppress(*errors), socket.create_connection(address.split(where), PROBE_S) as sock:
        handshake.call_blocking(sock, token, Purpose.STATE)
        return True
    return False


class BadReaders:
    """A context: on entry readers of state, `READERS` of each kind, begin to wake every `BEAT_S` on a thread."""

    def __init__(self, addresses: Sequence[str], token: str, wanted: Callable[[], str]) -> None:
        """Prepare the readers of servers at "host:port"; ``wanted`` returns a path that is worth reading."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readers", daemon=True)
        # How often each kind got which answer ("slow 200"; "slow gone": it was hung up on), and "beats".
        self.seen: Counter[str] = Counter()
        self._tokens = {"slow": token, "garbage": None, "stranger": "0" * 64}
        self._wanted = wanted
        self._random = random.Random(1)
        kinds = [kind for kind, count in READERS.items() for _ in range(count)]
        self._random.shuffle(kinds)  # a server has room for some: for some of each kind then
        self._readers = [_Reader(kind, where) for kind, where in zip(kinds, cycle(addresses), strict=False)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._over.is_set():
            for reader in self._readers:
                if what := reader.beat(self._request, self._tokens[reader.kind]):
                    self.seen[f"{reader.kind} {what}"] += 1
            self.seen["beats"] += 1
            beat = max(beat + BEAT_S, time.monotonic())
            self._over.wait(beat - time.monotonic())
        for reader in self._readers:
            reader.close()

    def _request(self, kind: str) -> bytes:
        if kind == "garbage":
            return self._random.randbytes(TEXT) + b"\r\n\r\n"
        return f"GET {self._wanted()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class _Reader:
    def __init__(self, kind: str, where: str) -> None:
        self.kind = kind
        self._address = address.split(where)
        self._sock: socket.socket | None = None
        self._status = b""

    def beat(self, request: Callable[[str], bytes], token: str | None) -> str:
        """Connect, or take one byte more; return what happened, if it is worth counting."""
        try:
            if self._sock is None:
                self._connect(request(self.kind), token)
                return ""
            return self._take(self._sock)
        except BlockingIOError:
            return ""
        except (OSError, ProtocolViolation):
            return self._gone()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self, request: bytes, token: str | None) -> None:
        self._status = b""
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)
        self._sock.settimeout(CONNECT_S)
        self._sock.connect(self._address)
        if token is not None:
            handshake.call_blocking(self._sock, token, Purpose.STATE)
        self._sock.sendall(request)
        self._sock.setblocking(False)

    def _take(self, sock: socket.socket) -> str:
        """Take the status of the answer at once, so that it is known, and then byte after byte."""
        data = sock.recv(1 if len(self._status) == STATUS else STATUS)
        if not data:
            return self._gone()
        if len(data) == 1 or not data.startswith(b"HTTP"):  # one byte more, or the handshake's first frame
            return ""
        self._status = data
        return data[-3:].decode(errors="replace")

    def _gone(self) -> str:
        self.close()
        return "gone"
