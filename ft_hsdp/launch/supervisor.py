"""The supervisor of one replica: it starts the ranks together, ends them together, and starts them again.

The unit of failure is the replica (FT-HSDP §4.2): when one rank exits, the others are killed at once, also
stopped ones, and the incarnation has exited when all of them are gone. The lighthouse tells a replica to leave if
it is drained, or if the job was scaled to fewer replicas. Then it rests until it is wanted again, which does not
count as a restart.

`ReplicaSupervisor.run` is the loop: rest while unwanted, find a place (`ReplicaPlace`), wait for the lease, run
one incarnation (`_live`), judge its end (`failures`), pause, and start again. So a replica has one recovery at a
time: a loss in the middle of one ends that incarnation, and the next one is placed on the hosts of that time.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.core.restart import LEAVING, OWN_FAULT, Cause, GiveUp, essence
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_UNREACHABLE, EXIT_USAGE, Retryable
from ft_hsdp.launch.backend.base import (
    DONE,
    LEFT,
    NOT_STARTED,
    STRAY,
    Backend,
    RankProcess,
    ReplicaProcess,
    ReplicaSpec,
    kind_of,
)
from ft_hsdp.launch.backend.rank_end import RankEnd
from ft_hsdp.launch.failures import (
    IncarnationEnd,
    JobFailures,
    Life,
    Outcome,
    ReplicaFailures,
    Restarts,
    end_of,
    what_prevented,
)
from ft_hsdp.launch.incarnation_watch import LOOK_S, UNHEARD, CommitWatch, IncarnationGuard, in_flight
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.replica_place import ReplicaPlace
from ft_hsdp.launch.run.directory import Row, RunDir, supervised
from ft_hsdp.memory.replacement import Action

ANSWER_S = 2.0  # longest wait for a lease before an event says that there is none


class ReplicaSupervisor:
    """Keeps one replica running, from its first start to its end."""

    def __init__(
        self,
        replica: int,
        config: Config,
        run: RunDir,
        *,
        backend: Backend,
        link: LighthouseLink,
        progress: Progress,
        emit: Callable[[Row], None],
        survivors: Callable[[], bool] = lambda: False,
        proven: Callable[[], bool] = lambda: False,
        failures: JobFailures | None = None,
    ) -> None:
        """Make the supervisor of a replica; `run` starts it.

        Args:
            replica: Its id.
            config: The job's configuration.
            run: The run's directory.
            backend: Starts the ranks.
            link: Reports to the lighthouse.
            progress: How far the job is.
            emit: Takes each event.
            survivors: Whether another replica of the job runs; a restart then waits for its next commit.
            proven: Whether others train with this configuration; then a rank that refuses it is on a bad machine.
            failures: Those of all replicas of the job; None: this process knows no other replica.
        """
        self.replica = replica
        self.current: ReplicaProcess | None = None  # the newest incarnation, running or not
        self.resting = False  # the replica is not wanted, and no process of it runs
        self._config = config
        self._run = run
        self._backend = backend
        self._link = link
        self._progress = progress
        self._emit = emit
        self._survivors = survivors
        self._proven = proven
        self._run_id = link.owner  # by this the lighthouse knows which supervisor started an incarnation
        self._restarts = Restarts(config, self._event)
        self._commits = CommitWatch(run, replica)
        self._failures = ReplicaFailures(replica, failures)
        self._stopping = False
        self._place = ReplicaPlace(
            replica, config, run, self._commits, backend=backend, link=link, progress=progress, event=self._event
        )
        self._away_until = 0  # step

    @property
    def drained(self) -> bool:
        """Return whether the replica must stay away, by an operator's order or because the job has fewer replicas.

        Until the lighthouse has said so, the replicas beyond `replicas` of the configuration stay away.
        """
        progress = self._progress
        surplus = not progress.heard and self.replica >= self._config.replicas
        return surplus or self.replica in progress.drained

    @property
    def _dismissed(self) -> bool:
        """Return whether the newest incarnation was sent away, even if the replica is wanted again."""
        return self.replica in self._progress.dismissed

    @property
    def _unreached(self) -> bool:
        """Return whether the incarnation that ended was a restart that no lighthouse answered."""
        last = self.current
        return last is not None and last.restarts > 0 and last.verdict()[0] == f"exit {EXIT_UNREACHABLE}"

    @property
    def _unneeded(self) -> bool:
        """Return whether the replica is stopped or not wanted, or the job has ended."""
        return self._stopping or self.drained or self._progress.finished or bool(self._progress.halted)

    @property
    def running(self) -> bool:
        return self.current is not None and self.current.complete

    def stay_away(self, until_step: int) -> None:
        """Do not start the replica again before ``until_step`` steps are committed."""
        self._away_until = max(self._away_until, until_step)

    def evict(self, incarnation: str, reason: str) -> None:
        """Kill ``incarnation``, if it is the one that runs."""
        current = self.current
        if current is None or current.name != incarnation or current.evicted or not current.living:
            return
        current.evicted = reason
        self._event("EvictionOrdered", reason)
        current.kill()

    async def stop(self, grace_s: float) -> None:
        """Send the ranks SIGTERM, and after ``grace_s`` seconds SIGKILL. `run` returns soon after."""
        self._stopping = True
        self._progress.wake()
        current = self.current
        if current is not None:
            current.send(signal.SIGTERM)
            current.send(signal.SIGCONT)  # a stopped process does not handle SIGTERM
            if not await current.wait_for(lambda: not current.living, grace_s):
                current.kill()

    async def run(self) -> Outcome:
        """Run the replica until it is done, lost or stopped, or the job has ended without it."""
        self._link.claims(self.replica)
        try:
            return await self._run_leased()
        finally:
            self._link.releases(self.replica)

    async def _run_leased(self) -> Outcome:
        reason = "first start"
        while not self._stopping:
            if self.drained:
                ended = await self._rest()
                if ended is not None:
                    return ended
                reason = "it is wanted"
            if not await self._place.find(lambda: self._unneeded):
                ended = self._end_of_job("unplaced", "there was no place for it until the end")
                if ended is not None:
                    return ended
                continue
            if not self._link.holds(self.replica):
                ended = await self._stand_by()
                if ended is not None:
                    return ended
                continue
            life = await self._live(reason)
            if life.outcome is not None:
                return life.outcome
            sent_away = (self._dismissed or self._place.told_to_leave) and life.cause.startswith((LEFT, STRAY))
            if self.drained or sent_away or self._link.rival(self.replica):
                self._restarts.not_counted()
                continue
            if life.prevented and self._progress.finished:
                return Outcome("unplaced", f"it could not be started until the end: {life.cause}")
            decision = self._restarts.after(life, self._unreached)
            if isinstance(decision, GiveUp):
                return self._lose(decision.reason)
            reason = decision.reason
            quiet = {"prevented": True} if life.prevented else {}
            self._event("RestartScheduled", reason, delay_s=decision.delay_s, **quiet)
            await self._hold(decision.delay_s)
            if self._progress.halted and not self._stopping:
                return self._lose(self._progress.halted)
        return Outcome("stopped", "on request")

    async def _until_begun(self, guard: IncarnationGuard) -> None:
        """Wait until an incarnation has checked in: nothing prevents a start any more."""
        await guard.begun.wait()
        self._restarts.begun()

    async def _live(self, reason: str) -> Life:
        """Run one incarnation from start to end."""
        spec = ReplicaSpec(
            self.replica,
            self._place.ranks,
            self._run_id,
            self._restarts.number,
            self._run.config,
            self._failures.blamed,
        )
        current = ReplicaProcess(spec, self._run)
        self.current = current
        self._progress.dismissed.discard(self.replica)
        guard = IncarnationGuard(current, self._config, self._run, self._progress, self.evict)
        began = self._progress.step
        self._link.started(self.replica, current.name)
        try:
            how = await self._unless_stopped(current.start(self._backend))
        except (Retryable, OSError) as error:  # OSError: this machine has no descriptor or port left, for now
            current.kill()
            kind, rank, why = NOT_STARTED, None, str(error)
        else:
            pids = [rank.pid for rank in current.ranks.values()]
            self._event("ReplicaStarted", reason, pids=pids, restarts=current.restarts, how=how)
            self._progress.wake()
            grow = self._place.grow(current, lambda: self._stopping)
            await self._watch(current, [self._settle(current), guard.run(), grow, self._until_begun(guard)])
            kind, rank, why = "", None, ""
        if not await current.wait_for(lambda: not current.living, self._config.timeouts.gone_s):
            stuck = [rank.pid for rank in current.living]
            self._backend.settled(spec)
            return Life(self._lose(f"pids {stuck} do not end after SIGKILL"))
        if not kind:
            kind, rank = self._verdict(current)
            why = current.evicted or (current.explain(rank) if rank else f"all ranks ended: {kind}")
        lost_hosts = self._backend.lost_hosts(self.replica)  # at once: one may be back when the replica starts
        self._link.exited(self.replica, current.name)
        self._backend.settled(spec)
        current.write()
        if kind == STRAY:  # its ranks may know of a drain, or of the end of the job, before this supervisor does
            progress = self._progress
            await progress.wait_for(
                lambda: self._dismissed or self._stopping or progress.finished, self._config.timeouts.news_s
            )
            if progress.finished and not self._dismissed:
                kind, why = DONE, "all ranks ended with the job; its final state is in no file"
        elif (current.evicted or "").startswith(UNHEARD):
            kind = DONE
        codes = {str(r.rank): r.code for r in current.ranks.values()}
        ending = "stopped" if self._stopping or (self._dismissed and kind in (LEFT, STRAY)) else kind
        self._event("ReplicaExited", why, kind=ending, rank=rank.rank if rank else None, codes=codes)
        self._progress.wake()
        guard.look()
        committed = self._commits.count()
        step = max(self._commits.newest_of(current.name), guard.restored) + 1 if guard.checked_in else None
        end = replace(end_of(current, step, committed), kind=kind)
        if kind == LEFT:
            end = replace(end, code=None, host="")  # also if it was killed as it left: no rank shows why
        # Steps that it committed itself count if others took part in them.
        together = self._commits.shared if committed else self._progress.step > began
        others_train = self._survivors() and together
        cause = f"{kind}: {why}"
        if not self._stopping and self._place.too_few(current, end, lost_hosts, cause):
            return Life(None, cause, committed, too_few=True)
        said = current.told(rank) if rank else None
        prevented = None
        if not self._stopping and not guard.checked_in:
            prevented = await asyncio.to_thread(what_prevented, current, kind, said, self._run)
        if prevented:
            return Life(None, cause, committed, prevented=prevented)
        fault = essence(said.error) if said else ""
        self._blame(current, end, said, why)
        own = fault if said and said.cause is Cause.SCRIPT else ""
        wrong = self._failures.ends_all(own, committed) and not self._stopping
        outcome = (
            Outcome("config", f"each replica ends with the same error before the first step: {why}")
            if wrong
            else self._judge(end, why, own, lost_hosts, others_train)
        )
        return Life(outcome, cause, committed, error=fault)

    def _verdict(self, current: ReplicaProcess) -> tuple[str, RankProcess | None]:
        """Return why an incarnation ended, as `ReplicaProcess.verdict` does, and whether it only left.

        One that was stopped, sent away, or told to leave so that it can grow, may be wanted again: it is not done
        because its script has called `Job.leave` then. One that was killed because it did not leave in time to
        grow has left, too: that says nothing against its ranks or hosts.
        """
        kind, rank = current.verdict()
        grows = current.name == self._place.told_to_leave
        told = grows or self._stopping or self._dismissed
        if not told or current.evicted is not None or self._progress.finished:
            return kind, rank
        left = not (current.final or {}).get("of_job") if kind == DONE else grows
        went = all(each.killed or each.code in LEAVING for each in current.ranks.values())
        return (LEFT, None) if left and went else (kind, rank)

    def _blame(self, current: ReplicaProcess, end: IncarnationEnd, said: RankEnd | None, why: str) -> None:
        """Blame the units that were in flight, if they have ended processes again and again."""
        units = None
        if end.step is not None and (end.code in OWN_FAULT or (said and said.cause is not Cause.TEMPORARY)):
            units = in_flight(self._run, self.replica, current.name, end.step - 1)
        contributed = self._commits.usable == current.name
        if self._failures.blame(units, end.step, contributed) and units is not None:
            shard, index, count = units
            self._event("BatchBlamed", f"it ended its process again: {why}", shard=shard, index=index, units=count)

    async def _stand_by(self) -> Outcome | None:
        """Wait until this supervisor has the replica's lease; return the outcome if the job ends first.

        This lasts while another supervisor runs the replica, or no lighthouse answers: an incarnation without a
        lease could replace a healthy one of the other supervisor.
        """
        progress, link, reported = self._progress, self._link, ""

        def settled() -> bool:
            return link.holds(self.replica) or self._unneeded

        def changed(rival: str) -> bool:
            return settled() or link.rival(self.replica) != rival

        if not await progress.wait_for(lambda: settled() or bool(link.rival(self.replica)), ANSWER_S):
            self._event("SupervisorStandsBy", f"no lighthouse has renewed the lease of replica {self.replica}")
        while not settled():
            rival = link.rival(self.replica)
            if rival and rival != reported:
                why = f"supervisor {rival} runs replica {self.replica}; this one starts it when that one is gone"
                self._event("SupervisorStandsBy", why)
            reported = rival
            await progress.wait_for(partial(changed, rival))
        return self._end_of_job("drained", "another supervisor ran it until the end")

    async def _unless_stopped(self, work: Coroutine[Any, Any, str]) -> str:
        """Await `work` and return its result; raise Retryable if the replica is stopped meanwhile."""
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
        """Keep the replica away until it is wanted; return the outcome if the job ends first."""
        progress, self.resting = self._progress, True
        self._link.rests(self.replica)
        self._backend.vacated(self.replica)
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

    async def _watch(self, current: ReplicaProcess, beside: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Wait until a rank exits, then kill the others; meanwhile run ``beside``, which ends then.

        An error in ``beside`` ends the incarnation and is raised: without what failed, it would run on unobserved.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in beside]
                await self._until_first_exit(current)
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as failed:
            current.kill()
            raise failed.exceptions[0] from None

    async def _until_first_exit(self, current: ReplicaProcess) -> None:
        """Wait until a rank exits, then kill the others; if the rank was done, they have time to exit."""
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
        said = current.told(first)
        known = said is not None and said.cause is self._restarts.prevented
        quiet = {"prevented": True} if known else {}  # the console has said it
        self._event("ProcessExited", why, rank=first.rank, pid=first.pid, kind=kind_of(first), **quiet)

    def _judge(
        self, end: IncarnationEnd, why: str, error: str, lost_hosts: tuple[str, ...], others_train: bool
    ) -> Outcome | None:
        """Return the outcome of the replica after the end of an incarnation; None: it is started again.

        What is done about a failure is DeadPool's Table II, `memory.replacement.decide`.
        """
        if end.kind == DONE:
            if not self._progress.finished:
                self._link.ended(self.replica)
            return Outcome("done", why)
        if self._stopping:
            return Outcome("stopped", why)
        if end.code in (EXIT_CONFIG, EXIT_USAGE):
            if not self._proven():
                return Outcome("config", why)
            if times := self._restarts.ended_by(error):  # it is wrong on another machine, too, or there is none
                told = f"it is refused again, while others train: {why}"
                if times > 1 or not self._backend.cordon(self.replica, end.host, told, False):
                    return self._lose(told)
        decision = self._failures.judge(end, lost_hosts, others_train)
        if decision.action is Action.HALT:
            return self._halt(end, decision.reason, why)
        broken, told = end.code == EXIT_HARDWARE, f"{decision.reason}: {why}"
        waits = broken and self._proven()  # others train, and it may wait for a host; alone it would wait in vain
        moved = decision.cordoned and self._backend.cordon(self.replica, end.host, told, waits)
        if broken and not moved and end.host not in lost_hosts:  # a lost one needs no cordon to be left
            return self._lose(why)
        if self._progress.halted:
            return self._lose(self._progress.halted)
        return None

    def _halt(self, end: IncarnationEnd, reason: str, why: str) -> Outcome:
        """Halt the job: the same step would end all replicas again."""
        told = f"step {end.step}: {reason}; the last time {why}"
        self._event("JobGivenUp", told, step=end.step)
        if self._failures.job is not None:
            self._failures.job.halted = told
        self._progress.saw(0, halted=told)
        return self._lose(told)

    def _end_of_job(self, kind: str, reason: str) -> Outcome | None:
        """Return the outcome of a replica that waited: as given if training is finished; None: the job goes on."""
        if self._progress.finished:
            return Outcome(kind, reason)
        return self._lose(self._progress.halted) if self._progress.halted else None

    def _lose(self, reason: str) -> Outcome:
        """Give the replica up, and return that outcome."""
        self._link.lost(self.replica)
        self._backend.vacated(self.replica)
        self._event("ReplicaLost", reason)
        self._progress.wake()
        return Outcome("lost", reason)

    async def _hold(self, delay_s: float) -> None:
        """Wait before a restart: for the backoff, the survivors' next commit, and the steps of `stay_away`."""
        progress = self._progress
        start = progress.step
        await progress.wait_for(lambda: self._stopping or progress.finished or bool(progress.halted), delay_s)

        def alone() -> bool:
            return self._stopping or progress.finished or not self._survivors()

        # The survivors repeat the step whose ring broke, and a cold start would take CPU time from them.
        await progress.wait_for(
            lambda: alone() or self._backend.warm or progress.step > start, self._config.timeouts.hold_s
        )

        def advanced(step: int) -> bool:
            return alone() or progress.step > step

        while not alone() and progress.step < self._away_until:
            if not await progress.wait_for(partial(advanced, progress.step), self._config.timeouts.stalled_s):
                break

    async def _settle(self, current: ReplicaProcess) -> None:
        """Tell the backend when the incarnation has the state, and when spares may be made.

        A spare that is made before it contributes would slow it down, so up to `timeouts.settle_s` pass first.
        """
        commits, until = self._commits, time.monotonic() + self._config.timeouts.settle_s
        committed = settled = False
        while True:
            if not committed and commits.newest_of(current.name):
                self._backend.committed(current.spec)
                committed = True
            waits = self._config.spares and commits.contributing != current.name and time.monotonic() < until
            if not settled and not waits:
                self._backend.settled(current.spec)
                settled = True
            if committed and settled:
                return
            await asyncio.sleep(LOOK_S)
            commits.look()

    def _event(self, name: str, reason: str, **fields: Any) -> None:
        incarnation = self.current.name if self.current else None
        self._emit(supervised(name, reason, replica=self.replica, incarnation=incarnation, **fields))
