"""The service of one job: drives the pure decisions with real requests, real time and a real store.

Every event goes through `Service.apply`: decide, save, and only then let any effect be known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.core.grant import Answer, Grant, Holders, Refused, Report
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.memory.hosts import Host
from ft_hsdp.protocol import ProcessReport, QuorumRequest, SupervisorReply, Wait
from lighthouse import status, validation
from lighthouse.http.rate_limits import Rates
from lighthouse.placement import machine, signs
from lighthouse.placement.state import ReplicaPhase
from lighthouse.quorum import commands
from lighthouse.quorum.events import (
    Action,
    Asked,
    AskWithdrawn,
    Commanded,
    Event,
    Evict,
    HostClosed,
    Note,
    OpenRequest,
    ProcessesReported,
    Reply,
    Ticked,
    Withdrawn,
)
from lighthouse.quorum.rules import Incarnation, replace
from lighthouse.quorum.state import Agreement, LighthouseState, StateAgents, alive, holders, wanted
from lighthouse.store import StateSaver, Store, StoreFailed

LONG_POLL_S = 20.0  # a request that is open for this long is answered with Wait
LINGER_S = 1.0  # such a request still counts for this long: the replica is about to repeat it
TICK_S = 0.05  # between two looks at the time, while time can change something
AGAIN_S = 60.0  # between two looks at a replica that is slow and stays
STORE_RETRY_S = 1.0  # before a store that failed is tried again

Journal = Callable[[Mapping[str, object]], None]
"""Takes each event, as a row of events.jsonl."""

_log = logging.getLogger(__name__)


class Evictions:
    """Orders to SIGKILL an incarnation, and members that get such an order if they stay silent.

    Bounded by the number of incarnations that may live: an order ends with the exit of its incarnation.
    """

    def __init__(self) -> None:
        self.orders: dict[Incarnation, str] = {}  # why they were given
        self._suspects: dict[Incarnation, float] = {}  # when to evict them, if they stay silent

    @property
    def pending(self) -> bool:
        """Whether the passing of time can lead to an order."""
        return bool(self._suspects)

    def suspect(self, before: LighthouseState, replica: object, now: float) -> None:
        """Note that a member of ``before``'s grant was left out for its silence: it is evicted if that lasts."""
        since = now if before.since is None else before.since
        for member in before.grant.members if before.grant else ():
            if member.replica == replica:
                self._suspects[member.replica, member.incarnation] = since + before.policy.evict_s

    def order(self, s: LighthouseState, who: Incarnation, why: str) -> bool:
        """Order the eviction of ``who`` unless it has exited; return whether this is a new order."""
        self._suspects.pop(who, None)
        if who in self.orders or not alive(s, who):
            return False
        self.orders[who] = why
        return True

    def undone(self, s: LighthouseState) -> list[tuple[Incarnation, str]]:
        """Return whom the hosts still have to run, though that was ordered to be killed, with the reasons."""
        placed = {(r, me.incarnation): me.phase for r, me in enumerate(s.placement.replicas)}
        return [(who, why) for who, why in self.orders.items() if placed.get(who) is ReplicaPhase.RUNS]

    def settle(self, s: LighthouseState, event: Event, now: float) -> list[tuple[Incarnation, str]]:
        """Drop what ``event`` has settled; return what is silent for too long, with the reasons to evict it."""
        match event:
            case Asked(request):
                self._suspects.pop((request.report.replica, request.report.incarnation), None)
            case ProcessesReported():
                for who in [*self.orders, *self._suspects]:
                    if s.views[who[0]].incarnation not in (None, who[1]) or not alive(s, who):
                        self.orders.pop(who, None)
                        self._suspects.pop(who, None)
        late = [who for who, due in self._suspects.items() if now >= due]
        return [(who, f"silent for {s.policy.evict_s:g} s since its ring broke") for who in late]


@dataclass(frozen=True, slots=True)
class Open:
    """A request of a replica, and the answer that it will get."""

    replica: int
    id: int
    answer: asyncio.Future[Answer | Wait]


class Service:
    """One job's lighthouse, used from one event loop; only the store's writes block it.

    Args:
        state: What `Store.load` returned.
        agreed: What every replica must have, unless ``state`` says it. A field that is None takes the first
            replica's.
        allow: validation.Networks in which replicas may listen besides the address that they ask from.
        long_poll_s: Longest wait of `ask`.
    """

    def __init__(
        self,
        state: LighthouseState,
        store: Store,
        token: str,
        journal: Journal,
        *,
        name: str = "",
        agreed: Agreement | None = None,
        allow: validation.Networks = (),
        long_poll_s: float = LONG_POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.name = name
        self._saver = StateSaver(state, store, self._note)
        self._token = token
        self._journal = journal
        self._agreed = state.agreed or agreed or Agreement()
        self._allow = allow
        self._rates = Rates()
        self._long_poll_s = long_poll_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer | Wait]] = {}  # by id of the request
        self._signature: tuple[Grant | None, Grant | None] = (None, None)  # the grant signed last, and signed
        self._reports: dict[int, Report] = {}  # the newest of each replica
        self._unsaved: dict[int, str] = {}  # by replica: who asked first while nothing could be stored
        self._agents: dict[int, StateAgents] = {}  # from the newest request of each replica
        self._evictions = Evictions()
        # When a culprit was evicted or moved last. Another lighthouse may have done so before this one came.
        self._culprit_at = -math.inf if state.grant is None else clock()
        self._slow: dict[int, commands.Culprit] = {}  # by replica: one that is slow and stays where it is
        self._waiting: str | None = None  # what the open requests wait for
        self._told: str | None = None  # the newest reason to wait that is in the journal
        self._timer: asyncio.TimerHandle | None = None
        self._moved = asyncio.Event()  # set, and replaced, when hosts may have to run something else
        self._closed = False

    def started(self) -> None:
        """Write to the journal that this lighthouse serves."""
        s = self.state
        why = f"goes on from epoch {s.epoch}, head {s.head}" if s.grant else "nothing was ever granted"
        facts = {"term": s.term, "epoch": s.epoch, "config_hash": self._agreed.config_hash}
        self._note("LighthouseStarted", why, facts | {"target": s.target, "drained": sorted(s.drained)})

    # Requests.

    async def ask(self, ask: QuorumRequest, peer: str | None = None) -> Answer | Wait:
        """Return the answer to a replica's request: `submit`, then `answered`. Raises as `submit`."""
        return await self.answered(self.submit(ask, peer))

    def submit(self, ask: QuorumRequest, peer: str | None = None) -> Open:
        """Take a request; what the current membership settles is answered at once. Does not wait.

        Args:
            peer: The address that it came from; None: this process.

        Returns:
            The open request; `answered` waits for its answer.

        Raises:
            ProtocolViolation: the report cannot be true.
            TooMany: the replica, or the address, has had too many incarnations.
            StoreFailed: nothing was decided; the replica may ask again.
        """
        report = ask.report
        try:
            validation.check_ask(self.state, ask, peer, self._allow)
        except ProtocolViolation as error:
            self._note("AskRefused", str(error), {"replica": report.replica})
            raise
        known = (self.state.views[report.replica].incarnation, self._unsaved.get(report.replica))
        if report.incarnation not in known:
            self._rates.join(report.replica, peer or "", self._clock())
        asked = Open(report.replica, next(self._ids), asyncio.get_running_loop().create_future())
        refusal = validation.refusal(self._agreed, ask)
        if refusal is not None:
            facts = {"replica": report.replica, "incarnation": report.incarnation}
            self._note("AskRefused", refusal.reason, facts)
            asked.answer.set_result(refusal)
        elif self._closed:
            asked.answer.set_result(Wait("the lighthouse is going down"))
        else:
            self._open[asked.id] = asked.answer
            before = self.state.views[report.replica].ask
            agreed, self._agreed = self._agreed, validation.with_first(self._agreed, ask)
            try:
                self.apply(Asked(OpenRequest(report, asked.id, ask.ring, ask.state, ask.hosts), self._clock()))
            except StoreFailed:
                del self._open[asked.id]
                self._agreed = agreed
                self._unsaved[report.replica] = report.incarnation
                raise
            if not self._learn(ask):
                self._agreed = agreed
            if before is not None and self.state.views[report.replica].ask is not before:
                self._reply(report.replica, before.id, Wait("a newer ask of this replica is open"))
        return asked

    async def answered(self, asked: Open) -> Answer | Wait:
        """Return the answer to an open request; Wait if there is none within ``long_poll_s``.

        Cancelling withdraws the request.
        """
        if asked.answer.done():
            return asked.answer.result()
        late = asyncio.get_running_loop().call_later(self._long_poll_s, self._late, asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._try(AskWithdrawn(asked.replica, asked.id))
            raise
        finally:
            late.cancel()
            self._open.pop(asked.id, None)

    def _late(self, asked: Open) -> None:
        """Have the replica ask again; its request still counts for `LINGER_S`, until it does."""
        if not asked.answer.done():
            asked.answer.set_result(Wait(self._reason))
            asyncio.get_running_loop().call_later(LINGER_S, self._try, AskWithdrawn(asked.replica, asked.id))

    async def host(self, report: ProcessReport, peer: str | None = None) -> SupervisorReply:
        """Take all that the agent of a host says, and return all that the host is to run.

        If the agent knows that already, the answer waits for another one, for a third of ``evict_s`` at most.

        Args:
            peer: As in `submit`.

        Raises:
            ProtocolViolation: the report cannot be true.
            StoreFailed: nothing was noted.
        """
        assert report.host is not None
        rules = validation.other_rules(self._agreed, report.rules)
        if line := rules or report.unfit:
            self._note("AskRefused", line, {"host": report.host.path.rpartition("/")[2][: protocol.MAX_TEXT]})
            return SupervisorReply(0, False, refused=line, wrong=bool(rules))
        validation.check_host(self.state, report.host, peer, self._allow)
        reply = self.processes(report)
        late = asyncio.get_running_loop().time() + self.state.policy.evict_s / 3
        while report.host.seen == reply.seen and not (
            reply.refused or reply.finished or reply.halted or self._closed
        ):
            try:
                async with asyncio.timeout_at(late):
                    await self._moved.wait()
                    reply = self._assignment(report.host, reply)
            except TimeoutError:
                break
            except asyncio.CancelledError:  # the connection has ended before the answer
                if not self._closed:
                    self._try(HostClosed(report.host, self._clock()))
                raise
        return reply

    def _assignment(self, host: HostReport, reply: SupervisorReply) -> SupervisorReply:
        """Return a reply with what a host is to run."""
        name, refused = Host.parse(host.path).name, machine.refusal(self.state, host)
        mine, lost = () if refused else signs.assigned(self.state, name), signs.lost_replicas(self.state)
        finished, halted = signs.fate(self.state, host)
        reply = replace(reply, finished=finished, halted=halted, wrong=self.state.placement.wrong, refused=refused)
        placed = signs.placed(self.state, name)
        return replace(reply, lost=lost, assigned=mine, seen=signs.seen(self.state, name), placed=placed)

    def processes(self, report: ProcessReport) -> SupervisorReply:
        """Take what is known of the processes of replicas, and return how far the job is.

        Raises:
            ProtocolViolation: the report cannot be true.
            StoreFailed: nothing was noted.
        """
        running, exited = validation.check_processes(self.state, report)
        said = report.machine
        machines = (said,) if said is not None else ()
        told = ProcessesReported(running, exited, frozenset(), self._clock(), machines=machines, host=report.host)
        self.apply(told)
        head = self.state.head
        reply = SupervisorReply(
            step=head.step if head else 0,
            finished=signs.is_finished(self.state),
            halted=self.state.halted,
            drained=tuple(r for r in range(self.state.policy.slots) if not wanted(self.state, r)),
            exited=said is not None and said.gone and said.who not in {each.who for each in self.state.spread},
            wrong=self.state.placement.wrong,
            lost=signs.lost_replicas(self.state),
            cordoned=tuple(name for name, _ in self.state.placement.cordoned),
        )
        return reply if report.host is None else self._assignment(report.host, reply)

    def command(
        self,
        action: Action,
        replica: int,
        reason: str,
        address: str,
        force: bool = False,
        target: int = 0,
        host: str = "",
    ) -> str | commands.Impossible:
        """Carry out an operator's order. It is in the journal before it is carried out.

        Args:
            replica: As in `Commanded`.
            reason: The operator's, for the journal.
            address: The address that the order came from.
            force: Allow an order that leaves too few replicas.
            target: As in `Commanded`.
            host: As in `Commanded`.

        Returns:
            One line that says what will happen, or why nothing can.

        Raises:
            StoreFailed: nothing was done.
        """
        why = f"an operator drained it: {reason}" if action == "drain-host" else reason
        command = Commanded(action, replica, why, self._clock(), target, host)
        found = commands.plan(self.state, command, self._evictions.orders, force)
        if isinstance(found, commands.Impossible):
            return found
        if found.due:
            facts: dict[str, object] = {
                "source": "admin",
                "address": address,
                "order": action,
                "will": found.detail,
            }
            if action == "scale":
                facts |= {"replicas": target}
            elif host:
                facts |= {"host": host}
            elif action != "checkpoint":
                facts |= {"replica": replica, "incarnation": self.state.views[replica].incarnation}
            self._note("OperatorOrdered", reason, facts)
            self.apply(command)
        return found.detail

    def suspect(self, found: commands.Culprit) -> None:
        """Evict or move a culprit, if the operator wants that and `commands.plan_culprit` allows it.

        It is done a moment later, so this may be called while the journal takes a row. A replica that is slow, and
        stays because of that moment, is looked at again every `AGAIN_S` seconds, until `catches_up`.
        """
        if commands.takes(self.state, found):
            asyncio.get_running_loop().call_soon(self._act_on, found, self.state.views[found.replica].incarnation)

    def catches_up(self, replica: int) -> None:
        """Take note that a replica is slow no more."""
        self._slow.pop(replica, None)

    def _look_again(self, found: commands.Culprit, incarnation: str | None) -> None:
        if self._slow.get(found.replica) is found and not self._closed:
            grant = self.state.grant
            self._act_on(found if grant is None else found._replace(epoch=grant.epoch), incarnation)

    def _act_on(self, found: commands.Culprit, incarnation: str | None) -> None:
        again = self._slow.pop(found.replica, None) is not None
        if self.state.views[found.replica].incarnation != incarnation:
            return
        now, why = self._clock(), f"by the diagnosis: {found.why}"
        planned = commands.plan_culprit(self.state, found, now, now - self._culprit_at, self._evictions.orders)
        if isinstance(planned, commands.Impossible):
            stays = planned.detail
        elif not planned.due or self._closed:
            return
        elif planned.host and not self._try(Commanded("drain-host", found.replica, why, now, host=planned.host)):
            stays = "the store takes nothing now"
        else:
            self._culprit_at = now
            if planned.host:
                facts = {"replica": found.replica, "host": planned.host}
                self._note("HostCordoned", f"{why}; {planned.detail}", facts)
            else:
                self._evict((found.replica, incarnation or ""), why, "diagnosis")
            return
        _log.log(logging.DEBUG if again else logging.WARNING, "replica %d stays: %s", found.replica, stays)
        if found.kind == commands.SLOW:
            self._slow[found.replica] = found
            asyncio.get_running_loop().call_later(AGAIN_S, self._look_again, found, incarnation)

    def status(self) -> dict[str, Any]:
        return status.describe_job(self.name, self.state, self._reports, self._reason, self._clock())

    def hosts(self) -> list[dict[str, object]]:
        """Return the hosts on which replicas are placed, for people."""
        return signs.listed_hosts(self.state, self._clock())

    def holders(self, replica: int | None = None) -> Holders:
        return holders(self.state, replica, self._agents)

    def close(self) -> None:
        """Answer every open request with Wait, and take no more. The store stays open."""
        self._closed = True
        self._moved.set()
        self._saver.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._open.values():
            if not future.done():
                future.set_result(Wait("the lighthouse is going down"))

    # Decisions.

    def apply(self, event: Event) -> None:
        """Decide, make the new state durable, then carry the effects out. Blocks for the store's write.

        Raises:
            StoreFailed: the event has changed nothing.
        """
        before = self.state
        after, effects = machine.decide(before, event)
        if after.grant is not None and after.agreed is None:
            after = replace(after, agreed=self._agreed)  # durable together with the first grant
        self._saver.save(after)
        self.state = after
        leaving = isinstance(event, ProcessesReported) and event.host is not None and event.host.leaving
        moved = leaving or after.placement is not before.placement or isinstance(event, Commanded)
        if moved or after.finished or after.halted:
            self._moved.set()
            self._moved = asyncio.Event()
        if after.rewinding:
            self._agents.clear()  # what they keep may be wrong
        waits: list[str] = []
        for effect in effects:
            match effect:
                case Reply(replica, id_, answer):
                    self._reply(replica, id_, answer)
                case Evict(replica, incarnation, reason):
                    self._evict((replica, incarnation), reason)
                case Note("Waiting", reason):
                    waits.append(reason)
                case Note(name, reason, facts):
                    self._note(name, reason, facts)
                    if name == "ReplicaExcluded":
                        self._evictions.suspect(before, facts["replica"], self._clock())
        self._wait_for(waits)
        for who, why in self._evictions.settle(after, event, self._clock()):
            self._evict(who, why)
        self._arm()

    def _evict(self, who: Incarnation, reason: str, source: str = "lighthouse") -> None:
        """Order a SIGKILL, once; the order stands until the incarnation is known to have exited."""
        if self._evictions.order(self.state, who, reason):
            facts = {"replica": who[0], "incarnation": who[1], "source": source}
            self._note("ReplicaEvicted", reason, facts)
            if self.state.placement.replicas:
                self._try(Withdrawn(who, reason, self._clock()))

    def _reply(self, replica: int, id_: int, answer: Answer | Wait) -> None:
        """Answer an open request. A lost answer does no harm: the repeated request gets an equal one."""
        if isinstance(answer, Grant):
            answer = self._signed(answer)
        if isinstance(answer, Refused):
            self._note("AskRefused", answer.reason, {"replica": replica})
        future = self._open.pop(id_, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _signed(self, grant: Grant) -> Grant:
        """`grant` with its MAC; all its members get the same one."""
        known, signed = self._signature
        if signed is None or known is not grant:
            signed = protocol.sign(self._token, grant)
            self._signature = grant, signed
        return signed

    def _learn(self, ask: QuorumRequest) -> bool:
        """Remember the newest request of a replica unless it was fenced; return whether it was remembered."""
        me = (ask.report.replica, ask.report.incarnation)
        counts = self.state.views[me[0]].incarnation == me[1] and me not in self.state.exited
        if counts:
            self._reports[me[0]] = ask.report
            self._agents[me[0]] = ask.state, ask.hosts
        return counts

    def _wait_for(self, reasons: Iterable[str]) -> None:
        """Remember what the open requests wait for; `_tick` writes it to the journal if it lasts."""
        reason = next(iter(reasons), None)
        self._waiting = reason or (self._waiting if self._held else None)
        if self._waiting is None:
            self._told = None

    @property
    def _reason(self) -> str:
        """What an open request waits for, in one line."""
        if self._waiting is not None:
            return self._waiting
        if self.state.final_since is not None:
            return "waiting until every replica has the final state"
        return f"waiting for the next step of epoch {self.state.epoch}"

    # Time.

    @property
    def _held(self) -> bool:
        """Whether open requests wait for replicas that have not asked."""
        s = self.state
        running = (s.since is not None or s.final_since is not None) and not s.finished
        return running and any(v.ask is not None for v in s.views)

    @property
    def _timed(self) -> bool:
        """Whether the passing of time can change something."""
        s = self.state
        ending = any(said.gone for each in s.spread for _, said in each.heard)
        placing = bool(s.presence.hosts) and not s.finished
        return placing or self._evictions.pending or ending or self._held

    def _arm(self, delay_s: float = TICK_S) -> None:
        """Schedule the next tick if time can change something, else cancel it."""
        if self._timer is not None and not self._timed:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and self._timed and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._timed and not (self._repeat_orders() and self._try(Ticked(self._clock()))):
            self._arm(STORE_RETRY_S)
        if self._waiting is not None and self._waiting != self._told:
            self._told = self._waiting
            self._note("Waiting", self._waiting)

    def _repeat_orders(self) -> bool:
        """Repeat the orders to kill that the store did not take; return whether it takes them all now."""
        undone = self._evictions.undone(self.state)
        return all(self._try(Withdrawn(who, why, self._clock())) for who, why in undone)

    def _try(self, event: Event) -> bool:
        """Apply an event that no caller waits for; return whether the store took it."""
        try:
            self.apply(event)
        except StoreFailed as error:
            _log.error("%s", error)
            return False
        return True

    def _note(self, event: str, reason: str, facts: Mapping[str, object] | None = None) -> None:
        row = {"t": time.time(), "event": event, "source": "lighthouse", "reason": reason}
        self._journal({**row, **(facts or {})})
