"""Restart: when a lost replica is started again, and when it is given up.

A replica is restarted as a whole (FT-HSDP §4.2). Progress refills the budget, so that it bounds a crash
loop and not the length of a job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

UNREACHED_S = 1.0  # shortest wait before a replica looks for its lighthouse in another life
REFILL_STEPS = 10  # steps that an incarnation must have committed to count as healthy


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """``budget`` restarts without progress; the second waits ``backoff_s``, each later one twice as long."""

    budget: int
    backoff_s: float
    backoff_max_s: float


@dataclass(frozen=True, slots=True)
class RestartState:
    """``restarts`` is the number of restarts so far, ``used`` how many of them since the last progress.

    ``unreached`` is how many of the newest lives, in a row, ended because no lighthouse answered them.
    """

    restarts: int = 0
    used: int = 0
    unreached: int = 0


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
    state: RestartState, policy: RestartPolicy, committed: int, cause: str, unreached: bool = False
) -> tuple[RestartState, Restart | GiveUp]:
    """What to do after an incarnation was lost to ``cause``, having committed ``committed`` steps.

    ``unreached``: it was started again and found no lighthouse. That says nothing about the replica: it costs no
    budget, and is tried again with growing pauses for as long as the job lasts.
    """
    if unreached:
        delay = doubled(max(policy.backoff_s, UNREACHED_S), state.unreached + 1, policy.backoff_max_s)
        after = replace(state, restarts=state.restarts + 1, unreached=state.unreached + 1)
        return after, Restart(delay, f"{cause}; tried again after {delay:g} s, which costs none of the budget")
    state = replace(state, unreached=0)
    if committed >= REFILL_STEPS:
        state = replace(state, used=0)
    if state.used >= policy.budget:
        return state, GiveUp(f"{cause}; the budget of {policy.budget} restarts is used up")
    delay = doubled(policy.backoff_s, state.used, policy.backoff_max_s)
    after = replace(state, restarts=state.restarts + 1, used=state.used + 1)
    wait = f" after {delay:g} s" if delay > 0 else ""
    return after, Restart(delay, f"{cause}; restart {after.used} of {policy.budget}{wait}")


def doubled(first_s: float, times: int, most_s: float) -> float:
    """The pause after ``times`` failures in a row: ``first_s``, then twice as long each time, up to ``most_s``.

    0.0 after none. The exponent is bounded: a float holds no power of 2 above 1023, and an outage may last for
    any number of failures.
    """
    return float(min(most_s, first_s * 2 ** min(times - 1, 64))) if times > 0 else 0.0
