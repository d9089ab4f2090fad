"""What slow and malicious readers of its state cost a healthy job: steps beside them, and steps without."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence

import psutil

from ft_hsdp import handshake
from ft_hsdp.address import join, split
from ft_hsdp.bench.interval import times
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.recovery.crowd import GARBAGE, SLOW, STRANGERS, Crowd
from ft_hsdp.bench.recovery.herd import Herd
from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.spread import milliseconds, spread
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.launch.run.directory import read_json
from ft_hsdp.launch.run.recorder import events_of

SCENE = Scene(replicas=2, elements=1 << 20)  # a state of 25 MB, which no buffer of the kernel swallows
WINDOW_STEPS = 40
AFTER_CHANGE = 2  # steps that do not count
PROBE_S = 0.5


def readers(rounds: int, log: Log, scene: Scene = SCENE, steps: int = WINDOW_STEPS) -> list[Row]:
    """A row: `rounds` windows of `steps` steps each, with and without readers in turn.

    None, and a note, where no state is served. Raises Retryable where the job fails.
    """
    took: dict[str, list[float]] = {"without": [], "with": []}
    seen: Counter[str] = Counter()
    with Herd(scene) as herd:
        herd.whole()
        victim = scene.replicas - 1
        herd.after(herd.kill(victim, 0), [n for n in herd.rows if n != victim])  # somebody has to fetch a state
        herd.whole()
        servers = _servers(herd)
        if not servers:
            log.note("readers are left out: nobody serves a state")
            return []
        token = herd.run.token.read_text().strip()
        wanted = _worth_reading(herd)
        for number in range(rounds):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                if name == "without":
                    took[name] += _window(herd, steps)
                    continue
                with Crowd(servers, token, wanted) as crowd:
                    took[name] += _window(herd, steps)
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
            "times": times(took["with"], took["without"]),
        }
    ]


def _window(herd: Herd, steps: int) -> list[float]:
    """Seconds of each of the next steps of replica 0."""
    herd.look()
    begin = len(herd.rows[0]) + AFTER_CHANGE
    herd.until(lambda: len(herd.rows[0]) >= begin + steps, f"{steps} more steps")
    return [row["step_s"] for row in herd.rows[0][begin : begin + steps]]


def _worth_reading(herd: Herd) -> Callable[[], str]:
    """Paths of states that may be served: what was fetched last, and the newest ones."""
    fetched = [e["step"] for e in events_of(herd.run) if e["event"] == "FetchStarted"]
    base = [row for row in herd.rows[0] if row["step"] in fetched[-1:]]
    chance = random.Random(0)

    def path() -> str:
        row = chance.choice([*base, *herd.rows[0][-3:]])
        return f"/v1/state/{row['epoch']}/{row['step']}/{row['lineage']}/0/data"

    return path


def _servers(herd: Herd) -> list[str]:
    """Where states are served, seen from outside: who lets in a reader that knows the token."""
    token = herd.run.token.read_text().strip()
    listening = {
        join(c.laddr.ip, c.laddr.port)
        for process in processes(herd)
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    return [where for where in sorted(listening) if _lets_in(where, token)]


def processes(herd: Herd) -> list[psutil.Process]:
    """All of a job but its supervisor: lighthouse, fork server, ranks, state agents."""
    below = psutil.Process(read_json(herd.run.supervisor)["pid"]).children(recursive=True)
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
