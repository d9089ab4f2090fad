"""Vitals: the newest sign of life of every rank, and which replicas are stalled by them. Pure: `now` comes in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ft_hsdp.protocol import RankBeat

SILENT_S = 5.0  # beats come about once a second
STUCK_S = 15.0  # without progress; or `STUCK_STEPS` usual steps, if that is longer
STUCK_STEPS = 8.0


class Change(NamedTuple):
    """A replica is stalled, or goes on."""

    event: Literal["ReplicaStalled", "ReplicaResumed"]
    replica: int
    rank: int | None
    reason: str


@dataclass(slots=True)
class _Rank:
    beat: RankBeat
    heard: float
    moved: float


class Vitals:
    """The beats of a job; times in monotonic seconds."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, _Rank]] = {}
        self._stalled: set[int] = set()

    def hear(self, replica: int, beats: Iterable[RankBeat], now: float) -> None:
        """Beats came from the ranks of a replica."""
        mine = self._of.setdefault(replica, {})
        for beat in beats:
            known = mine.get(beat.rank)
            same = known is not None and (known.beat.pid, known.beat.progress) == (beat.pid, beat.progress)
            mine[beat.rank] = _Rank(beat, now, known.moved if known is not None and same else now)

    def forget(self, replica: int) -> None:
        """The replica has ended."""
        self._of.pop(replica, None)
        self._stalled.discard(replica)

    def newest(self, replica: int, now: float) -> list[tuple[RankBeat, float]]:
        """The newest beat of each rank that ever spoke, and how old it is in seconds."""
        mine = self._of.get(replica, {})
        return [(mine[rank].beat, max(0.0, now - mine[rank].heard)) for rank in sorted(mine)]

    def judge(self, active: Iterable[int], typical: float, now: float) -> list[Change]:
        """What has changed; ``active``: replicas that should move; ``typical``: a usual step in seconds."""
        found = []
        patience = max(STUCK_S, STUCK_STEPS * typical)
        for replica in active:
            rank, why = self._trouble(replica, patience, now)
            if why and replica not in self._stalled:
                self._stalled.add(replica)
                found.append(Change("ReplicaStalled", replica, rank, why))
            elif not why and replica in self._stalled:
                self._stalled.discard(replica)
                found.append(Change("ReplicaResumed", replica, None, "its ranks beat and make progress"))
        return found

    def _trouble(self, replica: int, patience: float, now: float) -> tuple[int | None, str]:
        for rank, known in sorted(self._of.get(replica, {}).items()):
            if now - known.heard > SILENT_S:
                return rank, f"no beat of rank {rank} for {now - known.heard:.0f} s"
            if now - known.moved > patience:
                return rank, f"rank {rank} beats, but makes no progress for {now - known.moved:.0f} s"
        return None, ""
