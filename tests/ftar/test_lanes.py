import asyncio
import gc
import os
import threading

import pytest

from ft_hsdp.core.grant import Grant
from ft_hsdp.errors import FTARError, LocalResourceError, PeerDead, StaleEpoch
from ft_hsdp.ftar.lane import GroupState
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.ftar.transport.tcp import Tcp
from tests.support.ftar.ring_helpers import WideRank, WideRing, cut, error, flat, lane_of, values
from tests.support.waiting import async_until


@pytest.mark.parametrize("widths", [(4, 3, 2), (8, 7)])
async def test_works_in_any_order_of_the_lanes_do_not_wait_in_a_circle(widths: tuple[int, ...]) -> None:
    """Each rank begins its lanes in another order; each lane goes on as soon as all of its members are there."""
    async with WideRing(widths, "auto") as ring:
        given = await ring.form(1)
        works = []
        for turn, rank in enumerate(ring.ranks):
            plan = rank.lanes.plan(given.widths)
            buckets = [flat(b, rank.width, rank.rank) for b in values(rank.replica)]
            order = list(range(len(plan.lanes)))[:: -1 if turn % 2 else 1]
            for lane in order:  # all buckets of one lane before those of the next
                works += rank.reduce(given, buckets, only=[lane])[1]
        await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, works)), 30)


@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2, 2)])
async def test_members_of_a_ring_call_it_the_same_and_know_who_is_to_their_left(widths: tuple[int, ...]) -> None:
    async with WideRing(widths) as ring:
        await ring.check(await ring.form(1))
        told = {(r.replica, r.rank): {t.name: t for t in r.group.traces()} for r in ring.ranks}
        for place, rings in told.items():
            assert rings
            for name, here in rings.items():
                assert here.left is not None
                there = told[here.left][name]
                assert here.left.replica == (place[0] - 1) % len(widths)
                assert (here.joined, here.done, here.received) == (there.joined, there.joined, there.sent)
        ring.ranks[0].group.stop(1, "the replica leaves")
        assert not ring.ranks[0].group.traces()


async def test_the_widths_change_from_epoch_to_epoch() -> None:
    """Replica 1 has four ranks, then three, then four again; the one ring of each rank comes back."""

    def threads() -> int:
        return sum(t.name == "ftar" for t in threading.enumerate())

    gc.collect()
    before = threads(), len(os.listdir("/proc/self/fd"))
    async with WideRing((4, 4), "auto") as ring:
        await ring.check(await ring.form(1))
        wide, narrow = ring.replicas[1], ring.replica(1, 3)
        for rank in wide:
            rank.group.stop(1, "the replica shrinks")
        ring.replicas[1] = narrow
        await ring.check(await ring.form(2))
        await ring.check(await ring.form(3))
        for rank in narrow:
            await rank.group.close()
        ring.replicas[1] = wide
        await ring.check(await ring.form(4))
        await async_until(lambda: threads() - before[0] == 8, "lanes that ended leave no thread", 20.0)
        assert all(r.connected == [1, 2, 3, 4] for r in ring.replicas[0])
    gc.collect()
    await async_until(lambda: (threads(), len(os.listdir("/proc/self/fd"))) <= before, "nothing is left", 20.0)


async def test_new_lanes_do_not_wait_for_a_neighbour_that_ended_as_it_connected(monkeypatch) -> None:
    """It has called, and its data connection never comes. The one that follows has fewer ranks."""
    called: list[int] = []

    async def silent(kind: Tcp, edge: Edge, arena: Arena) -> StreamSender:
        called.append(edge.member)
        await asyncio.Event().wait()
        raise AssertionError

    async with WideRing((2, 2), connect_s=120.0) as ring:
        with monkeypatch.context() as patched:
            patched.setattr(Tcp, "dial", silent)
            given = ring.grant(1)
            for rank in ring.ranks:
                rank.group.configure(given)
            await async_until(lambda: len(called) == 4, "all have called and were answered", 20.0)
            await asyncio.gather(*(rank.group.close() for rank in ring.replicas[1]))
            await async_until(lambda: all(rank.broken for rank in ring.replicas[0]), "the others hear of it", 20.0)
        ring.replicas[1] = ring.replica(1, 1)
        await ring.check(await ring.form(2))


async def test_works_of_lanes_that_are_over_are_stale() -> None:
    async with WideRing((4, 3)) as ring:
        given = await ring.form(1)
        rank = ring.replicas[0][1]
        buckets = [flat(b, 4, 1) for b in values(0)]
        ring.replicas[1] = ring.replica(1, 4)
        await ring.form(2)
        _, works = rank.reduce(given, buckets)
        assert all([isinstance(await error(w), StaleEpoch) for w in works])


def numbers(rank: WideRank, given: Grant) -> list[int]:
    """The numbers of a rank's lanes, in the order of its plan."""
    return [lane.ring.number for lane in rank.lanes.plan(given.widths).lanes]


def in_touch_with(rank: WideRank, ring: WideRing, given: Grant) -> list[WideRank]:
    return [r for r in ring.ranks if set(numbers(r, given)) & set(numbers(rank, given))]


@pytest.mark.parametrize("victim", [(0, 0), (0, 2), (1, 2)])
async def test_a_loss_in_one_lane_ends_all_lanes_with_one_verdict(victim: tuple[int, int]) -> None:
    """One rank is cut off in one of its lanes. No rank hears of it twice, and all blame an end of that edge."""
    async with WideRing((4, 3, 3), "auto") as ring:
        given = await ring.form(1)
        works = []
        for rank in ring.ranks:
            if (rank.replica, rank.rank) != victim:
                works += rank.reduce(given, [flat(b, rank.width, rank.rank) for b in values(rank.replica)])[1]
        replica, number = victim
        told = ring.replicas[replica][number]
        lane = lane_of(told.group)
        assert lane.current is not None
        cut(lane.current.right)
        in_touch = in_touch_with(told, ring, given)
        await async_until(lambda: all(r.broken for r in in_touch), "all that share a lane with it know", 20.0)
        blamed = {replica, lane.current.member_at(+1).replica}
        for rank in in_touch:
            assert len(rank.broken) == 1
            assert rank.broken[0].suspect in blamed
            assert not rank.broken[0].planned
            assert all(lane_of(rank.group, number).over for number in numbers(rank, given))
        for rank in ring.ranks:
            rank.group.stop(1, "the leader says so")
        failed = [await error(w) for w in works]
        assert all(e is None or isinstance(e, FTARError) for e in failed)
        assert any(isinstance(e, FTARError) for e in failed)
        await ring.check(await ring.form(2))


async def test_an_error_of_this_rank_is_blamed_on_nobody_else() -> None:
    async with WideRing((4, 3)) as ring:
        given = await ring.form(1)
        here = ring.replicas[0][1]
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the rank would end
        here.group._exhausted(LocalResourceError("no descriptor is left"))
        neighbours = in_touch_with(here, ring, given)
        await async_until(lambda: all(r.broken for r in neighbours), "all that share a lane with it know", 20.0)
        assert {(len(r.broken), r.broken[0].suspect) for r in neighbours} == {(1, 0)}


async def test_a_member_that_leaves_on_purpose_lets_running_lanes_finish() -> None:
    """Rank 1 of replica 1 has done its part in both of its lanes and leaves; replica 0 is still in one of them."""
    async with WideRing((4, 3)) as ring:
        given = await ring.form(1)
        wide, narrow = ring.replicas[0][2], ring.replicas[1][1]
        (running,) = set(numbers(wide, given)) & set(numbers(narrow, given))
        (idle,) = set(numbers(wide, given)) - {running}
        place = numbers(wide, given).index(running)
        _, works = wide.reduce(given, [flat(b, 4, 2) for b in values(0)][:1], only=[place])
        runs, rests = lane_of(wide.group, running), lane_of(wide.group, idle)
        await async_until(lambda: runs.state is GroupState.RUNNING, "it waits", 20.0)
        other = ring.replicas[1][2]  # the other member of the lane that does not run
        assert idle in numbers(other, given)
        other.group.stop(1, "the replica leaves")
        await async_until(lambda: rests.over, "the idle lane is over", 20.0)
        assert not runs.over
        assert not wide.broken, "the owner would stop what still runs"
        place = numbers(narrow, given).index(running)
        works += narrow.reduce(given, [flat(b, 3, 1) for b in values(1)][:1], only=[place])[1]
        assert [await error(w) for w in works] == [None, None]
        await async_until(lambda: wide.broken, "then it ends", 20.0)
        assert [(a.planned, a.cause) for a in wide.broken] == [(True, "the replica leaves")]


async def test_a_lane_of_another_layout_is_refused() -> None:
    """A member that cuts the gradient in another way cannot join a lane of the same number."""
    async with WideRing((4, 3), connect_s=0.3) as ring:
        odd = ring.replicas[1][0]
        odd.lanes._sizes = "other chunks"
        given = ring.grant(1)
        for rank in ring.ranks:
            rank.group.configure(given)
        await async_until(lambda: odd.broken, "nobody takes it in", 30.0)
        assert not odd.connected


async def test_a_dead_lane_is_not_reported_as_a_stuck_one() -> None:
    """While one lane waits for its left neighbour, the other lanes of both are at rest: nobody is blamed."""
    async with WideRing((4, 3), timeout_s=1.0) as ring:
        given = await ring.form(1)
        wide = ring.replicas[0][1]
        assert len(numbers(wide, given)) == 2
        _, works = wide.reduce(given, [flat(values(0)[0], 4, 1)], only=[0])
        failed = [await error(w) for w in works]
        assert [getattr(e, "suspect", None) for e in failed] == [1]
        assert not isinstance(failed[0], PeerDead)
        await async_until(lambda: wide.broken, "it is told", 20.0)
        assert (wide.broken[0].stuck, wide.broken[0].suspect) == (True, 1)
