"""Crew: the processes of one gang, which may be told later than they are started whose they are."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_hsdp.launch.engine import Gang, Process, Watch
from ft_hsdp.launch.rundir import RunDir


class Crew:
    """The processes of one gang: a replica's from the start, or a spare's until it is `given` to one.

    called: whose ranks they are; None: a spare's.
    """

    def __init__(self, size: int, config: Path, called: Gang | None = None, number: int = 0) -> None:
        self.size = size
        self.config = config
        self.called = called
        self.number = number
        self.processes: dict[int, Process] = {}
        self.gone: dict[int, int] = {}  # rank -> exit code
        self.waiting: set[int] = set()  # ranks that are warm
        self.began = time.monotonic()
        self.warm_at: float | None = None
        self._heard: Callable[[], None] = lambda: None
        self._watch: Watch | None = None

    def heard_by(self, heard: Callable[[], None]) -> None:
        """Have `heard` called after each change, until the crew is given."""
        self._heard = heard

    def given(self, watch: Watch) -> None:
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

    def started(self, rank: int, process: Process) -> None:
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

    def exited(self, rank: int, process: Process, code: int) -> None:
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


def call(gang: Gang, rank: int, run: RunDir) -> dict[str, Any]:
    """What a rank of `gang` is told."""
    log = str(run.rank_log(gang.replica, rank))
    return {"replica": gang.replica, "run_id": gang.run_id, "restarts": gang.restarts, "log": log}


def spare_log(folder: Path, number: int, rank: int) -> Path:
    """stdout and stderr of one rank of a spare, until it is called."""
    return folder / f"{number}-rank{rank}.log"
