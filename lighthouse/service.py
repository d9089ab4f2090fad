"""The service: drives the pure decisions with real requests, real time and a real store.

Every event goes through `Service.apply`: decide, save, and only then let anything be known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.core.assignment import Answer, Grant, Refused, Report
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.protocol import Ask, Eviction, Overview, Processes, Wait
from lighthouse import admission, health
from lighthouse.admission import Job
from lighthouse.decide import transition
from lighthouse.quorum import Incarnation
from lighthouse.state import (
    Asked,
    AskWithdrawn,
    Event,
    Evict,
    Note,
    ProcessesReported,
    Reply,
    Request,
    State,
    Ticked,
)
from lighthouse.store import Store, StoreFailed

LONG_POLL_S = 20.0  # after this long an ask is answered with Wait
LINGER_S = 1.0  # for this long such an ask still counts: the replica is about to repeat it
TICK_S = 0.05
STORE_RETRY_S = 1.0

Journal = Callable[[Mapping[str, object]], None]
"""Takes each event as a row of events.jsonl."""

_log = logging.getLogger(__name__)


class Service:
    """One job's lighthouse, to be used from one event loop.

    state: what `store.load` gave; token: signs grants; journal: takes each event; name: of the job;
    config_hash: that every replica must have, None takes that of the first; long_poll_s: longest wait of
    `ask`, in seconds; clock: monotonic seconds.
    """

    def __init__(
        self,
        state: State,
        store: Store,
        token: str,
        journal: Journal,
        *,
        name: str = "",
        config_hash: str | None = None,
        long_poll_s: float = LONG_POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.name = name
        self._store = store
        self._token = token
        self._journal = journal
        self._job = Job(config_hash)
        self._long_poll_s = long_poll_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer | Wait]] = {}
        self._reports: dict[int, Report] = {}
        self._evictions: dict[Incarnation, Eviction] = {}
        self._suspects: dict[Incarnation, float] = {}  # left out for their silence; when to evict them
        self._waiting: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def started(self) -> None:
        """Note in the journal that this lighthouse serves."""
        s = self.state
        why = f"goes on from epoch {s.epoch}, head {s.head}" if s.grant else "nothing was ever granted"
        self._note("LighthouseStarted", why, {"term": s.term, "epoch": s.epoch})

    # Requests.

    async def ask(self, ask: Ask) -> Answer | Wait:
        """The answer to a replica's ask; Wait if there is none within `long_poll_s`.

        Cancelling withdraws the ask.

        Raises:
            ProtocolViolation: the report cannot be true.
            StoreFailed: nothing was decided; the replica may ask again.
        """
        report = ask.report
        try:
            admission.check_ask(self.state, ask)
        except ProtocolViolation as error:
            self._note("AskRefused", str(error), {"replica": report.replica})
            raise
        refusal = self._job.refusal(ask)
        if refusal is not None:
            self._refused(report, refusal)
            return refusal
        if self._closed:
            return Wait("the lighthouse is going down")
        id_ = next(self._ids)
        future: asyncio.Future[Answer | Wait] = asyncio.get_running_loop().create_future()
        self._open[id_] = future
        try:
            self.apply(Asked(Request(report, id_, ask.ring, ask.state), self._clock()))
            self._learn(ask)
            async with asyncio.timeout(self._long_poll_s):
                return await future
        except TimeoutError:
            loop = asyncio.get_running_loop()
            loop.call_later(LINGER_S, self._withdraw, report.replica, id_)
            return Wait(self._reason)
        except asyncio.CancelledError:
            self._withdraw(report.replica, id_)
            raise
        finally:
            del self._open[id_]

    def processes(self, picture: Processes) -> Overview:
        """Take a supervisor's full picture; give it the orders to kill, and how far the job is.

        A replica of which it names an exited incarnation, or that it has given up, is its own: if that is not
        in ``running``, nothing of it runs.

        Raises:
            ProtocolViolation: the picture cannot be true.
            StoreFailed: nothing was noted.
        """
        exited = admission.check_processes(self.state, picture)
        owned: dict[int, str | None] = dict.fromkeys(sorted({r for r, _ in exited} | set(picture.lost)))
        owned |= picture.running
        self.apply(ProcessesReported(owned, exited, frozenset(picture.lost), self._clock()))
        head = self.state.head
        return Overview(
            evict=tuple(e for e in self._evictions.values() if e.replica in owned),
            epoch=self.state.epoch,
            step=head.step if head else 0,
            finished=self.state.finished,
            halted=self.state.halted,
        )

    def status(self) -> dict[str, Any]:
        """What GET /v1/status shows."""
        s = self.state
        return {
            "job": self.name,
            "term": s.term,
            "epoch": s.epoch,
            "step": s.head.step if s.head else 0,
            "finished": s.finished,
            "members": list(s.grant.ring) if s.grant else [],
            "replicas": [health.row(s, r, self._reports, self._reason) for r in range(s.policy.total)],
        }

    def close(self) -> None:
        """Answer every open ask with Wait, and take no more; the store stays open."""
        self._closed = True
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
        self._store.save(after)
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
                        self._suspect(before, facts["replica"])
        self._wait_for(waits)
        self._forget(event)
        self._arm()

    def _reply(self, replica: int, id_: int, answer: Answer) -> None:
        """Answer an open ask. A lost answer does no harm: the repeated ask gets an equal one."""
        if isinstance(answer, Grant):
            answer = protocol.sign(self._token, answer)
        if isinstance(answer, Refused):
            self._note("AskRefused", answer.reason, {"replica": replica})
        future = self._open.get(id_)
        if future is not None and not future.done():
            future.set_result(answer)

    def _refused(self, report: Report, refusal: Refused) -> None:
        facts = {"replica": report.replica, "incarnation": report.incarnation}
        self._note("AskRefused", refusal.reason, facts)

    def _learn(self, ask: Ask) -> None:
        """Remember the newest report of a replica, unless it was fenced."""
        me = (ask.report.replica, ask.report.incarnation)
        if self.state.views[me[0]].incarnation == me[1] and me not in self.state.exited:
            self._job = self._job.with_first(ask)
            self._reports[me[0]] = ask.report

    def _wait_for(self, reasons: Iterable[str]) -> None:
        """Journal what is waited for when that changes."""
        reason = next(iter(reasons), None)
        if reason is not None and reason != self._waiting:
            self._note("Waiting", reason)
        self._waiting = reason or (self._waiting if self._timed else None)

    @property
    def _reason(self) -> str:
        """What an open ask waits for."""
        if self._waiting is not None:
            return self._waiting
        if self.state.final_since is not None:
            return "waiting until every replica has the final state"
        return f"waiting for the next step of epoch {self.state.epoch}"

    # Silence.

    def _suspect(self, before: State, replica: object) -> None:
        """A member was left out for its silence: evict it too if it stays silent."""
        since = self._clock() if before.since is None else before.since
        for member in before.grant.members if before.grant else ():
            if member.replica == replica:
                self._suspects[member.replica, member.incarnation] = since + self.state.policy.evict_s

    def _evict(self, who: Incarnation, reason: str) -> None:
        """Order a SIGKILL, once; it stands until the incarnation is known to have exited."""
        self._suspects.pop(who, None)
        if who in self._evictions or who in self.state.exited:
            return
        self._evictions[who] = Eviction(*who, reason)
        self._note("ReplicaEvicted", reason, {"replica": who[0], "incarnation": who[1]})

    def _forget(self, event: Event) -> None:
        """Drop suspicions and orders that this event has settled; act on the suspicions that are due."""
        match event:
            case Asked(request):
                self._suspects.pop((request.report.replica, request.report.incarnation), None)
            case ProcessesReported():
                for gone in event.exited:
                    self._evictions.pop(gone, None)
                    self._suspects.pop(gone, None)
        now = self._clock()
        for who in [who for who, due in self._suspects.items() if now >= due]:
            self._evict(who, f"silent for {self.state.policy.evict_s:g} s since its ring broke")

    def _withdraw(self, replica: int, id_: int) -> None:
        """The replica has gone away from this ask."""
        self._try(AskWithdrawn(replica, id_))

    # Time.

    @property
    def _timed(self) -> bool:
        """Whether the passing of time can change something."""
        s = self.state
        waiting = any(v.ask is not None for v in s.views) and not s.finished
        return bool(self._suspects) or (waiting and (s.since is not None or s.final_since is not None))

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
