"""How a replica asks the lighthouse for grants: one request at a time, and the lease while there is no answer.

A request is repeated until it is answered. A step waits for an answer no longer than the last step took; then the
last grant is repeated as long as its lease runs, and after that the ring stops until a lighthouse answers. All of
it runs on the control loop of rank 0, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from ft_hsdp import fault_injection, protocol
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.rank_channel import RankBus
from ft_hsdp.core import effects, events
from ft_hsdp.core.grant import Grant, Refused, Report
from ft_hsdp.core.replica_state import Phase, Replica
from ft_hsdp.errors import EXIT_RETRYABLE, EXIT_UNREACHABLE, LighthouseUnreachable, exhausted
from ft_hsdp.jsonl import Journal

RETRY_S = 0.2  # between two attempts to reach the lighthouse
PATIENCE_S = 0.02  # shortest wait for the answer of a lighthouse that has answered before
LATE = "no answer in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    lease_s: float  # how long the last grant may be repeated without an answer of the lighthouse
    answer_wait_s: float  # longest wait for an answer before the step goes on without it
    join_timeout_s: float | None  # a first start exits when the lighthouse is away for so long; None: never
    reach_s: float = 10.0  # how long the lighthouse may be away before an event says so


class Asker(Protocol):
    """Who asks for grants: `Leader`."""

    replica: Replica

    def handle(self, event: events.Event) -> None: ...

    async def clear_to_ask(self, report: Report) -> None:
        """Wait until the report may be sent."""


class GrantRequests:
    """The open request of a replica, and the lease of its last grant.

    Args:
        bus: Where orders to the ranks go.
        asker: Gets the answers as events.
        journal: Where it is written that the lighthouse does not answer.
    """

    def __init__(
        self, client: LighthouseClient, settings: LeaseSettings, bus: RankBus, asker: Asker, journal: Journal
    ) -> None:
        self._client = client
        self._settings = settings
        self._bus = bus
        self._asker = asker
        self._journal = journal
        self._request: asyncio.Task[None] | None = None  # asks the lighthouse until it answers
        # The newest request that was sent, and when.
        self._newest: tuple[float, protocol.QuorumRequest] | None = None
        self._queued: protocol.QuorumRequest | None = None  # a newer one, sent once the lighthouse has answered
        self._unanswered_since: float | None = None  # when the oldest request without an answer was sent
        self.overdue = False  # whether a request went unanswered for too long, and none was answered since
        self._answered_at = 0.0  # when the lighthouse decided last
        self._away_since: float | None = None  # the first failure since the lighthouse said anything
        self._pace_s = settings.answer_wait_s  # between the newest two requests
        self._joined = False  # whether the lighthouse has ever answered
        # Whether the journal has these events of the present outage.
        self._lease_noted = False  # LeaseUsed
        self._lease_end_noted = False  # LeaseEnded
        self._wait_noted = False  # LighthouseAwaited

    def close(self) -> None:
        if self._request is not None:
            self._request.cancel()

    def send(self, ask: protocol.QuorumRequest, pause: bool = False) -> None:
        """Ask the lighthouse, in place of the request before.

        A lighthouse that owes an answer is given more time, but the step does not wait for it: on a ring that
        works the new request is held back until the answer comes or the time is over.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        sent = self._newest[0] if self._newest is not None else 0.0
        works = self._asker.replica.phase is Phase.ASKING and self._asker.replica.intact
        if self._request is not None and works and self.overdue and now < sent + self._settings.answer_wait_s:
            self._queued = ask
            loop.call_soon(self._lapse, None)
            return
        if self._request is not None:
            self._request.cancel()
        if self._newest is not None and self._newest[1].report.step + 1 == ask.report.step:
            self._pace_s = now - sent
        self._newest, self._queued = (now, ask), None
        self._unanswered_since = now if self._unanswered_since is None else self._unanswered_since
        self._request = loop.create_task(self._asking(ask, pause))

    async def _asking(self, ask: protocol.QuorumRequest, pause: bool) -> None:
        """Ask until there is an answer. Meanwhile the last grant is repeated as long as its lease runs."""
        if pause:
            await asyncio.sleep(RETRY_S)
        await self._asker.clear_to_ask(ask.report)
        loop = asyncio.get_running_loop()
        patience_s = 0.0 if self.overdue else min(self._settings.answer_wait_s, max(self._pace_s, PATIENCE_S))
        lapse = loop.call_later(patience_s, self.late)
        try:
            while True:
                try:
                    answer = await self._client.ask(ask)
                except LighthouseUnreachable as error:
                    self._unreachable(error)
                    await asyncio.sleep(RETRY_S)
                    ask, self._queued = self._queued or ask, None
                    continue
                self._away_since, self._wait_noted = None, False
                if not isinstance(answer, protocol.Wait):
                    break
        finally:
            lapse.cancel()
        self._answered_at = time.monotonic()
        self._joined = True
        self.overdue = self._lease_noted = self._lease_end_noted = False
        self._unanswered_since = None
        self._request = None
        fault_injection.reach("quorum-reply", ask.report.step)
        held, self._queued = self._queued, None
        if held is None or isinstance(answer, Refused):
            self._asker.handle(events.Answered(answer))
        elif isinstance(answer, Grant):
            self._asker.handle(events.GrantShown(answer))
        if held is not None and self._request is None and self._asker.replica.phase is Phase.ASKING:
            self.send(held)

    def _unreachable(self, error: LighthouseUnreachable) -> None:
        """Handle a request without an answer.

        End this process if the cause is its own, give up a first start, or use the lease.
        """
        why = str(error)
        if (local := exhausted(error)) is not None:  # this process has run out of something: it cannot call
            self._bus.end(str(local), EXIT_RETRYABLE)
            return
        now, limit_s = time.monotonic(), self._settings.join_timeout_s
        self._away_since = now if self._away_since is None else self._away_since
        away_s = now - self._away_since
        if not self._joined and limit_s is not None and away_s > limit_s:
            self._bus.broadcast(effects.Exit(EXIT_UNREACHABLE, f"{why} for {away_s:.0f} s"))
            return
        if not self._joined and not self._wait_noted and away_s > self._settings.reach_s:
            self._wait_noted = True
            self._journal.event("LighthouseAwaited", f"{why} for {away_s:.0f} s; it is asked until it answers")
        self._lapse(error)

    def late(self) -> None:
        """Go on without the answer.

        A step waits no longer than the last one took, and later ones do not wait at all.
        """
        self.overdue = True
        self._lapse(None)

    def _lapse(self, error: LighthouseUnreachable | None) -> None:
        """Repeat the last grant as long as its lease runs. After that all members of the ring stop together.

        An ``error`` says why the lighthouse cannot be reached; without one it has not answered in time.
        """
        silent = time.monotonic() - self._answered_at
        if not self._joined:
            return
        if silent > self._settings.lease_s:
            self._end_lease(error)
            return
        replica = self._asker.replica
        away = error is not None or silent > self._settings.answer_wait_s
        if away and not self._lease_noted and replica.phase is Phase.ASKING and replica.intact:
            self._lease_noted = True
            self._journal.event(
                "LeaseUsed", str(error or LATE), epoch=replica.fence.epoch, step=replica.fence.step
            )
        self._asker.handle(events.Unanswered())

    def _end_lease(self, error: LighthouseUnreachable | None) -> None:
        """Stop training until a lighthouse answers. The ring is told that this is no failure.

        A step may be longer than the lease: the first request after it has the usual time for its answer.
        """
        replica, now = self._asker.replica, time.monotonic()
        if replica.phase is not Phase.ASKING or not replica.intact:
            return
        due = (now if self._unanswered_since is None else self._unanswered_since) + self._settings.answer_wait_s
        if now < due:
            asyncio.get_running_loop().call_later(due - now, self._lapse, error)
            return
        if not self._lease_end_noted:
            self._lease_end_noted = True
            fence, silent = replica.fence, now - self._answered_at
            reason = f"no lighthouse has answered for {silent:.0f} s, quorum.lease_s is over: {error or LATE}"
            self._journal.event("LeaseEnded", reason, epoch=fence.epoch, step=fence.step)
        self._asker.handle(events.LeaseEnded())
