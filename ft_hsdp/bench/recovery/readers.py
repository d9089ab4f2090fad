"""What slow and malicious readers of its state cost a healthy job: steps beside them, and steps without."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable

import psutil

from ft_hsdp import handshake
from ft_hsdp.address import join, split
from ft_hsdp.bench.hostile import READERS, BadReaders
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import ProgressLog, ResultRow, milliseconds, ratio_interval, spread
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.launch.run.recorder import events_of

SETUP = RecoverySetup(replicas=2, elements=1 << 20)  # a state of 25 MB, which no buffer of the kernel swallows
WINDOW_STEPS = 40
PROBE_S = 0.5


def readers(
    rounds: int, log: ProgressLog, setup: RecoverySetup = SETUP, steps: int = WINDOW_STEPS
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
    listening = {
        join(c.laddr.ip, c.laddr.port)
        for process in job.processes()
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    return [where for where in sorted(listening) if _lets_in(where, token)]


def _lets_in(where: str, token: str) -> bool:
    try:
        with socket.create_connection(split(where), PROBE_S) as sock:
            handshake.call_blocking(sock, token, Purpose.STATE)
            return True
    except (OSError, ProtocolViolation):
        return False
