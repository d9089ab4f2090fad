"""Keeps one replica running: starts its ranks together, ends them together, starts them again.

The unit of failure is the replica (FT-HSDP §4.2): when one rank exits, the others are killed at once, stopped
ones too, and the incarnation counts as exited when all of them are gone.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ft_hsdp.config import Config
from ft_hsdp.core import restart
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_OK, Retryable
from ft_hsdp.launch.forkserver import ForkServer
from ft_hsdp.launch.incarnation import DONE, Incarnation, kind_of
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.rundir import Row, RunDir, Tailer

TOGETHER_S = 30.0  # after one rank is done, how long the others have until they are killed
GONE_S = 30.0  # how long a killed process has to go away
STALLED_S = 60.0  # without a commit for this long, a replica that was to stay away is started anyway


class Link(Protocol):
    """What a supervisor tells the lighthouse; see `lighthouse_link.LighthouseLink`."""

    def started(self, replica: int, incarnation: str) -> None:
        """An incarnation has been started."""

    def exited(self, replica: int, incarnation: str) -> None:
        """All ranks of an incarnation are gone."""

    def lost(self, replica: int) -> None:
        """A replica will not be started again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replica ended: `kind` is done, stopped, lost or config; `reason` is one line."""

    kind: str
    reason: str = ""


class ReplicaSupervisor:
    """One replica, from its first start to its end.

    emit: takes each event; survivors: whether another replica of the job runs, for whose next commit a
    restart then waits; config_file: what the ranks load.
    """

    def __init__(
        self,
        replica: int,
        config: Config,
        run: RunDir,
        *,
        forks: ForkServer,
        link: Link,
        progress: Progress,
        emit: Callable[[Row], None],
        survivors: Callable[[], bool] = lambda: False,
        config_file: Path | None = None,
    ) -> None:
        self.replica = replica
        self.current: Incarnation | None = None
        self._config = config
        self._run = run
        self._forks = forks
        self._link = link
        self._progress = progress
        self._emit = emit
        self._survivors = survivors
        self._config_file = config_file or run.config
        self._run_id = secrets.token_hex(4)
        self._restarts = restart.RestartState()
        self._commits = Tailer(run.commits(replica))
        self._stopping = False
        self._away_until = 0

    @property
    def running(self) -> bool:
        """Whether all ranks run."""
        return self.current is not None and self.current.complete

    def stay_away(self, until_step: int) -> None:
        """Not to be started again before `until_step` steps are committed."""
        self._away_until = max(self._away_until, until_step)

    def evict(self, incarnation: str, reason: str) -> None:
        """Kill the incarnation, if it is the one that runs."""
        current = self.current
        if current is None or current.name != incarnation or current.evicted or not current.living:
            return
        current.evicted = reason
        self._event("EvictionOrdered", reason)
        current.kill()

    async def stop(self, grace_s: float) -> None:
        """End the replica: SIGTERM, and after `grace_s` SIGKILL. `run` returns soon after."""
        self._stopping = True
        self._progress.wake()
        current = self.current
        if current is not None:
            current.send(signal.SIGTERM)
            current.send(signal.SIGCONT)  # a stopped process does not see the other
            if not await current.wait_for(lambda: not current.living, grace_s):
                current.kill()

    async def run(self) -> Outcome:
        """Run the replica until it is done, lost or stopped."""
        reason = "first start"
        while not self._stopping:
            outcome, cause = await self._live(reason)
            if outcome is not None:
                return outcome
            policy = self._config.restart
            self._restarts, decision = restart.on_loss(
                self._restarts,
                restart.RestartPolicy(policy.budget, policy.backoff_s, policy.backoff_max_s),
                len({row["step"] for row in self._commits.poll()}),
                cause,
            )
            if isinstance(decision, restart.GiveUp):
                return self._lose(decision.reason)
            reason = decision.reason
            self._event("RestartScheduled", reason, delay_s=decision.delay_s)
            await self._hold(decision.delay_s)
        return Outcome("stopped", "on request")

    async def _live(self, reason: str) -> tuple[Outcome | None, str]:
        """One incarnation from start to end: the outcome if it is the last, and the cause of its end."""
        size = self._config.ranks_per_replica
        current = Incarnation(self.replica, self._run_id, self._restarts.restarts, size, self._run)
        self.current = current
        self._link.started(self.replica, current.name)
        try:
            await current.start(self._forks, self._config_file)
        except Retryable as error:
            current.kill()
            kind, rank, why = "not started", None, str(error)
        else:
            pids = [rank.pid for rank in current.ranks.values()]
            self._event("ReplicaStarted", reason, pids=pids, restarts=current.restarts)
            self._progress.wake()
            await self._until_first_exit(current)
            kind, rank, why = "", None, ""
        if not await current.wait_for(lambda: not current.living, GONE_S):
            stuck = [rank.pid for rank in current.living]
            return self._lose(f"pids {stuck} do not end after SIGKILL"), ""
        if not kind:
            kind, rank = current.verdict()
            why = current.evicted or (current.explain(rank) if rank else f"all ranks ended: {kind}")
        self._link.exited(self.replica, current.name)
        current.write()
        codes = {str(r.rank): r.code for r in current.ranks.values()}
        ending = "stopped" if self._stopping else kind
        self._event("ReplicaExited", why, kind=ending, rank=rank.rank if rank else None, codes=codes)
        self._progress.wake()
        return self._judge(kind, rank.code if rank else None, why), f"{kind}: {why}"

    async def _until_first_exit(self, current: Incarnation) -> None:
        """Wait until a rank exits, then end the others; ranks that are done may end by themselves."""
        if self._stopping:
            current.kill()
        await current.wait_for(lambda: current.first is not None)
        first = current.first
        assert first is not None
        if first.code == EXIT_OK:
            await current.wait_for(
                lambda: not current.living or any(r.code for r in current.ranks.values()), TOGETHER_S
            )
        if current.living and not self._stopping:
            current.kill()
        why = current.evicted or current.explain(first)
        self._event("ProcessExited", why, rank=first.rank, pid=first.pid, kind=kind_of(first))

    def _judge(self, kind: str, code: int | None, why: str) -> Outcome | None:
        """What the end of an incarnation means for the replica; None asks for a restart."""
        if kind == DONE:
            return Outcome("done", why)
        if self._stopping:
            return Outcome("stopped", why)
        if code == EXIT_CONFIG:
            return Outcome("config", why)
        if code == EXIT_HARDWARE:
            return self._lose(why)
        if self._progress.halted:
            return self._lose(self._progress.halted)
        return None

    def _lose(self, reason: str) -> Outcome:
        self._link.lost(self.replica)
        self._event("ReplicaLost", reason)
        self._progress.wake()
        return Outcome("lost", reason)

    async def _hold(self, delay_s: float) -> None:
        """Wait for the backoff, for the survivors' next commit, and for as long as chaos keeps us away."""
        progress = self._progress
        start = progress.step
        await progress.wait_for(lambda: self._stopping, delay_s)

        def alone() -> bool:
            return self._stopping or progress.finished or not self._survivors()

        # The survivors repeat the step that just broke: a start beside it would take their CPUs.
        await progress.wait_for(lambda: alone() or progress.step > start, self._config.restart.hold_s)
        while not alone() and progress.step < self._away_until:
            seen = progress.step
            if not await progress.wait_for(lambda seen=seen: alone() or progress.step > seen, STALLED_S):  # type: ignore[misc]
                break

    def _event(self, name: str, reason: str, **fields: Any) -> None:
        incarnation = self.current.name if self.current else None
        head = {"t": time.time(), "event": name, "source": "supervisor", "replica": self.replica}
        self._emit({**head, "incarnation": incarnation, **fields, "reason": reason})
