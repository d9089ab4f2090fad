"""Failures of a run: one per incarnation that was hurt or lost, and the phases of its replica's return. Pure.

Rows come late and out of order, so `Failures` keeps facts as they come, and computes phases when it is asked. A
failure begins with its injection, else with the first evidence: a broken ring whose survivors suspect the
replica, an exclusion by the lighthouse, or the exit of its process. It is over when the replica contributes to a
commit again, or stands by. A planned end (done, stopped, or left without an injection) is not a failure.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ft_hsdp.analysis.incarnations import IncarnationRecord

MAX_FAILURES = 512
MAX_EPOCHS = 4096
LIVES = 4  # newest incarnations of a replica that are kept
AFTERMATH_S = 10.0  # a ring that breaks later than this after a failure broke for another reason
COMMITS = 64  # newest commits whose times are kept, for failures that are reported late
EARLY_S = 0.05  # clocks of processes on one host may differ by this
LIMIT = 2**16  # ranks of a replica
_LIVED = frozenset(
    {"ReplicaStarted", "ReplicaBooted", "ReplicaWarmed", "CheckedIn", "FetchStarted", "FetchCompleted", "Rejoined"}
    | {"StateRestored"}
)
"""The events that say how far an incarnation is."""


@dataclass(slots=True)
class EpochSpan:
    """A membership that the lighthouse granted. Times are in Unix seconds."""

    t: float  # of the grant
    epoch: int
    members: tuple[int, ...]
    holders: frozenset[int]  # members that contribute or stand by
    reason: str
    seq: int  # of the grant's row in the journal
    resumed: float | None = None  # when its first step was committed


@dataclass(slots=True)
class Failure:
    """An incarnation that failed. Times are in Unix seconds; None: not known."""

    seq: int  # of the row that first reported it
    replica: int
    rank: int | None
    kind: str  # a signal, "exit 1", "silent", "ring broken", or the kind of an injection
    cause: str  # the reason in that row
    life: IncarnationRecord  # that failed
    injected: float | None = None
    evidence: float | None = None  # the first sign of it
    broke: int | None = None  # the epoch whose ring it broke
    next: IncarnationRecord | None = None  # that follows it
    rejoined: float | None = None  # when the replica contributed again
    gap_s: float | None = None  # from the commit before it to the commit after it
    hopeless: bool = False  # the replica is given up
    noticed: float | None = None  # when another replica, or the lighthouse, first noticed
    lost: bool = False  # its incarnation has ended

    @property
    def detected(self) -> tuple[float, float] | None:
        """Return when the failure began and when others noticed it; None if that was not measured.

        It begins with the injection, or with the end of the process as its supervisor saw it. If others noticed
        it before the process ended, the process hung before, and the time from which it hung is not known.
        """
        if self.injected is not None:
            return None if self.evidence is None else (self.injected, max(self.injected, self.evidence))
        if self.life.exited is None or self.noticed is None or self.noticed < self.life.exited:
            return None
        return self.life.exited, self.noticed

    @property
    def t(self) -> float:
        """Return when it happened: the time of the injection, else of the first evidence."""
        if self.injected is not None:
            return self.injected
        return self.evidence if self.evidence is not None else 0.0

    def seen(self, t: float) -> None:
        if self.injected is None or t >= self.injected - EARLY_S:
            self.evidence = t if self.evidence is None else min(self.evidence, t)
        if self.life.exited is not None and self.life.started is None:  # no `ReplicaExited` follows: torchrun
            self.lost = True


@dataclass(slots=True)
class _Replica:
    lives: list[IncarnationRecord] = field(default_factory=list)
    open: list[Failure] = field(default_factory=list)  # not known to be over


class Failures:
    """All failures of a job, and its epochs."""

    def __init__(self, slots: int, most: int | None = MAX_FAILURES) -> None:
        """Begin without rows.

        Args:
            slots: ids of replicas are below it; rows of others are ignored.
            most: how many failures are kept, the newest ones; None: all.
        """
        self._most = most
        self.epochs: dict[int, EpochSpan] = {}
        self._numbers: list[int] = []  # of the epochs, in order
        self.all: list[Failure] = []
        self.cut = False  # older ones are no longer kept
        self._replicas = [_Replica() for _ in range(slots)]
        self._commits: deque[float] = deque(maxlen=COMMITS)
        self._fresh: list[Failure] = []  # whose gap is not settled
        self._epoch = -1  # of the newest commit
        self._resumed: dict[int, float] = {}  # newest epochs, when a first step was committed in them

    def event(self, seq: int, name: str, row: Mapping[str, Any]) -> None:
        """Take an event; ``seq`` is its number, ``name`` its row's "event". Other events change nothing."""
        replica: Any = row.get("replica")
        t = row["t"]
        if name == "EpochGranted":
            self._granted(seq, row)
        elif replica not in range(len(self._replicas)):
            return
        elif name == "RingBroken":
            self._broke(seq, row)
        elif name == "FailureInjected":
            self._injected(seq, row)
        elif name == "FailureLifted":
            self._drop(replica, row.get("incarnation"))
        elif name in ("ProcessExited", "ReplicaExited", "ExitReported"):
            self._exited(seq, name, row)
        elif name in ("ReplicaExcluded", "ReplicaEvicted"):
            failure = self._at(seq, replica, self._life(replica, row.get("incarnation"), t), "silent", row)
            failure.seen(t)
            failure.noticed = t if failure.noticed is None else min(failure.noticed, t)
        elif name == "ReplicaLost":
            for failure in self._replicas[replica].open:
                failure.hopeless = True
            self._replicas[replica].open = []
        elif name == "RestartScheduled" and row.get("prevented"):  # it had not begun: nothing was lost
            self._drop(replica, row.get("incarnation"), evident=True)
        elif name in _LIVED:
            self._lived(name, replica, row)

    def commit(self, t: float, epoch: int, contributors: Collection[int]) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            first = self._resumed[epoch] = min(t, self._resumed.get(epoch, t))
            if len(self._resumed) > COMMITS:
                del self._resumed[next(iter(self._resumed))]
            if epoch in self.epochs:
                self.epochs[epoch].resumed = first
        self._commits.append(t)
        for replica in contributors:
            self._contributes(replica, t)
        if self._fresh:
            for failure in self._fresh:
                failure.gap_s = self._gap(failure.t) or failure.gap_s
            oldest = self._commits[0] if len(self._commits) < 8 else self._commits[-8]
            self._fresh = [f for f in self._fresh if f.t >= oldest]

    def _contributes(self, replica: int, t: float) -> None:
        """Close the failures of a replica that contributed to a commit at ``t`` with a later incarnation."""
        mine = self._replicas[replica]
        if not mine.open:
            return
        for failure in list(mine.open):
            if failure.next is not None and failure.next.first < t:
                failure.rejoined = t if failure.rejoined is None else min(failure.rejoined, t)
                mine.open.remove(failure)

    def losses(self) -> list[Failure]:
        """Return a failure for each incarnation that was lost, by time."""
        found = [f for f in self.all if f.lost and f.evidence is not None]
        return sorted(found, key=lambda f: f.t)

    def account(self, failure: Failure, typical: float) -> dict[str, Any]:
        """Return what summary.json, the page and `explain` say of a failure.

        ``detect_s`` is None if it was not measured, ``rejoin_s`` is None as long as the replica has not
        contributed again; ``stall_s`` is how much longer the others took for the step that was hit.

        Args:
            failure: one of `all`.
            typical: a fault-free step, in seconds.
        """
        over, detected = self.over(failure), failure.detected
        return {
            "t": failure.t,
            "replica": failure.replica,
            "rank": failure.rank,
            "kind": failure.kind,
            "incarnation": failure.life.incarnation,
            "detect_s": None if detected is None else detected[1] - detected[0],
            "stall_s": max(0.0, (failure.gap_s or typical) - typical),
            "rejoin_s": None if over is None else max(0.0, over - failure.t),
            "source": failure.next.donor if failure.next is not None else "",
        }

    def before(self, failure: Failure) -> int:
        """Return the number of the epoch that ran when it happened; 0: none."""
        if failure.broke is not None:
            return failure.broke
        at = bisect_right(self._numbers, failure.t, key=lambda number: self.epochs[number].t)
        return self._numbers[at - 1] if at else 0

    def after(self, failure: Failure) -> EpochSpan | None:
        """Return the first epoch without the failed incarnation; None: there is none yet, or none is needed."""
        before = self.before(failure)
        ran = self.epochs.get(before)
        if ran is None or failure.replica not in ran.members:
            return None
        return next(self._above(before), None)

    def back(self, failure: Failure) -> EpochSpan | None:
        """Return the first epoch in which the replica contributes or stands by again; None: there is none yet."""
        life = failure.next or (failure.life if failure.life.exited is None else None)
        if life is None:
            return None
        before = self.before(failure)
        since = (life.checked_in or life.started or 0.0) - 1.0 if failure.next else 0.0
        later = self._above(before)
        return next((e for e in later if failure.replica in e.holders and e.t >= since), None)

    def _above(self, epoch: int) -> Iterator[EpochSpan]:
        """Yield the epochs after one, in order."""
        return (self.epochs[n] for n in self._numbers[bisect_right(self._numbers, epoch) :])

    def phases(self, failure: Failure) -> Iterator[tuple[str, float, float]]:
        """Yield name, begin and end (Unix seconds) of each phase that is over. Phases may overlap."""
        after, back, life = self.after(failure), self.back(failure), failure.next
        fetch = life or failure.life
        marks: list[tuple[str, float | None, float | None]] = [
            ("detect", *(failure.detected or (None, None))),
            ("quorum", failure.evidence, after.t if after else None),
            ("reconnect", after.t if after else None, after.resumed if after else None),
        ]
        if life is not None:
            marks.append(("boot", life.started, life.booted or life.warmed or life.checked_in))
            marks.append(("warm", life.booted, life.warmed or life.checked_in))
            marks.append(("check_in", life.warmed, life.checked_in))
        if fetch.fetching is not None and fetch.fetching >= failure.t:
            marks.append(("fetch", fetch.fetching, fetch.fetched))
            if fetch.fetched is not None and back is not None:
                marks.append(("load", fetch.fetched, max(back.t, fetch.fetched)))
        if back is not None and back is not after:
            marks.append(("first_step", max(back.t, fetch.fetched or 0.0), self.over(failure)))
        for name, t0, t1 in marks:
            if t0 is not None and t1 is not None:
                yield name, t0, max(t0, t1)

    def over(self, failure: Failure) -> float | None:
        """Return when the replica contributed again; None: it has not yet."""
        back = self.back(failure)
        times = [t for t in (failure.rejoined, back.resumed if back else None) if t is not None]
        return min(times, default=None)

    def _granted(self, seq: int, row: Mapping[str, Any]) -> None:
        epoch, members, roles = row.get("epoch"), row.get("members"), row.get("roles")
        if not isinstance(epoch, int) or not isinstance(members, list) or epoch in self.epochs:
            return
        able = [
            r for r in members if not isinstance(roles, dict) or roles.get(str(r)) in ("contribute", "standby")
        ]
        reason = str(row.get("reason", ""))
        first = self._resumed.get(epoch)
        self.epochs[epoch] = EpochSpan(row["t"], epoch, tuple(members), frozenset(able), reason, seq, first)
        insort(self._numbers, epoch)
        if len(self._numbers) > MAX_EPOCHS:
            del self.epochs[self._numbers.pop(0)]

    def _injected(self, seq: int, row: Mapping[str, Any]) -> None:
        """Take an injection. It counts once there is evidence; the last injection before that counts."""
        replica, t = row["replica"], row["t"]
        life = self._life(replica, row.get("incarnation"), t)
        failure = self._find(replica, life, t)
        if failure is not None and failure.injected is not None and failure.evidence is not None:
            return
        failure = failure or self._at(seq, replica, life, "", row)
        failure.injected, failure.kind = t, str(row.get("kind", "failure"))[:64]
        failure.rank, failure.cause = row.get("rank"), str(row.get("reason", ""))

    def _broke(self, seq: int, row: Mapping[str, Any]) -> None:
        """Take a survivor's broken ring: evidence of this epoch's failure, or of a new one of the suspect."""
        suspect, epoch, t = row.get("suspect"), row.get("epoch"), row["t"]
        newest = self._numbers[-1] if self._numbers else 0
        if not isinstance(epoch, int) or (epoch < newest and t > self.epochs[newest].t + 1.0):
            return
        known = isinstance(suspect, int) and 0 <= suspect < len(self._replicas) and suspect != row["replica"]
        failure = next(
            (
                f
                for f in reversed(self.all[-MAX_FAILURES:])
                if self._explains(f, suspect if known else None, epoch, t)
            ),
            None,
        )
        if failure is None and known and not any(f.broke == epoch for f in self.all[-8:]):
            assert isinstance(suspect, int)
            life = self._life(suspect, None, t)
            rank = row.get("at_rank")
            rank = rank if isinstance(rank, int) and 0 <= rank <= LIMIT else None
            failure = self._at(seq, suspect, life, "ring broken", {**row, "rank": rank})
        if failure is not None:
            failure.broke = epoch
            failure.seen(t)
            failure.noticed = t if failure.noticed is None else min(failure.noticed, t)

    def _explains(self, failure: Failure, suspect: int | None, epoch: int, t: float) -> bool:
        """Return whether this failure is why a ring of ``epoch`` broke at ``t``."""
        if suspect is not None and failure.replica != suspect:
            return False
        if failure.broke is not None:
            return failure.broke == epoch
        return failure.t - 1.0 <= t <= failure.t + AFTERMATH_S or failure.life.exited is None

    def _exited(self, seq: int, name: str, row: Mapping[str, Any]) -> None:
        replica, t, kind = row["replica"], row["t"], row.get("kind")
        life = self._life(replica, row.get("incarnation"), t)
        failure = self._find(replica, life, t)
        life.exited = t if life.exited is None else min(life.exited, t)
        known = life.kind  # its `ReplicaExited` came before: this row is late
        if name == "ReplicaExited":
            life.kind = str(kind)
            if kind in ("done", "stopped") or (kind == "left" and (failure is None or failure.injected is None)):
                if failure is not None and failure.broke is None and failure.injected is None:
                    self._drop(replica, life.incarnation, evident=True)
                return
        if failure is None and (known or name == "ExitReported" or kind == "exit 0"):
            return
        failure = failure or self._at(seq, replica, life, str(kind)[:64], row)
        failure.seen(t)
        failure.lost = failure.lost or name == "ReplicaExited"
        if failure.injected is None and name != "ExitReported":
            failure.kind, failure.rank, failure.cause = str(kind)[:64], row.get("rank"), str(row.get("reason", ""))
        self._follow(replica)

    def _follow(self, replica: int) -> None:
        """Find the incarnation that followed a failed one; their rows may come in any order."""
        mine = self._replicas[replica]
        for failure in mine.open:
            exited = failure.life.exited
            if failure.next is None and exited is not None:
                others = (life for life in mine.lives if life is not failure.life)
                later = [life for life in others if life.first >= exited - EARLY_S]
                failure.next = min(later, key=lambda life: life.first, default=None)

    def _lived(self, name: str, replica: int, row: Mapping[str, Any]) -> None:
        incarnation, t = row.get("incarnation"), row["t"]
        if incarnation is None:
            return
        life = self._life(replica, incarnation, t)
        if name == "Rejoined":
            for failure in self._replicas[replica].open:
                failure.rejoined = t
            self._replicas[replica].open = []
            return
        life.take(name, row)
        self._follow(replica)

    def _life(self, replica: int, incarnation: str | None, t: float) -> IncarnationRecord:
        """Return the incarnation of that name; without a name, the one that ran at ``t``."""
        mine = self._replicas[replica]
        if incarnation is None:
            ran = [life for life in mine.lives if life.first <= t + EARLY_S]
            if ran:
                return ran[-1]
            incarnation = ""
        for life in mine.lives:
            if life.incarnation == incarnation:
                return life
        life = IncarnationRecord(incarnation)
        mine.lives = [*mine.lives[1 - LIVES :], life]
        return life

    def _find(self, replica: int, life: IncarnationRecord, t: float) -> Failure | None:
        """Return the newest open failure of an incarnation; one that was over before ``t`` is closed instead."""
        mine = self._replicas[replica]
        found = next((f for f in reversed(mine.open) if f.life is life), None)
        over = None if found is None else self.over(found)
        if found is None or over is None or t <= over:
            return found
        found.rejoined = over
        mine.open = [f for f in mine.open if f is not found]
        return None

    def _at(self, seq: int, replica: int, life: IncarnationRecord, kind: str, row: Mapping[str, Any]) -> Failure:
        """Return the open failure of an incarnation, a new one if there is none."""
        failure = self._find(replica, life, row["t"])
        if failure is None:
            rank, cause = row.get("rank"), str(row.get("reason", ""))
            failure = Failure(seq, replica, rank, kind, cause, life)
            mine = self._replicas[replica]
            mine.open = [*mine.open[1 - LIVES :], failure]
            self.all.append(failure)
            self._fresh.append(failure)
            if self._most is not None and len(self.all) > self._most:
                del self.all[0]
                self.cut = True
        return failure

    def _drop(self, replica: int, incarnation: str | None, evident: bool = False) -> None:
        """Remove failures that were none: they healed before there was evidence, or the end was planned."""
        for failure in list(self._replicas[replica].open):
            if failure.life.incarnation == incarnation and (evident or failure.evidence is None):
                self._replicas[replica].open.remove(failure)
                self.all = [f for f in self.all if f is not failure]
                self._fresh = [f for f in self._fresh if f is not failure]

    def _gap(self, t: float) -> float | None:
        """Return the seconds between the commits before and after ``t``; None: they are not known."""
        return next((b - a for a, b in pairwise(self._commits) if a <= t < b), None)
