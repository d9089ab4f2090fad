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
    """The ranks of one incarnation of a replica, to be started."""

    replica: int
    size: int  # number of ranks
    run_id: str  # TORCHELASTIC_RUN_ID of the ranks
    restarts: int  # TORCHELASTIC_RESTART_COUNT of the ranks
    config: Path  # the YAML file that they load

    @property
    def name(self) -> str:
        """The name of the incarnation."""
        return str(IncarnationId(self.replica, self.run_id, self.restarts))


class WorkerProcess(Protocol):
    """A rank's process, on this machine or another one."""

    @property
    def pid(self) -> int:
        """Its pid on its machine."""

    @property
    def host(self) -> str:
        """The name of its machine."""

    def signal(self, number: int) -> None:
        """Send a signal if it still runs; never to another process that has got its pid."""


class ProcessWatch(Protocol):
    """Is told of the processes of one incarnation, on the event loop."""

    def started(self, rank: int, process: WorkerProcess) -> None:
        """Take note that a rank runs."""

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        """Take note that a rank is gone; ``code`` is negative for a signal. `started` came before."""


class Backend(Protocol):
    """Starts and ends the ranks of replicas, and keeps spares."""

    @property
    def warm(self) -> bool:
        """Whether a spare is ready: the next start takes no CPU from the others, and need not wait for them."""

    async def open(self) -> None:
        """Make ready for the first start.

        Raises:
            FtHsdpError: No rank can be started.
        """

    async def place(self, replica: int) -> None:
        """Wait until there is a place for a replica's ranks, without an end; the caller cancels it."""

    def vacancy(self, replica: int) -> str:
        """Return in one line why a replica has no place: what it asks for, and what there is."""

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        """Start all ranks of an incarnation, whose replica has a place.

        Stops before the last one if a rank exits meanwhile.

        Args:
            spec: The incarnation.
            watch: Is told of its processes.

        Returns:
            How that was done: COLD, WARMING, WARM, or where.

        Raises:
            Retryable: A rank cannot be started; others may run then.
        """

    def vacated(self, replica: int) -> None:
        """Give a replica's place back: it does not need one, for now or for good."""

    def settled(self, spec: ReplicaSpec) -> None:
        """Note that an incarnation trains, or has ended: spares may be made again."""

    async def close(self) -> None:
        """End all processes that were started, spares included."""


class WorkerGroup:
    """The processes of one incarnation, or those of a spare until it is `given` to one."""

    def __init__(self, size: int, config: Path, called: ReplicaSpec | None = None, number: int = 0) -> None:
        """Make a group without processes.

        Args:
            size: Number of ranks.
            config: The YAML file that they load.
            called: The incarnation; None for a spare.
            number: Of the spare, from 1.
        """
        self.size = size
        self.config = config
        self.called = called
        self.number = number
        self.processes: dict[int, WorkerProcess] = {}  # by rank
        self.gone: dict[int, int] = {}  # rank -> exit code
        self.waiting: set[int] = set()  # ranks that are warm
        self.began = time.monotonic()
        self.warm_at: float | None = None
        self._heard: Callable[[], None] = lambda: None
        self._watch: ProcessWatch | None = None

    def heard_by(self, heard: Callable[[], None]) -> None:
        """Have ``heard`` called after each change, until the group is given to a replica."""
        self._heard = heard

    def given(self, watch: ProcessWatch) -> None:
        """Report to ``watch`` from now on; first what has happened so far."""
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
        """Whether all ranks are warm and wait for their incarnation."""
        return self.complete and len(self.waiting) == self.size

    def started(self, rank: int, process: WorkerProcess) -> None:
        """Note that a rank runs."""
        if rank in self.processes:
            return
        self.processes[rank] = process
        if self._watch is not None:
            self._watch.started(rank, process)
        else:
            self._heard()

    def warm(self, rank: int) -> None:
        """Note that a rank is warm and waits for its incarnation."""
        self.waiting.add(rank)
        if self.ready:
            self.warm_at = time.monotonic()
        if self._watch is None:
            self._heard()

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        """Note that a rank is gone."""
        self.started(rank, process)
        self.gone[rank] = code
        if self._watch is not None:
            self._watch.exited(rank, process, code)
        else:
            self._heard()

    def kill(self) -> None:
        """Send SIGKILL to all processes that run."""
        for rank, process in self.processes.items():
            if rank not in self.gone:
                process.signal(signal.SIGKILL)


def call(spec: ReplicaSpec, rank: int, run: RunDir) -> dict[str, Any]:
    """Return what a rank of ``spec`` is told: the fields of its `IncarnationId`, and the path of its log."""
    log = str(run.rank_log(spec.replica, rank))
    return {"replica": spec.replica, "run_id": spec.run_id, "restarts": spec.restarts, "log": log}


def spare_log(folder: Path, number: int, rank: int) -> Path:
    """Return the path of one rank's stdout and stderr while it is a spare's."""
    return folder / f"{number}-rank{rank}.log"
