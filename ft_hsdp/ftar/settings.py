"""Settings of a group: transports, sizes and deadlines."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ft_hsdp.errors import InvalidArgument

if TYPE_CHECKING:
    from ft_hsdp.config import Config

SLOTS = 8  # chunks in flight, unless the settings say otherwise
FEW_CORES = 2  # up to this number of cores, threads for connections cost more than they bring


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes, deadlines and transports of a group. None leaves a choice to this package.

    All members of a ring must have the same sizes: they are part of HELLO, and members that differ refuse each
    other.

    Raises:
        InvalidArgument: a value is out of its range.
    """

    transport: Literal["auto", "tcp", "shm", "c10d"] = "auto"  # auto: shared memory on one host, TCP between hosts
    chunk_bytes: int | None = None  # S (FT-HSDP §4.2)
    chunks: int | None = None  # C: chunks in flight to a neighbour at once
    connections: int = 1  # K: data connections of an edge
    receivers: bool | None = None  # threads read and write each connection while the engine adds
    timeout_s: float = 60.0  # a member that makes no progress for so long is stuck
    pause_s: float = 0.0  # the longest pause of a training loop, for which the others wait beyond that
    connect_timeout_s: float = 5.0  # to connect to both neighbours
    beat_s: float = 0.1  # between two heartbeats
    silence_s: float = 0.5  # the shortest silence after which a member is suspected

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

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings of a job's rings."""
        ftar, timeouts = config.ftar, config.timeouts
        return cls(
            ftar.transport,
            ftar.chunk_bytes,
            ftar.chunks,
            ftar.connections,
            timeout_s=ftar.timeout_s,
            pause_s=timeouts.pause_s,
            connect_timeout_s=timeouts.connect_s,
            beat_s=timeouts.beat_s,
            silence_s=timeouts.silence_s,
        )

    @property
    def patient(self) -> Settings:
        """The same settings with twice the timeout and the longest pause, for data connections.

        A data connection that waits too long gives up only after the heartbeats have had time to name the member
        at fault. They know of pauses, and it does not.
        """
        return replace(self, timeout_s=2 * self.timeout_s + self.pause_s)

    @property
    def slots(self) -> int:
        """C: the number of chunks that are in flight to a neighbour at once."""
        return self.chunks or SLOTS

    @property
    def threaded(self) -> bool:
        """Whether threads read and write each data connection while the engine adds.

        With `receivers` None: if there are cores for them, for threads pay only then.
        """
        if self.receivers is not None:
            return self.receivers
        return self.connections > 1 or len(os.sched_getaffinity(0)) > FEW_CORES

    @property
    def offers(self) -> tuple[str, ...]:
        """The transports that may be used, best first."""
        return ("shm", "tcp") if self.transport == "auto" else (self.transport,)
