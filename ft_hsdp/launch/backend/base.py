"""The processes of ranks: those of one incarnation on a host, or of a spare, which is assigned to one later.

What starts ranks promises that each exit is reported once (`ProcessWatch`), and that nothing outlives it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import IncarnationId, exit_in_words
from ft_hsdp.launch.backend.processes import last_line
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
    fatal: tuple[Run, ...] = ()  # units that have ended the processes which trained them

    @property
    def name(self) -> str:
        return str(IncarnationId(self.replica, self.run_id, self.restarts))


class Forks(Protocol):
    """Forks ranks: the fork server of this process (`ForkServer`), or that of its holder (`HeldForks`)."""

    async def spawn(
        self,
        *,
        env: Mapping[str, str],
        config: Path,
        log: Path,
        on_exit: Callable[[int, int], None],
        assignment: Mapping[str, Any] | None = None,
        on_warm: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Fork a rank and return its pid.

        Args:
            config: The YAML file that it loads.
            assignment: Its incarnation; None for a spare's rank, which gets warm and waits for `assign`.

        Raises:
            Retryable: It cannot be forked, is not in time, or the fork server dies meanwhile.
        """

    def assign(self, pid: int, assignment: Mapping[str, Any]) -> None:
        """Send a waiting rank its incarnation."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank, if it runs."""

    def forget(self, pids: Sequence[int]) -> None:
        """Forget ranks that have ended: the lighthouse knows how."""

    async def close(self) -> None:
        """End all ranks, or leave that to the holder."""


class WorkerProcess(Protocol):
    """A rank's process, on this machine or another one."""

    @property
    def pid(self) -> int:
        """Return its pid on its machine."""

    @property
    def machine(self) -> str:
        """Return the name of its machine, on which its pid counts."""

    @property
    def host(self) -> str:
        """Return the name of its host: that of the machine, unless the machine stands for several hosts."""

    def signal(self, number: int) -> None:
        """Send a signal if it still runs; never to another process that has got its pid."""


class ProcessWatch(Protocol):
    """Takes reports of the processes of one incarnation, on the event loop."""

    def started(self, rank: int, process: WorkerProcess) -> None:
        """Take note that a rank runs."""

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        """Take note that a rank is gone; ``code`` is negative for a signal. `started` came before."""


class WorkerGroup:
    """The processes of one incarnation, or those of a spare until it is `given` to one."""

    def __init__(
        self,
        size: int,
        config: Path,
        spec: ReplicaSpec | None = None,
        number: int = 0,
        changed: Callable[[WorkerGroup], None] | None = None,
    ) -> None:
        """Make a group without processes.

        Args:
            config: The YAML file that they load.
            spec: The incarnation; None for a spare.
            number: The number of the spare, from 1; 0 for an incarnation.
            changed: Called with the group after each change of a spare that waits; None for an incarnation.
        """
        self.size = size  # number of ranks
        self.config = config  # the YAML file that they load
        self.spec = spec  # None for a spare until it is assigned
        self.number = number  # of the spare, from 1; 0 for an incarnation
        self.processes: dict[int, WorkerProcess] = {}  # by rank
        self.gone: dict[int, int] = {}  # rank -> exit code
        self.waiting: set[int] = set()  # ranks that are warm
        self.began = time.monotonic()
        self.warm_at: float | None = None
        self.taken = False  # it left its pool: changes concern the replica to which it is given
        self._changed = changed
        self._watches: dict[int, ProcessWatch] = {}  # by rank

    def given(self, watch: ProcessWatch, ranks: Collection[int] | None = None) -> None:
        """Report ranks to ``watch`` from now on, or all, beginning with what has happened so far."""
        self._watches |= dict.fromkeys(range(self.size) if ranks is None else ranks, watch)
        for rank, process in sorted(self.processes.items()):
            if self._watches.get(rank) is watch:
                watch.started(rank, process)
        for rank, code in self.gone.items():
            if self._watches.get(rank) is watch:
                watch.exited(rank, self.processes[rank], code)

    @property
    def complete(self) -> bool:
        return len(self.processes) == self.size and not self.gone

    @property
    def ready(self) -> bool:
        """Return whether all ranks are warm and wait for their incarnation."""
        return self.complete and len(self.waiting) == self.size

    def started(self, rank: int, process: WorkerProcess) -> None:
        if rank in self.processes:
            return
        self.processes[rank] = process
        if rank in self._watches:
            self._watches[rank].started(rank, process)
        self._note_change()

    def warm(self, rank: int) -> None:
        """Note that a rank is warm and waits for its incarnation."""
        self.waiting.add(rank)
        if self.ready:
            self.warm_at = time.monotonic()
        self._note_change()

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        self.started(rank, process)
        self.gone[rank] = code
        if rank in self._watches:
            self._watches[rank].exited(rank, process, code)
        self._note_change()

    def _note_change(self) -> None:
        if self._changed is not None and not self.taken:
            self._changed(self)

    def kill(self) -> None:
        """Send SIGKILL to all processes that run."""
        for rank, process in self.processes.items():
            if rank not in self.gone:
                process.signal(signal.SIGKILL)


def assignment(
    spec: ReplicaSpec, rank: int, run: RunDir, hosts: Sequence[str] = (), host: str = ""
) -> dict[str, Any]:
    """Return the message that assigns a rank to ``spec``: its `IncarnationId`, its log and the hosts.

    Args:
        hosts: On which the replica was placed: the name of each rank's host; (): its ranks do not compare them.
        host: The name of this rank's host, if its machine stands for several; "": its process knows it.
    """
    log = str(run.rank_log(spec.replica, rank))
    named: dict[str, Any] = {**({"host": host} if host else {}), **({"hosts": list(hosts)} if hosts else {})}
    named |= {"fatal": spec.fatal} if spec.fatal else {}
    return {"replica": spec.replica, "run_id": spec.run_id, "restarts": spec.restarts, "log": log, **named}


@dataclass(slots=True)
class RankProcess:
    rank: int
    process: WorkerProcess
    state: str = "running"  # or "exited"
    code: int | None = None  # exit code, negative for a signal
    killed: bool = False  # by its host, because of another rank: its exit does not show the cause

    @property
    def pid(self) -> int:
        """Return its pid on the machine where it runs."""
        return self.process.pid


def exit_line(rank: int, code: int, log: Path) -> str:
    """Return one line on the exit of a rank, with the last line of its log unless a signal ended it."""
    why = last_line(log) if code > 0 else ""
    return f"rank {rank} ended with {exit_in_words(code)}" + (f": {why}" if why else "")
