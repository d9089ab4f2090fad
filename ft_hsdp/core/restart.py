"""When a lost replica is started again, and when it is given up.

A replica is restarted as a whole (FT-HSDP §4.2). Progress refills the budget, so the budget bounds a crash loop
and not the length of a job. What ends a replica that has just started with fewer ranks costs none of it: fewer
ranks need more memory each, and may not run at all where all of them do (`NarrowEnds`). What prevents a start
costs none of it either: a shortage of the machine says nothing about the replica (`on_shortage`). An error that
comes again has longer and longer pauses; one that ends every replica is the script's (`ends_all`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from ft_hsdp.core.host_report import EndedRank
from ft_hsdp.core.ledger import Run
from ft_hsdp.errors import EXIT_HARDWARE, EXIT_LEFT, EXIT_OK, EXIT_UNREACHABLE

BACKOFF_MAX_S = 60.0  # longest pause before a restart: a machine that was repaired is found within it
UNREACHED_S = 1.0  # shortest wait before a replica looks for its lighthouse in another life
SHORTAGE_S = (1.0, 60.0)  # the first and the longest pause after a start that was prevented
REPEATED_S = 1.0  # shortest pause before a restart after the same error has ended a replica twice
FATAL_ENDS = 2  # ends by one unit, after which it is blamed
SAME_ENDS = 2  # ends of each replica by one error, after which the script is to blame
REFILL_STEPS = 10  # steps that an incarnation must have committed to count as healthy
NARROW_ENDS = 2  # ends with so few ranks, or more, before a contribution, after which they are too few
TOO_FEW = f"{NARROW_ENDS} starts with so few ranks, or more, ended before a commit"
# Signals with which a program ends by its own fault; the others come from outside, and say nothing about a step.
OWN_FAULT = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL})
LEAVING = frozenset({EXIT_OK, EXIT_LEFT})  # exit codes of a rank that is done, or left the job


_NAME = re.compile("[0-9]{1,3}-[!-~]{1,200}")  # every name that is accepted; ASCII without spaces


@dataclass(frozen=True, slots=True)
class IncarnationId:
    """One life of a replica, from the start of its processes until all of them are gone; `str` gives its name.

    Each start of a replica is a new incarnation, with a name that no other one has: REPLICA-RUN-RESTARTS, such as
    `2-5eed0a1b-3`. A replica is started again only when all processes of the incarnation before have exited, so
    within one run a greater number of restarts means a later life. Runs have no order among themselves; the
    lighthouse orders those (lighthouse/quorum). What travels and is written down is always the text.
    """

    replica: int
    run_id: str  # TORCHELASTIC_RUN_ID of its ranks: the supervisor's name, or "run" in a job without one
    restarts: int  # TORCHELASTIC_RESTART_COUNT of its ranks: how many incarnations of this run came before

    def __str__(self) -> str:
        """Return the name, REPLICA-RUN-RESTARTS."""
        return f"{self.replica}-{self.run_id}-{self.restarts}"

    @classmethod
    def parse(cls, text: str) -> IncarnationId | None:
        """Return the incarnation of this name; None if it is not a name.

        The number of restarts may be missing: `0-abc` is read as `0-abc-0`. So keep the text where it is
        compared or sent on.
        """
        if _NAME.fullmatch(text) is None:
            return None
        replica, _, rest = text.partition("-")
        run_id, _, restarts = rest.rpartition("-")
        if not restarts.isdecimal():
            run_id, restarts = rest, "0"
        return cls(int(replica), run_id, int(restarts))

    @property
    def previous(self) -> IncarnationId | None:
        """The incarnation of the same run just before this one; None if this is the first."""
        return replace(self, restarts=self.restarts - 1) if self.restarts else None


class Cause(StrEnum):
    """What is to blame for the end of a rank, as it says itself."""

    SHORTAGE = "shortage"  # this machine had too little of something
    CHANGED = "changed"  # the script is not the one with which the job began
    DEVICE = (
        "device"  # a kernel on its device, or a process that reads its data, failed: the batch may be to blame
    )
    HARDWARE = "hardware"  # the kernel of its machine says that hardware is broken (said by the host's agent)
    TEMPORARY = "temporary"  # it may not happen again
    SCRIPT = "script"  # none of these: it may well happen again


def code_of(rank: EndedRank) -> int:
    """Return with which exit code the end of a rank counts: as broken hardware if its machine's kernel says so."""
    return EXIT_HARDWARE if rank.cause == Cause.HARDWARE else rank.code


def own_fault(code: int) -> bool:
    """Return whether a rank with this exit code failed by itself: nobody ended it, and it lacked nothing."""
    return code in OWN_FAULT if code < 0 else code not in (*LEAVING, EXIT_UNREACHABLE)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """What the operator chose."""

    budget: int  # restarts without progress; 0: none
    backoff_s: float  # pause before the second of them; each later one is twice as long
    shortage_s: float = 600.0  # how long a shortage may prevent its start
    backoff_max_s: float = BACKOFF_MAX_S  # longest pause


@dataclass(frozen=True, slots=True)
class RestartState:
    """How often a replica was restarted."""

    restarts: int = 0  # so far
    used: int = 0  # of these, since the last progress
    unreached: int = 0  # newest incarnations in a row that ended because no lighthouse answered them
    prevented: int = 0  # newest starts in a row that were prevented
    prevented_at: float = 0.0  # when the first of these was, in seconds of the caller's clock
    error: str = ""  # that ended the newest incarnation, as `essence` has it; "": none that is known
    same: int = 0  # newest incarnations in a row that it ended


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
    state: RestartState,
    policy: RestartPolicy,
    committed: int,
    cause: str,
    unreached: bool = False,
    error: str = "",
) -> tuple[RestartState, Restart | GiveUp]:
    """Return what to do after an incarnation was lost.

    Args:
        state: of the replica, before the loss.
        policy: what the operator chose.
        committed: steps that the lost incarnation committed; `REFILL_STEPS` refill the budget.
        cause: why it was lost, in one clause.
        unreached: it was started again and found no lighthouse. That says nothing about the replica: it costs no
            budget, and is tried again with growing pauses for as long as the job lasts.
        error: that ended it, as `essence` has it; "": none. If it comes again, a pause comes first.

    Returns:
        The state after the loss, and the decision.
    """
    state = on_start(state)
    if unreached:
        delay = doubled(max(policy.backoff_s, UNREACHED_S), state.unreached + 1, policy.backoff_max_s)
        after = replace(state, restarts=state.restarts + 1, unreached=state.unreached + 1)
        return after, Restart(delay, f"{cause}; tried again after {delay:g} s, which costs none of the budget")
    state = replace(state, unreached=0)
    if committed >= REFILL_STEPS:
        state = replace(state, used=0, error="")
    state = replace(
        state, error=error, same=state.same + 1 if error and error == state.error else int(bool(error))
    )
    if state.used >= policy.budget:
        return state, GiveUp(f"{cause}; the budget of {policy.budget} restarts is used up")
    delay = doubled(policy.backoff_s, state.used, policy.backoff_max_s)
    delay = max(delay, doubled(REPEATED_S, state.same - 1, policy.backoff_max_s))
    after = replace(state, restarts=state.restarts + 1, used=state.used + 1)
    wait = f" after {delay:g} s" if delay > 0 else ""
    return after, Restart(delay, f"{cause}; restart {after.used} of {policy.budget}{wait}")


def on_shortage(
    state: RestartState, policy: RestartPolicy, cause: str, now_s: float, *, bounded: bool = True
) -> tuple[RestartState, Restart | GiveUp]:
    """Return what to do after something prevented a start, which costs no budget.

    Args:
        state: of the replica, before that.
        policy: what the operator chose.
        cause: what prevented it, in one clause.
        now_s: the time, of any clock that does not go back.
        bounded: whether it may last for `shortage_s` only; False: until somebody removes it.

    Returns:
        The state after it, and the decision.
    """
    since = state.prevented_at if state.prevented else now_s
    left = policy.shortage_s - (now_s - since) if bounded else float("inf")
    if left <= 0:
        return state, GiveUp(f"{cause}; that has lasted for {policy.shortage_s:g} s (restart.shortage_s)")
    first, most = SHORTAGE_S
    delay = min(doubled(first, state.prevented + 1, most), left)
    after = replace(
        state, restarts=state.restarts + 1, unreached=0, prevented=state.prevented + 1, prevented_at=since
    )
    return after, Restart(delay, f"{cause}; tried again after {delay:.3g} s, which costs none of the budget")


def on_start(state: RestartState) -> RestartState:
    """Return the state after an incarnation has begun: nothing prevents a start any more."""
    return replace(state, prevented=0, prevented_at=0.0)


def essence(error: str) -> str:
    """Return the text of an error without numbers, addresses and temporary paths: two of one cause are equal."""
    text = re.sub(r"(/tmp|/var/tmp|/dev/shm|/run)/[^\s'\"]*", "PATH", error)
    return re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{16,}\b|\d+", "N", text)


def ends_all(ends: Iterable[tuple[str, int]]) -> bool:
    """Return whether one error has ended each replica `SAME_ENDS` times in a row.

    `ends` are, of each replica, the error that ended it last ("": none), and how often in a row.
    """
    known = list(ends)
    errors = {error for error, _ in known}
    return len(errors) == 1 and "" not in errors and all(times >= SAME_ENDS for _, times in known)


@dataclass(frozen=True, slots=True)
class FatalUnits:
    """Which units of the data end the processes that train them, whichever replica that is.

    What fails with every unit is not the fault of the units: a replica for which one was blamed has to
    contribute to a step before another one is.
    """

    ends: tuple[tuple[Run, int], ...] = ()  # what was in flight when processes ended, and how often
    blamed: tuple[Run, ...] = ()  # these are left out like those whose gradients are never finite
    waiting: frozenset[int] = frozenset()  # replicas that have not contributed since one was blamed for them

    def after_end(self, replica: int, units: Run | None, contributed: bool) -> FatalUnits:
        """Return this after the end of an incarnation.

        Args:
            replica: whose it was.
            units: that were in flight, if one of its processes ended by an error of its own; None: it did not.
            contributed: whether it has contributed to a step.
        """
        waiting = self.waiting - {replica} if contributed else self.waiting
        if units is None or replica in waiting or units in self.blamed:
            return replace(self, waiting=waiting)
        ends = dict(self.ends)
        ends[units] = ends.get(units, 0) + 1
        if ends[units] < FATAL_ENDS:
            return replace(self, ends=tuple(ends.items()), waiting=waiting)
        del ends[units]
        return FatalUnits(tuple(ends.items()), (*self.blamed, units), waiting | {replica})


def on_narrow_end(state: RestartState, policy: RestartPolicy, cause: str) -> tuple[RestartState, Restart]:
    """Return what to do after fewer ranks ended for which `NarrowEnds.blames` their number: it costs no budget.

    `state`, `policy` and `cause` are as for `on_loss`.
    """
    after = replace(on_start(state), restarts=state.restarts + 1, unreached=0)
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

    def after_run(
        self, ranks: int, wanted: int, *, began: bool, contributed: bool, elsewhere: bool
    ) -> tuple[NarrowEnds, bool]:
        """Return this after the end of an incarnation, and whether its ranks may have been too few.

        Args:
            ranks: that it had.
            wanted: ranks that the replica is to have.
            began: whether they were started.
            contributed: whether it has contributed to a step.
            elsewhere: whether its end has another known reason: it lost a host, or was sent away.
        """
        if ranks == wanted:
            return NarrowEnds() if began else self, False  # fewer are tried anew after the next loss
        if contributed:
            return self.after_contribution(ranks), False
        if elsewhere or not began or not self.blames(ranks):
            return self, False
        return self.after_end(ranks), True

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
    """
    return float(min(most_s, first_s * 2 ** min(times - 1, 64))) if times > 0 else 0.0


def exit_in_words(code: int) -> str:
    """Return an exit code in words: `SIGKILL`, `exit 75`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
