"""Engine: where the ranks of a job run, and who starts them: this machine's fork server, or a Ray cluster.

A supervisor decides when a replica is started and ended; an engine only does it. What is true of all engines: the
ranks of one incarnation are started together, each exit is told once, and nothing outlives `close`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

COLD = "cold"
WARM = "from a spare"
WARMING = "from a spare that was not ready"


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of one incarnation of a replica, to be started. run_id and restarts: TORCHELASTIC_RUN_ID and
    TORCHELASTIC_RESTART_COUNT of its ranks; config: the YAML file that they load."""

    replica: int
    size: int
    run_id: str
    restarts: int
    config: Path

    @property
    def name(self) -> str:
        """What the protocol calls the incarnation."""
        return f"{self.replica}-{self.run_id}-{self.restarts}"


class Process(Protocol):
    """A rank's process, on whatever machine."""

    @property
    def pid(self) -> int:
        """Its pid there."""

    @property
    def host(self) -> str:
        """The machine's name."""

    def signal(self, number: int) -> None:
        """Signal it, if it still runs; never another process that has got its pid."""


class Watch(Protocol):
    """Hears of the processes of one gang, on the event loop."""

    def started(self, rank: int, process: Process) -> None:
        """A rank runs."""

    def exited(self, rank: int, process: Process, code: int) -> None:
        """It is gone; ``code`` is negative for a signal. `started` came before."""


class Engine(Protocol):
    """Starts gangs."""

    @property
    def warm(self) -> bool:
        """Whether a spare is ready: the next start takes no CPU from the others, and need not wait for them."""

    async def open(self) -> None:
        """Make ready for the first gang. Raises FtHsdpError."""

    async def place(self, replica: int) -> None:
        """Wait until there is a place for a replica's ranks, however long; cancelled where nobody wants it."""

    def vacancy(self, replica: int) -> str:
        """Why a replica has no place, in one line: what it asks for, and what there is."""

    async def start(self, gang: Gang, watch: Watch) -> str:
        """Start all ranks of a gang, whose replica has a place; how that was done: COLD, WARMING, WARM, or where.

        Stops before the end if a rank exits meanwhile. Raises Retryable; some ranks may run then.
        """

    def vacated(self, replica: int) -> None:
        """A replica needs its place no more, for now or for good: it is given back."""

    def settled(self, gang: Gang) -> None:
        """A gang that was started trains, or has ended: spares may be made beside it."""

    async def close(self) -> None:
        """End whatever runs, spares included."""
