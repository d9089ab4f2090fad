"""What a supervisor does about the end of an incarnation: the evidence for `memory.replacement.decide`.

`ReplicaFailures` counts what happened to one replica: how often a rank failed on which host since the replica was
healthy. A host that ends its ranks every few steps is counted, too: only as many steps as refill the budget of
restarts make the replica healthy again.
`JobFailures` is shared by all replicas of a job, and knows how often one and the same step has ended all of them.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import REFILL_STEPS, FatalUnits, ends_all
from ft_hsdp.errors import EXIT_UNREACHABLE
from ft_hsdp.launch.backend.base import DONE, EVICTED, LEAVING, LEFT, STRAY, ReplicaProcess
from ft_hsdp.memory.replacement import Decision, Evidence, decide

# Signals with which a program ends by its own fault; the others come from outside, and say nothing about a step.
OWN_FAULT = frozenset({-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL})


@dataclass(frozen=True, slots=True)
class IncarnationEnd:
    """How an incarnation ended."""

    kind: str  # as `ReplicaProcess.verdict` says
    code: int | None  # exit code of the rank that shows why; negative: the signal; None: no rank does
    host: str  # of that rank; "" if there is none
    step: int | None  # that was in flight; None: it had not joined the job
    committed: int  # steps, in its life

    @property
    def own_fault(self) -> bool:
        """Return whether a rank failed by itself: nobody ended it, and it lacked nothing from outside."""
        if self.code is None or self.kind in (DONE, EVICTED, LEFT, STRAY):
            return False
        return self.code in OWN_FAULT if self.code < 0 else self.code not in (*LEAVING, EXIT_UNREACHABLE)


def end_of(current: ReplicaProcess, step: int | None, committed: int) -> IncarnationEnd:
    """Return how an incarnation ended whose ranks are all gone.

    Args:
        current: The incarnation.
        step: That was in flight; None: it had not joined the job.
        committed: Steps that it committed.
    """
    kind, rank = current.verdict()
    if rank is None:
        return IncarnationEnd(kind, None, "", step, committed)
    return IncarnationEnd(kind, rank.code, rank.process.host, step, committed)


class JobFailures:
    """How often one step has ended all replicas of a job."""

    def __init__(self, active: Callable[[], Collection[int]], trained: Callable[[], bool] = lambda: False) -> None:
        """Begin without a failure.

        Args:
            active: Returns the replicas that take part in the job now.
            trained: Returns whether this run of the job has committed a step.
        """
        self._active = active
        self._trained = trained
        self._errors: dict[int, tuple[str, int]] = {}  # by replica: that ended it last, how often in a row
        self._ended: dict[int, tuple[int, int]] = {}  # replica -> step, and how often that step ended it
        self.fatal = FatalUnits()
        self.halted = ""  # why the job cannot go on; "": it can

    def note(self, replica: int, step: int) -> int:
        """Note that a step has ended a replica; return how often it has ended all of them."""
        before, times = self._ended.get(replica, (step, 0))
        self._ended[replica] = (step, times + 1 if before == step else 1)
        counts = [self._ended.get(each, (0, 0)) for each in {replica, *self._active()}]
        return min(times if at == step else 0 for at, times in counts)

    def has_ended_the_others(self, replica: int, step: int | None) -> bool:
        """Return whether a step is the one that has ended each other replica last; False without another one."""
        others = {*self._active()} - {replica}
        return bool(others) and all(self._ended.get(each, (None, 0))[0] == step for each in others)

    def ends_all(self, replica: int, error: str, committed: int) -> bool:
        """Note the error of the script that has ended a replica; return whether the script is to blame.

        It is, if the same error has ended each replica again and again, and no step was committed before.

        Args:
            replica: The replica.
            error: As `restart.essence` has it; "": it was no error of the script.
            committed: Steps that the replica has committed in that life.
        """
        before, times = self._errors.get(replica, ("", 0))
        self._errors[replica] = (error, times + 1 if error == before else 1)
        known = [self._errors.get(each, ("", 0)) for each in {replica, *self._active()}]
        return not committed and not self._trained() and ends_all(known)


class ReplicaFailures:
    """The failures of one replica, as evidence."""

    def __init__(self, replica: int, job: JobFailures | None = None) -> None:
        """Begin without a failure.

        Args:
            replica: Its id.
            job: Of all replicas; None: this process knows no other one, and halts no job.
        """
        self.job = job
        self._units = JobFailures(tuple) if job is None else job  # where the ends by units are counted
        self._replica = replica
        self._on_host: Counter[str] = Counter()  # failures since the replica was healthy

    def ends_all(self, error: str, committed: int) -> bool:
        """Return whether one error ends each replica, as `JobFailures.ends_all` says."""
        return self.job is not None and self.job.ends_all(self._replica, error, committed)

    @property
    def blamed(self) -> tuple[Run, ...]:
        """Return the units that have ended the processes which trained them."""
        return self._units.fatal.blamed

    def blame(self, units: Run | None, step: int | None, contributed: bool) -> bool:
        """Note the end of an incarnation (`FatalUnits.after_end`); return whether its units are blamed now."""
        before = self.blamed
        if self.job is not None and self.job.has_ended_the_others(self._replica, step):
            units = None  # each has other units: the step is to blame
        self._units.fatal = self._units.fatal.after_end(self._replica, units, contributed)
        return self.blamed != before

    def judge(self, end: IncarnationEnd, lost: Collection[str], others_train: bool) -> Decision:
        """Return what is done about the end of an incarnation.

        Args:
            end: How it ended.
            lost: Its hosts that are lost.
            others_train: Another replica has committed a step during its life.
        """
        if end.committed >= REFILL_STEPS:
            self._on_host.clear()
        here = all_ended = 0
        if end.host and end.own_fault and not lost:
            self._on_host[end.host] += 1
            here = self._on_host[end.host]
        if self.job is not None and end.step is not None and end.own_fault and not lost:
            all_ended = self.job.note(self._replica, end.step)
        evidence = Evidence(
            exit_code=end.code,
            host_lost=bool(lost),
            failures_here=here,
            others_train=others_train,
            all_ended_at=all_ended,
        )
        return decide(evidence)
