"""Drives the core of a replica: effects become messages and requests, and their outcome comes back as events.

One place (`Leader._perform`) turns effects into tasks. All of it runs on the control loop of rank 0, so nothing
here is locked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_hsdp import fault_injection, protocol
from ft_hsdp.control.grant_requests import GrantRequests, LeaseSettings
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.rank_channel import RankBus
from ft_hsdp.control.telemetry import Decisions
from ft_hsdp.core import effects, events
from ft_hsdp.core import replica as core
from ft_hsdp.core.commit import AttemptId, CommitToken, Intervention, Vote, VoteTally
from ft_hsdp.core.grant import Report
from ft_hsdp.core.replica_state import DEFAULT, Phase, Replica, ReplicaPolicy
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_RETRYABLE
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
    ShardLeftOut,
)

KEPT_EPOCHS = 16  # epochs for which it is remembered which ranks have left their ring
VOTES = 3  # x ftar.timeout_s between the first and the last vote of a replica; a ring that hangs ends within two


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings(LeaseSettings):
    ranks: int  # ranks of the replica
    intervention: Intervention  # how the learning rate depends on the number of contributors
    chunk_bytes: int  # size of a chunk of the all-reduce
    token_timeout_s: float  # longest wait for the token, and for the ranks to leave a ring
    # How long a step may wait for this replica's fetch, so that it is equal from the next step.
    catchup_wait_s: float = 0.0
    leave_s: float = 2.0  # how long a replica that leaves waits for a ring: of the others, or of its own
    write_s: float = 1200.0  # longest time for a checkpoint
    # Pause after a failed checkpoint until it is tried again, if no replica has written one.
    write_again_s: float = 60.0
    checkpoint_s: float = 0.0  # longest time between two durable checkpoints; 0: time does not count
    ranks_per_unit: int = 1  # ranks that train the same units
    norm_mads: float | None = None  # how far the norm of a contribution may be from that of the others
    nominal: int = 0  # data ranks of a replica that has all its ranks; 0: as many as this one has


WHY: dict[events.Leaving, str] = {
    "told": "it is told to end",
    "leaves": "its script has called job.leave()",
    "stops": "its script has called job.stop(): all replicas leave",
    "ended": "its script has ended",
}


class Leader:
    """The decisions of one replica, on the control loop of rank 0.

    Args:
        replica: the state of the core with which it checks in (`initial`).
        about: what every request to the lighthouse repeats; its report is replaced each time.
        bus: where orders to the ranks go.
        send_token: passes the commit token to the right neighbour in the ring of rank 0.
    """

    def __init__(
        self,
        replica: Replica,
        about: protocol.QuorumRequest,
        client: LighthouseClient,
        settings: LeaderSettings,
        bus: RankBus,
        send_token: Callable[[CommitToken], None],
        journal: Journal,
    ) -> None:
        self.replica = replica
        self._about = about
        self._settings = settings
        self._bus = bus
        self._send_token = send_token
        self._journal = journal
        self.requests = GrantRequests(client, settings, bus, self, journal)
        self._tally: VoteTally | None = None  # votes on the attempt that is being reduced
        self._voted = 0.0  # when the newest votes were complete, on the monotonic clock; 0: never
        self._settled: tuple[AttemptId, Settled] | None = None  # what the newest votes say of copies of the base
        self._waiting_vote: events.Reduced | None = None  # held back until a fetch is done
        self._fetch_waited_for: StateId | None = None  # its base; a fetch is waited for once
        self._fetched: dict[int, bool] = {}  # by rank that has fetched: whether its host keeps a snapshot of it
        self._written: tuple[StateId | None, set[int]] = (None, set())  # a checkpoint, and the ranks that wrote it
        self._stopped: dict[int, set[int]] = {}  # by epoch: the ranks that have left its ring
        self._all_stopped = asyncio.Event()  # set with each rank that leaves a ring
        # Set from outside when the final state is in the logs; then it is reported.
        self.concluded = asyncio.Event()
        self._decisions = Decisions(journal)
        self._checkpoint_timer: asyncio.TimerHandle | None = None
        self._leave_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check in: the ranks are warm."""
        self._journal.event("CheckedIn", "warm", state=str(self.replica.state))
        self._time_checkpoint()
        self.handle(events.Started())

    def handle(self, event: events.Event) -> None:
        """Pass one event through the core and carry out its effects, in order."""
        before = _record_lost(self.replica, event)
        self.replica, due = core.transition(before, event)
        self._decisions.note(before, event, self.replica, due)
        for effect in due:
            self._perform(effect)
        if self.replica.saved > before.saved:  # at the same step on all replicas
            self._time_checkpoint()
        if self._waiting_vote is not None and self.replica.fetching is None:
            self._release(self._waiting_vote)
        leaves = self.replica.phase is Phase.LEAVING, self.replica.departing
        if leaves != (before.phase is Phase.LEAVING, before.departing) or event == events.LeaveOverdue():
            self._time_leaving()
        if self.replica.phase is Phase.VOTED and before.phase is not Phase.VOTED:
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.token_timeout_s, self._token_overdue, self.replica.fence)

    def _time_leaving(self) -> None:
        if self._leave_timer is not None:
            self._leave_timer.cancel()
        leaves = self.replica.departing or self.replica.phase is Phase.LEAVING
        if leaves and self.replica.phase is not Phase.DONE:
            loop, overdue = asyncio.get_running_loop(), events.LeaveOverdue()
            self._leave_timer = loop.call_later(self._settings.leave_s, self.handle, overdue)

    def _time_checkpoint(self) -> None:
        """Demand a checkpoint when time is up, unless another replica does so before: then it starts again."""
        if self._checkpoint_timer is not None:
            self._checkpoint_timer.cancel()
        if self._settings.checkpoint_s > 0:
            loop, due = asyncio.get_running_loop(), events.CheckpointDue()
            self._checkpoint_timer = loop.call_later(self._settings.checkpoint_s, self.handle, due)

    def _token_overdue(self, fence: AttemptId) -> None:
        """Break the ring: the token does not come round in time, so another leader is silent."""
        if self.replica.phase is not Phase.VOTED or self.replica.fence != fence:
            return
        cause = f"no verdict on step {fence.step} within {self._settings.token_timeout_s} s"
        self.received(RankBroken(0, fence.epoch, cause))

    def received(self, message: object) -> None:
        match message:
            case Vote():
                self._vote(message)
            case CommitToken():
                self.token(message)
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
            case RankLeaves(rank, how):
                if not self.replica.departing:
                    self._journal.event("LeaveRequested", WHY[how], at_rank=rank)
                self.handle(events.LeaveRequested(how))
            case RankFetchFailed(_, base, reason):
                self.handle(events.FetchFailed(base, reason))
            case RankCheckpointed(rank, state):
                self._wrote(rank, state)
            case RankCheckpointFailed(rank, state, reason):
                if self._written[0] == state:
                    self._written = (None, set())
                    self._not_written(state, reason, at_rank=rank)

    def token(self, token: CommitToken) -> None:
        self.handle(events.TokenArrived(token))

    def close(self) -> None:
        """Cancel the open request to the lighthouse, and demand no checkpoint any more."""
        for timer in (self._checkpoint_timer, self._leave_timer):
            if timer is not None:
                timer.cancel()
        self.requests.close()

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.RequestGrant(report, pause):
                if report.number and self._about.rules:
                    self._about = replace(self._about, rules={}, data={})  # all agreed with the first grant
                self.requests.send(replace(self._about, report=report), pause)
            case effects.SendToken(token):
                fault_injection.reach("token-second" if token.verdict else "token-first", token.fence.step)
                self._send_token(token)
            case effects.Reduce(fence):
                self._tally = VoteTally(fence, self._settings.ranks, ranks_per_unit=self._settings.ranks_per_unit)
                self._bus.broadcast(effect)
            case effects.StopRing(epoch):
                recent = {e: ranks for e, ranks in self._stopped.items() if e > epoch - KEPT_EPOCHS}
                self._stopped = {**recent, epoch: recent.get(epoch, set())}
                self._bus.broadcast(effect)
            case effects.Fetch():
                self._fetched = {}
                self._bus.broadcast(effect)
            case effects.InstallSnapshot(base):
                self._bus.broadcast(Settled(base, all(self._fetched.values())))
                self._bus.broadcast(effect)
            case effects.BufferUpdate():
                self._settled = None
                self._bus.broadcast(effect)
            case effects.Commit(record) if self._settled is not None and self._settled[0] == record.fence:
                self._bus.broadcast(self._settled[1])
                self._bus.broadcast(effect)
            case effects.WriteCheckpoint(state):
                self._written = (state, set())
                self._bus.broadcast(effect)
                asyncio.get_running_loop().call_later(self._settings.write_s, self._write_overdue, state)
            case _:
                self._bus.broadcast(effect)

    def _vote(self, vote: Vote) -> None:
        """Count a rank's vote. When all are in, the replica holds the reduced gradient."""
        if self._tally is None:
            return
        if not self._tally.votes:
            patience_s = VOTES * self._settings.token_timeout_s
            asyncio.get_running_loop().call_later(patience_s, self._votes_overdue, self._tally.fence, patience_s)
        self._tally = self._tally.add(vote)
        if vote.left_out and vote.fence == self._tally.fence:
            self._bus.broadcast(ShardLeftOut(vote.fence))
        grant = self.replica.grant
        if not self._tally.complete or grant is None:
            return
        settings = self._settings
        record = self._tally.record(
            prev=self.replica.ring_state.lineage,
            ring=grant.ring,
            total=grant.total,
            wanted=grant.units,
            intervention=settings.intervention,
            chunk_bytes=settings.chunk_bytes,
            widths=grant.narrower(settings.nominal, settings.ranks_per_unit),
            ring_widths=grant.widths,
            mads=settings.norm_mads,
        )
        fence, digest = self._tally.fence, self._tally.state_digest
        waited_s, copied = max(v.waited_s for v in self._tally.votes), sum(v.copied for v in self._tally.votes)
        voted, self._voted = self._voted, time.monotonic()
        step_s = self._voted - voted if voted else 0.0
        refused = tuple((rank, vote.rank) for vote in self._tally.votes for rank in vote.refused)
        late = any(vote.late for vote in self._tally.votes)
        settled = Settled(self.replica.state, self._tally.kept, waited_s, copied, step_s, refused, late)
        self._settled = fence, settled
        self._tally = None
        if record is None:
            why = f"the ranks of this replica saw different contributors, or weights of the same units, at {fence}"
            self._bus.broadcast(effects.Exit(75, why))
            return
        reduced = events.Reduced(fence, record, digest)
        base = self.replica.fetching
        if base is None or settings.catchup_wait_s <= 0 or base == self._fetch_waited_for:
            self.handle(reduced)
            return
        self._fetch_waited_for = base
        self._waiting_vote = reduced
        asyncio.get_running_loop().call_later(settings.catchup_wait_s, self._release, reduced)

    def _votes_overdue(self, fence: AttemptId, waited_s: float) -> None:
        """End the replica: a rank holds its sum, and another does not although every ring has had its time."""
        tally = self._tally
        if tally is None or tally.fence != fence or not tally.votes:
            return
        late = sorted(set(range(self._settings.ranks)) - {vote.rank for vote in tally.votes})
        step = f"step {fence.step} of epoch {fence.epoch}"
        self._bus.end(f"ranks {late} have not voted on {step} within {waited_s:g} s", EXIT_RETRYABLE)

    def _release(self, reduced: events.Reduced) -> None:
        """Count the vote that was held back for a fetch.

        The other replicas wait for it at the end of their step.
        """
        if self._waiting_vote is reduced:
            self._waiting_vote = None
            self.handle(reduced)

    async def clear_to_ask(self, report: Report) -> None:
        """Wait until ``report`` may be sent: its broken ring is left, and the end of the job is in the logs."""
        if report.after:
            await self._ring_left(report.after)
        if report.state.step >= self.replica.steps:
            await self.concluded.wait()

    async def _ring_left(self, epoch: int) -> None:
        """Wait until all ranks have left the ring of an epoch; a rank that does not ends the replica."""
        while len(self._stopped.get(epoch, ())) < self._settings.ranks:
            self._all_stopped.clear()
            try:
                async with asyncio.timeout(self._settings.token_timeout_s):
                    await self._all_stopped.wait()
            except TimeoutError:
                late = sorted(set(range(self._settings.ranks)) - self._stopped.get(epoch, set()))
                limit_s = self._settings.token_timeout_s
                why = f"ranks {late} have not left the ring of epoch {epoch} within {limit_s:g} s"
                self._bus.end(why, EXIT_RETRYABLE)

    def _wrote(self, rank: int, state: StateId) -> None:
        wanted, ranks = self._written
        if wanted != state:
            return
        ranks.add(rank)
        if len(ranks) == self._settings.ranks:
            self._written = (None, set())
            self._journal.event("CheckpointWritten", "all ranks wrote their shards", step=state.step)
            self.handle(events.CheckpointWritten(state))

    def _not_written(self, state: StateId, reason: str, **facts: object) -> None:
        """Report that a checkpoint failed here: the next token says so, and after a pause it is tried again."""
        self._journal.event("CheckpointFailed", reason, step=state.step, **facts)
        self.handle(events.CheckpointFailed(state, reason))
        asyncio.get_running_loop().call_later(
            self._settings.write_again_s, self.handle, events.CheckpointOverdue()
        )

    def _write_overdue(self, state: StateId) -> None:
        """Give a checkpoint up whose disk seems to hang, so that another replica writes one.

        If it still comes, it counts.
        """
        if self._written[0] == state:
            late = sorted(set(range(self._settings.ranks)) - self._written[1])
            self._not_written(
                state, f"ranks {late} have not written within {self._settings.write_s:g} s", late=late
            )


def _record_lost(replica: Replica, event: events.Event) -> Replica:
    """Failpoint "record-lost": return the replica without the record in doubt when its ring breaks."""
    in_doubt = isinstance(event, events.RingBroken) and replica.forwarded
    if in_doubt and fault_injection.hit("record-lost", replica.fence.step):
        return replace(replica, forwarded=False, record=None)
    return replica


def initial(
    me: int,
    incarnation: str,
    steps: int,
    state: StateId,
    policy: ReplicaPolicy = DEFAULT,
    requested_checkpoint: int = 0,
) -> Replica:
    """Return a replica that is about to check in.

    Args:
        state: initial weights, or what it found on its machine.
        requested_checkpoint: demand a checkpoint of a state of that many steps or more; 0: no demand.

    Returns:
        A replica in phase ASKING, without a grant.
    """
    return Replica(me, incarnation, steps, state, state, policy, requested_checkpoint=requested_checkpoint)
