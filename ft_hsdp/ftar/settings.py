"""Settings of a group: which transports, how much at once, how long to wait; and the plan that follows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from ft_hsdp.core.ring import RingPlan
from ft_hsdp.errors import InvalidArgument

SLOTS = 8
FEW_CORES = 2
LEAST, MOST = 2**20, 8 * 2**20
PIECES = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """S (``chunk_bytes``), C (``chunks``), K (``connections``) and deadlines; None leaves a choice to the tuner.

    All members of a ring must have the same sizes: they are part of its HELLO. ``receivers``: each connection is
    read by a thread of its own while the engine adds. ``beat_s``: between two signs of life; ``silence_s``: the
    shortest silence that makes a suspect.
    """

    transport: Literal["auto", "tcp", "shm", "c10d"] = "auto"
    chunk_bytes: int | None = None
    chunks: int | None = None
    connections: int = 1
    receivers: bool | None = None
    timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    beat_s: float = 0.05
    silence_s: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("chunk_bytes", 8), ("chunks", 1), ("connections", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidArgument(f"{name}: got {value}; allowed: at least {least}")
        if self.connections > self.slots:  # each has a chunk on its way
            raise InvalidArgument(f"connections: got {self.connections}; allowed: at most chunks ({self.slots})")
        for name in ("timeout_s", "connect_timeout_s", "beat_s", "silence_s"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name}: got {getattr(self, name)}; allowed: more than 0")

    @property
    def patient(self) -> Settings:
        """For data connections: before they give up by themselves, the beats have said who is stuck."""
        return replace(self, timeout_s=2 * self.timeout_s)

    @property
    def slots(self) -> int:
        """C: chunks on their way to a neighbour at once."""
        return self.chunks or SLOTS

    @property
    def threaded(self) -> bool:
        """Whether connections have threads that receive: they pay where there are cores for them."""
        if self.receivers is not None:
            return self.receivers
        return self.connections > 1 or len(os.sched_getaffinity(0)) > FEW_CORES

    @property
    def offers(self) -> tuple[str, ...]:
        """The transports that may be used, best first."""
        return ("shm", "tcp") if self.transport == "auto" else (self.transport,)

    def plan(self, elements: int, itemsize: int, members: int) -> RingPlan:
        """How a message goes round; the same at all members.

        The tuner cuts a shard into enough chunks to overlap adding with receiving, but not into smaller ones than
        are worth a thread's wake-up.
        """
        shard = -(-elements * itemsize // members)
        chunk = self.chunk_bytes or min(MOST, max(LEAST, -(-shard // PIECES)))
        return RingPlan(elements, members, max(1, chunk // itemsize), self.slots)
