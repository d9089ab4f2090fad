"""Readers of state as they should not be: slow ones, ones that talk garbage, ones without a token.

One thread that wakes once a second: their own work must not be what a trainer has to wait for.

What slow and malicious readers of its state cost a healthy job: steps beside them, and steps without.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle

import psutil

from ft_hsdp import handshake
from ft_hsdp.address import join, split
from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.results import milliseconds, ratio_interval, spread
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.launch.run.directory import read_json
from ft_hsdp.launch.run.recorder import events_of

SLOW, GARBAGE, STRANGERS = 24, 8, 8  # connections of each kind
BEAT_S = 1.0  # a slow reader takes a byte; who was hung up on comes back
WINDOW = 4096  # bytes that the kernel takes for a slow reader
CONNECT_S = 0.5
TEXT = 64  # bytes of garbage


class Crowd:
    """A context: while it is open, they read. addresses: "host:port" of each server; wanted: a path worth reading.

    seen: how often each kind got which answer ("slow 200", "garbage 400"; "slow gone": it was
    hung up on), and "beats".
    """

    def __init__(self, addresses: Sequence[str], token: str, wanted: Callable[[], str]) -> None:
        self.seen: Counter[str] = Counter()
        self._tokens = {"slow": token, "garbage": None, "stranger": "0" * 64}
        self._wanted = wanted
        self._random = random.Random(1)
        self._over = threading.Event()
        where = cycle(addresses)
        kinds = {"slow": SLOW, "garbage": GARBAGE, "stranger": STRANGERS}
        named = [kind for kind, count in kinds.items() for _ in range(count)]
        self._random.shuffle(named)  # a server has room for some: for some of each kind then
        self._readers = [_Reader(kind, next(where)) for kind in named]
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def __enter__(self) -> Crowd:
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
    def __init__(self, kind: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.kind = kind
        self._address = host, int(port)
        self._sock: socket.socket | None = None
        self._status = b""

    def beat(self, request: Callable[[str], bytes], token: str | None) -> str:
        """Connect, or take one byte more; what happened, if it is worth counting."""
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
        """Close the connection, if there is one."""
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
        """The status of the answer comes first and at once, or nothing could be said about it."""
        data = sock.recv(1 if len(self._status) == len("HTTP/1.1 200") else len("HTTP/1.1 200"))
        if not data:
            return self._gone()
        if len(data) == 1 or not data.startswith(b"HTTP"):  # one byte more, or the handshake's first frame
            return ""
        self._status = data
        return data[-3:].decode(errors="replace")

    def _gone(self) -> str:
        self.close()
        return "gone"


SCENE = RecoveryScene(replicas=2, elements=1 << 20)  # a state of 25 MB, which no buffer of the kernel swallows
WINDOW_STEPS = 40
PROBE_S = 0.5


def readers(
    rounds: int, log: ProgressLog, scene: RecoveryScene = SCENE, steps: int = WINDOW_STEPS
) -> list[ResultRow]:
    """A row: `rounds` windows of `steps` steps each, with and without readers in turn.

    None, and a note, where no state is served. Raises Retryable where the job fails.
    """
    took: dict[str, list[float]] = {"without": [], "with": []}
    seen: Counter[str] = Counter()
    with JobUnderTest(scene) as job:
        job.whole()
        victim = scene.replicas - 1
        job.after(job.kill(victim, 0))  # so that a replica fetches a state
        job.whole()
        servers = _servers(job)
        if not servers:
            log.note("readers are left out: nobody serves a state")
            return []
        token = job.run.token.read_text().strip()
        wanted = _worth_reading(job)
        for number in range(rounds):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                if name == "without":
                    took[name] += job.window(steps)
                    continue
                with Crowd(servers, token, wanted) as crowd:
                    took[name] += job.window(steps)
                seen += crowd.seen
    found = {name: spread(seconds) for name, seconds in took.items()}
    log.say(f"readers: a step takes {found['with']['p50_ms']:.4g} ms, {found['without']['p50_ms']:.4g} without")
    if not seen["slow 200"]:
        log.note("the slow readers found no state that they were given")
    return [
        {
            "replicas": scene.replicas,
            "servers": len(servers),
            "readers": {"slow": SLOW, "garbage": GARBAGE, "stranger": STRANGERS},
            "seen": dict(seen),
            "steps": found,
            "delay_ms": milliseconds((found["with"]["p50_ms"] - found["without"]["p50_ms"]) / 1e3),
            "times": ratio_interval(took["with"], took["without"]),
        }
    ]


def _worth_reading(job: JobUnderTest) -> Callable[[], str]:
    """Paths of states that may be served: what was fetched last, and the newest ones."""
    fetched = [e["step"] for e in events_of(job.run) if e["event"] == "FetchStarted"]
    base = [row for row in job.rows[0] if row["step"] in fetched[-1:]]
    chance = random.Random(0)

    def path() -> str:
        row = chance.choice([*base, *job.rows[0][-3:]])
        return f"/v1/state/{row['epoch']}/{row['step']}/{row['lineage']}/0/data"

    return path


def _servers(job: JobUnderTest) -> list[str]:
    """Where states are served, seen from outside: who lets in a reader that knows the token."""
    token = job.run.token.read_text().strip()
    listening = {
        join(c.laddr.ip, c.laddr.port)
        for process in processes(job)
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    return [where for where in sorted(listening) if _lets_in(where, token)]


def processes(job: JobUnderTest) -> list[psutil.Process]:
    """All of a job but its supervisor: lighthouse, fork server, ranks, state agents."""
    below = psutil.Process(read_json(job.run.supervisor)["pid"]).children(recursive=True)
    return below + [process for process in psutil.process_iter() if _outlives(process, below)]


def _outlives(process: psutil.Process, job: Sequence[psutil.Process]) -> bool:
    """Whether its parent is gone and its command line names a process of the job: so does a state agent."""
    try:
        return process.ppid() == 1 and not {str(p.pid) for p in job}.isdisjoint(process.cmdline())
    except psutil.Error:
        return False


def _lets_in(where: str, token: str) -> bool:
    try:
        with socket.create_connection(split(where), PROBE_S) as sock:
            handshake.call_blocking(sock, token, Purpose.STATE)
            return True
    except (OSError, ProtocolViolation):
        return False
