"""When a lost replica is started again, and when it is given up.

A replica is restarted as a whole (FT-HSDP §4.2). Progress refills the budget, so the budget bounds a crash loop
and not the length of a job. What ends a replica that has just started with fewer ranks costs none of it: fewer
ranks need more memory each, and may not run at all where all of them do (`NarrowEnds`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

UNREACHED_S = 1.0  # shortest wait before a replica looks for its lighthouse in another life
REFILL_STEPS = 10  # steps that an incarnation must have committed to count as healthy
NARROW_ENDS = 2  # ends with so few ranks, or more, before a contribution, after which they are too few


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


def on_narrow_end(state: RestartState, policy: RestartPolicy, cause: str) -> tuple[RestartState, Restart]:
    """Return what to do after fewer ranks ended for which `NarrowEnds.blames` their number: it costs no budget.

    Args:
        state: of the replica, before the end.
        policy: what the operator chose.
        cause: why they ended, in one clause.

    Returns:
        The state after it, and the restart.
    """
    after = replace(state, restarts=state.restarts + 1, unreached=0)
    reason = f"{cause}; fewer ranks may need too much memory, which costs none of the budget"
    return after, Restart(policy.backoff_s, reason)


@dataclass(frozen=True, slots=True)
class NarrowEnds:
    """How a replica has fared with fewer ranks since all its ranks were started."""

    fits: int = 0  # fewest ranks that have contributed; 0: none have
    ended: tuple[int, ...] = ()  # ranks of each incarnation that ended before it contributed

    def blames(self, ranks: int) -> bool:
        """Return whether the end of so many ranks before a contribution may be due to their number."""
        return not 0 < self.fits <= ranks

    def after_end(self, ranks: int) -> NarrowEnds:
        """Return this after so many ranks have ended before they contributed."""
        return replace(self, ended=(*self.ended, ranks))

    def after_contribution(self, ranks: int) -> NarrowEnds:
        """Return this after so many ranks have contributed: these and more are enough."""
        fits = min(ranks, self.fits or ranks)
        return NarrowEnds(fits, tuple(each for each in self.ended if each < fits))

    @property
    def least(self) -> int:
        """Return the fewest ranks with which the replica is started: fewer have ended `NARROW_ENDS` times.

        What ends some ranks would end fewer of them, which need more memory each.
        """
        widest = sorted(self.ended, reverse=True)
        return widest[NARROW_ENDS - 1] + 1 if len(widest) >= NARROW_ENDS else 1


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
