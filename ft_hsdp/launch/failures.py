"""What a supervisor does about the end of an incarnation: the evidence for `memory.replacement.decide`.

`Life` is an incarnation after its end. `Restarts` says when the next one starts, by the rules of `core.restart`.
`ReplicaFailures` counts what happened to one replica: how often a rank failed on which host since the replica was
healthy. A host that ends its ranks every few steps is counted, too: only as many steps as refill the budget of
restarts make the replica healthy again.
`JobFailures` is shared by all replicas of a job, and knows how often one and the same step has ended all of them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ft_hsdp.config import Config
from ft_hsdp.core import restart
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import REFILL_STEPS, Cause, FatalUnits, ends_all
from ft_hsdp.launch.backend.base import DONE, EVICTED, LEFT, NOT_STARTED, STRAY, ReplicaProcess
from ft_hsdp.launch.backend.processes import no_room
from ft_hsdp.launch.backend.rank_end import RankEnd
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.memory.replacement import Decision, Evidence, decide

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - ranks and state agents keep their memory there
TOLD_AGAIN_S = 60.0  # after so many seconds a changed script is named again


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str  # done, stopped, drained, unplaced, lost or config
    reason: str = ""  # one line


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a replica, after its end."""

    outcome: Outcome | None  # of the replica, if it was the last; None: it is started again
    cause: str = ""  # why it ended, in one clause
    committed: int = 0  # steps
    too_few: bool = False  # it may have ended because it had too few ranks
    prevented: Cause | None = None  # it has not really begun: a shortage, or a changed script, prevented that
    error: str = ""  # that ended it, as `restart.essence` has it


@dataclass(frozen=True, slots=True)
class IncarnationEnd:
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
        return restart.own_fault(self.code)


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


def what_prevented(current: ReplicaProcess, kind: str, said: RankEnd | None, run: RunDir) -> Cause | None:
    """Return what prevented the start of an incarnation that has not checked in; None: nothing did."""
    if kind == NOT_STARTED or (said and said.cause is Cause.SHORTAGE):
        return Cause.SHORTAGE
    if said and said.cause is Cause.CHANGED and current.restarts:
        return Cause.CHANGED  # a first start has the wrong script: that is an error of the operator
    failed = any(rank.code and not rank.killed for rank in current.ranks.values())
    full = no_room(run.path) or (os.access(SHARED_MEMORY, os.W_OK) and no_room(SHARED_MEMORY))
    return Cause.SHORTAGE if failed and not current.evicted and full else None


class Restarts:
    """When one replica is started again, and what prevents its start now."""

    def __init__(self, config: Config, event: Callable[..., None]) -> None:
        """Begin without a restart.

        Args:
            config: The job's configuration.
            event: Writes an event of the replica: takes its name, the reason, and its other fields by keyword.
        """
        self._policy = config.restart_policy
        self._state = restart.RestartState()
        self._event = event
        self.prevented: Cause | None = None  # what prevents a start
        self._told_at = 0.0  # when that was said

    @property
    def number(self) -> int:
        """Return how often the replica was started again."""
        return self._state.restarts

    def ended_by(self, error: str) -> int:
        """Return how many of the newest incarnations in a row an error has ended; "": it is none."""
        return self._state.same if error == self._state.error else 0

    def not_counted(self) -> None:
        """Take note of a restart that costs no budget: the replica was sent away."""
        self._state = replace(self._state, restarts=self.number + 1)

    def begun(self) -> None:
        """Take note that an incarnation has checked in: nothing prevents a start any more."""
        self._state = restart.on_start(self._state)
        if self.prevented is not None:
            self.prevented = None
            self._event("StartPrevented", "what prevented it is over", over=True)

    def after(self, life: Life, unreached: bool) -> restart.Restart | restart.GiveUp:
        """Return what is done after an incarnation that was not the last one, and remember that.

        Args:
            life: The incarnation.
            unreached: It was a restart that no lighthouse answered.
        """
        decision: restart.Restart | restart.GiveUp
        if life.too_few:
            self._state, decision = restart.on_narrow_end(self._state, self._policy, life.cause)
        elif life.prevented:
            now, short = time.monotonic(), life.prevented is Cause.SHORTAGE
            self._state, decision = restart.on_shortage(self._state, self._policy, life.cause, now, bounded=short)
            if self.prevented is not life.prevented or (not short and now - self._told_at >= TOLD_AGAIN_S):
                self.prevented, self._told_at = life.prevented, now
                self._event("StartPrevented", life.cause, cause=life.prevented)
        else:
            self._state, decision = restart.on_loss(
                self._state, self._policy, life.committed, life.cause, unreached, life.error
            )
        return decision


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
