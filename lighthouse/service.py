"""Evictions: who is to be killed, and who will be if it stays silent; no more than incarnations that may live.

The service: drives the pure decisions with real requests, real time and a real store.

Every event goes through `Service.apply`: decide, save, and only then let anything be known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.core.grant import Answer, Grant, Refused, Report
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import Eviction, ProcessReport, QuorumRequest, SupervisorReply, Wait
from lighthouse import status, validation
from lighthouse.http.rate_limits import Rates
from lighthouse.quorum import commands, incarnations
from lighthouse.quorum.commands import Impossible, Supervised
from lighthouse.quorum.rules import Incarnation
from lighthouse.quorum.state import (
    Action,
    Agreement,
    Asked,
    AskWithdrawn,
    Commanded,
    Event,
    Evict,
    LighthouseState,
    Note,
    OpenRequest,
    ProcessesReported,
    Reply,
    Ticked,
    alive,
    wanted,
)
from lighthouse.quorum.transition import transition
from lighthouse.store import Store, StoreFailed
from lighthouse.validation import Networks


class Evictions:
    """Orders to SIGKILL an incarnation, by incarnation, and members that were left out for their silence."""

    def __init__(self) -> None:
        self.orders: dict[Incarnation, Eviction] = {}
        self._suspects: dict[Incarnation, float] = {}  # when to evict them, if they stay silent

    @property
    def pending(self) -> bool:
        """Whether the passing of time can lead to an order."""
        return bool(self._suspects)

    def of(self, replicas: Container[int]) -> tuple[Eviction, ...]:
        """The orders for the supervisor of ``replicas``."""
        return tuple(order for order in self.orders.values() if order.replica in replicas)

    def suspect(self, before: LighthouseState, replica: object, now: float) -> None:
        """A member of ``before``'s grant was left out for its silence: evict it too if it stays silent."""
        since = now if before.since is None else before.since
        for member in before.grant.members if before.grant else ():
            if member.replica == replica:
                self._suspects[member.replica, member.incarnation] = since + before.policy.evict_s

    def order(self, s: LighthouseState, who: Incarnation, reason: str) -> bool:
        """Whether this is a new order; there is none for who is known to have exited."""
        self._suspects.pop(who, None)
        if who in self.orders or not alive(s, who):
            return False
        self.orders[who] = Eviction(*who, reason)
        return True

    def settle(self, s: LighthouseState, event: Event, now: float) -> list[tuple[Incarnation, str]]:
        """Drop what ``event`` has settled; whom to evict now, and why."""
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


LONG_POLL_S = 20.0  # after this long an ask is answered with Wait
LINGER_S = 1.0  # for this long such an ask still counts: the replica is about to repeat it
TICK_S = 0.05
MAY_LAG = frozenset({"head", "edges"})  # a member that goes on is promised nothing: replicas know the head
HEAD_LAG_S = 0.1  # by so much the durable head may lag; a grant always takes it along
STORE_RETRY_S = 1.0
SUPERVISED_S = 5.0  # a supervisor that has not reported for so long is away

Journal = Callable[[Mapping[str, object]], None]
"""Takes each event as a row of events.jsonl."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Open:
    """An ask and the answer that it will get."""

    replica: int
    id: int
    answer: asyncio.Future[Answer | Wait]


class Service:
    """One job's lighthouse, to be used from one event loop.

    state: what `store.load` gave; token: signs grants; journal: takes each event; name: of the job; agreed: what
    every replica must have, unless the state says it (None takes what the first has); allow: networks in which
    replicas may listen besides where they ask from; long_poll_s: longest wait of `ask`, in seconds; clock: seconds
    that never jump.
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
        allow: Networks = (),
        long_poll_s: float = LONG_POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.name = name
        self._store = store
        self._token = token
        self._journal = journal
        self._agreed = state.agreed or agreed or Agreement()
        self._allow = allow
        self._rates = Rates()
        self._long_poll_s = long_poll_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer | Wait]] = {}
        self._signature: tuple[Grant | None, Grant | None] = (None, None)
        self._reports: dict[int, Report] = {}
        self._evictions = Evictions()
        self._supervised: dict[int, float] = {}  # when the supervisor of a replica reported last
        self._waiting: str | None = None
        self._told: str | None = None  # what the journal says of that
        self._timer: asyncio.TimerHandle | None = None
        self._saving: asyncio.TimerHandle | None = None
        self._closed = False
        self._failing = False  # the store takes no writes

    def started(self) -> None:
        """Note in the journal that this lighthouse serves."""
        s = self.state
        why = f"goes on from epoch {s.epoch}, head {s.head}" if s.grant else "nothing was ever granted"
        facts = {"term": s.term, "epoch": s.epoch, "config_hash": self._agreed.config_hash}
        self._note("LighthouseStarted", why, facts)

    # Requests.

    async def ask(self, ask: QuorumRequest, peer: str | None = None) -> Answer | Wait:
        """The answer to a replica's ask; Wait if there is none within `long_poll_s`.

        ``peer``: the address that it came from (None: this process). Cancelling withdraws the ask.

        Raises:
            ProtocolViolation: the report cannot be true.
            TooMany: the replica, or the address, has had too many incarnations.
            StoreFailed: nothing was decided; the replica may ask again.
        """
        return await self.answered(self.submit(ask, peer))

    def submit(self, ask: QuorumRequest, peer: str | None = None) -> Open:
        """Take an ask: what the current membership settles is answered at once. Raises as `ask` does."""
        report = ask.report
        try:
            validation.check_ask(self.state, ask, peer, self._allow)
        except ProtocolViolation as error:
            self._note("AskRefused", str(error), {"replica": report.replica})
            raise
        if report.incarnation != self.state.views[report.replica].incarnation:
            self._rates.join(report.replica, peer or "", self._clock())
        asked = Open(report.replica, next(self._ids), asyncio.get_running_loop().create_future())
        refusal = validation.refusal(self._agreed, ask)
        if refusal is not None:
            self._refused(report, refusal)
            asked.answer.set_result(refusal)
        elif self._closed:
            asked.answer.set_result(Wait("the lighthouse is going down"))
        else:
            self._open[asked.id] = asked.answer
            before = self.state.views[report.replica].ask
            agreed, self._agreed = self._agreed, validation.with_first(self._agreed, ask)
            try:
                self.apply(Asked(OpenRequest(report, asked.id, ask.ring, ask.state), self._clock()))
            except StoreFailed:
                del self._open[asked.id]
                self._agreed = agreed
                raise
            if not self._learn(report):
                self._agreed = agreed
            if before is not None and self.state.views[report.replica].ask is not before:
                self._reply(report.replica, before.id, Wait("a newer ask of this replica is open"))
        return asked

    async def answered(self, asked: Open) -> Answer | Wait:
        """The answer to an open ask, as `ask` gives it."""
        if asked.answer.done():
            return asked.answer.result()
        late = asyncio.get_running_loop().call_later(self._long_poll_s, self._late, asked)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._withdraw(asked.replica, asked.id)
            raise
        finally:
            late.cancel()
            self._open.pop(asked.id, None)

    def _late(self, asked: Open) -> None:
        """Have the replica ask again; what it asked counts until it does."""
        if not asked.answer.done():
            asked.answer.set_result(Wait(self._reason))
            asyncio.get_running_loop().call_later(LINGER_S, self._withdraw, asked.replica, asked.id)

    def processes(self, picture: ProcessReport) -> SupervisorReply:
        """Take a supervisor's full picture; give it the orders to kill, and how far the job is.

        A replica of which it names an exited incarnation, or that it has given up, is its own: if that is not
        in ``running``, nothing of it runs.

        Raises:
            ProtocolViolation: the picture cannot be true.
            StoreFailed: nothing was noted.
        """
        exited = validation.check_processes(self.state, picture)
        owned: dict[int, str | None] = dict.fromkeys(sorted({r for r, _ in exited} | set(picture.lost)))
        owned |= picture.running
        now = self._clock()
        owner, claims = picture.owner, tuple(sorted(picture.leases.items()))
        self.apply(ProcessesReported(owned, exited, frozenset(picture.lost), now, owner, claims))
        found = {replica: incarnations.lease_of(self.state, replica) for replica in picture.leases}
        held = {replica: lease.number for replica, lease in found.items() if lease and lease.owner == owner}
        rivals = {replica: lease.owner for replica, lease in found.items() if lease and lease.owner != owner}
        self._supervised |= dict.fromkeys((r for r in owned if r not in rivals), now)
        head = self.state.head
        return SupervisorReply(
            evict=self._evictions.of(owned),
            epoch=self.state.epoch,
            step=head.step if head else 0,
            finished=self.state.finished,
            halted=self.state.halted,
            drained=tuple(r for r in range(self.state.policy.slots) if not wanted(self.state, r)),
            leases=held,
            rivals=rivals,
            lease_s=self.state.policy.supervisor_lease_s,
        )

    def command(
        self, action: Action, replica: int, reason: str, address: str, force: bool = False, target: int = 0
    ) -> str | Impossible:
        """Carry out an operator's order that came from ``address``: what will happen, or why nothing can.

        ``replica`` and ``target`` are as in `Commanded`.

        What is to be done is in the journal first. Raises StoreFailed: nothing was done.
        """
        now = self._clock()
        command = Commanded(action, replica, reason, now, target)
        reporting = {r for r, at in self._supervised.items() if at > now - SUPERVISED_S}
        supervised = Supervised(reporting, self._evictions.orders)
        found = commands.plan(self.state, command, supervised, force)
        if isinstance(found, Impossible):
            return found
        if found.event:
            facts: dict[str, object] = {"source": "admin", "address": address, "will": found.detail}
            if action == "scale":
                facts |= {"replicas": target}
            elif action != "checkpoint":
                facts |= {"replica": replica, "incarnation": self.state.views[replica].incarnation}
            self._note(found.event, reason, facts)
            self.apply(command)
        return found.detail

    def status(self) -> dict[str, Any]:
        """What GET /v1/status shows."""
        s = self.state
        return {
            "job": self.name,
            "term": s.term,
            "epoch": s.epoch,
            "step": s.head.step if s.head else 0,
            "finished": s.finished,
            "target": s.target,
            "members": list(s.grant.ring) if s.grant else [],
            "replicas": [status.row(s, r, self._reports, self._reason) for r in range(s.policy.slots)],
        }

    def close(self) -> None:
        """Answer every open ask with Wait, and take no more; the store stays open."""
        self._closed = True
        if self._saving is not None:
            self._saving.cancel()
            self._save_head()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._open.values():
            if not future.done():
                future.set_result(Wait("the lighthouse is going down"))

    # Decisions.

    def apply(self, event: Event) -> None:
        """Decide, make it durable, then carry it out. StoreFailed: as if the event had never come."""
        before = self.state
        after, effects = transition(before, event)
        if after.grant is not None and after.agreed is None:
            after = replace(after, agreed=self._agreed)  # durable together with the first grant
        if self._store.unsaved(after) - MAY_LAG:
            self._save(after)
        elif after.head is not before.head and self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(HEAD_LAG_S, self._save_head)
        self.state = after
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

    def _evict(self, who: Incarnation, reason: str) -> None:
        """Order a SIGKILL, once; it stands until the incarnation is known to have exited."""
        if self._evictions.order(self.state, who, reason):
            self._note("ReplicaEvicted", reason, {"replica": who[0], "incarnation": who[1]})

    def _save(self, state: LighthouseState) -> None:
        """Make `state` durable; say when the store begins to fail, and when that is over. Raises StoreFailed."""
        try:
            self._store.save(state)
        except StoreFailed as error:
            if not self._failing:
                self._failing = True
                self._note("StoreFailed", f"{error}; no new epoch until it writes, members go on with their lease")
            raise
        if self._failing:
            self._failing = False
            self._note("StoreRecovered", "the store takes writes again")

    def _save_head(self) -> None:
        """Make the head durable; a store that fails is tried again with the next one."""
        self._saving = None
        try:
            self._save(self.state)
        except StoreFailed as error:
            _log.error("%s", error)

    def _reply(self, replica: int, id_: int, answer: Answer | Wait) -> None:
        """Answer an open ask. A lost answer does no harm: the repeated ask gets an equal one."""
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

    def _refused(self, report: Report, refusal: Refused) -> None:
        facts = {"replica": report.replica, "incarnation": report.incarnation}
        self._note("AskRefused", refusal.reason, facts)

    def _learn(self, report: Report) -> bool:
        """Remember the newest report of a replica, unless it was fenced; whether it was not."""
        me = (report.replica, report.incarnation)
        counts = self.state.views[me[0]].incarnation == me[1] and me not in self.state.exited
        if counts:
            self._reports[me[0]] = report
        return counts

    def _wait_for(self, reasons: Iterable[str]) -> None:
        """Remember what is waited for; it is journaled once that lasts."""
        reason = next(iter(reasons), None)
        self._waiting = reason or (self._waiting if self._timed else None)
        if self._waiting is None:
            self._told = None

    @property
    def _reason(self) -> str:
        """What an open ask waits for."""
        if self._waiting is not None:
            return self._waiting
        if self.state.final_since is not None:
            return "waiting until every replica has the final state"
        return f"waiting for the next step of epoch {self.state.epoch}"

    def _withdraw(self, replica: int, id_: int) -> None:
        """The replica has gone away from this ask."""
        self._try(AskWithdrawn(replica, id_))

    # Time.

    @property
    def _timed(self) -> bool:
        """Whether the passing of time can change something."""
        s = self.state
        running = (s.since is not None or s.final_since is not None) and not s.finished
        return self._evictions.pending or (running and any(v.ask is not None for v in s.views))

    def _arm(self, delay_s: float = TICK_S) -> None:
        """Have a next tick if time matters now, else none."""
        if self._timer is not None and not self._timed:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and self._timed and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._timed and not self._try(Ticked(self._clock())):
            self._arm(STORE_RETRY_S)
        if self._waiting is not None and self._waiting != self._told:
            self._told = self._waiting
            self._note("Waiting", self._waiting)

    def _try(self, event: Event) -> bool:
        """`apply` where nobody waits for the outcome."""
        try:
            self.apply(event)
        except StoreFailed as error:
            _log.error("%s", error)
            return False
        return True

    def _note(self, event: str, reason: str, facts: Mapping[str, object] | None = None) -> None:
        """Write an event to the journal."""
        row = {"t": time.time(), "event": event, "source": "lighthouse", "reason": reason}
        self._journal({**row, **(facts or {})})
