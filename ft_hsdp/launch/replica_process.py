"""One incarnation of a replica: its rank processes, started together and ended together.

`ReplicaProcess` is the `ProcessWatch` of its ranks. When they are gone, `verdict` says why the incarnation ended,
and which rank shows it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_LEFT, EXIT_OK
from ft_hsdp.launch.backend.base import Backend, ReplicaSpec, WorkerProcess
from ft_hsdp.launch.backend.processes import last_line
from ft_hsdp.launch.progress import Changes
from ft_hsdp.launch.run.directory import RunDir, try_write_json

DONE = "done"
EVICTED = "evicted"
TORN = "exit 0 of some ranks only"
LEFT = "left"
STRAY = "exit 0 before the end"
LEAVING = frozenset({EXIT_OK, EXIT_LEFT})


@dataclass(slots=True)
class RankProcess:
    """The process of one rank."""

    rank: int
    process: WorkerProcess
    state: str = "running"  # or "exited"
    code: int | None = None  # exit code, negative for a signal
    killed: bool = False  # by us, because of another rank: its exit says nothing about the cause

    @property
    def pid(self) -> int:
        """Its pid on the machine where it runs."""
        return self.process.pid


class ReplicaProcess(Changes):
    """The ranks of one incarnation, and what happens to them."""

    def __init__(self, spec: ReplicaSpec, run: RunDir) -> None:
        super().__init__()
        self.spec = spec
        self.ranks: dict[int, RankProcess] = {}
        self.evicted: str | None = None  # why, once that was ordered
        self.first: RankProcess | None = None  # the rank that was seen to exit first
        self._run = run

    @property
    def name(self) -> str:
        """The name of the incarnation."""
        return self.spec.name

    @property
    def replica(self) -> int:
        """The id of its replica."""
        return self.spec.replica

    @property
    def restarts(self) -> int:
        """How many incarnations of the run came before it."""
        return self.spec.restarts

    @property
    def complete(self) -> bool:
        """Whether all ranks run."""
        return len(self.living) == self.spec.size

    @property
    def living(self) -> list[RankProcess]:
        """The ranks that have not exited."""
        return [rank for rank in self.ranks.values() if rank.state == "running"]

    async def start(self, backend: Backend) -> str:
        """Start all ranks and return how that was done. Raises Retryable; some may run then."""
        how = await backend.start(self.spec, self)
        self.write()
        return how

    def started(self, rank: int, process: WorkerProcess) -> None:
        """Note that a rank runs."""
        self.ranks[rank] = RankProcess(rank, process)
        self.wake()

    def exited(self, rank: int, process: WorkerProcess, code: int) -> None:
        """Note that a rank is gone."""
        gone = self.ranks[rank]
        gone.state, gone.code = "exited", code
        self.first = self.first or gone
        self.wake()

    def send(self, number: int) -> None:
        """Send a signal to every rank that has not exited."""
        for rank in self.living:
            rank.process.signal(number)

    def kill(self) -> None:
        """Send SIGKILL to every rank that has not exited; it ends stopped ones too."""
        for rank in self.living:
            rank.killed = True
        self.send(signal.SIGKILL)

    def verdict(self) -> tuple[str, RankProcess | None]:
        """Return why the incarnation ended, and the rank that shows it."""
        if self.evicted is not None:
            return EVICTED, None
        own = [rank for rank in self.ranks.values() if not rank.killed and rank.code is not None]
        if len(own) == self.spec.size and all(rank.code in LEAVING for rank in own):
            if self._run.final(self.replica).exists():
                return DONE, None
            return (LEFT if any(rank.code == EXIT_LEFT for rank in own) else STRAY), None
        telling = [rank for code in (EXIT_CONFIG, EXIT_HARDWARE) for rank in own if rank.code == code]
        if self.first is not None and self.first.code != EXIT_OK:
            telling.append(self.first)
        telling += [rank for rank in own if rank.code != EXIT_OK]
        return (kind_of(telling[0]), telling[0]) if telling else (TORN, self.first)

    def explain(self, rank: RankProcess) -> str:
        """Return one line on the exit of ``rank``; with the last line of its log, unless a signal ended it."""
        said = last_line(self._run.rank_log(self.replica, rank.rank)) if (rank.code or 0) > 0 else ""
        return f"rank {rank.rank} ended with {kind_of(rank)}" + (f": {said}" if said else "")

    def write(self) -> None:
        """Write processes.json for `status`."""
        ranks = [
            {"rank": rank.rank, "pid": rank.pid, "host": rank.process.host, "state": rank.state}
            for rank in sorted(self.ranks.values(), key=lambda rank: rank.rank)
        ]
        picture = {
            "replica": self.replica,
            "incarnation": self.name,
            "restarts": self.restarts,
            "ranks": ranks,
        }
        try_write_json(self._run.processes(self.replica), picture)


def kind_of(rank: RankProcess) -> str:
    """Return in words how a rank ended."""
    return named(rank.code or 0)


def named(code: int) -> str:
    """Return an exit code in words: `SIGKILL`, `exit 75`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
