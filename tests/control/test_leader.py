import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ft_hsdp.control import grant_requests
from ft_hsdp.control import leader as control
from ft_hsdp.control.leader import Leader, LeaderSettings
from ft_hsdp.core import effects, state_id
from ft_hsdp.core.commit import AttemptId, CommitToken, Contribution, Vote
from ft_hsdp.core.grant import Answer, Continue, Finish, Grant, Member, Report
from ft_hsdp.core.replica_state import DEFAULT, Phase, ReplicaPolicy
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import (
    QuorumRequest,
    RankBroken,
    RankCheckpointed,
    RankCheckpointFailed,
    RankFetched,
    RankFetchFailed,
    RankLeaves,
    RankShown,
    RankStopped,
    Settled,
    Wait,
)
from tests.support.waiting import async_until

STATE = StateId(0, 0, "0" * 32)
OTHER = StateId(1, 3, "1" * 32)
SETTINGS = LeaderSettings(
    ranks=2,
    intervention="none",
    chunk_bytes=64,
    lease_s=60.0,
    answer_wait_s=30.0,
    join_timeout_s=30.0,
    token_timeout_s=30.0,
)


class Lighthouse:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asks: list[QuorumRequest] = []
        self.cancelled = 0
        self.answers: asyncio.Queue[Answer | Wait | Exception] = asyncio.Queue()

    async def ask(self, ask: QuorumRequest) -> Answer | Wait:
        self.asks.append(ask)
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


class Down(Lighthouse):
    """Is unreachable after the answers that it was given."""

    async def ask(self, ask: QuorumRequest) -> Answer | Wait:
        self.asks.append(ask)
        if self.answers.empty():
            raise LighthouseUnreachable("down")
        answer = self.answers.get_nowait()
        assert not isinstance(answer, Exception)
        return answer


class Scene:
    """A leader among fakes, and the bus to its ranks."""

    def __init__(
        self, folder: Path, lighthouse: Lighthouse | None = None, rules: ReplicaPolicy = DEFAULT, **settings: Any
    ) -> None:
        self.lighthouse = lighthouse or Lighthouse()
        self.orders: list[object] = []
        self.tokens: list[CommitToken] = []
        self.ended: list[tuple[str, int]] = []
        self._journal = folder / "events.jsonl"
        self._told = Journal(self._journal)
        about = QuorumRequest(Report(0, "0-x-0", STATE, 1), ("r0", "r1"), ("s0", "s1"), "hash", "layout")
        self.leader = Leader(
            control.initial(0, "0-x-0", 9, STATE, rules),
            about,
            self.lighthouse,  # type: ignore[arg-type]
            replace(SETTINGS, **settings),
            self,
            self.tokens.append,
            self._told,
        )

    def broadcast(self, order: object) -> None:
        self.orders.append(order)

    def end(self, reason: str, code: int) -> None:
        self.ended.append((reason, code))

    def events(self, name: str) -> list[dict[str, Any]]:
        self._told.flush()
        rows = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [r for r in rows if r["event"] == name]

    def named(self, kind: type) -> list[Any]:
        return [o for o in self.orders if isinstance(o, kind)]

    async def until(self, ready: Callable[[], Any], what: str) -> None:
        await async_until(ready, what, 5.0, lambda: f"orders: {self.orders}")

    async def granted(self, given: Grant) -> None:
        if not self.lighthouse.asks:
            self.leader.start()
        self.lighthouse.answers.put_nowait(given)
        await self.until(lambda: self.leader.replica.grant == given, "the grant is adopted")

    def vote(
        self, rank: int, fence: AttemptId, members: tuple[int, ...] = (0,), digest: str = "d", **more: Any
    ) -> None:
        batches = tuple(Contribution(m, 1, m, 0, loss=float(rank)) for m in members)
        self.leader.received(Vote(rank, fence, f"{digest}{rank}", 2.0, batches, **more))


def grant(epoch: int, *members: int, behind: tuple[int, ...] = (), base: StateId = STATE) -> Grant:
    named = tuple(
        Member(m, f"{m}-x-0", "behind" if m in behind else "contribute", (f"r{m}",) * 2, (f"s{m}",) * 2)
        for m in members
    )
    return Grant(1, epoch, base, named, 2, "test")


async def one_step(s: Scene) -> None:
    await s.granted(grant(1, 0))
    s.vote(0, AttemptId(1, 1, 0))
    s.vote(1, AttemptId(1, 1, 0))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Callable[..., Scene]]:
    """Makes leaders, which are closed at the end."""
    made: list[Scene] = []

    def make(*fakes: Any, **settings: Any) -> Scene:
        made.append(Scene(tmp_path, *fakes, **settings))
        return made[-1]

    yield make
    for one in made:
        one.leader.close()


@pytest.fixture
def s(scene: Callable[..., Scene]) -> Scene:
    return scene()


def both_vote(s: Scene, fence: AttemptId, members: tuple[int, ...] = (0,), **more: Any) -> None:
    for rank in (0, 1):
        s.vote(rank, fence, members, **more)


def both_stopped(s: Scene) -> None:
    for rank in (0, 1):
        s.leader.received(RankStopped(rank, 1))


async def test_a_checkpoint_is_written_when_its_time_is_up(scene: Callable[..., Scene]) -> None:
    s = scene(checkpoint_s=0.02)
    await s.granted(grant(1, 0))
    await s.until(lambda: s.leader.replica.requested_checkpoint == 1, "a demand for the next state")
    both_vote(s, AttemptId(1, 1, 0))
    (written,) = s.named(effects.WriteCheckpoint)
    assert written.state.step == 1
    await s.until(lambda: s.leader.replica.requested_checkpoint == 2, "the time counts again")


async def test_a_step_alone_from_check_in_to_the_next_ask(s: Scene) -> None:
    await s.granted(grant(1, 0))
    ask = s.lighthouse.asks[0]
    assert (ask.ring, ask.state, ask.config_hash, ask.layout) == (("r0", "r1"), ("s0", "s1"), "hash", "layout")
    fence = AttemptId(1, 1, 0)
    assert s.orders == [
        effects.Configure(grant(1, 0)),
        effects.RunBatch(1, ((0, 1),), 1),
        effects.Reduce(fence, "contribute", "0" * 32, ((0, 1),)),
    ]
    s.vote(1, fence)
    assert not s.named(effects.Commit), "committed with one vote of two"
    s.vote(0, fence)
    (commit,) = s.named(effects.Commit)
    record = commit.record
    assert (record.contributors, record.loss, record.norm) == ((0,), 0.5, 2.0)
    assert (record.chunk_bytes, record.ring, record.total) == (64, (0,), 2)
    assert s.orders[-2:] == [commit, effects.RunBatch(2, ((0, 1),), 1)]
    await s.until(lambda: len(s.lighthouse.asks) == 2, "asks for step 2")
    assert s.lighthouse.asks[1].report.state == record.state_id
    s.lighthouse.answers.put_nowait(Continue(1, 2))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence == AttemptId(1, 2, 0), "step 2")


async def test_after_a_broken_ring_it_asks_once_all_ranks_have_left_it(s: Scene) -> None:
    await s.granted(grant(1, 0, 1))
    s.leader.received(RankBroken(1, 1, "replica 1 is gone", suspect=1))
    s.leader.received(RankBroken(0, 1, "and again"))
    assert s.named(effects.StopRing) == [effects.StopRing(1, "the ring broke")]
    s.leader.received(RankStopped(0, 1))
    s.leader.received(RankStopped(0, 1))
    s.leader.received(RankStopped(1, 7))
    await asyncio.sleep(0.05)
    assert len(s.lighthouse.asks) == 1, "asked while rank 1 was still in the ring"
    s.leader.received(RankStopped(1, 1))
    await s.until(lambda: len(s.lighthouse.asks) == 2, "asks")
    assert s.lighthouse.asks[1].report.after == 1
    (event,) = s.events("RingBroken")
    assert (event["suspect"], event["at_rank"], event["epoch"]) == (1, 1, 1)


async def test_a_rank_that_left_before_the_order_counts(s: Scene) -> None:
    """Its report may overtake the leader's own decision to leave."""
    await s.granted(grant(1, 0, 1))
    s.leader.received(RankStopped(0, 1))
    s.leader.received(RankStopped(1, 1))
    s.leader.received(RankBroken(1, 1, "gone"))
    await s.until(lambda: len(s.lighthouse.asks) == 2, "asks")


async def test_a_planned_end_is_no_failure_and_other_epochs_do_not_matter(s: Scene) -> None:
    await s.granted(grant(4, 0, 1))
    s.leader.received(RankBroken(1, 3, "an old ring"))
    assert not s.named(effects.StopRing)
    s.leader.received(RankBroken(1, 4, "a newer epoch", planned=True))
    assert s.named(effects.StopRing)
    assert not s.events("RingBroken")


async def test_the_lease_is_used_while_the_lighthouse_is_away(scene: Callable[..., Scene]) -> None:
    s = scene(Down())
    await s.granted(grant(1, 0))
    both_vote(s, AttemptId(1, 1, 0))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence == AttemptId(1, 2, 0), "step 2 without an answer")
    (event,) = s.events("LeaseUsed")
    assert (event["epoch"], event["step"], event["reason"]) == (1, 2, "down")


async def test_a_replica_that_was_started_again_waits_for_its_lighthouse_as_long_as_it_takes(scene) -> None:
    s = scene(Down(), join_timeout_s=None, reach_s=0.0)
    s.leader.start()
    await s.until(lambda: len(s.lighthouse.asks) > 2, "it goes on asking")
    assert not s.named(effects.Exit)
    assert len(s.events("LighthouseAwaited")) == 1
    s.lighthouse.answers.put_nowait(grant(1, 0))
    await s.until(lambda: s.named(effects.Reduce), "it joins")


async def test_at_the_end_of_the_lease_the_ring_is_left_on_purpose_and_nobody_exits(scene) -> None:
    s = scene(Down(), lease_s=0.0, answer_wait_s=0.05)
    await s.granted(grant(1, 0, 1))
    both_vote(s, AttemptId(1, 1, 0), (0, 1))
    await s.until(lambda: s.tokens, "it votes")
    s.leader.token(replace(s.tokens[0], equal=(0, 1)))
    await s.until(lambda: s.named(effects.StopRing), "it leaves its ring")
    assert [r.fence for r in s.named(effects.Reduce)] == [AttemptId(1, 1, 0)], "went on without a lease"
    (event,) = s.events("LeaseEnded")
    assert (event["epoch"], event["step"]) == (1, 2)
    both_stopped(s)
    s.lighthouse.answers.put_nowait(grant(2, 0, 1, base=s.leader.replica.state))
    await s.until(
        lambda: s.named(effects.Reduce)[-1].fence == AttemptId(2, 2, 0), "goes on when there is an answer"
    )
    assert s.lighthouse.asks[-1].report.after == 1
    assert not s.named(effects.Exit)
    assert not s.ended


async def test_a_step_that_is_longer_than_the_lease_does_not_end_it(scene: Callable[..., Scene]) -> None:
    """Its first ask has the usual time for an answer."""
    s = scene(lease_s=0.0, answer_wait_s=5.0)
    await s.granted(grant(1, 0, 1))
    both_vote(s, AttemptId(1, 1, 0), (0, 1))
    s.leader.token(replace(s.tokens[0], equal=(0, 1)))
    await s.until(lambda: len(s.lighthouse.asks) == 2, "asks for step 2")
    s.leader.requests.late()
    assert s.leader.replica.phase is Phase.ASKING
    s.lighthouse.answers.put_nowait(Continue(1, 2))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence == AttemptId(1, 2, 0), "step 2")
    assert not s.named(effects.StopRing)
    assert not s.events("LeaseEnded")


async def test_who_never_joined_ends_with_69(scene: Callable[..., Scene]) -> None:
    s = scene(Down(), join_timeout_s=0.3)
    s.leader.start()
    await asyncio.sleep(0.1)
    assert not s.orders
    await s.until(lambda: s.orders, "the end")
    assert isinstance(s.orders[0], effects.Exit)
    assert (s.orders[0].code, "down" in s.orders[0].reason) == (69, True)


@pytest.mark.parametrize("restarted", [False, True])
async def test_while_it_waits_for_others_an_outage_counts_from_its_own_begin(scene, restarted: bool) -> None:
    s = scene(join_timeout_s=None if restarted else 10.0, reach_s=10.0)
    wait, down = Wait("for replica 1"), LighthouseUnreachable("down")
    hiccup: list[tuple[int, Wait | Exception]] = [(3600, wait), (20, down), (9, down)]
    outage = [*hiccup, (2, down)]
    with mock.patch.multiple(grant_requests, time=mock.DEFAULT, RETRY_S=0.0) as patched:
        clock = patched["time"].monotonic
        clock.return_value = 0.0

        def told() -> list[str]:
            given_up = [order.reason for order in s.named(effects.Exit)]
            return [row["reason"] for row in s.events("LighthouseAwaited")] if restarted else given_up

        async def after(seconds: int, said: Wait | Exception) -> int:
            clock.return_value, asks = clock.return_value + seconds, len(s.lighthouse.asks)
            s.lighthouse.answers.put_nowait(said)
            await s.until(lambda: len(s.lighthouse.asks) > asks, "it asks again")
            return len(told())

        s.leader.start()
        await s.until(lambda: s.lighthouse.asks, "it asks")
        assert [await after(*each) for each in hiccup] == [0, 0, 0]
        assert [await after(*each) for each in outage + outage] == [0, 0, 0, 1, 1, 1, 1, 2]
        assert ["for 11 s" in why for why in told()] == [True, True]
        assert all(ask == s.lighthouse.asks[0] for ask in s.lighthouse.asks), "with the same report"


async def test_a_token_that_does_not_come_round_breaks_the_ring(scene: Callable[..., Scene]) -> None:
    s = scene(token_timeout_s=0.1)
    await s.granted(grant(1, 0, 1))
    both_vote(s, AttemptId(1, 1, 0), (0, 1))
    assert s.leader.replica.phase is Phase.VOTED
    (token,) = s.tokens
    assert (token.fence, token.verdict, token.yes) == (AttemptId(1, 1, 0), False, True)
    await s.until(lambda: s.named(effects.StopRing), "the ring is left")
    assert "no verdict on step 1" in s.events("RingBroken")[0]["cause"]
    assert s.leader.replica.prepared is not None, "the record in doubt was dropped"


async def test_a_token_in_time_is_followed_by_no_alarm(scene: Callable[..., Scene]) -> None:
    s = scene(token_timeout_s=0.1)
    await s.granted(grant(1, 0, 1))
    both_vote(s, AttemptId(1, 1, 0), (0, 1))
    s.leader.token(s.tokens[0])
    assert len(s.named(effects.Commit)) == 1
    assert s.tokens[1] == replace(s.tokens[0], verdict=True)
    await asyncio.sleep(0.2)
    assert not s.named(effects.StopRing)


async def test_a_new_ask_cancels_the_old_one(s: Scene) -> None:
    await one_step(s)
    await s.until(lambda: len(s.lighthouse.asks) == 2, "asks for step 2")
    s.leader.received(RankBroken(0, 1, "gone"))
    both_stopped(s)
    await s.until(lambda: len(s.lighthouse.asks) == 3, "asks again")
    assert s.lighthouse.cancelled == 1
    assert [a.report.after for a in s.lighthouse.asks] == [0, 0, 1]
    s.leader.close()
    await asyncio.sleep(0.01)
    assert s.lighthouse.cancelled == 2


async def test_a_shown_grant_is_adopted(s: Scene) -> None:
    await s.granted(grant(1, 0, 1))
    s.leader.received(RankShown(1, grant(2, 0, 1)))
    s.leader.received(RankShown(0, grant(2, 0, 1)))
    assert [o.grant.epoch for o in s.named(effects.Configure)] == [1, 2]


@pytest.mark.parametrize("kept", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("late", [(False, False), (False, True)])
async def test_a_copy_that_a_rank_has_left_out_is_settled_nowhere(s: Scene, kept, late) -> None:
    await s.granted(grant(1, 0))
    for rank in (0, 1):
        s.vote(rank, AttemptId(1, 1, 0), kept=kept[rank], late=late[rank])
    commit = next(i for i, o in enumerate(s.orders) if isinstance(o, effects.Commit))
    assert s.orders[commit - 1] == Settled(STATE, all(kept), late=any(late)), "told before the next copy is made"


@pytest.mark.parametrize("kept", [(True, True), (True, False)])
async def test_what_was_fetched_is_settled_if_all_ranks_keep_it(s: Scene, kept: tuple[bool, bool]) -> None:
    await s.granted(grant(2, 0, 1, behind=(0,), base=OTHER))
    both_vote(s, AttemptId(2, 4, 0), (1,), kept=True)  # of what it holds while it is behind
    s.leader.token(replace(s.tokens[-1], verdict=True, equal=(1,)))
    for rank in (0, 1):
        s.leader.received(RankFetched(rank, OTHER, kept[rank]))
    assert s.named(effects.InstallSnapshot)
    assert s.named(effects.Commit), "the step that was committed meanwhile"
    assert s.named(Settled) == [Settled(OTHER, all(kept))]


async def test_a_fetch_is_over_when_all_ranks_have_their_shards(s: Scene) -> None:
    await s.granted(grant(2, 0, 1, behind=(0,), base=OTHER))
    (order,) = s.named(effects.Fetch)
    assert (order.base, [m.replica for m in order.donors]) == (OTHER, [1])
    s.leader.received(RankFetched(1, OTHER))
    s.leader.received(RankFetched(1, OTHER))
    s.leader.received(RankFetched(0, STATE))
    assert not s.named(effects.InstallSnapshot)
    s.leader.received(RankFetched(0, OTHER))
    assert s.named(effects.InstallSnapshot) == [effects.InstallSnapshot(OTHER)]
    assert s.leader.replica.state == OTHER
    assert len(s.events("LeftBehind")) == 1


async def test_a_fetch_that_failed_ends_the_replica(s: Scene) -> None:
    await s.granted(grant(2, 0, 1, behind=(0,), base=OTHER))
    s.leader.received(RankFetchFailed(1, STATE, "of an older fetch"))
    assert not s.named(effects.Exit)
    s.leader.received(RankFetchFailed(1, OTHER, "replica 1: gone"))
    (end,) = s.named(effects.Exit)
    assert (end.code, "replica 1: gone" in end.reason) == (75, True)


@pytest.mark.parametrize("written", [True, False])
async def test_the_final_state_is_reported_once_it_is_written_down(s: Scene, written: bool) -> None:
    end = StateId(1, 9, "9" * 32)
    s.leader.replica = control.initial(0, "0-x-0", 9, end)
    if written:
        s.leader.concluded.set()
    s.leader.start()
    await asyncio.sleep(0.05)
    assert bool(s.lighthouse.asks) == written
    s.leader.concluded.set()
    s.lighthouse.answers.put_nowait(Finish())
    await s.until(lambda: s.named(effects.Exit), "the end")
    assert s.named(effects.Exit)[0].code == 0


async def test_a_leader_without_a_descriptor_to_call_the_lighthouse_ends_and_names_its_limit(s: Scene) -> None:
    """The lighthouse may be well: to wait for it would hold up the ring for as long as the lease."""
    s.leader.start()
    lacking = LighthouseUnreachable("no connection")
    lacking.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    s.lighthouse.answers.put_nowait(lacking)
    await s.until(lambda: s.ended, "it ends")
    ((why, code),) = s.ended
    assert "RLIMIT_NOFILE" in why
    assert code == 75


# What is compared, written and waited for.


@pytest.mark.parametrize(("mine", "compared"), [("a", ((0, state_id.digest(["a", "b"])),)), ("", ())])
async def test_the_digests_of_all_ranks_are_compared_in_one_if_all_have_one(s, mine, compared) -> None:
    await s.granted(grant(1, 0, 1))
    s.vote(1, AttemptId(1, 1, 0), (0, 1), state_digest="b")
    s.vote(0, AttemptId(1, 1, 0), (0, 1), state_digest=mine)
    assert s.tokens[0].digests == compared


async def test_a_checkpoint_is_whole_when_all_ranks_have_written_it(scene: Callable[..., Scene]) -> None:
    s = scene(rules=ReplicaPolicy(checkpoint_every=1))
    await one_step(s)
    (order,) = s.named(effects.WriteCheckpoint)
    commit = next(i for i, o in enumerate(s.orders) if isinstance(o, effects.Commit))
    assert s.orders[commit + 1] == order, "written before the step was applied, or after the next batch began"
    assert order.state == s.leader.replica.state
    s.leader.replica = replace(s.leader.replica, checkpoint_failed=True)
    s.leader.received(RankCheckpointed(0, order.state))
    s.leader.received(RankCheckpointed(0, order.state))
    s.leader.received(RankCheckpointed(1, STATE))
    assert not s.events("CheckpointWritten")
    s.leader.received(RankCheckpointed(1, order.state))
    assert len(s.events("CheckpointWritten")) == 1
    assert not s.leader.replica.checkpoint_failed


async def test_who_is_told_to_leave_writes_its_state_and_leaves_although_no_ring_forms(scene) -> None:
    s = scene(rules=ReplicaPolicy(keep_last=True), leave_s=0.05)
    await one_step(s)
    s.leader.received(RankLeaves(1))
    s.leader.received(RankBroken(1, 1, "its neighbour is gone"))
    both_stopped(s)
    await s.until(lambda: s.named(effects.WriteCheckpoint), "a checkpoint")
    state = s.leader.replica.state
    assert state.step == 1
    assert not s.named(effects.Exit)
    for rank in (0, 1):
        s.leader.received(RankCheckpointed(rank, state))
    await s.until(lambda: s.named(effects.Exit), "the end")


async def test_a_checkpoint_that_nobody_could_write_is_tried_again_after_a_pause(scene) -> None:
    s = scene(rules=ReplicaPolicy(checkpoint_every=1), write_again_s=0.05)
    await one_step(s)
    (order,) = s.named(effects.WriteCheckpoint)
    s.leader.received(RankCheckpointFailed(1, order.state, "no space left"))
    assert s.leader.replica.requested_checkpoint == 0
    await s.until(lambda: s.leader.replica.requested_checkpoint == 2, "the next state is demanded")


async def test_a_checkpoint_that_hangs_is_given_to_another_and_counts_if_it_comes(scene) -> None:
    s = scene(rules=ReplicaPolicy(checkpoint_every=1), write_s=0.05)
    await one_step(s)
    (order,) = s.named(effects.WriteCheckpoint)
    s.leader.received(RankCheckpointed(0, order.state))
    await s.until(lambda: s.leader.replica.checkpoint_failed, "it is overdue")
    (event,) = s.events("CheckpointFailed")
    assert (event["late"], event["step"]) == ([1], 1)
    s.leader.received(RankCheckpointed(1, order.state))
    assert len(s.events("CheckpointWritten")) == 1
    assert not s.leader.replica.checkpoint_failed


async def test_the_loss_of_a_writer_is_said_with_what_follows(scene: Callable[..., Scene]) -> None:
    s = scene(rules=ReplicaPolicy(checkpoint_every=1))
    s.leader.replica = replace(s.leader.replica, writers=((1, "1-x-0"),), checkpoint_missing=True)
    await s.granted(grant(1, 0))
    (event,) = s.events("CheckpointFailed")
    assert event["replicas"] == [1]
    assert s.leader.replica.requested_checkpoint == 1


async def test_a_slow_fetch_is_waited_for_once_and_no_longer_than_the_limit(scene: Callable[..., Scene]) -> None:
    s = scene(catchup_wait_s=0.05)
    await s.granted(grant(2, 0, 1, behind=(0,), base=OTHER))
    both_vote(s, AttemptId(2, 4, 0), (1,))
    await s.until(lambda: s.tokens, "the vote goes on without the base")
    s.leader.token(s.tokens[0])
    assert len(s.named(effects.BufferUpdate)) == 1
    s.lighthouse.answers.put_nowait(Continue(2, 5))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence == AttemptId(2, 5, 0), "step 5")
    both_vote(s, AttemptId(2, 5, 0), (1,))
    assert [t.fence.step for t in s.tokens if not t.verdict] == [4, 5], "it waited for the same fetch again"


async def test_a_lighthouse_that_hangs_costs_no_step_more_than_the_last_one_took(scene) -> None:
    """It is waited for once, for as long as a step took; later asks are held back until it answers."""
    s = scene(answer_wait_s=30.0)
    await s.granted(grant(1, 0))
    for step in range(1, 6):
        both_vote(s, AttemptId(1, step, 0))
        await s.until(lambda n=step: s.named(effects.Reduce)[-1].fence.step == n + 1, f"step {step + 1}")
    assert len(s.lighthouse.asks) == 2, "asked again although an answer was owed"
    assert s.lighthouse.cancelled == 0
    assert not s.events("LeaseUsed"), "nothing was away for long"
    s.lighthouse.answers.put_nowait(Continue(1, 2))
    await s.until(lambda: not s.leader.requests.overdue, "the late answer")
    assert [r.fence.step for r in s.named(effects.Reduce)] == [1, 2, 3, 4, 5, 6]
    both_vote(s, AttemptId(1, 6, 0))
    await s.until(lambda: len(s.lighthouse.asks) == 3, "the next step is asked for")
    assert s.lighthouse.asks[2].report.step == 7


async def test_an_answer_that_is_owed_too_long_is_asked_for_anew(scene: Callable[..., Scene]) -> None:
    s = scene(answer_wait_s=0.1)
    await one_step(s)
    await s.until(lambda: s.named(effects.Reduce)[-1].fence.step == 2, "step 2")
    await asyncio.sleep(0.15)
    both_vote(s, AttemptId(1, 2, 0))
    await s.until(lambda: len(s.lighthouse.asks) == 3, "the newest state is reported")
    assert s.lighthouse.asks[2].report.step == 3
    assert len(s.events("LeaseUsed")) == 1


async def test_a_grant_that_was_owed_is_adopted_late(scene: Callable[..., Scene]) -> None:
    """A replica that joins is let in although the lighthouse is slower than a step."""
    s = scene(answer_wait_s=30.0)
    await s.granted(grant(1, 0))
    for step in (1, 2):
        both_vote(s, AttemptId(1, step, 0))
        await s.until(lambda n=step: s.named(effects.Reduce)[-1].fence.step == n + 1, f"step {step + 1}")
    s.lighthouse.answers.put_nowait(grant(2, 0, 1, behind=(1,), base=s.leader.replica.state))
    await s.until(lambda: s.leader.replica.grant.epoch == 2, "the grant is adopted")
    assert s.named(effects.Reduce)[-1].fence == AttemptId(2, 3, 0)


async def test_a_broken_ring_waits_for_no_answer_that_is_owed(scene: Callable[..., Scene]) -> None:
    s = scene(answer_wait_s=30.0)
    await s.granted(grant(1, 0))
    both_vote(s, AttemptId(1, 1, 0))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence.step == 2, "step 2 without an answer")
    s.leader.received(RankBroken(0, 1, "gone"))
    both_stopped(s)
    await s.until(lambda: len(s.lighthouse.asks) == 3, "asks for another ring")
    assert s.lighthouse.asks[2].report.after == 1


async def test_an_ask_that_was_held_back_is_sent_once_the_lease_is_over(scene: Callable[..., Scene]) -> None:
    s = scene(lease_s=0.3, answer_wait_s=30.0)
    await s.granted(grant(1, 0))
    both_vote(s, AttemptId(1, 1, 0))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence.step == 2, "step 2 on the lease")
    await asyncio.sleep(0.4)
    both_vote(s, AttemptId(1, 2, 0))
    await asyncio.sleep(0.05)
    assert s.leader.replica.phase is Phase.ASKING, "trained on beyond its lease"
    s.lighthouse.answers.put_nowait(Continue(1, 2))
    await s.until(lambda: len(s.lighthouse.asks) == 3, "what was held back is sent")
    s.lighthouse.answers.put_nowait(Continue(1, 3))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence.step == 3, "step 3")


async def test_ranks_that_do_not_leave_a_broken_ring_end_the_replica(scene: Callable[..., Scene]) -> None:
    """The leader waits for all of them before it asks; one that hangs would be waited for without an end."""
    s = scene(token_timeout_s=0.1)
    await s.granted(grant(1, 0, 1))
    s.leader.received(RankBroken(0, 1, "gone"))
    s.leader.received(RankStopped(0, 1))
    await s.until(lambda: s.ended, "it ends")
    ((why, code),) = s.ended
    assert (code, why.startswith("ranks [1]")) == (75, True)


async def test_a_rank_that_does_not_vote_ends_the_replica(scene: Callable[..., Scene]) -> None:
    """Not one whose replica has gone on to another attempt meanwhile."""
    s = scene(token_timeout_s=0.05)
    await s.granted(grant(1, 0))
    both_vote(s, AttemptId(1, 1, 0))
    await s.until(lambda: len(s.lighthouse.asks) == 2, "step 2")
    s.lighthouse.answers.put_nowait(Continue(1, 2))
    await s.until(lambda: s.named(effects.Reduce)[-1].fence == AttemptId(1, 2, 0), "step 2")
    await asyncio.sleep(0.2)
    assert not s.ended
    s.vote(1, AttemptId(1, 2, 0))
    await s.until(lambda: s.ended, "it ends")
    ((why, code),) = s.ended
    assert (code, why.startswith("ranks [0]")) == (75, True)
