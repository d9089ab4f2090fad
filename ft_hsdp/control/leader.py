"""Leader: drives the replica's core. Effects become messages and requests, their outcome comes back as events.

One place turns effects into tasks. All of it runs on the control loop of rank 0, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_hsdp import failpoints, protocol
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core import divergence, effects, events, lr
from ft_hsdp.core import replica as core
from ft_hsdp.core.assignment import Grant, Refused
from ft_hsdp.core.commit import Fence, Tally, Token, Vote
from ft_hsdp.core.lineage import StateId
from ft_hsdp.core.rules import DEFAULT, Rules
from ft_hsdp.core.standing import Phase, Replica
from ft_hsdp.errors import EXIT_UNREACHABLE, LighthouseUnreachable
from ft_hsdp.events import Journal
from ft_hsdp.protocol import (
    RankBroken,
    RankCheckpointed,
    RankCheckpointFailed,
    RankFetched,
    RankFetchFailed,
    RankLeaves,
    RankShown,
    RankStopped,
)

RETRY_S = 0.2
PATIENCE_S = 0.02  # shortest wait for the answer of a lighthouse that has answered before
OWING = "no answer in time"
KEPT_EPOCHS = 16
LEAVE_S = 2.0  # longest wait of a replica that leaves for the others to form a ring without it


@dataclass(frozen=True, slots=True)
class Settings:
    """What the leader needs to know of the configuration; times in seconds.

    ``catchup_wait_s`` is how long a step may wait for this replica's fetch, so that it is equal from the next one.
    """

    ranks: int
    intervention: lr.Intervention
    chunk_bytes: int
    lease_s: float
    answer_wait_s: float
    join_timeout_s: float
    token_timeout_s: float
    catchup_wait_s: float = 0.0


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
    ) -> None:
        self.replica = replica
        self._about = about
        self._client = client
        self._settings = settings
        self._outlets = outlets
        self._journal = journal
        self._ask: asyncio.Task[None] | None = None
        self._asked: tuple[float, protocol.Ask] | None = None  # the newest ask that was sent, and when
        self._held: protocol.Ask | None = None  # the newest one, while the lighthouse owes an answer
        self._owing = False  # whether it has let an ask lapse, and said nothing since
        self._leased = False  # whether this outage is in the journal
        self._pace_s = settings.answer_wait_s  # between the newest two asks
        self._tally: Tally | None = None
        self._fetched: set[int] = set()
        self._held_back: events.Reduced | None = None
        self._waited_for: StateId | None = None
        self._written: tuple[StateId | None, set[int]] = (None, set())
        self._stopped: dict[int, set[int]] = {}
        self._all_stopped = asyncio.Event()
        self.concluded = asyncio.Event()
        self._joined = False
        self._away = False
        self._torn = 0  # the newest epoch whose ring failed, that is, was not left for a newer one
        self._contact = time.monotonic()

    def start(self) -> None:
        """Check in: the replica is warm."""
        self._contact = time.monotonic()
        self._journal.event("CheckedIn", "warm", state=str(self.replica.state))
        self.handle(events.Started())

    def handle(self, event: events.Event) -> None:
        """One event through the core; its effects are carried out in order."""
        before = _record_lost(self.replica, event)
        self.replica, due = core.transition(before, event)
        self._note(before, event, due)
        for effect in due:
            self._perform(effect)
        if self._held_back is not None and self.replica.fetching is None:
            self._release(self._held_back)
        if self.replica.phase is Phase.LEAVING and before.phase is not Phase.LEAVING:
            asyncio.get_running_loop().call_later(LEAVE_S, self.handle, events.LeaveOverdue())
        if self.replica.phase is Phase.VOTED and before.phase is not Phase.VOTED:
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.token_timeout_s, self._token_overdue, self.replica.fence)

    def _token_overdue(self, fence: Fence) -> None:
        """The token does not come round: some leader is silent, so this ring is of no more use."""
        if self.replica.phase is not Phase.VOTED or self.replica.fence != fence:
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
                    self._torn = epoch
                    facts = {"epoch": epoch, "suspect": suspect, "cause": cause, "at_rank": rank}
                    self._journal.event("RingBroken", cause, **facts)
                self.handle(events.RingBroken(epoch, None if planned else suspect))
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
            case RankLeaves(rank):
                if not self.replica.departing:
                    self._journal.event("LeaveRequested", "it is told to end", at_rank=rank)
                self.handle(events.LeaveRequested())
            case RankFetchFailed(_, base, reason):
                self.handle(events.FetchFailed(base, reason))
            case RankCheckpointed(rank, state):
                self._wrote(rank, state)
            case RankCheckpointFailed(rank, state, reason):
                if self._written[0] == state:
                    self._written = (None, set())
                    self._journal.event("CheckpointFailed", reason, step=state.step, at_rank=rank)
                    self.handle(events.CheckpointFailed(state, reason))

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
                self._send(replace(self._about, report=report))
            case effects.SendToken(token):
                failpoints.reach("token-second" if token.verdict else "token-first", token.fence.step)
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
            case effects.Checkpoint(state):
                self._written = (state, set())
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
        fence, digest, self._tally = self._tally.fence, self._tally.state_digest, None
        if record is None:
            self._outlets.order(
                effects.Exit(75, f"the ranks of this replica saw different contributors at {fence}")
            )
            return
        reduced = events.Reduced(fence, record, digest)
        base = self.replica.fetching
        if base is None or settings.catchup_wait_s <= 0 or base == self._waited_for:
            self.handle(reduced)
            return
        self._waited_for = base  # one fetch is waited for once
        self._held_back = reduced
        asyncio.get_running_loop().call_later(settings.catchup_wait_s, self._release, reduced)

    def _release(self, reduced: events.Reduced) -> None:
        """The vote that was held back for a fetch goes on; the others wait for it at the end of their step."""
        if self._held_back is reduced:
            self._held_back = None
            self.handle(reduced)

    def _wrote(self, rank: int, state: StateId) -> None:
        """A rank wrote its shard of a checkpoint; whole is what all have written."""
        wanted, ranks = self._written
        if wanted != state:
            return
        ranks.add(rank)
        if len(ranks) == self._settings.ranks:
            self._written = (None, set())
            self._journal.event("CheckpointWritten", "all ranks wrote their shards", step=state.step)
            self.handle(events.CheckpointWritten(state))

    def _send(self, ask: protocol.Ask) -> None:
        """Have the lighthouse asked, in place of whatever it was asked before.

        One that owes an answer is given time, but not ours: on a ring that works this ask is held back.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        sent = self._asked[0] if self._asked is not None else 0.0
        works = self.replica.phase is Phase.ASKING and self.replica.intact
        if self._ask is not None and works and self._owing and now < sent + self._settings.answer_wait_s:
            self._held = ask
            loop.call_soon(self._lapse, OWING)
            return
        if self._ask is not None:
            self._ask.cancel()
        if self._asked is not None and self._asked[1].report.step + 1 == ask.report.step:
            self._pace_s = now - sent
        self._asked, self._held = (now, ask), None
        self._ask = loop.create_task(self._asking(ask))

    async def _asking(self, ask: protocol.Ask) -> None:
        """Ask until there is an answer; meanwhile the last grant may be repeated on its lease."""
        report = ask.report
        while report.after and len(self._stopped.get(report.after, ())) < self._settings.ranks:
            self._all_stopped.clear()
            await self._all_stopped.wait()
        if report.state.step >= self.replica.steps:
            await self.concluded.wait()
        loop = asyncio.get_running_loop()
        patience_s = 0.0 if self._owing else min(self._settings.answer_wait_s, max(self._pace_s, PATIENCE_S))
        lapse = loop.call_later(patience_s, self._late)
        try:
            while True:
                try:
                    answer = await self._client.ask(ask)
                except LighthouseUnreachable as error:
                    self._unreachable(str(error))
                    await asyncio.sleep(RETRY_S)
                    ask, self._held = self._held or ask, None
                    continue
                break
        finally:
            lapse.cancel()
        self._contact = time.monotonic()
        self._joined = True
        self._owing = self._leased = False
        self._ask = None
        failpoints.reach("quorum-reply", ask.report.step)
        held, self._held = self._held, None
        if held is None or isinstance(answer, Refused):
            self.handle(events.Answered(answer))
        elif isinstance(answer, Grant):
            self.handle(events.GrantShown(answer))
        if held is not None and self._ask is None and self.replica.phase is Phase.ASKING:
            self._send(held)

    def _unreachable(self, why: str) -> None:
        silent = time.monotonic() - self._contact
        if not self._joined and silent > self._settings.join_timeout_s:
            self._outlets.order(effects.Exit(EXIT_UNREACHABLE, f"{why} for {silent:.0f} s"))
            return
        self._lapse(why)

    def _late(self) -> None:
        """A step is not kept waiting for longer than the last one took, and later ones not at all."""
        self._owing = True
        self._lapse(OWING)

    def _lapse(self, why: str) -> None:
        """The last grant repeats, as long as its lease runs."""
        silent = time.monotonic() - self._contact
        if not self._joined or silent > self._settings.lease_s:
            return
        away = why is not OWING or silent > self._settings.answer_wait_s
        if away and not self._leased and self.replica.phase is Phase.ASKING and self.replica.intact:
            self._leased = True
            self._journal.event("LeaseUsed", why, epoch=self.replica.fence.epoch, step=self.replica.fence.step)
        self.handle(events.Unanswered())

    def _note(self, before: Replica, event: events.Event, due: tuple[effects.Effect, ...]) -> None:
        """Journal what the core decided."""
        after = self.replica
        wrong = after.suspects or after.diverged
        if wrong and wrong != (before.suspects or before.diverged):
            step = after.head.step
            facts = {"replicas": list(wrong), "step": step, "slice": divergence.number(step)}
            self._journal.event("StateDiverged", _differing(event, after), majority=bool(after.suspects), **facts)
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
                case effects.Reduce(fence) if _again(before, fence, self._torn):
                    reason = "the same gradient is reduced again on another ring"
                    self._journal.event("StepRetried", reason, **_fence(fence))
                case effects.Commit(record) if record.skipped:
                    reason = f"gradient of replicas {list(record.poisoned)} is not finite: no weight changes"
                    self._journal.event(
                        "StepSkipped", reason, replicas=list(record.poisoned), **_fence(record.fence)
                    )
                case effects.Checkpoint(state):
                    reason = "this replica writes it for all"
                    self._journal.event("CheckpointStarted", reason, step=state.step)
                case effects.Commit(record) if isinstance(event, events.Answered | events.GrantShown):
                    reason = "the new grant builds on the record that was in doubt"
                    self._journal.event("DoubtResolved", reason, **_fence(record.fence))
                case effects.StopRing(_, reason) if reason.startswith("stale"):
                    self._journal.event("GrantRefused", reason, state=str(before.state))
                case effects.Exit(code, reason):
                    final = after.state.step >= after.steps
                    name = ("Finished" if final else "Left") if code == 0 else "Ended"
                    self._journal.event(name, reason, code=code)


def _again(before: Replica, fence: Fence, torn: int) -> bool:
    """Whether this reduction repeats a step that had begun, or whose ring, of epoch ``torn``, failed before."""
    begun = before.phase is not Phase.ASKING or before.void is not None or before.forwarded
    failed = not before.intact and before.fence.epoch == torn
    again = before.grant is not None and before.fence.step == fence.step and before.fence != fence
    return again and (begun or failed)


def _differing(event: events.Event, after: Replica) -> str:
    """Who differs from whom, in words."""
    token = event.token if isinstance(event, events.TokenArrived) else None
    return divergence.describe(token.digests, after.head) if token is not None else ""


def _record_lost(replica: Replica, event: events.Event) -> Replica:
    """The failpoint: what was in doubt is forgotten when its ring breaks."""
    in_doubt = isinstance(event, events.RingBroken) and replica.forwarded
    if in_doubt and failpoints.hit("record-lost", replica.fence.step):
        return replace(replica, forwarded=False, record=None)
    return replica


def _fence(fence: Fence) -> dict[str, int]:
    return {"epoch": fence.epoch, "step": fence.step, "attempt": fence.attempt}


def initial(me: int, incarnation: str, steps: int, state: StateId, rules: Rules = DEFAULT) -> Replica:
    """A replica that is about to check in with ``state``: initial weights, or what it found on its machine."""
    return Replica(me, incarnation, steps, state, state, rules)
