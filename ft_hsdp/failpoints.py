"""Failpoints: named places at which a process can be made to fail, for tests. Off unless they are configured.

``debug.failpoints`` maps a name to which replicas, which rank and which incarnation fail there, at which step.
Each fires once in a process, the first time that the place is reached at that step or a later one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Mapping
from typing import Protocol

PLACES = {
    "reduce-begin": "the first bucket is about to enter the ring",
    "reduce-copy": "an own chunk is about to be sent",
    "reduce-scatter": "a partial sum is about to be made (reduce-scatter)",
    "reduce-boundary": "a shard's final sum is about to be made, which nobody has yet",
    "reduce-gather": "a final sum of another member is about to be stored (all-gather)",
    "vote": "the rank is about to vote",
    "token-first": "the leader is about to pass the token on in pass 1",
    "token-second": "the verdict is decided here, and nobody else has heard of it from here",
    "apply-begin": "the commit is logged, nothing is applied yet",
    "apply-middle": "the weights are updated, ledger and name are not",
    "apply-end": "the step is applied, and no snapshot of it is taken",
    "snapshot": "a snapshot is copied, and its agent does not know that it is complete",
    "snapshot-kept": "a snapshot is complete, and its agent knows it",
    "fetch": "a part of the state that is fetched has arrived",
    "checkpoint-write": "the files of a checkpoint are written, its manifest is not",
    "checkpoint-rename": "a checkpoint is complete, and does not have its name yet",
    "quorum-reply": "the lighthouse has answered, nothing was done about it",
    "state-flip": "a bit of the state flips, as a broken machine would have it",
    "live-flip": "a bit of the state flips after its snapshot was taken",
    "snapshot-flip": "a bit of a complete snapshot flips",
    "snapshot-out": "there is no memory for a snapshot: it is left out",
    "record-lost": "the ring broke in doubt: the record is forgotten, as a loss of memory would",
}


class Failpoint(Protocol):
    """Who fails at a place, at ``step`` or the first time after it; ``life`` counts the replica's restarts."""

    @property
    def replicas(self) -> Collection[int]:
        """Their ids."""

    @property
    def rank(self) -> int:
        """The rank in each."""

    @property
    def life(self) -> int:
        """The number of restarts before the incarnation that fails."""

    @property
    def step(self) -> int:
        """The first step."""

    @property
    def signal(self) -> str:
        """KILL or STOP."""


_armed: dict[str, Failpoint] = {}


def arm(points: Mapping[str, Failpoint], replica: int, rank: int, life: int) -> None:
    """Arm what is meant for this process."""
    _armed.clear()
    _armed.update({n: p for n, p in points.items() if replica in p.replicas and (p.rank, p.life) == (rank, life)})


def hit(place: str, step: int) -> bool:
    """Whether ``place`` fails now, at ``step``."""
    if not _armed:
        return False
    point = _armed.get(place)
    if point is None or step < point.step:
        return False
    del _armed[place]
    return True


def reach(place: str, step: int) -> None:
    """End, or stop, this process if ``place`` fails now."""
    if not _armed:
        return
    point = _armed.get(place)
    if point is not None and hit(place, step):
        # To this thread: of a signal to the process, its thread may hear a little later.
        signal.pthread_kill(threading.get_ident(), getattr(signal, f"SIG{point.signal}"))
