"""Keeps one replica running: starts its ranks together, ends them together, starts them again.

The unit of failure is the replica (FT-HSDP §4.2): when one rank exits, the others are killed at once, stopped
ones too, and the incarnation counts as exited when all of them are gone. A replica that is drained, or beyond the
number that the job is scaled to, is told to leave by the lighthouse, and rests until it is wanted; that counts
against no budget.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ft_hsdp.config import Config
from ft_hsdp.core import restart
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, Retryable
from ft_hsdp.launch.engine import Engine, Gang
from ft_hsdp.launch.incarnation import DONE, LEAVING, LEFT, STRAY, Incarnation, kind_of
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.rundir import Row, RunDir, Tailer

NEWS_S = 1.0  # longest wait for what the lighthouse says to an exit that may have been ordered
LOOK_S = 0.2  # between two looks at the commits of an incarnation that does not contribute yet
SETTLE_S = 60.0  # how long spares wait for it
STALLED_S = 60.0  # without a commit for this long, a replica that was to stay away is started anyway


class Link(Protocol):
    """What a supervisor tells the lighthouse; see `lighthouse_link.LighthouseLink`."""

    def started(self, replica: int, incarnation: str) -> None:
        """An incarnation has been started; a replica that was given up is not any more."""

    def rests(self, replica: int) -> None:
        """Nothing of a replica runs, and nothing will before it is wanted."""

    def exited(self, replica: int, incarnation: str) -> None:
        """All ranks of an incarnation are gone."""

    def lost(self, replica: int) -> None:
        """Nobody has to wait for a replica: it will not be started again, or it is not known when."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replica ended: `kind` is done, stopped, drained, unplaced, lost or config; `reason` is one line."""

    kind: str
    reason: str = ""


class ReplicaSupervisor:
    """One replica, from its first start to its end.

    emit: takes each event; survivors: whether another replica of the job runs, for whose next commit a
    restart then waits; proven: whether others train with this configuration, so that a rank that refuses it is its
    machine's fault; config_file: what the ranks load.
    """

    def __init__(
        self,
        replica: int,
        config: Config,
        run: RunDir,
        *,
        engine: Engine,
        link: Link,
        progress: Progress,
        emit: Callable[[Row], None],
        survivors: Callable[[], bool] = lambda: False,
        proven: Callable[[], bool] = lambda: False,
        config_file: Path | None = None,
    ) -> None:
        self.replica = replica
        self.current: Incarnation | None = None
        self._config = config
        self._run = run
        self._engine = engine
        self._link = link
        self._progress = progress
        self._emit = emit
        self._survivors = survivors
        self._proven = proven
        self._config_file = config_file or run.config
        self._run_id = secrets.token_hex(4)
        self._restarts = restart.RestartState()
        self._commits = Tailer(run.commits(replica))
        self._committed: set[int] = set()  # steps, since the last loss
        self._contributing = ""  # the newest incarnation that contributed
        self._stopping = False
        self._away_until = 0
        self.resting = False  # not wanted, and nothing of it runs

    @property
    def drained(self) -> bool:
        """Whether this replica is to stay away: by an operator's order, or because the job has fewer replicas."""
        progress = self._progress
        unheard = not progress.heard and self.replica >= self._config.replicas
        return unheard or self.replica in progress.drained

    @property
    def _dismissed(self) -> bool:
        """Whether the incarnation that ran last was sent away, even if the replica is wanted again."""
        return self.replica in self._progress.dismissed

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
        """Run the replica until it is done, lost or stopped, or the job has ended without it."""
        reason = "first start"
        while not self._stopping:
            if self.drained:
                ended = await self._rest()
                if ended is not None:
                    return ended
                reason = "it is wanted"
            placed, ended = await self._find_place()
            if ended is not None:
                return ended
            if not placed:
                continue
            outcome, cause = await self._live(reason)
            if outcome is not None:
                return outcome
            if self.drained or (self._dismissed and cause.startswith((LEFT, STRAY))):
                self._restarts = replace(self._restarts, restarts=self._restarts.restarts + 1)
                continue
            policy = self._config.restart
            self._restarts, decision = restart.on_loss(
                self._restarts,
                restart.RestartPolicy(policy.budget, policy.backoff_s, policy.backoff_max_s),
                self._count(),
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
        gang = Gang(self.replica, size, self._run_id, self._restarts.restarts, self._config_file)
        current = Incarnation(gang, self._run)
        self.current = current
        self._progress.dismissed.discard(self.replica)
        self._link.started(self.replica, current.name)
        try:
            how = await self._unless_stopped(current.start(self._engine))
        except Retryable as error:
            current.kill()
            kind, rank, why = "not started", None, str(error)
        else:
            pids = [rank.pid for rank in current.ranks.values()]
            self._event("ReplicaStarted", reason, pids=pids, restarts=current.restarts, how=how)
            self._progress.wake()
            settling = asyncio.create_task(self._settle(current))
            try:
                await self._until_first_exit(current)
            finally:
                settling.cancel()
            kind, rank, why = "", None, ""
        if not await current.wait_for(lambda: not current.living, self._config.timeouts.gone_s):
            stuck = [rank.pid for rank in current.living]
            self._engine.settled(gang)
            return self._lose(f"pids {stuck} do not end after SIGKILL"), ""
        if not kind:
            kind, rank = current.verdict()
            why = current.evicted or (current.explain(rank) if rank else f"all ranks ended: {kind}")
        self._link.exited(self.replica, current.name)
        self._engine.settled(gang)
        current.write()
        if kind == STRAY:  # the replica may have heard of a drain before its supervisor did
            await self._progress.wait_for(lambda: self._dismissed or self._stopping, NEWS_S)
        codes = {str(r.rank): r.code for r in current.ranks.values()}
        ending = "stopped" if self._stopping or (self._dismissed and kind in (LEFT, STRAY)) else kind
        self._event("ReplicaExited", why, kind=ending, rank=rank.rank if rank else None, codes=codes)
        self._progress.wake()
        return self._judge(kind, rank.code if rank else None, why), f"{kind}: {why}"

    async def _find_place(self) -> tuple[bool, Outcome | None]:
        """Wait until the replica has a place, or is not wanted; whether it has, and its end if the job ends first.

        After timeouts.place_s the others need not wait for it any more. This counts against no budget.
        """
        progress, patience_s = self._progress, self._config.timeouts.place_s

        def settled() -> bool:
            over = self._stopping or self.drained or progress.finished or bool(progress.halted)
            return placing.done() or over

        placing = asyncio.ensure_future(self._engine.place(self.replica))
        placing.add_done_callback(lambda _: progress.wake())
        try:
            if not await progress.wait_for(settled, patience_s):
                self._link.lost(self.replica)
                self._event("ReplicaUnplaced", self._engine.vacancy(self.replica))
                await progress.wait_for(settled)
            if placing.done():
                placing.result()
                return True, None
        finally:
            placing.cancel()
        if progress.finished:
            return False, Outcome("unplaced", "there was no place for it until the end")
        return False, self._lose(progress.halted) if progress.halted else None

    async def _unless_stopped(self, work: Coroutine[Any, Any, str]) -> str:
        """Do `work`; raises Retryable if the replica is stopped meanwhile, or what `work` raises."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._progress.wake())
        try:
            await self._progress.wait_for(lambda: task.done() or self._stopping)
            if task.done():
                return task.result()
            raise Retryable("it was stopped while it started")
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _rest(self) -> Outcome | None:
        """Keep the replica away until it is wanted; how it ended, if the job ends first."""
        progress, self.resting = self._progress, True
        self._link.rests(self.replica)
        self._engine.vacated(self.replica)
        progress.wake()
        await progress.wait_for(
            lambda: self._stopping or not self.drained or progress.finished or bool(progress.halted)
        )
        if self._stopping or progress.finished:
            return Outcome("drained", "it was not wanted until the end")
        if progress.halted:
            return self._lose(progress.halted) if self.current else Outcome("drained", progress.halted)
        self.resting = False
        return None

    async def _until_first_exit(self, current: Incarnation) -> None:
        """Wait until a rank exits, then end the others; ranks that are done may end by themselves."""
        if self._stopping:
            current.kill()
        await current.wait_for(lambda: current.first is not None)
        first = current.first
        assert first is not None
        if first.code in LEAVING:
            await current.wait_for(
                lambda: not current.living or any((r.code or 0) not in LEAVING for r in current.ranks.values()),
                self._config.timeouts.together_s,
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
        if code == EXIT_CONFIG and not self._proven():
            return Outcome("config", why)
        if code == EXIT_HARDWARE:
            return self._lose(why)
        if self._progress.halted:
            return self._lose(self._progress.halted)
        return None

    def _lose(self, reason: str) -> Outcome:
        self._link.lost(self.replica)
        self._engine.vacated(self.replica)
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

        # The survivors repeat the step that just broke: a cold start beside it would take their CPUs.
        await progress.wait_for(
            lambda: alone() or self._engine.warm or progress.step > start, self._config.restart.hold_s
        )
        while not alone() and progress.step < self._away_until:
            seen = progress.step
            if not await progress.wait_for(lambda seen=seen: alone() or progress.step > seen, STALLED_S):  # type: ignore[misc]
                break

    async def _settle(self, current: Incarnation) -> None:
        """Tell the engine when the incarnation contributes: until then, spares would be made at its cost."""
        until = time.monotonic() + SETTLE_S
        while self._config.spares and self._contributing != current.name and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            self._look()
        self._engine.settled(current.gang)

    def _look(self) -> None:
        """Read what was committed since."""
        for row in self._commits.poll():
            self._committed.add(row["step"])
            if row.get("role") == "contribute":
                self._contributing = row["incarnation"]

    def _count(self) -> int:
        """Steps that were committed since the last loss."""
        self._look()
        count = len(self._committed)
        self._committed.clear()
        return count

    def _event(self, name: str, reason: str, **fields: Any) -> None:
        incarnation = self.current.name if self.current else None
        head = {"t": time.time(), "event": name, "source": "supervisor", "replica": self.replica}
        self._emit({**head, "incarnation": incarnation, **fields, "reason": reason})
