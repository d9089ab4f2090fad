"""Leader: drives the replica's core. Effects become messages and requests, their outcome comes back as events.

One place turns effects into tasks. All of it runs on the control loop of rank 0, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_hsdp import protocol
from ft_hsdp.control.failpoints import Failpoints
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core import effects, events, lr
from ft_hsdp.core import replica as core
from ft_hsdp.core.commit import Fence, Tally, Token, Vote
from ft_hsdp.core.lineage import StateId
from ft_hsdp.core.replica import Replica
from ft_hsdp.errors import EXIT_UNREACHABLE, LighthouseUnreachable
from ft_hsdp.events import Journal
from ft_hsdp.protocol import RankBroken, RankFetched, RankFetchFailed, RankShown, RankStopped

RETRY_S = 0.2
KEPT_EPOCHS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What the leader needs to know of the configuration; times in seconds."""

    ranks: int
    total: int
    intervention: lr.Intervention
    chunk_bytes: int
    lease_s: float
    answer_wait_s: float
    join_timeout_s: float
    token_timeout_s: float


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where effects go: to all ranks, and the token to the ring of rank 0."""

    order: Callable[[object], None]
    token: Callable[[Token], None]


class Leader:
    """The decisions of one replica, on rank 0."""

    def __init__(
        self,
        replica: Replica,
        about: protocol.Ask,
        client: LighthouseClient,
        settings: Settings,
        outlets: Outlets,
        journal: Journal,
        failpoints: Failpoints,
    ) -> None:
        self.replica = replica
        self._failpoints = failpoints
        self._about = about
        self._client = client
        self._settings = settings
        self._outlets = outlets
        self._journal = journal
        self._ask: asyncio.Task[None] | None = None
        self._tally: Tally | None = None
        self._fetched: set[int] = set()
        self._stopped: dict[int, set[int]] = {}
        self._all_stopped = asyncio.Event()
        self.concluded = asyncio.Event()
        self._joined = False
        self._away = False
        self._contact = time.monotonic()

    def start(self) -> None:
        """Check in: the replica is warm."""
        self._contact = time.monotonic()
        self._journal.event("CheckedIn", "warm", state=str(self.replica.state))
        self.handle(events.Started())

    def handle(self, event: events.Event) -> None:
        """One event through the core; its effects are carried out in order."""
        before = self._failpoints.record_lost(self.replica, event)
        self.replica, due = core.transition(before, event)
        self._note(before, event, due)
        for effect in due:
            self._perform(effect)
        if self.replica.phase is core.Phase.VOTED and before.phase is not core.Phase.VOTED:
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.token_timeout_s, self._token_overdue, self.replica.fence)

    def _token_overdue(self, fence: Fence) -> None:
        """The token does not come round: some leader is silent, so this ring is of no more use."""
        if self.replica.phase is not core.Phase.VOTED or self.replica.fence != fence:
            return
        cause = f"no verdict on step {fence.step} within {self._settings.token_timeout_s} s"
        self.received(RankBroken(0, fence.epoch, cause))

    def received(self, message: object) -> None:
        """A rank (this one included) reports."""
        match message:
            case Vote():
                self._vote(message)
            case RankBroken(rank, epoch, cause, suspect, planned):
                grant = self.replica.grant
                if grant is not None and grant.epoch == epoch and self.replica.intact and not planned:
                    facts = {"epoch": epoch, "suspect": suspect, "cause": cause, "at_rank": rank}
                    self._journal.event("RingBroken", cause, **facts)
                self.handle(events.RingBroken(epoch))
            case RankShown(_, grant):
                self.handle(events.GrantShown(grant))
            case RankStopped(rank, epoch):
                self._stopped.setdefault(epoch, set()).add(rank)
                self._all_stopped.set()
            case RankFetched(rank, base):
                if base == self.replica.fetching:
                    self._fetched.add(rank)
                    if len(self._fetched) == self._settings.ranks:
                        self.handle(events.Fetched(base))
            case RankFetchFailed(_, base, reason):
                self.handle(events.FetchFailed(base, reason))

    def token(self, token: Token) -> None:
        """The commit token came from the left."""
        self.handle(events.TokenArrived(token))

    def close(self) -> None:
        """Stop asking."""
        if self._ask is not None:
            self._ask.cancel()

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Ask(report):
                if self._ask is not None:
                    self._ask.cancel()
                ask = replace(self._about, report=report)
                self._ask = asyncio.get_running_loop().create_task(self._asking(ask))
            case effects.SendToken(token):
                self._failpoints.verdict(token)
                self._outlets.token(token)
            case effects.Reduce(fence):
                self._tally = Tally(fence, self._settings.ranks)
                self._outlets.order(effect)
            case effects.StopRing(epoch):
                recent = {e: ranks for e, ranks in self._stopped.items() if e > epoch - KEPT_EPOCHS}
                self._stopped = {**recent, epoch: recent.get(epoch, set())}
                self._outlets.order(effect)
            case effects.Fetch():
                self._fetched = set()
                self._outlets.order(effect)
            case _:
                self._outlets.order(effect)

    def _vote(self, vote: Vote) -> None:
        """Count a rank's vote; when all are in, the replica holds the reduced gradient."""
        if self._tally is None:
            return
        self._tally = self._tally.add(vote)
        grant = self.replica.grant
        if not self._tally.complete or grant is None:
            return
        settings = self._settings
        record = self._tally.record(
            prev=self.replica.head.lineage,
            ring=grant.ring,
            total=grant.total,
            lr_scale=lambda n, total: lr.scale(settings.intervention, n, total),
            chunk_bytes=settings.chunk_bytes,
        )
        fence, self._tally = self._tally.fence, None
        if record is None:
            self._outlets.order(
                effects.Exit(75, f"the ranks of this replica saw different contributors at {fence}")
            )
            return
        self.handle(events.Reduced(fence, record))

    async def _asking(self, ask: protocol.Ask) -> None:
        """Ask until there is an answer; meanwhile the last grant may be repeated on its lease."""
        report = ask.report
        while report.after and len(self._stopped.get(report.after, ())) < self._settings.ranks:
            self._all_stopped.clear()
            await self._all_stopped.wait()
        if report.state.step >= self.replica.steps:
            await self.concluded.wait()
        loop = asyncio.get_running_loop()
        lapse = loop.call_later(self._settings.answer_wait_s, self._lapse, "no answer in time")
        try:
            while True:
                try:
                    answer = await self._client.ask(ask)
                except LighthouseUnreachable as error:
                    self._unreachable(str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                break
        finally:
            lapse.cancel()
        self._contact = time.monotonic()
        self._joined = True
        self._ask = None
        self.handle(events.Answered(answer))

    def _unreachable(self, why: str) -> None:
        silent = time.monotonic() - self._contact
        if not self._joined and silent > self._settings.join_timeout_s:
            self._outlets.order(effects.Exit(EXIT_UNREACHABLE, f"{why} for {silent:.0f} s"))
            return
        self._lapse(why)

    def _lapse(self, why: str) -> None:
        """The last grant repeats, as long as its lease runs."""
        if not self._joined or time.monotonic() - self._contact > self._settings.lease_s:
            return
        if self.replica.phase is core.Phase.ASKING and self.replica.intact:
            self._journal.event("LeaseUsed", why, epoch=self.replica.fence.epoch, step=self.replica.fence.step)
        self.handle(events.Unanswered())

    def _note(self, before: Replica, event: events.Event, due: tuple[effects.Effect, ...]) -> None:
        """Journal what the core decided."""
        after = self.replica
        for effect in due:
            match effect:
                case effects.Configure(grant):
                    facts = {"epoch": grant.epoch, "step": after.fence.step, "members": list(grant.ring)}
                    self._journal.event("GrantAdopted", grant.reason, role=after.role, **facts)
                case effects.Commit(record) if self._away and self.replica.me in record.contributors:
                    self._away = False
                    self._journal.event("Rejoined", "contributes again", **_fence(record.fence))
                case effects.Discard(reason):
                    self._away = True
                    self._journal.event("LeftBehind", reason, step=before.fence.step)
                case effects.Reduce(fence) if _again(before, fence, event):
                    reason = "the same gradient is reduced again on another ring"
                    self._journal.event("StepRetried", reason, **_fence(fence))
                case effects.Commit(record) if isinstance(event, events.Answered | events.GrantShown):
                    reason = "the new grant builds on the record that was in doubt"
                    self._journal.event("DoubtResolved", reason, **_fence(record.fence))
                case effects.StopRing(_, reason) if reason.startswith("stale"):
                    self._journal.event("GrantRefused", reason, state=str(before.state))
                case effects.Exit(code, reason):
                    self._journal.event("Finished" if code == 0 else "Ended", reason, code=code)


def _again(before: Replica, fence: Fence, event: events.Event) -> bool:
    """Whether this reduction repeats a step that had been started."""
    return before.grant is not None and before.fence.step == fence.step and before.fence != fence


def _fence(fence: Fence) -> dict[str, int]:
    return {"epoch": fence.epoch, "step": fence.step, "attempt": fence.attempt}


def initial(me: int, incarnation: str, steps: int, state: StateId) -> Replica:
    """A replica that is about to check in with ``state``."""
    return Replica(me, incarnation, steps, state, state)
