"""Restart: when a lost replica is started again, and when it is given up.

A replica is restarted as a whole (FT-HSDP §4.2). Progress refills the budget, so that it bounds a crash
loop and not the length of a job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

REFILL_STEPS = 10  # steps that an incarnation must have committed to count as healthy


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """``budget`` restarts without progress; the second waits ``backoff_s``, each later one twice as long."""

    budget: int
    backoff_s: float
    backoff_max_s: float


@dataclass(frozen=True, slots=True)
class RestartState:
    """``restarts`` is the number of restarts so far, ``used`` how many of them since the last progress."""

    restarts: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the replica again after ``delay_s``."""

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The replica is lost for good."""

    reason: str


def on_loss(
    state: RestartState, policy: RestartPolicy, committed: int, cause: str
) -> tuple[RestartState, Restart | GiveUp]:
    """What to do after an incarnation was lost to ``cause``, having committed ``committed`` steps."""
    if committed >= REFILL_STEPS:
        state = replace(state, used=0)
    if state.used >= policy.budget:
        return state, GiveUp(f"{cause}; the budget of {policy.budget} restarts is used up")
    delay = backoff(policy, state.used)
    after = RestartState(state.restarts + 1, state.used + 1)
    wait = f" after {delay:g} s" if delay > 0 else ""
    return after, Restart(delay, f"{cause}; restart {after.used} of {policy.budget}{wait}")


def backoff(policy: RestartPolicy, used: int) -> float:
    """Seconds to wait before a restart when ``used`` were made since the last progress."""
    if used == 0:
        return 0.0
    exponent = min(used - 1, 64)
    return float(min(policy.backoff_max_s, policy.backoff_s * 2**exponent))
