"""Failures on purpose: which one is due is decided by pure code, a signal to one pid carries it out."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from ft_hsdp.config import ChaosConfig
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.rundir import Appender, RunDir, alive, read_json

DAY_S = 86400.0
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM, "CONT": signal.SIGCONT}


@dataclass(frozen=True, slots=True)
class Injection:
    """Send `signal` to rank `rank` of `replica`; a STOP ends after `for_s` (0: never)."""

    replica: int
    rank: int
    signal: str
    down_steps: int
    for_s: float
    reason: str


@dataclass(slots=True)
class _Rule:
    """A rule of the configuration and what of it is still to come."""

    config: ChaosConfig
    random: random.Random
    waiting: list[int] = field(default_factory=list)  # at_step: replicas that were not hit yet
    next_t: float | None = None  # rate_per_min: when the next one is due


class Planner:
    """Decides which injections are due. Deterministic: equal calls give equal answers."""

    def __init__(self, rules: Sequence[ChaosConfig], ranks: int) -> None:
        self._ranks = ranks
        self._rules = [_Rule(rule, random.Random(f"{rule.seed}/{n}")) for n, rule in enumerate(rules)]
        for rule in self._rules:
            rule.waiting = list(rule.config.replicas) if rule.config.at_step is not None else []

    def due(self, committed: int, now: float, running: Collection[int]) -> list[Injection]:
        """The injections to make at time `now` (seconds, any origin), with `committed` steps committed.

        A replica that does not run cannot be hit: a rule with at_step waits for it, one with a rate
        passes it over. The clock of a rate starts with the first committed step.
        """
        found: list[Injection] = []
        for rule in self._rules:
            if rule.config.at_step is not None:
                found += self._at_step(rule, committed, running)
            elif committed > 0:
                found += self._at_rate(rule, now, running)
        return found

    def _at_step(self, rule: _Rule, committed: int, running: Collection[int]) -> list[Injection]:
        at_step = rule.config.at_step
        assert at_step is not None
        if committed + 1 < at_step:
            return []
        hit = [replica for replica in rule.waiting if replica in running]
        rule.waiting = [replica for replica in rule.waiting if replica not in running]
        rank = rule.config.rank or 0
        return [self._injection(rule, replica, rank, f"chaos at step {at_step}") for replica in hit]

    def _at_rate(self, rule: _Rule, now: float, running: Collection[int]) -> list[Injection]:
        rate = rule.config.rate_per_min
        assert rate is not None
        if rule.next_t is None:
            rule.next_t = now + rule.random.expovariate(rate / 60)
        found: list[Injection] = []
        while rule.next_t <= now:
            rule.next_t += rule.random.expovariate(rate / 60)
            replica = rule.random.choice(rule.config.replicas)
            drawn = rule.random.randrange(self._ranks)
            rank = drawn if rule.config.rank is None else rule.config.rank
            if replica in running and all(i.replica != replica for i in found):
                found.append(self._injection(rule, replica, rank, f"chaos at {rate:g} a minute"))
        return found

    def _injection(self, rule: _Rule, replica: int, rank: int, reason: str) -> Injection:
        config = rule.config
        return Injection(replica, rank, config.signal, config.down_steps, config.for_s, reason)


def event(injection: Injection, pid: int, incarnation: str, now: float) -> dict[str, Any]:
    """The event that says that `injection` was made."""
    return {
        "t": now,
        "event": "FailureInjected",
        "source": "chaos",
        "replica": injection.replica,
        "rank": injection.rank,
        "incarnation": incarnation,
        "kind": f"SIG{injection.signal}",
        "pid": pid,
        "for_s": injection.for_s,
        "reason": injection.reason,
    }


def send(pid: int, name: str) -> bool:
    """Send signal `name` to `pid`; False where the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[name])
        return True
    return False


def victim(run: RunDir, replica: int, rank: int) -> tuple[int, str]:
    """Pid and incarnation of a rank of a running job: only a pid that the run's own files list.

    Raises ConfigError where there is no such rank, it does not run, or its pid belongs to somebody else.
    """
    listed = read_json(run.processes(replica))
    if not isinstance(listed, dict):
        raise ConfigError("--replica", replica, f"one of {run.replicas()} (replicas of {run.path})")
    pids = {entry["rank"]: entry["pid"] for entry in listed["ranks"]}
    if rank not in pids:
        raise ConfigError("--rank", rank, f"one of {sorted(pids)} (ranks of replica {replica})")
    pid = pids[rank]
    if not alive({"pid": pid}):
        raise ConfigError("--rank", rank, f"a rank that runs (pid {pid} of replica {replica} does not)")
    if not _belongs(pid, run):
        raise ConfigError("--rank", rank, f"a process of {run.path} (pid {pid} is another one)")
    return pid, str(listed["incarnation"])


def _belongs(pid: int, run: RunDir) -> bool:
    """Whether the process, or its parent, was started for `run`."""
    try:
        process = psutil.Process(pid)
        above = process.parent()
        lines = [process.cmdline(), above.cmdline() if above else []]
    except psutil.Error:
        return False
    return any(str(run.path.resolve()) in line for line in lines)


def by_hand(run: RunDir, replica: int, rank: int, name: str, for_s: float = 0.0) -> dict[str, Any]:
    """Send a signal to a rank of a running job; the event that was recorded.

    With STOP and `for_s` the rank continues after that many seconds. The job's supervisor merges
    replicas/<id>/chaos.jsonl like any other log. Raises ConfigError as `victim` does.
    """
    if not 0 <= for_s <= DAY_S or (for_s > 0 and name != "STOP"):
        raise ConfigError("--for-s", for_s, "seconds up to a day, with --signal STOP only")
    pid, incarnation = victim(run, replica, rank)
    log = Appender(run.injections(replica))
    made = event(Injection(replica, rank, name, 0, for_s, "chaos by hand"), pid, incarnation, time.time())
    try:
        log.append(made)
        send(pid, name)
        if for_s > 0:
            try:
                time.sleep(for_s)
            finally:  # Ctrl-C must not leave it stopped
                send(pid, "CONT")
                log.append({**made, "t": time.time(), "event": "FailureLifted"})
    finally:
        log.close()
    return made
