"""`bench strangers` and the readers of `bench recovery`: what hostile callers cost the steps of a healthy job.

Each kind of callers is on one thread of the bench, so that their own work stays small:

- `Flood`: strangers that call all listeners of a job of 3 x 2, each with a hostile first frame. In turn they call
  a sink instead, for the cost of the calls alone;
- `BadReaders`: readers of state that are slow, talk garbage, or do not know the token.

`python -m ft_hsdp.bench.strangers FILE` is the sink: it writes its address to FILE, takes connections, looks once
at what came, and hangs up.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Self, TextIO

import psutil

from ft_hsdp import address, caller_gate, handshake
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import MIB, ProgressLog, ResultRow, milliseconds, ratio_interval, spread
from ft_hsdp.bench.scope import listening, scratch, spawn
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Caller, Purpose
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import read_json, write_json
from ft_hsdp.launch.run.recorder import events_of
from ft_hsdp.protocol import LENGTH

SETUP = RecoverySetup(replicas=3, ranks=2, wait_s=0.03)
READERS_SETUP = RecoverySetup(replicas=2, elements=1 << 20)  # a state of 25 MB, which no kernel's buffer swallows
STEPS = 40  # of each window
PROBE_S = 0.5
LOCAL = {"@ftar-": "local ring doors", "@ft_hsdp/state/": "agents"}  # names of local sockets

PER_S = 1000  # hostile first frames, of all listeners together
TICK_S = 0.01  # between two looks at how many are due
OPEN = 256  # connections that strangers keep open
BIG = b'{"type":"RingHello","body":{"grant":{"members":[' + b"0," * ((1 << 19) - 100) + b"0]}}}"

READERS = {"slow": 24, "garbage": 8, "stranger": 8}  # connections of each kind
BEAT_S = 1.0  # a slow reader takes a byte; a reader that was hung up on comes back
WINDOW = 4096  # bytes that the kernel takes for a slow reader
CONNECT_S = 0.5
TEXT = 64  # bytes of garbage
STATUS = len("HTTP/1.1 200")


def run(rounds: int, stream: TextIO, setup: RecoverySetup = SETUP, steps: int = STEPS) -> dict[str, Any]:
    """Return the result, ready for JSON: windows of steps with strangers at the job and at the sink, as ABBA.

    Raises:
        Retryable: The job fails.
    """
    log = ProgressLog(stream)
    result, started = begin_result("strangers", log)
    took: dict[str, list[float]] = {"sink": [], "job": []}
    calls: dict[str, int] = {"sink": 0, "job": 0}
    refused = 0
    with JobUnderTest(setup) as job, scratch() as (stack, folder):
        file, sink_log = folder / "sink.json", folder / "sink.log"
        process = spawn(stack, tied("ft_hsdp.bench.strangers", str(file)), sink_log)
        sink = listening(process, file, sink_log, "the sink")["address"]
        job.wait_for_all()
        targets = listeners(job)
        where = {"sink": [sink] * len(targets), "job": list(targets)}
        _window(job, where["job"], steps)  # what is made once, such as a first snapshot, does not count
        before, epoch = _memory(job), job.rows[0][-1]["epoch"]
        for number in range(rounds):
            for name in ("job", "sink") if number % 2 else ("sink", "job"):
                seconds, flood = _window(job, where[name], steps)
                took[name] += seconds
                calls[name] += flood.sent
                refused += flood.refused if name == "job" else 0
            log.say(f"round {number + 1} of {rounds}: {1e3 * took['job'][-1]:.4g} ms for a step")
        job.wait_for_all()
        after, broken = _memory(job), len({row["epoch"] for row in job.rows[0]} - set(range(epoch + 1)))
    grown = {pid: after[pid] - before[pid] for pid in before.keys() & after.keys()}
    result["strangers"] = [
        {
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "per_s": PER_S,
            "listeners": dict(Counter(targets.values())),
            "calls": calls,
            "refused": refused,
            "steps": {name: spread(seconds) for name, seconds in took.items()},
            "times": ratio_interval(took["job"], took["sink"]),
            "rings_broken": broken,
            "processes": len(grown),
            "processes_gone": len(before) - len(grown),
            "growth_mib": round(max(grown.values()) / MIB, 1),
        }
    ]
    return finish_result(result, log, started)


def listeners(job: JobUnderTest) -> dict[str, str]:
    """Return where the job listens, and what kind each listener is.

    Torch's own listeners know no handshake and are left out. A replica's hub and store listen only until its ranks
    are there.
    """
    lighthouse = read_json(job.run.lighthouse)["url"].rpartition("/")[2]
    found = {lighthouse: "lighthouse"}
    for process in job.processes():
        agent = any("ft_hsdp.state.agent.server" in word for word in process.cmdline())
        for where in _listening(process):
            if where != lighthouse and _greets(where):
                found[where] = "state servers" if agent else "ring doors"
        for c in process.net_connections("unix"):
            name = str(c.laddr)
            for prefix, kind in LOCAL.items():
                if name.startswith(prefix):
                    found["\0" + name[1:]] = kind
    return found


def _greets(where: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address.split(where), PROBE_S) as sock:
        return sock.recv(len(handshake.MAGIC)) == handshake.MAGIC
    return False


def _listening(process: psutil.Process) -> list[str]:
    """Return where a process listens for TCP."""
    found = process.net_connections("tcp")
    return [address.join(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def _window(job: JobUnderTest, targets: list[str], steps: int) -> tuple[list[float], Flood]:
    """Return the seconds of each of the next steps of replica 0, while strangers call."""
    with Flood(targets) as flood:
        return job.window(steps), flood


def _memory(job: JobUnderTest) -> dict[int, int]:
    """Return the bytes that each process has for itself; the snapshots, which processes share, do not count."""
    return {process.pid: process.memory_info().rss - process.memory_info().shared for process in job.processes()}


def readers(
    rounds: int, log: ProgressLog, setup: RecoverySetup = READERS_SETUP, steps: int = STEPS
) -> list[ResultRow]:
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
                    took[name] += job.window(steps)
                    continue
                with BadReaders(servers, token, wanted) as crowd:
                    took[name] += job.window(steps)
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


def _worth_reading(job: JobUnderTest) -> Callable[[], str]:
    """Return what chooses paths of states that may be served: what was fetched last, and the newest ones."""
    fetched = [e["step"] for e in events_of(job.run) if e["event"] == "FetchStarted"]
    base = [row for row in job.rows[0] if row["step"] in fetched[-1:]]
    chance = random.Random(0)

    def path() -> str:
        row = chance.choice([*base, *job.rows[0][-3:]])
        return f"/v1/state/{row['epoch']}/{row['step']}/{row['lineage']}/0/data"

    return path


def _servers(job: JobUnderTest, token: str) -> list[str]:
    """Return where states are served: listeners that let in a reader that knows the token."""
    listening = {where for process in job.processes() for where in _listening(process)}
    return [where for where in sorted(listening) if _lets_in(where, token)]


def _lets_in(where: str, token: str) -> bool:
    errors = OSError, ProtocolViolation
    with contextlib.suppress(*errors), socket.create_connection(address.split(where), PROBE_S) as sock:
        handshake.call_blocking(sock, token, Purpose.STATE)
        return True
    return False


class Hostile(ABC):
    """A context: while it is open, its callers call on a thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Call until it is over."""


class Flood(Hostile):
    """Strangers that call the targets in turn, so many a second."""

    def __init__(self, targets: Sequence[str], per_s: int = PER_S) -> None:
        """Prepare the calls; each of ``targets`` is "host:port", or a local socket's name behind a zero byte."""
        super().__init__()
        self.sent = 0
        self.refused = 0
        self._targets = targets
        self._per_s = per_s
        self._open: deque[socket.socket] = deque()

    def _run(self) -> None:
        kinds, began, sent = frames(), time.monotonic(), 0
        while not self._over.wait(TICK_S):
            due = int((time.monotonic() - began) * self._per_s)
            for number in range(sent, due):
                # Every listener gets every kind, whatever their numbers are.
                turn = number // len(self._targets)
                self._call(self._targets[number % len(self._targets)], kinds[turn % len(kinds)])
            sent = due
        while self._open:
            self._open.popleft().close()

    def _call(self, target: str, frame: bytes) -> None:
        local = target.startswith("\0")
        family = socket.AF_UNIX if local else address.family(address.split(target)[0])
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)  # a full backlog holds up its own stranger only
        self._open.append(sock)
        if len(self._open) > OPEN:
            self._open.popleft().close()
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(target if local else address.split(target))
            sock.send(frame)
            self.sent += 1
        except BlockingIOError:
            self.sent += 1
        except OSError:
            self.refused += 1


def frames(seed: int = 1) -> list[bytes]:
    """Return one of each kind: 1 MiB of a message of wrong items, a wrong proof, HTTP, noise, silence."""
    proof = Caller("0" * 64, Purpose.RING).answer(handshake.MAGIC + os.urandom(handshake.NONCE))
    request = b"GET /v1/state/1/1/00000000000000000000000000000000/0/data HTTP/1.1\r\nHost: x\r\n\r\n"
    return [LENGTH.pack(len(BIG)) + BIG, proof, request, random.Random(seed).randbytes(4096), b""]


class BadReaders(Hostile):
    """Readers of state, `READERS` of each kind, that wake every `BEAT_S`."""

    def __init__(self, addresses: Sequence[str], token: str, wanted: Callable[[], str]) -> None:
        """Prepare the readers of servers at "host:port"; ``wanted`` returns a path that is worth reading."""
        super().__init__()
        # How often each kind got which answer ("slow 200"; "slow gone": it was hung up on), and "beats".
        self.seen: Counter[str] = Counter()
        self._tokens = {"slow": token, "garbage": None, "stranger": "0" * 64}
        self._wanted = wanted
        self._random = random.Random(1)
        kinds = [kind for kind, count in READERS.items() for _ in range(count)]
        self._random.shuffle(kinds)  # a server has room for some: for some of each kind then
        self._readers = [_Reader(kind, where) for kind, where in zip(kinds, cycle(addresses), strict=False)]

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


def serve_sink(file: Path) -> None:
    """Be the sink until killed; it must take less of a processor than a listener of a job."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    write_json(file, {"address": address.join(*listener.getsockname())})
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    callers: deque[socket.socket] = deque()

    def drop(sock: socket.socket) -> None:
        if sock in callers:  # else it was dropped for a newer one since `select` returned
            callers.remove(sock)
            selector.unregister(sock)
            sock.close()

    while True:
        for key, _ in selector.select():
            if isinstance(sock := key.fileobj, socket.socket) and sock is not listener:
                with contextlib.suppress(OSError):
                    sock.recv(handshake.ANSWER_BYTES)
                drop(sock)
                continue
            caller, _ = listener.accept()
            caller.setblocking(False)
            selector.register(caller, selectors.EVENT_READ)
            callers.append(caller)
            if len(callers) > caller_gate.MAX_STRANGERS:
                drop(callers[0])


if __name__ == "__main__":
    serve_sink(Path(sys.argv[1]))
