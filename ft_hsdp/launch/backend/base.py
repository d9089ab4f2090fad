"""What a backend is: it runs the ranks of a job, on this machine or on a Ray cluster.

A supervisor decides when a replica is started and ended; a backend only does it. All backends promise that the
ranks of one incarnation are started together, that each exit is reported once, and that nothing outlives `close`.

`WorkerGroup` is the processes of one incarnation, or of a spare, which is assigned to an incarnation later.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.launch.run.directory import RunDir

COLD = "cold"
WARM = "from a spare"
WARMING = "from a spare that was not ready"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
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
        return str(IncarnationId(self.replica, self.run_id, self.restarts))


class WorkerProcess(Protocol):
    """A rank's process, on whatever machine."""

    @property
    def pid(self) -> int:
        """Its pid there."""

    @property
    def host(self) -> str:
        """The machine's name."""

    def signal(self, number: int) -> None:
        """Signal it, if it still runs; never another process that has got its pid."""


class ProcessWatch(Protocol):
    """Hears of the processes of one gang, on the event loop."""

    def started(self, rank: int, process: WorkerProcess) -> None:
        """A rank runs."""

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        """It is gone; ``code`` is negative for a signal. `started` came before."""


class Backend(Protocol):
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

    async def start(self, gang: ReplicaSpec, watch: ProcessWatch) -> str:
        """Start all ranks of a gang, whose replica has a place; how that was done: COLD, WARMING, WARM, or where.

        Stops before the end if a rank exits meanwhile. Raises Retryable; some ranks may run then.
        """

    def vacated(self, replica: int) -> None:
        """A replica needs its place no more, for now or for good: it is given back."""

    def settled(self, gang: ReplicaSpec) -> None:
        """A gang that was started trains, or has ended: spares may be made beside it."""

    async def close(self) -> None:
        """End whatever runs, spares included."""


class WorkerGroup:
    """The processes of one gang: a replica's from the start, or a spare's until it is `given` to one.

    called: whose ranks they are; None: a spare's.
    """

    def __init__(self, size: int, config: Path, called: ReplicaSpec | None = None, number: int = 0) -> None:
        self.size = size
        self.config = config
        self.called = called
        self.number = number
        self.processes: dict[int, WorkerProcess] = {}
        self.gone: dict[int, int] = {}  # rank -> exit code
        self.waiting: set[int] = set()  # ranks that are warm
        self.began = time.monotonic()
        self.warm_at: float | None = None
        self._heard: Callable[[], None] = lambda: None
        self._watch: ProcessWatch | None = None

    def heard_by(self, heard: Callable[[], None]) -> None:
        """Have `heard` called after each change, until the crew is given."""
        self._heard = heard

    def given(self, watch: ProcessWatch) -> None:
        """From now on it is watched by `watch`, which hears first of what has happened."""
        self._watch = watch
        for rank, process in sorted(self.processes.items()):
            watch.started(rank, process)
        for rank, code in self.gone.items():
            watch.exited(rank, self.processes[rank], code)

    @property
    def complete(self) -> bool:
        """Whether all ranks run."""
        return len(self.processes) == self.size and not self.gone

    @property
    def ready(self) -> bool:
        """Whether all ranks wait to be called."""
        return self.complete and len(self.waiting) == self.size

    def started(self, rank: int, process: WorkerProcess) -> None:
        """A rank runs."""
        if rank in self.processes:
            return
        self.processes[rank] = process
        if self._watch is not None:
            self._watch.started(rank, process)
        else:
            self._heard()

    def warm(self, rank: int) -> None:
        """A rank has got all ready, and waits to be called."""
        self.waiting.add(rank)
        if self.ready:
            self.warm_at = time.monotonic()
        if self._watch is None:
            self._heard()

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        """A rank is gone."""
        self.started(rank, process)
        self.gone[rank] = code
        if self._watch is not None:
            self._watch.exited(rank, process, code)
        else:
            self._heard()

    def kill(self) -> None:
        """SIGKILL whatever runs."""
        for rank, process in self.processes.items():
            if rank not in self.gone:
                process.signal(signal.SIGKILL)


def call(gang: ReplicaSpec, rank: int, run: RunDir) -> dict[str, Any]:
    """What a rank of `gang` is told."""
    log = str(run.rank_log(gang.replica, rank))
    return {"replica": gang.replica, "run_id": gang.run_id, "restarts": gang.restarts, "log": log}


def spare_log(folder: Path, number: int, rank: int) -> Path:
    """stdout and stderr of one rank of a spare, until it is called."""
    return folder / f"{number}-rank{rank}.log"
