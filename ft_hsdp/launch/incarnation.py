"""One incarnation of a replica: its rank processes, started together and ended together."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_OK
from ft_hsdp.launch.forkserver import ForkServer
from ft_hsdp.launch.processes import ONE_THREAD, free_port, last_line
from ft_hsdp.launch.progress import Changes
from ft_hsdp.launch.rundir import RunDir, write_json

DONE = "done"
EVICTED = "evicted"
TORN = "exit 0 of some ranks only"
LEFT = "exit 0 before the end"


@dataclass(slots=True)
class Rank:
    """One process. `code` is its exit code, negative for a signal."""

    rank: int
    pid: int
    state: str = "running"
    code: int | None = None
    killed: bool = False  # by us, because of another rank: its exit says nothing about the cause


class Incarnation(Changes):
    """The ranks of one start of a replica. `name` is what the protocol calls it."""

    def __init__(self, replica: int, run_id: str, restarts: int, size: int, run: RunDir) -> None:
        super().__init__()
        self.name = f"{replica}-{run_id}-{restarts}"
        self.replica = replica
        self.restarts = restarts
        self.ranks: dict[int, Rank] = {}
        self.evicted: str | None = None  # why, once that was ordered
        self.first: Rank | None = None  # the rank that was seen to exit first
        self._run_id = run_id
        self._size = size
        self._run = run
        self._forks: ForkServer | None = None

    @property
    def complete(self) -> bool:
        """Whether all ranks run."""
        return len(self.living) == self._size

    @property
    def living(self) -> list[Rank]:
        """The ranks that have not exited."""
        return [rank for rank in self.ranks.values() if rank.state == "running"]

    async def start(self, forks: ForkServer, config_file: Path) -> None:
        """Fork all ranks, with torchrun's environment. Raises Retryable; some may run then."""
        self._forks = forks
        shared = {
            **ONE_THREAD,
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": self._run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
        }
        for n in range(self._size):
            if self.first is not None:
                break
            pid = await forks.spawn(
                replica=self.replica,
                env={**shared, "RANK": str(n), "LOCAL_RANK": str(n)},
                config=config_file,
                log=self._run.rank_log(self.replica, n),
                on_exit=partial(self._exited, n),
            )
            self.ranks.setdefault(n, Rank(n, pid))
        self.write()

    def send(self, number: int) -> None:
        """Signal every rank that lives."""
        for rank in self.living:
            if self._forks is not None:
                self._forks.signal(rank.pid, number)

    def kill(self) -> None:
        """SIGKILL every rank that lives; that reaches stopped ones too."""
        for rank in self.living:
            rank.killed = True
        self.send(signal.SIGKILL)

    def verdict(self) -> tuple[str, Rank | None]:
        """Why the incarnation ended, and the rank that shows it."""
        if self.evicted is not None:
            return EVICTED, None
        own = [rank for rank in self.ranks.values() if not rank.killed and rank.code is not None]
        if len(own) == self._size and all(rank.code == EXIT_OK for rank in own):
            return (DONE, None) if self._run.final(self.replica).exists() else (LEFT, None)
        telling = [rank for code in (EXIT_CONFIG, EXIT_HARDWARE) for rank in own if rank.code == code]
        if self.first is not None and self.first.code != EXIT_OK:
            telling.append(self.first)
        telling += [rank for rank in own if rank.code != EXIT_OK]
        return (kind_of(telling[0]), telling[0]) if telling else (TORN, self.first)

    def explain(self, rank: Rank) -> str:
        """One line on the exit of `rank`: what its log ends with, where it chose to exit."""
        said = last_line(self._run.rank_log(self.replica, rank.rank)) if (rank.code or 0) > 0 else ""
        return f"rank {rank.rank} ended with {kind_of(rank)}" + (f": {said}" if said else "")

    def write(self) -> None:
        """Write processes.json."""
        ranks = [
            {"rank": rank.rank, "pid": rank.pid, "state": rank.state}
            for rank in sorted(self.ranks.values(), key=lambda rank: rank.rank)
        ]
        picture = {
            "replica": self.replica,
            "incarnation": self.name,
            "restarts": self.restarts,
            "ranks": ranks,
        }
        write_json(self._run.processes(self.replica), picture)

    def _exited(self, number: int, pid: int, code: int) -> None:
        rank = self.ranks.setdefault(number, Rank(number, pid))
        rank.state, rank.code = "exited", code
        self.first = self.first or rank
        self.wake()


def kind_of(rank: Rank) -> str:
    """`SIGKILL`, `exit 75`."""
    code = rank.code or 0
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
