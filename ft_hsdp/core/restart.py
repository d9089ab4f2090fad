"""When a lost replica is started again, and when it is given up.

A replica is restarted as a whole (FT-HSDP §4.2). Progress refills the budget, so the budget bounds a crash loop
and not the length of a job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

UNREACHED_S = 1.0  # shortest wait before a replica looks for its lighthouse in another life
REFILL_STEPS = 10  # steps that an incarnation must have committed to count as healthy


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """What the operator chose."""

    budget: int  # restarts without progress; 0: none
    backoff_s: float  # pause before the second of them; each later one is twice as long
    backoff_max_s: float  # longest pause


@dataclass(frozen=True, slots=True)
class RestartState:
    """How often a replica was restarted."""

    restarts: int = 0  # so far
    used: int = 0  # of these, since the last progress
    unreached: int = 0  # newest incarnations in a row that ended because no lighthouse answered them


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the replica again after `delay_s` seconds."""

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Never start the replica again."""

    reason: str


def on_loss(
    state: RestartState, policy: RestartPolicy, committed: int, cause: str, unreached: bool = False
) -> tuple[RestartState, Restart | GiveUp]:
    """Return what to do after an incarnation was lost.

    Args:
        state: of the replica, before the loss.
        policy: what the operator chose.
        committed: steps that the lost incarnation committed; `REFILL_STEPS` refill the budget.
        cause: why it was lost, in one clause.
        unreached: it was started again and found no lighthouse. That says nothing about the replica: it costs no
            budget, and is tried again with growing pauses for as long as the job lasts.

    Returns:
        The state after the loss, and the decision.
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
    """Return the pause after `times` failures in a row: `first_s`, then twice as long each time, up to `most_s`.

    The exponent is bounded: a float holds no power of 2 above 1023, and an outage may last for any number of
    failures.

    Args:
        first_s: pause in seconds after one failure.
        times: failures in a row.
        most_s: longest pause in seconds.

    Returns:
        Seconds; 0.0 after no failure.
    """
    return float(min(most_s, first_s * 2 ** min(times - 1, 64))) if times > 0 else 0.0
