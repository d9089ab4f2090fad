"""The agent of a host: it starts and ends the ranks that the lighthouse assigns to the host.

It decides nothing. Each report to the lighthouse is complete: which ranks run here, which have ended, and how. The
answer is complete, too: which ranks are to run here. The agent makes that true. So an exit, a restart of either
side, a lost or a doubled message need no repair, and while no lighthouse answers the ranks go on.

The lighthouse keeps a report open until the assignment changes. When something changes on the host, the agent
sends another one beside it, so both sides hear of a change at once. An open report whose connection ends tells the
lighthouse that the agent is gone.

An assignment holds numbers and addresses alone. What runs is what this host's command line says. Ranks end with
what has forked them: with the agent (`up`, Ray), or with its holder, which starts another agent for them. That
goes on with the same life (`HostReport.life`), and a new life begins without ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from ft_hsdp import address
from ft_hsdp.config import Config, agreed
from ft_hsdp.control.exit_watch import process_space
from ft_hsdp.control.lighthouse_client import LighthouseClient, own_address
from ft_hsdp.core.host_report import AssignedRanks, HostReport
from ft_hsdp.core.restart import code_of
from ft_hsdp.errors import (
    EXIT_CONFIG,
    EXIT_HARDWARE,
    EXIT_OK,
    EXIT_RETRYABLE,
    FtHsdpError,
    InvalidArgument,
    LighthouseUnreachable,
    Retryable,
    one_line,
)
from ft_hsdp.launch.backend.held import KeptRank, Told
from ft_hsdp.launch.backend.processes import kept_port
from ft_hsdp.launch.backend.ranks import WHY, HeldRanks, LocalRanks, Watch
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.protocol import ProcessReport, SupervisorReply
from ft_hsdp.secret import current, worker_token
from ft_hsdp.state.agent.starter import visit
from ft_hsdp.train.identity import HOST_VARIABLE, host_name, host_path

AGAIN_S = 0.2  # to the next report, after one without an answer, or with an old one that came at once
LAST_S = 2.0  # for the answer to the last report
LOOK_S = 1.0  # between two looks whether a rank is stopped, and at the kernel's log
VISITS = 8  # of a state agent that waits for its ranks, before it would end
STOPPED = 2  # times evict_s until a rank that is stopped is killed: the lighthouse knows more, and acts first


class HostAgent:
    """Makes the assignments of the lighthouse true on this host."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        ranks: LocalRanks,
        client: LighthouseClient,
        path: str,
        *,
        replica: int | None = None,
        home: tuple[int, int] | None = None,
        only: tuple[int, ...] = (),
        emit: Callable[[Row], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        news: Callable[[SupervisorReply], None] = lambda _: None,
        may_start: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        """Make the agent; nothing is started or reported before `run`. May look up network.host.

        Args:
            path: Of the host, as `agent_path` has it.
            replica: Whose ranks alone it takes, and all of them; None: those of each.
            home: The replica, and the place in it, that the host has first; None: it is spare.
            only: Replicas whose ranks it takes, and which know the host by another name; (): those of each.
            say: Takes lines for people.
            news: Takes each answer of the lighthouse.
            may_start: Waits until a replica may start; None: each may at once.

        Raises:
            ConfigError: `network.host` cannot be used.
            OSError: No port is free.
        """
        self._config = config
        self._run = run
        self._ranks = ranks
        self._client = client
        self._path = path
        self._replica = replica
        self._home = home
        self._only = only
        self._emit = emit
        self._say = say
        self._news = news
        self._may_start = may_start
        self.name = path.rpartition("/")[2]
        self._life, self._space = secrets.token_hex(8), process_space()
        self._port = kept_port(own_address(config.network.host, client.url))
        self.held: dict[str, HeldRanks] = {}  # by incarnation; one that was held is never started again
        self._seen, self._number = "", 0
        self._placed: tuple[int, ...] = ()  # replicas that have a place here
        self._problem: str | None = None  # why the last report failed; "": it did not; None: there was none
        self._leaving = False
        self._code: int | None = None  # with which this process ends once no rank is left
        self._cut = ""  # which incarnations did not end after the last step
        self._changed = asyncio.Event()
        self._warm = False  # all ranks of a replica wait here
        self._starts: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Task[SupervisorReply]] = set()  # older reports without an answer

    def resume(self, told: Told, watch: Watch) -> None:
        """Go on for an earlier agent of this host, which a signal has ended, by what the holder has told."""
        self._life, self._number = told.life, told.agents << 32
        kept: dict[str, dict[int, KeptRank]] = {}
        for pid, rank in told.ranks.items():
            kept.setdefault(rank.incarnation, {})[pid] = rank
        for name, ranks in kept.items():
            held = self._held(ranks_of(name, self.name, ranks))
            self._ranks.resume(held, self.name, ranks, watch)
            self._say(f"{held.name} goes on" if held.living else f"{held.name} has ended meanwhile")

    async def run(self) -> int:
        """Report and carry out the answers until this host has no part in the job any more; return the exit code.

        Its ranks are killed at the end, also if it is cancelled.

        Raises:
            Retryable: The lighthouse refuses this host, or a script did not end after the last step.
            InvalidArgument: Its configuration is not the job's.
        """
        beside = asyncio.create_task(self._look()), asyncio.create_task(self._visit())
        try:
            self._ranks.keep_spares()
            if self._ranks.lone:
                self._keep(self._tell_of_spares())
            while self._code is None or not all(held.over for held in self.held.values()):
                await self._exchange()
            self._leaving, self._seen = True, ""
            with contextlib.suppress(LighthouseUnreachable, TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self._client.report(ProcessReport(host=self._report()))
            if self._cut:
                raise Retryable(self._cut)
            return self._code
        finally:
            tasks = (*self._starts, *self._open, *beside)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._kill_all()
            self._port.close()

    def stop(self, number: int) -> None:
        """Leave the job because of a signal; a second SIGINT kills the ranks, as a user means it."""
        for held in self.held.values():
            if not self._leaving:
                held.leave(self._config.timeouts.stop_s)
            elif number == signal.SIGINT:  # schedulers repeat SIGTERM
                held.kill()
        if not self._leaving:
            self._leaving, self._code = True, 128 + number
        self._changed.set()

    async def _look(self) -> None:
        """End ranks that are stopped, give up those that do not end, read the kernel's log, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._ranks.kernel_log.evidence()  # when a rank ends, only what is new may count
            for held in self.held.values():
                held.end_stopped(STOPPED * self._config.timeouts.evict_s)
                held.give_up(self._config.timeouts.gone_s)

    async def _visit(self) -> None:
        """Have the state agents here wait for replicas that have a place here, until cancelled.

        Ranks that wait for another host come back late, and need what is in memory.
        """
        while True:
            await asyncio.sleep(self._config.timeouts.linger_s / VISITS)
            for replica in self._placed:
                name = self.name if self._named else os.environ.get(HOST_VARIABLE, "")
                with contextlib.suppress(OSError, RuntimeError, FtHsdpError):  # none is here, or no thread is left
                    await asyncio.to_thread(visit, worker_token(current(self._run.token)), replica, name)

    async def _exchange(self) -> None:
        """Send a report and act on the answer; leave it open when something changes on this host."""
        self._changed.clear()
        loop, report = asyncio.get_running_loop(), self._report()
        began, problem, old = loop.time(), "", False
        rules = {} if self._problem == "" else agreed(self._config)
        asking = asyncio.create_task(self._client.report(ProcessReport(host=report, rules=rules)))
        changing = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((asking, changing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self._leave_open(asking)
                return
            reply = asking.result()
            for each in report.ranks:
                self.held[each.incarnation].reported = not each.living
            self._take(reply)
            old = self._seen == report.seen and loop.time() - began < AGAIN_S
        except LighthouseUnreachable as error:
            problem = str(error)
            self._heard(problem)
        finally:
            tasks = {asking, changing} - self._open
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # A lighthouse may have taken a report that was open: without another one at once, the host counts as lost.
        if (problem and loop.time() - began < AGAIN_S) or old:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._changed.wait()

    def _leave_open(self, asking: asyncio.Task[SupervisorReply]) -> None:
        """Let a report that a newer one follows have its answer, which nobody needs."""

        def over(task: asyncio.Task[SupervisorReply]) -> None:
            self._open.discard(task)
            if not task.cancelled():
                task.exception()  # the newer report has it, too

        self._open.add(asking)
        asking.add_done_callback(over)

    def _heard(self, problem: str = "") -> None:
        """Say that a lighthouse answers, or why none does, if that is new."""
        if self._problem is None and not problem:
            self._say(f"host {self.name} joined, {self._client.url}")
        elif bool(problem) != bool(self._problem):
            self._say(f"{problem}; the ranks go on" if problem else f"lighthouse {self._client.url} answers again")
        self._problem = problem

    def _report(self) -> HostReport:
        ranks = tuple(held.report() for held in self.held.values() if held.wanted or not held.reported)
        self._number += 1
        return HostReport(
            *(self._path, self._life, self._space, self._number, self._address),
            *(ranks, self._leaving, self._seen, self._replica, self._home),
            only=self._only,
            warm=self._warm,
        )

    async def _tell_of_spares(self) -> None:
        """Report each time that the ranks of a replica wait here, or do not any more."""
        pool = self._ranks.pool
        while True:
            await pool.wait_for(lambda: pool.ready != self._warm)
            self._warm = pool.ready
            self._changed.set()

    @property
    def _address(self) -> str:
        return address.join(*self._port.getsockname()[:2])

    def _take(self, reply: SupervisorReply) -> None:
        """Kill what is not assigned, and start what is new. Raises what `run` does if this host is refused."""
        if reply.refused:
            refused = InvalidArgument if reply.wrong else Retryable
            raise refused(f"the lighthouse refuses host {self.name}: {reply.refused}")
        self._heard()
        self._news(reply)
        timeouts = self._config.timeouts
        if self._code is None and (reply.halted or reply.finished):
            self._code = (EXIT_CONFIG if reply.wrong else self._failure) if reply.halted else EXIT_OK
            if reply.halted:
                self._say(reply.halted)
            allowed_s = timeouts.stop_s
            if not reply.halted:  # a checkpoint is written, or the script evaluates, or saves its model
                allowed_s += max(timeouts.save_s, timeouts.pause_s)
            for held in self.held.values() if reply.halted else ():
                held.leave(timeouts.stop_s)
            asyncio.get_running_loop().call_later(allowed_s, self._cut_off, allowed_s)
        self._placed = reply.placed
        names = {each.incarnation for each in reply.assigned}
        for name, held in self.held.items():
            held.wanted = name in names
            if not held.wanted:
                held.kill()
            if held.over:
                self._ranks.pool.settled(held.spec)
            if held.kept and held.reported and not held.wanted:
                held.kept = False
                self._ranks.forks.forget([rank.pid for rank in held.ranks.values()])
        for each in reply.assigned:
            held = self.held.get(each.incarnation) or self._hold(each)
            held.assigned = each
            if each.leaves:
                held.leave(timeouts.stop_s)
            if each.trains:
                self._ranks.pool.settled(held.spec)
        if self._ranks.lone and reply.step and not reply.assigned and self._code is None:
            self._ranks.pool.want(1)
        self._seen = reply.seen

    @property
    def _named(self) -> bool:
        """Return whether its ranks have its name: there may be several hosts on its machine."""
        return self._replica is None and not self._only

    @property
    def _failure(self) -> int:
        """Return with which code this process ends if its job or replica has failed, for a scheduler."""
        newest = next(reversed(self.held.values()), None)
        codes = {code_of(rank) for rank in newest.ends if not rank.killed} if newest else set()
        return next((code for code in (EXIT_CONFIG, EXIT_HARDWARE) if code in codes), EXIT_RETRYABLE)

    def _cut_off(self, after_s: float) -> None:
        # What has no last state did not hear of the end, and is needed no more.
        late = ", ".join(held.name for held in self.held.values() if not held.over and held.final())
        if late and self._code == EXIT_OK:
            self._cut = f"{late} still ran {after_s:g} s after the last step, and was killed (timeouts.pause_s)"
        self._kill_all()

    def _kill_all(self) -> None:
        for held in self.held.values():
            held.kill()

    def _hold(self, assigned: AssignedRanks) -> HeldRanks:
        """Begin to start an incarnation, unless this host leaves."""
        held = self._held(assigned)
        if self._code is not None:
            held.failed = "this host leaves the job"
            held.starting.clear()
            return held
        self._say(
            f"{'ranks' if len(assigned.ranks) > 1 else 'rank'} {str([*assigned.ranks])[1:-1]} of {held.name} start"
        )
        self._keep(self._start(held))
        return held

    def _held(self, assigned: AssignedRanks) -> HeldRanks:
        ranks = self._ranks
        heard = self._changed.set, self._emit, ranks.kernel_log.evidence
        held = self.held[assigned.incarnation] = HeldRanks(assigned, ranks.file, self._run, *heard)
        return held

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _start(self, held: HeldRanks) -> None:
        """Assign a spare, or else fork the ranks of an incarnation here; `HeldRanks.failed` says why it failed."""
        assigned, run, port = held.assigned, self._run, None
        self._ranks.pool.began(held.spec)
        try:
            if self._may_start is not None:
                await self._may_start(held.replica)
            if 0 in assigned.ranks and assigned.master == self._address:
                port, self._port = self._port, kept_port(self._port.getsockname()[0])
                self._changed.set()  # the next rank 0 gets the new one
            same = [each for each in self.held.values() if each.replica == held.replica and each is not held]
            await asyncio.gather(*(each.gone() for each in same if each.dropped))  # they may use a GPU's memory
            run.replica(held.replica).mkdir(parents=True, exist_ok=True)
            if port is not None:
                port.close()
            await self._ranks.start(held, self.name, self._named)
            held.write()
        except (FtHsdpError, OSError, ValueError) as error:
            held.failed = one_line(str(error))[:WHY]
            self._say(f"{held.name}: {held.failed}")
            held.kill()
        finally:
            if port is not None:
                port.close()
            held.starting.clear()
            self._changed.set()
            held.wake()


def ranks_of(incarnation: str, host: str, kept: Mapping[int, KeptRank]) -> AssignedRanks:
    """Return what was assigned to a host that has ranks of an incarnation."""
    rank = next(iter(kept.values()))
    hosts = tuple(rank.assignment.get("hosts") or [host] * int(rank.env["WORLD_SIZE"]))
    here = tuple(n for n, name in enumerate(hosts) if name == host)
    master = address.join(rank.env["MASTER_ADDR"], int(rank.env["MASTER_PORT"]))
    return AssignedRanks(
        incarnation, here, hosts, master, fatal=tuple(map(tuple, rank.assignment.get("fatal", ())))
    )


def agent_path(config: Config, environment: Mapping[str, str], replica_id: int | None = None) -> str:
    """Return the path of a host in the job: that of the machine, or of one replica's agent on it.

    Its name is unique, also where hosts are lost with one machine (FT_HSDP_NODE).

    Raises:
        ConfigError: `hosts.labels` or the environment cannot be used.
    """
    where, slash, _ = host_path(config.hosts.labels, environment).rpartition("/")
    return f"{where}{slash}{host_name(environment)}" + ("" if replica_id is None else f"-r{replica_id}")
