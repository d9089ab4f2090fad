"""What a backend is: it runs the ranks of a job, on this machine or on a Ray cluster.

A supervisor decides when a replica is started and ended; a backend only does it. All backends promise that the
ranks of one incarnation are started together, that each exit is reported once, and that nothing outlives `close`.

`WorkerGroup` is the processes of one incarnation as a backend has them, or those of a spare, which is assigned
to an incarnation later. `ReplicaProcess` is the same incarnation as its supervisor sees it: the `ProcessWatch`
of its ranks. When they are gone, its `verdict` says why the incarnation ended, and which rank shows it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import LEAVING, Cause, exit_in_words
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_LEFT, EXIT_OK, EXIT_RETRYABLE, EXIT_USAGE
from ft_hsdp.launch.backend import rank_end
from ft_hsdp.launch.backend.processes import last_line
from ft_hsdp.launch.backend.rank_end import RankEnd
from ft_hsdp.launch.progress import Changes
from ft_hsdp.launch.run.directory import Row, RunDir, read_json, write_json_later

COLD = "cold"
WARM = "from a spare"
WARMING = "from a spare that was not ready"

# Kinds of the end of an incarnation; the others are as in `exit_in_words`.
DONE = "done"
EVICTED = "evicted"
TORN = "exit 0 of some ranks only"
LEFT = "left"
STRAY = "exit 0 before the end"
NOT_STARTED = "not started"  # a rank could not be started


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


class Backend(Protocol):
    """Starts and ends the ranks of replicas, and keeps spares."""

    @property
    def warm(self) -> bool:
        """Return whether a spare is ready. Then a start takes no CPU time from the others, and need not wait."""

    async def open(self) -> None:
        """Make ready for the first start.

        Raises:
            FtHsdpError: No rank can be started.
        """

    async def place(self, replica: int) -> None:
        """Wait until there is a place for a replica's ranks, without an end; the caller cancels it."""

    def shrink(self, replica: int, least: int) -> int:
        """Place a replica on the hosts that it has left; return its ranks there, 0 if it has to wait.

        Args:
            replica: The replica, which has no processes.
            least: Fewest ranks with which it goes on, if `memory.shrink_to` is smaller.
        """

    def lend(self, replica: int) -> None:
        """Let other replicas have the hosts of one that waits for others, until it has a place."""

    def could_grow(self, replica: int) -> bool:
        """Return whether there is a place for all ranks of a replica that goes on with fewer."""

    def vacancy(self, replica: int) -> str:
        """Return in one line why a replica has no place: what it asks for, and what there is."""

    def lost_hosts(self, replica: int) -> tuple[str, ...]:
        """Return the hosts of a replica that are lost, of which the backend knows that."""

    def cordon(self, replica: int, host: str, reason: str, waits: bool) -> bool:
        """Start no rank on a host any more; return False if nothing was done, because no other can take its place.

        Args:
            replica: The replica that has ranks there.
            host: The host's name.
            reason: Why, in one line.
            waits: The replica waits for another host if there is none now.
        """

    async def start(self, spec: ReplicaSpec, watch: ProcessWatch) -> str:
        """Start all ranks of an incarnation, whose replica has a place.

        Stops before the last one if a rank exits meanwhile.

        Args:
            spec: The incarnation.
            watch: Takes the reports of its processes.

        Returns:
            How that was done: COLD, WARMING, WARM, or where.

        Raises:
            Retryable: A rank cannot be started; others may run then.
        """

    def vacated(self, replica: int) -> None:
        """Give a replica's place back: it does not need one any more, or not now."""

    def settled(self, spec: ReplicaSpec) -> None:
        """Note that an incarnation trains or has ended, or has had its time to start: spares may be made again."""

    def committed(self, spec: ReplicaSpec) -> None:
        """Note that an incarnation committed a step: it has the state of the job."""

    async def close(self) -> None:
        """End all processes that were started, spares included."""


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
            size: Number of ranks.
            config: The YAML file that they load.
            spec: The incarnation; None for a spare.
            number: The number of the spare, from 1; 0 for an incarnation.
            changed: Called with the group after each change of a spare that waits; None for an incarnation.
        """
        self.size = size
        self.config = config
        self.spec = spec  # None for a spare until it is assigned
        self.number = number
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
        spec: The incarnation.
        rank: The rank.
        run: The run's directory.
        hosts: On which the replica was placed: the name of each rank's host; (): its ranks do not compare them.
        host: The name of this rank's host, if its machine stands for several; "": its process knows it.
    """
    log = str(run.rank_log(spec.replica, rank))
    named: dict[str, Any] = {**({"host": host} if host else {}), **({"hosts": list(hosts)} if hosts else {})}
    named |= {"fatal": spec.fatal} if spec.fatal else {}
    return {"replica": spec.replica, "run_id": spec.run_id, "restarts": spec.restarts, "log": log, **named}


def spare_log(folder: Path, number: int, rank: int) -> Path:
    """Return the path of one rank's stdout and stderr while it is a spare's."""
    return folder / f"{number}-rank{rank}.log"


@dataclass(slots=True)
class RankProcess:
    rank: int
    process: WorkerProcess
    state: str = "running"  # or "exited"
    code: int | None = None  # exit code, negative for a signal
    killed: bool = False  # by the supervisor, because of another rank: its exit does not show the cause

    @property
    def pid(self) -> int:
        """Return its pid on the machine where it runs."""
        return self.process.pid


class ReplicaProcess(Changes):
    """The ranks of one incarnation and their states; tasks wait for changes with `wait_for`."""

    def __init__(self, spec: ReplicaSpec, run: RunDir) -> None:
        super().__init__()
        self.spec = spec
        self.ranks: dict[int, RankProcess] = {}
        self.evicted: str | None = None  # reason of the eviction, if one was ordered
        self.first: RankProcess | None = None  # the rank whose exit was reported first
        self._run = run

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def replica(self) -> int:
        return self.spec.replica

    @property
    def restarts(self) -> int:
        """Return the number of earlier incarnations of this run."""
        return self.spec.restarts

    @property
    def complete(self) -> bool:
        return len(self.living) == self.spec.size

    @property
    def living(self) -> list[RankProcess]:
        """Return the ranks that have not exited."""
        return [rank for rank in self.ranks.values() if rank.state == "running"]

    async def start(self, backend: Backend) -> str:
        """Start all ranks and return how, as `Backend.start` does; after Retryable some ranks may run."""
        how = await backend.start(self.spec, self)
        self.write()
        return how

    def started(self, rank: int, process: WorkerProcess) -> None:
        self.ranks[rank] = RankProcess(rank, process)
        self.wake()

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        gone = self.ranks[rank]
        gone.state, gone.code = "exited", code
        # With another code it had ended by itself, and is only heard of now.
        gone.killed = gone.killed and code == -signal.SIGKILL
        self.first = self.first or gone
        self.wake()

    @property
    def final(self) -> Row | None:
        """Return what this incarnation has said of its last state; None: it has not trained to its end."""
        said = read_json(self._run.final(self.replica))
        return said if said and said.get("incarnation") == self.name else None

    def send(self, number: int) -> None:
        """Send a signal to every rank that has not exited."""
        for rank in self.living:
            rank.process.signal(number)

    def kill(self) -> None:
        """Send SIGKILL to every rank that has not exited; it also ends stopped ones."""
        for rank in self.living:
            rank.killed = True
        self.send(signal.SIGKILL)

    def verdict(self) -> tuple[str, RankProcess | None]:
        """Return why the incarnation ended, and the rank that shows it.

        The order in which exits are reported says nothing: ranks of other machines are heard of late. A rank that
        lost its peers ends with 75, so any other code comes before that one.
        """
        if self.evicted is not None:
            return EVICTED, None
        own = [rank for rank in self.ranks.values() if not rank.killed and rank.code is not None]
        if len(own) == self.spec.size and all(rank.code in LEAVING for rank in own):
            if self.final is not None:
                return DONE, None
            return (LEFT if any(rank.code == EXIT_LEFT for rank in own) else STRAY), None
        own.sort(key=lambda rank: rank is not self.first)
        telling = [rank for code in (EXIT_CONFIG, EXIT_USAGE, EXIT_HARDWARE) for rank in own if rank.code == code]
        telling += [rank for rank in own if rank.code not in (*LEAVING, EXIT_RETRYABLE)]
        telling += [rank for rank in own if (end := self.told(rank)) and end.cause is not Cause.TEMPORARY]
        if self.first is not None and self.first.code != EXIT_OK:
            telling.append(self.first)
        telling += [rank for rank in own if rank.code != EXIT_OK]
        return (kind_of(telling[0]), telling[0]) if telling else (TORN, self.first)

    def told(self, rank: RankProcess) -> RankEnd | None:
        """Return what ``rank`` has said about its end, if it has; one that a signal ended says nothing."""
        said = (rank.code or 0) > 0
        return rank_end.told(self._run, self.replica, rank.rank, self.name) if said else None

    def explain(self, rank: RankProcess) -> str:
        """Return one line on the exit of ``rank``."""
        return exit_line(rank.rank, rank.code or 0, self._run.rank_log(self.replica, rank.rank))

    @property
    def on_machine(self) -> list[RankProcess]:
        """Return the ranks of the incarnation on this machine."""
        return list(self.ranks.values())

    def write(self) -> None:
        """Write processes.json for `status`."""
        ranks = [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "host": rank.process.host,
                "machine": rank.process.machine,
                "state": rank.state,
            }
            for rank in sorted(self.on_machine, key=lambda rank: rank.rank)
        ]
        document = {
            "replica": self.replica,
            "incarnation": self.name,
            "restarts": self.restarts,
            "ranks": ranks,
        }
        write_json_later(self._run.processes(self.replica), document)


def kind_of(rank: RankProcess) -> str:
    return exit_in_words(rank.code or 0)


def exit_line(rank: int, code: int, log: Path) -> str:
    """Return one line on the exit of a rank, with the last line of its log unless a signal ended it."""
    why = last_line(log) if code > 0 else ""
    return f"rank {rank} ended with {exit_in_words(code)}" + (f": {why}" if why else "")
