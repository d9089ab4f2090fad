"""Liveness: replicas that are slower than the others, and replicas that make no progress. Pure.

Stragglers. All replicas commit a step together, so `step_s` does not tell them apart: fast replicas wait for slow
ones. The own work of a replica is ``busy_s = step_s - sum(waits)``: data, forward, backward and optimizer. A
straggler has more than twice the median of the others, for each micro-batch of a rank, in 20 of its last 24
steps, and stops being one when that is so in at most 12. (With `quorum.batch: constant` the ranks of one replica
may train twice as many as those of another. With `memory.shrink_to` a replica may have half its ranks, and train
half the units in the same time.)

Limits: it cannot tell *which rank* of a replica is slow (its ranks wait for each other inside FSDP's
collectives, where no wait is counted); nor a slow *link* (both ends, and then the whole ring, wait in ``ftar``,
and no replica is busier than another): `ft_hsdp.analysis.culprits` can; nor what is slow beside the step, such as
a fetch. All-reduces that run
beside backward count as busy time as long as no replica waits for them. With two replicas the slower one is
compared with the faster.

Vitals. Ranks send beats; a replica is stalled if a rank's beats stop, or if they show no progress. While a
training loop pauses, on purpose, no replica has to make progress: all wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ft_hsdp.analysis.diagnosis import KnownRank

if TYPE_CHECKING:
    from ft_hsdp.core.traces import RankTrace
    from ft_hsdp.protocol import RankBeat

FACTOR = 2.0
FLOOR_S = 0.05  # a smaller difference is ignored
WINDOW = 24
SLOW = 20
SLOW_NO_MORE = 12
OPEN_STEPS = 4  # a step is judged once it is so far behind, even if contributors have not reported it


class StragglerVerdict(NamedTuple):
    replica: int
    over: bool
    reason: str
    witnesses: int  # other replicas that needed less than half as long for the step
    epoch: int  # of the step
    kind: str = "slow"
    rank: int | None = None  # of it; None: it is not known which


class Stragglers:
    """Takes the commit rows of all replicas of a job, in about the order of their steps."""

    def __init__(self, slots: int) -> None:
        self.busy_s: dict[int, float] = {}  # of the newest step of each replica
        self.step_s: dict[int, float] = {}
        # step -> replica -> busy seconds, and micro-batches of each rank
        self._open: dict[int, dict[int, tuple[float, int]]] = {}
        self._slow: list[deque[bool]] = [deque(maxlen=WINDOW) for _ in range(slots)]
        self._named: set[int] = set()
        self._judged = 0
        self.epoch = 0  # of the newest step

    def add(self, replica: int, row: Mapping[str, Any], micro_batches: int = 1) -> list[StragglerVerdict]:
        """Take a step as a contributor has measured it, and what each rank trained; return what changes."""
        if row["role"] != "contribute":
            return []
        step = row["step"]
        busy = max(0.0, row["step_s"] - sum(row["waits"].values()))
        self.busy_s[replica], self.step_s[replica] = busy, row["step_s"]
        if step + 100 * OPEN_STEPS < self._judged:
            self._open, self._judged = {}, 0  # the job was rolled back
        if step <= self._judged:
            return []
        here = self._open.setdefault(step, {})
        here[replica] = busy, micro_batches
        self.epoch = row["epoch"]
        due = {s for s in self._open if s <= step - OPEN_STEPS}
        if len(here) >= len(row["contributors"]):
            due.add(step)
        if len(self._open) > WINDOW:
            due.add(min(self._open))
        return [verdict for s in sorted(due) for verdict in self._judge(s)]

    def forget(self, replica: int) -> None:
        self._slow[replica].clear()
        self._named.discard(replica)
        self.busy_s.pop(replica, None)
        self.step_s.pop(replica, None)

    def _judge(self, step: int) -> list[StragglerVerdict]:
        reported = self._open.pop(step)
        self._judged = max(self._judged, step)
        found: list[StragglerVerdict] = []
        for replica, (mine, micro_batches) in reported.items():
            others = [seconds / count for r, (seconds, count) in reported.items() if r != replica]
            if not others:
                continue
            usual = median(others) * micro_batches
            window = self._slow[replica]
            window.append(mine > FACTOR * usual and mine - usual > FLOOR_S)
            slow = sum(window)
            why = f"busy {mine:.2f} s where others need {usual:.2f} s; slow in {slow} of {len(window)} steps"
            if slow >= SLOW if replica not in self._named else slow <= SLOW_NO_MORE:
                witnesses = sum(mine > FACTOR * micro_batches * each for each in others)
                over = replica in self._named
                self._named ^= {replica}
                found.append(StragglerVerdict(replica, over, why, witnesses, self.epoch))
        return found


SILENT_S = 5.0  # without a beat; ranks beat about once a second
STUCK_S = 15.0  # without progress; or `STUCK_STEPS` usual steps, if that is longer
STUCK_STEPS = 8.0
MEASURED_S = 60.0  # for which a load counts that no newer one has followed


class Change(NamedTuple):
    replica: int
    over: bool
    rank: int | None
    reason: str


@dataclass(slots=True)
class _Rank:
    beat: RankBeat
    heard: float
    moved: float
    trace: RankTrace | None  # the newest that it has sent
    measured: float  # when the load of the beat, which is the newest one, was heard


class Vitals:
    """The newest beat of each rank of a job. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, _Rank]] = {}
        self._stalled: set[int] = set()

    def hear(self, replica: int, beats: Iterable[RankBeat], now: float) -> None:
        mine = self._of.setdefault(replica, {})
        for beat in beats:
            known = mine.get(beat.rank)
            if known is not None and known.beat.pid != beat.pid:
                known = None
            moved = known.moved if known is not None and known.beat.progress == beat.progress else now
            trace, measured = beat.trace, now
            if known is not None:
                trace = known.trace if trace is None else trace
                if not beat.load and now - known.measured < MEASURED_S:
                    beat, measured = replace(beat, load=known.beat.load), known.measured
            mine[beat.rank] = _Rank(beat, now, moved, trace, measured)

    def forget(self, replica: int) -> None:
        self._of.pop(replica, None)
        self._stalled.discard(replica)

    def newest(self, replica: int, now: float) -> list[tuple[RankBeat, float]]:
        """Return the newest beat of each rank that has sent one, and its age in seconds."""
        mine = self._of.get(replica, {})
        return [(mine[rank].beat, max(0.0, now - mine[rank].heard)) for rank in sorted(mine)]

    def known(self, now: float) -> Iterable[KnownRank]:
        """Yield what each rank has told of its collectives."""
        for replica, mine in self._of.items():
            for rank, seen in mine.items():
                beat = seen.beat
                yield KnownRank(replica, rank, beat.host, beat.pid, now - seen.heard, seen.trace, beat.still_s)

    def judge(self, active: Iterable[int], typical: float, now: float) -> list[Change]:
        """Return which replicas stalled or went on since the last call.

        Args:
            active: replicas that should make progress.
            typical: a fault-free step, in seconds.
        """
        found = []
        patience, pauses = max(STUCK_S, STUCK_STEPS * typical), bool(self.pauses(now))
        for replica in active:
            rank, why = self._trouble(replica, patience, pauses, now)
            if why and replica not in self._stalled:
                self._stalled.add(replica)
                found.append(Change(replica, over=False, rank=rank, reason=why))
            elif not why and replica in self._stalled:
                self._stalled.discard(replica)
                found.append(Change(replica, over=True, rank=None, reason="its ranks beat and make progress"))
        return found

    def pauses(self, now: float) -> dict[int, str]:
        found = {}
        for replica, mine in sorted(self._of.items()):
            said = [k.beat.pause for k in mine.values() if k.beat.pause and now - k.heard <= SILENT_S]
            if said:
                found[replica] = said[0]
        return found

    def _trouble(self, replica: int, patience: float, pauses: bool, now: float) -> tuple[int | None, str]:
        for rank, known in sorted(self._of.get(replica, {}).items()):
            if now - known.heard > SILENT_S:
                return rank, f"no beat of rank {rank} for {now - known.heard:.0f} s"
            if pauses:
                known.moved = now
            elif now - known.moved > patience:
                return rank, f"rank {rank} beats, but makes no progress for {now - known.moved:.0f} s"
        return None, ""
