"""Where the ranks of one replica may run, and how many there are.

A replica asks its `Backend` for a place before each incarnation. If it has lost hosts and no others are free, it
goes on with the ranks that have a host, down to `memory.shrink_to` of them (ADR 40), and has all of them again
once there is a place for all. If fewer ranks end before they contribute, their number may be the reason:
`core.restart.NarrowEnds` decides with how few the replica is still started.

`ReplicaSupervisor` calls `find` before an incarnation, `grow` while it runs, and `too_few` after its end. All of
it belongs to the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection

from ft_hsdp.config import Config
from ft_hsdp.core import restart
from ft_hsdp.errors import EXIT_HARDWARE, EXIT_UNREACHABLE
from ft_hsdp.launch.backend.base import DONE, LEFT, NOT_STARTED, STRAY, Backend, ReplicaProcess
from ft_hsdp.launch.failures import IncarnationEnd
from ft_hsdp.launch.incarnation_watch import LOOK_S, CommitWatch
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import RunDir


class ReplicaPlace:
    """The place of one replica, and the number of its ranks there, over all its incarnations."""

    def __init__(
        self,
        replica: int,
        config: Config,
        run: RunDir,
        commits: CommitWatch,
        *,
        backend: Backend,
        link: LighthouseLink,
        progress: Progress,
        event: Callable[..., None],
    ) -> None:
        """Begin with all ranks, and without a place.

        Args:
            replica: Its id.
            config: The job's configuration.
            run: The run's directory.
            commits: The steps that the replica commits.
            backend: Has the places.
            link: Tells the lighthouse that the others need not wait for the replica.
            progress: How far the job is; waits end at its changes.
            event: Writes an event of the replica: takes its name, the reason, and its other fields by keyword.
        """
        self.ranks = config.ranks_per_replica  # of the next incarnation: fewer while hosts are missing
        self.told_to_leave = ""  # the incarnation since the last `find` that was to leave, so that it can grow
        self._all = config.ranks_per_replica
        self._replica = replica
        self._timeouts = config.timeouts
        self._run = run
        self._backend = backend
        self._link = link
        self._progress = progress
        self._commits = commits
        self._event = event
        self._narrow = restart.NarrowEnds()

    async def find(self, unneeded: Callable[[], bool]) -> bool:
        """Wait until the replica has a place, or needs none. This does not count as a restart.

        After timeouts.place_s it goes on with the ranks that have a host, if that is allowed. Otherwise the
        lighthouse is told that the others need not wait for it, and they may have its hosts. It tries again every
        timeouts.place_s: more hosts may be back by then, or the job may have committed its first step.

        Args:
            unneeded: Whether the replica needs no place any more. Before it turns true, `Progress.wake` is called.

        Returns:
            Whether it has a place, for `ranks` ranks.
        """
        self.told_to_leave = ""
        progress, patience_s, unplaced = self._progress, self._timeouts.place_s, False
        fewer = self.ranks < self._all and not self._backend.could_grow(self._replica)
        if fewer and (self.ranks < self._narrow.least or self._shrink() == self.ranks):
            patience_s = 0.0  # it has waited, and no other host is lost
        placing = asyncio.ensure_future(self._backend.place(self._replica))
        placing.add_done_callback(lambda _: progress.wake())
        try:
            while not await progress.wait_for(lambda: placing.done() or unneeded(), patience_s):
                patience_s = max(self._timeouts.place_s, LOOK_S)
                if self._shrinks():
                    return True
                if not unplaced:
                    unplaced = True
                    self._link.lost(self._replica)
                    self._event("ReplicaUnplaced", self._backend.vacancy(self._replica))
                    self._backend.lend(self._replica)
            if not placing.done():
                return False
            placing.result()
            self._has_all_ranks()
            return True
        finally:
            placing.cancel()

    def _shrinks(self) -> bool:
        """Go on with the ranks that have a host; return whether there are enough of them."""
        ranks = self._shrink() if self._progress.step else 0  # the first state is of all ranks
        if not ranks:
            return False
        if ranks != self.ranks:
            reason = f"{ranks} of {self._all} ranks go on: {self._backend.vacancy(self._replica)}"
            self._event("Shrunk", reason, **{"from": self.ranks, "to": ranks})
            self.ranks = ranks
        return True

    def _shrink(self) -> int:
        """Place the replica on the hosts that it has left; return its ranks there, 0 if they are too few."""
        return self._backend.shrink(self._replica, self._narrow.least)

    def _has_all_ranks(self) -> None:
        before, self.ranks = self.ranks, self._all
        if before < self.ranks:
            reason = f"there is a host for all {self.ranks} ranks again"
            self._event("Grown", reason, **{"from": before, "to": self.ranks})

    async def grow(self, current: ReplicaProcess, stopping: Callable[[], bool]) -> None:
        """Tell an incarnation with too few ranks to leave at a commit, once there is a place for all of them.

        Waits for that without an end, and returns at once if it has all ranks; the caller cancels it when a rank
        exits. A rank that does not leave within timeouts.stop_s is killed.

        Args:
            current: The incarnation, which runs.
            stopping: Whether the replica is stopped; then it has been told to leave already.
        """
        if current.spec.size == self._all:
            return
        while not (self._commits.contributing == current.name and self._backend.could_grow(self._replica)):
            await asyncio.sleep(LOOK_S)
            self._commits.look()
        if stopping() or self._progress.finished:
            return
        self.told_to_leave = current.name
        current.send(signal.SIGTERM)
        if not await current.wait_for(lambda: not current.living, self._timeouts.stop_s):
            current.kill()

    def too_few(
        self, current: ReplicaProcess, end: IncarnationEnd, lost_hosts: Collection[str], cause: str
    ) -> bool:
        """Note how an incarnation has ended that was not stopped; return whether its ranks may have been too few.

        Then nothing is said against its hosts. It contributed to no step, lost no host, and was not sent away.

        Args:
            current: The incarnation.
            end: How it ended.
            lost_hosts: Its hosts that are lost.
            cause: Why it ended, in one line.
        """
        ranks, elsewhere = current.spec.size, end.kind in (DONE, LEFT, STRAY)
        self._narrow, too_few = self._narrow.after_run(
            ranks,
            self._all,
            began=end.kind != NOT_STARTED,
            contributed=self._commits.contributing == current.name or end.committed >= restart.REFILL_STEPS,
            elsewhere=elsewhere or bool(lost_hosts) or end.code in (EXIT_HARDWARE, EXIT_UNREACHABLE),
        )
        if too_few and ranks < self._narrow.least:
            self._event("TooFewRanks", f"{restart.TOO_FEW}; {cause}", ranks=ranks)
        return too_few
