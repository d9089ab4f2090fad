"""What a supervisor learns of a running incarnation from its files, and when it ends one that does not get on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from ft_hsdp.config import Config
from ft_hsdp.config.entry import title
from ft_hsdp.core.ledger import Run
from ft_hsdp.launch.backend.base import ReplicaProcess
from ft_hsdp.launch.backend.processes import no_room, stands_still
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import RunDir, Tailer

LOOK_S = 0.2  # between two reads of the commits of an incarnation that does not contribute yet
FED_BYTES = 4096  # of the end of a log of what was fed
GUARD_S = 0.5  # between two checks whether the ranks of an incarnation have checked in, and run
STOPPED = 2  # times timeouts.evict_s: after that long the supervisor kills a rank that is stopped by SIGSTOP
UNHEARD = "its ranks did not end"  # start of the reason for an eviction after the end of the job


class CommitWatch:
    """The steps that a replica commits, over all its incarnations."""

    def __init__(self, run: RunDir, replica: int) -> None:
        self._commits = Tailer(run.commits(replica))
        self._committed: set[int] = set()  # steps since the last loss
        self._newest: tuple[str, int] = ("", 0)  # incarnation and step
        self.contributing = ""  # the newest incarnation that contributed
        self.usable = ""  # the newest one of which a contribution changed the weights
        self.shared = False  # another replica contributed to a step that `count` has counted last
        self._replica = replica
        self._beside = False  # the same, of the steps since then

    def look(self) -> None:
        """Read the replica's new commits; only the newest, if there are many."""
        for row in self._commits.newest():
            self._committed.add(row.get("step", 0))
            self._newest = row.get("incarnation", ""), row.get("step", 0)
            self._beside |= any(other != self._replica for other in row.get("contributors", ()))
            if row.get("role") == "contribute":
                self.contributing = row.get("incarnation", "")
                if self._replica not in row.get("poisoned", ()):
                    self.usable = self.contributing

    def newest_of(self, incarnation: str) -> int:
        """Return the newest step that an incarnation has committed; 0: none."""
        return self._newest[1] if self._newest[0] == incarnation else 0

    def count(self) -> int:
        """Return the number of steps that the replica committed since the last call."""
        self.look()
        count, self.shared = len(self._committed), self._beside
        self._committed.clear()
        self._beside = False
        return count


def in_flight(run: RunDir, replica: int, incarnation: str, committed: int) -> Run | None:
    """Return the units that an incarnation has fed last, unless they are of a step that is ``committed``."""
    fed = [row for row in Tailer(run.fed(replica)).newest(FED_BYTES) if row.get("incarnation") == incarnation]
    if not fed or int(fed[-1].get("step", 0)) <= committed:
        return None
    return int(fed[-1]["shard"]), int(fed[-1]["index"]), int(fed[-1]["units"])


def last_fed(run: RunDir, replica: int, incarnation: str) -> tuple[Run | None, bool]:
    """Return the units that an incarnation had in flight, and whether its gradients have changed the weights."""
    newest = Tailer(run.commits(replica)).newest(4 * FED_BYTES)
    rows = [row for row in newest if row.get("incarnation") == incarnation]
    usable = any(row.get("role") == "contribute" and replica not in row.get("poisoned", ()) for row in rows)
    return in_flight(run, replica, incarnation, max((row.get("step", 0) for row in rows), default=0)), usable


class IncarnationGuard:
    """Watches one incarnation until it is over."""

    def __init__(
        self,
        current: ReplicaProcess,
        config: Config,
        run: RunDir,
        progress: Progress,
        evict: Callable[[str, str], None],
    ) -> None:
        """Begin with the events that come from now on.

        Args:
            current: The incarnation.
            config: The job's configuration.
            run: The run's directory.
            progress: How far the job is.
            evict: Ends an incarnation, for a reason.
        """
        self._current = current
        self._config = config
        self._run = run
        self._progress = progress
        self._evict = evict
        self._log = Tailer(run.replica_events(current.replica))
        self._log.skip()  # the log may be long, and has no event of this incarnation yet
        self.begun = asyncio.Event()  # it has checked in
        self.restored = 0  # the step with which it began

    @property
    def checked_in(self) -> bool:
        """Return whether the incarnation has checked in, as far as is known here."""
        return self.begun.is_set()

    def look(self) -> None:
        """Read what the incarnation has said since the last look."""
        for row in self._log.poll():
            if row.get("incarnation") != self._current.name:
                continue
            if row.get("event") == "CheckedIn":
                self.begun.set()
            elif row.get("event") == "StateRestored" and isinstance(row.get("step"), int):
                self.restored = row["step"]

    async def run(self) -> NoReturn:
        """Evict the incarnation if it does not check in, does not end with the job, or has a stopped rank.

        The limits are long: the lighthouse and the other ranks of the replica, which know more, act first if they
        can. A replica that cannot reach the lighthouse does not hear of the end of the job.
        """
        timeouts, began = self._config.timeouts, time.monotonic()
        current = self._current
        stopped: dict[int, float] = {}
        finished: float | None = None
        while True:
            await asyncio.sleep(GUARD_S)
            now = time.monotonic()
            if self._progress.finished:
                finished = finished or now
                allowed_s = timeouts.save_s + timeouts.stop_s  # a rank that is done may still write a checkpoint
                if now - finished >= allowed_s:
                    keys = "half of timeouts.final_wait_s, and timeouts.stop_s"
                    self._evict(
                        current.name, f"{UNHEARD} within {allowed_s:g} s ({keys}) after the end of the job"
                    )
            self.look()
            late = not self.checked_in and now - began >= timeouts.start_s
            # On a full disk the line CheckedIn may be missing.
            if late and not await asyncio.to_thread(no_room, self._run.path):
                self._evict(current.name, f"{self._late} within {timeouts.start_s:g} s (timeouts.start_s)")
            for rank in current.living:
                if not stands_still(rank.pid, rank.process.machine):
                    stopped.pop(rank.rank, None)
                elif now - stopped.setdefault(rank.rank, now) >= STOPPED * timeouts.evict_s:
                    reason = f"rank {rank.rank} has been stopped for {now - stopped[rank.rank]:.1f} s"
                    self._evict(current.name, reason)

    @property
    def _late(self) -> str:
        """Return what an incarnation has not done that is too late."""
        entry = self._config.entry
        if entry is None:
            return "it has not checked in"
        return f"{title(entry)} has not come to the first batch of job.batches()"
