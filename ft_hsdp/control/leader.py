"""Leader: drives the replica's core. Effects become messages and requests, their outcome comes back as events.

One place turns effects into tasks. All of it runs on the control loop of rank 0, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_hsdp import fault_injection, protocol
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.telemetry import Decisions
from ft_hsdp.core import effects, events, lr
from ft_hsdp.core import replica as core
from ft_hsdp.core.commit import AttemptId, CommitToken, Vote, VoteTally
from ft_hsdp.core.grant import Grant, Refused
from ft_hsdp.core.replica_state import DEFAULT, Phase, Replica, ReplicaPolicy
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_RETRYABLE, EXIT_UNREACHABLE, LighthouseUnreachable, exhausted
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import (
    RankBroken,
    RankCheckpointed,
    RankCheckpointFailed,
    RankFetched,
    RankFetchFailed,
    RankLeaves,
    RankShown,
    RankStopped,
    Settled,
)

RETRY_S = 0.2
PATIENCE_S = 0.02  # shortest wait for the answer of a lighthouse that has answered before
OWING = "no answer in time"
KEPT_EPOCHS = 16
VOTES = 3  # x ftar.timeout_s: between the first and the last vote of a replica; a ring that hangs ends within two


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """What the leader needs to know of the configuration; times in seconds.

    ``reach_s`` is how long it looks for its lighthouse before it says so. ``join_timeout_s`` is when it exits if
    it has not joined by then; None, for a replica that was started again: never. ``catchup_wait_s`` is how long a
    step may wait for this replica's fetch, so that it is equal from the next one. ``leave_s`` is how long a
    replica that leaves waits for the others to form a ring without it. ``write_s`` is the longest time for a
    checkpoint, ``write_again_s`` the pause after one that failed, until it is tried again if nobody has written
    one.
    """

    ranks: int
    intervention: lr.Intervention
    chunk_bytes: int
    lease_s: float
    answer_wait_s: float
    join_timeout_s: float | None
    token_timeout_s: float
    catchup_wait_s: float = 0.0
    reach_s: float = 10.0
    leave_s: float = 2.0
    write_s: float = 1200.0
    write_again_s: float = 60.0


@dataclass(frozen=True, slots=True)
class LeaderOutlets:
    """Where effects go: to all ranks, and the token to the ring of rank 0.

    ``end`` ends this process at once, whatever its ranks do, and with it the replica: a reason and an exit code.
    """

    order: Callable[[object], None]
    token: Callable[[CommitToken], None]
    end: Callable[[str, int], None]


class Leader:
    """The decisions of one replica, on rank 0."""

    def __init__(
        self,
        replica: Replica,
        about: protocol.QuorumRequest,
        client: LighthouseClient,
        settings: LeaderSettings,
        outlets: LeaderOutlets,
        journal: Journal,
    ) -> None:
        self.replica = replica
        self._about = about
        self._client = client
        self._settings = settings
        self._outlets = outlets
        self._journal = journal
        self._ask: asyncio.Task[None] | None = None
        self._asked: tuple[float, protocol.QuorumRequest] | None = None  # the newest ask that was sent, and when
        self._held: protocol.QuorumRequest | None = None  # the newest one, while the lighthouse owes an answer
        self._owing = False  # whether it has let an ask lapse, and said nothing since
        self._leased = False  # whether this outage is in the journal
        self._lease_over = False  # and whether the end of the lease is
        self._unanswered: float | None = None  # since when the lighthouse owes an answer to the oldest ask
        self._pace_s = settings.answer_wait_s  # between the newest two asks
        self._tally: VoteTally | None = None
        self._fetched: dict[int, bool] = {}  # by rank: whether it keeps what it has fetched
        self._voted: tuple[AttemptId, Settled] | None = (
            None  # what the newest votes say of copies of the state before
        )
        self._held_back: events.Reduced | None = None
        self._waited_for: StateId | None = None
        self._written: tuple[StateId | None, set[int]] = (None, set())
        self._stopped: dict[int, set[int]] = {}
        self._all_stopped = asyncio.Event()
        self.concluded = asyncio.Event()
        self._joined = False
        self._awaited = False  # whether it is in the journal that this replica cannot join yet
        self._decisions = Decisions(journal)
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
        self._decisions.note(before, event, self.replica, due)
        for effect in due:
            self._perform(effect)
        if self._held_back is not None and self.replica.fetching is None:
            self._release(self._held_back)
        if self.replica.phase is Phase.LEAVING and before.phase is not Phase.LEAVING:
            asyncio.get_running_loop().call_later(self._settings.leave_s, self.handle, events.LeaveOverdue())
        if self.replica.phase is Phase.VOTED and before.phase is not Phase.VOTED:
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.token_timeout_s, self._token_overdue, self.replica.fence)

    def _token_overdue(self, fence: AttemptId) -> None:
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
            case RankBroken(rank, epoch, cause, suspect, planned, accuser):
                grant = self.replica.grant
                if grant is not None and grant.epoch == epoch and self.replica.intact and not planned:
                    self._decisions.torn = epoch
                    facts = {"epoch": epoch, "suspect": suspect, "cause": cause, "at_rank": rank}
                    self._journal.event("RingBroken", cause, **facts)
                self.handle(events.RingBroken(epoch) if planned else events.RingBroken(epoch, suspect, accuser))
            case RankShown(_, grant):
                self.handle(events.GrantShown(grant))
            case RankStopped(rank, epoch):
                self._stopped.setdefault(epoch, set()).add(rank)
                self._all_stopped.set()
            case RankFetched(rank, base, kept):
                if base == self.replica.fetching:
                    self._fetched[rank] = kept
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
                    self._not_written(state, reason, at_rank=rank)

    def token(self, token: CommitToken) -> None:
        """The commit token came from the left."""
        self.handle(events.TokenArrived(token))

    def close(self) -> None:
        """Stop asking."""
        if self._ask is not None:
            self._ask.cancel()

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.RequestGrant(report, pause):
                if report.number and self._about.rules:
                    self._about = replace(self._about, rules={})  # they were agreed on with the first grant
                self._send(replace(self._about, report=report), pause)
            case effects.SendToken(token):
                fault_injection.reach("token-second" if token.verdict else "token-first", token.fence.step)
                self._outlets.token(token)
            case effects.Reduce(fence):
                self._tally = VoteTally(fence, self._settings.ranks)
                self._outlets.order(effect)
            case effects.StopRing(epoch):
                recent = {e: ranks for e, ranks in self._stopped.items() if e > epoch - KEPT_EPOCHS}
                self._stopped = {**recent, epoch: recent.get(epoch, set())}
                self._outlets.order(effect)
            case effects.Fetch():
                self._fetched = {}
                self._outlets.order(effect)
            case effects.InstallSnapshot(base):
                self._outlets.order(Settled(base, all(self._fetched.values())))
                self._outlets.order(effect)
            case effects.BufferUpdate():
                self._voted = None
                self._outlets.order(effect)
            case effects.Commit(record) if self._voted is not None and self._voted[0] == record.fence:
                self._outlets.order(self._voted[1])
                self._outlets.order(effect)
            case effects.WriteCheckpoint(state):
                self._written = (state, set())
                self._outlets.order(effect)
                asyncio.get_running_loop().call_later(self._settings.write_s, self._write_overdue, state)
            case _:
                self._outlets.order(effect)

    def _vote(self, vote: Vote) -> None:
        """Count a rank's vote; when all are in, the replica holds the reduced gradient."""
        if self._tally is None:
            return
        if not self._tally.votes:
            patience_s = VOTES * self._settings.token_timeout_s
            asyncio.get_running_loop().call_later(patience_s, self._votes_overdue, self._tally.fence, patience_s)
        self._tally = self._tally.add(vote)
        grant = self.replica.grant
        if not self._tally.complete or grant is None:
            return
        settings = self._settings
        record = self._tally.record(
            prev=self.replica.ring_state.lineage,
            ring=grant.ring,
            total=grant.total,
            lr_scale=lambda n, total: lr.scale(settings.intervention, n, total),
            chunk_bytes=settings.chunk_bytes,
        )
        fence, digest = self._tally.fence, self._tally.state_digest
        self._voted, self._tally = (fence, Settled(self.replica.state, self._tally.kept)), None
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

    def _votes_overdue(self, fence: AttemptId, waited_s: float) -> None:
        """Some rank holds its sum and another does not, although all rings of other ranks have had their time."""
        tally = self._tally
        if tally is None or tally.fence != fence or not tally.votes:
            return
        late = sorted(set(range(self._settings.ranks)) - {vote.rank for vote in tally.votes})
        self._outlets.end(f"ranks {late} have not voted on {_named(fence)} within {waited_s:g} s", EXIT_RETRYABLE)

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

    def _not_written(self, state: StateId, reason: str, **facts: object) -> None:
        """A checkpoint has failed here: the next token says so, and after a pause it is tried again."""
        self._journal.event("CheckpointFailed", reason, step=state.step, **facts)
        self.handle(events.CheckpointFailed(state, reason))
        asyncio.get_running_loop().call_later(
            self._settings.write_again_s, self.handle, events.CheckpointOverdue()
        )

    def _write_overdue(self, state: StateId) -> None:
        """The disk seems to hang: another replica is to write one. Should this one come after all, it counts."""
        if self._written[0] == state:
            late = sorted(set(range(self._settings.ranks)) - self._written[1])
            self._not_written(
                state, f"ranks {late} have not written within {self._settings.write_s:g} s", late=late
            )

    def _send(self, ask: protocol.QuorumRequest, pause: bool = False) -> None:
        """Have the lighthouse asked, in place of whatever it was asked before; with ``pause`` a moment later.

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
        self._unanswered = now if self._unanswered is None else self._unanswered
        self._ask = loop.create_task(self._asking(ask, pause))

    async def _asking(self, ask: protocol.QuorumRequest, pause: bool) -> None:
        """Ask until there is an answer; meanwhile the last grant may be repeated on its lease."""
        report = ask.report
        if pause:
            await asyncio.sleep(RETRY_S)
        while report.after and len(self._stopped.get(report.after, ())) < self._settings.ranks:
            self._all_stopped.clear()
            try:
                async with asyncio.timeout(self._settings.token_timeout_s):
                    await self._all_stopped.wait()
            except TimeoutError:
                gone = self._stopped.get(report.after, set())
                late = sorted(set(range(self._settings.ranks)) - gone)
                limit_s = self._settings.token_timeout_s
                why = f"ranks {late} have not left the ring of epoch {report.after} within {limit_s:g} s"
                self._outlets.end(why, EXIT_RETRYABLE)
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
                    self._unreachable(error)
                    await asyncio.sleep(RETRY_S)
                    ask, self._held = self._held or ask, None
                    continue
                break
        finally:
            lapse.cancel()
        self._contact = time.monotonic()
        self._joined = True
        self._owing = self._leased = self._lease_over = False
        self._unanswered = None
        self._ask = None
        fault_injection.reach("quorum-reply", ask.report.step)
        held, self._held = self._held, None
        if held is None or isinstance(answer, Refused):
            self.handle(events.Answered(answer))
        elif isinstance(answer, Grant):
            self.handle(events.GrantShown(answer))
        if held is not None and self._ask is None and self.replica.phase is Phase.ASKING:
            self._send(held)

    def _unreachable(self, error: LighthouseUnreachable) -> None:
        why = str(error)
        if (local := exhausted(error)) is not None:  # the lighthouse may be there: this process cannot call it
            self._outlets.end(str(local), EXIT_RETRYABLE)
            return
        silent = time.monotonic() - self._contact
        limit_s = self._settings.join_timeout_s
        if not self._joined and limit_s is not None and silent > limit_s:
            self._outlets.order(effects.Exit(EXIT_UNREACHABLE, f"{why} for {silent:.0f} s"))
            return
        if not self._joined and not self._awaited and silent > self._settings.reach_s:
            self._awaited = True
            self._journal.event("LighthouseAwaited", f"{why} for {silent:.0f} s; it is asked until it answers")
        self._lapse(why)

    def _late(self) -> None:
        """A step is not kept waiting for longer than the last one took, and later ones not at all."""
        self._owing = True
        self._lapse(OWING)

    def _lapse(self, why: str) -> None:
        """The last grant repeats, as long as its lease runs; then all members of the ring stop together."""
        silent = time.monotonic() - self._contact
        if not self._joined:
            return
        if silent > self._settings.lease_s:
            self._end_lease(why)
            return
        away = why is not OWING or silent > self._settings.answer_wait_s
        if away and not self._leased and self.replica.phase is Phase.ASKING and self.replica.intact:
            self._leased = True
            self._journal.event("LeaseUsed", why, epoch=self.replica.fence.epoch, step=self.replica.fence.step)
        self.handle(events.Unanswered())

    def _end_lease(self, why: str) -> None:
        """Training stops here until a lighthouse answers; the ring is told so, which is no failure.

        A step may be longer than the lease: the first ask after it has the usual time for its answer.
        """
        if self.replica.phase is not Phase.ASKING or not self.replica.intact:
            return
        now = time.monotonic()
        due = (now if self._unanswered is None else self._unanswered) + self._settings.answer_wait_s
        if now < due:
            asyncio.get_running_loop().call_later(due - now, self._lapse, why)
            return
        if not self._lease_over:
            self._lease_over = True
            fence, silent = self.replica.fence, now - self._contact
            reason = f"no lighthouse has answered for {silent:.0f} s, quorum.lease_s is over: {why}"
            self._journal.event("LeaseEnded", reason, epoch=fence.epoch, step=fence.step)
        self.handle(events.LeaseEnded())


def _record_lost(replica: Replica, event: events.Event) -> Replica:
    """The failpoint: what was in doubt is forgotten when its ring breaks."""
    in_doubt = isinstance(event, events.RingBroken) and replica.forwarded
    if in_doubt and fault_injection.hit("record-lost", replica.fence.step):
        return replace(replica, forwarded=False, record=None)
    return replica


def _named(fence: AttemptId) -> str:
    return f"step {fence.step} of epoch {fence.epoch}"


def initial(
    me: int,
    incarnation: str,
    steps: int,
    state: StateId,
    policy: ReplicaPolicy = DEFAULT,
    requested_checkpoint: int = 0,
) -> Replica:
    """A replica that is about to check in with ``state``: initial weights, or what it found on its machine.

    ``wanted``: it demands a checkpoint of a state of that many steps or more (0: it demands none).
    """
    return Replica(me, incarnation, steps, state, state, policy, requested_checkpoint=requested_checkpoint)
