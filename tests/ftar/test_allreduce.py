import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ft_hsdp.core.ring import OperationKind, ProcessChunk, RingPlan
from ft_hsdp.errors import PeerDead, StaleEpoch
from ft_hsdp.ftar import allreduce
from ft_hsdp.ftar.allreduce import MARKED, AllReduceOrder, Ring
from ft_hsdp.ftar.dataplane.cpu import CpuJob, CpuPlane
from ft_hsdp.ftar.pieces import Values
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.base import Chunk, Transfer
from tests.support.ftar.ring_rig import FLAVOURS, Engines, Flavour, Shape, feed, framing, rig
from tests.support.ftar.ring_values import KEY, entry, same

SETTINGS = Settings(chunk_bytes=64, chunks=4)  # as the Shape of a rig


def alone(plane: CpuPlane | None = None) -> Ring:
    return Ring(1, [4], 0, None, None, plane or CpuPlane(), Settings(chunk_bytes=8, chunks=2))


@pytest.mark.parametrize(("name", "chunk"), [("tcp", 16 << 20), ("shm-registered", 4096), ("shm-remote", 4096)])
def test_it_returns_only_when_its_own_sends_have_drained(name: str, chunk: int) -> None:
    """The sum is here, but the right neighbour has not taken all that it needs of our memory."""
    flavour = next(f for f in FLAVOURS if f.name == name)
    n = 2 * chunk // 4
    with rig(flavour, 2, Shape(chunk)) as ring:
        local = ring.tensor(0, torch.ones(n))
        out = ring.tensor(0, torch.full((n,), float("nan")))
        work = ring.submit(0, AllReduceOrder(KEY, local, out, entry(5)))
        sent = feed(ring, 1, n, framing(ring, 1, n))  # member 1 sends zeros
        expected = torch.cat([torch.zeros(n // 2), torch.ones(n // 2)])
        while not same(out, expected):
            time.sleep(0.01)
        time.sleep(0.1)
        assert not work.done(), "over, but its sends are not"
        how, receiver = framing(ring, 0, n), ring.receivers[1]
        job = CpuPlane().open(None, torch.empty(n), ring.plan(n, 4))
        receiver.begin(Transfer(how, job, 2, False))
        for _ in range(2):
            arrival = receiver.next(block=True)
            assert arrival is not None
            receiver.release(arrival)
        receiver.end()
        assert work.result(20).out is out
        assert len(sent) == 2


class SlowToTake(CpuPlane):
    """Takes its time with what it only stores, so nobody to its right waits for it."""

    def open(
        self, local: Values | None, out: Values, plan: RingPlan, after: object = None, wire: object = None
    ) -> CpuJob:
        job = super().open(local, out, plan, after)
        post = job.post

        def slow(process: ProcessChunk, chunk: Chunk | None) -> None:
            time.sleep(0.1 if process.operation.kind is OperationKind.STORE else 0.0)
            post(process, chunk)

        job.post = slow  # type: ignore[method-assign]
        return job


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_a_member_tells_whom_it_waits_for_and_counts_how_long_its_right_one_blocks_it(
    chunk: int,
) -> None:
    """Member 1 comes late; member 1 takes late what member 0 has sent."""
    n, late_s = 3 * chunk, 0.4  # 4 chunks of each shard
    engines = Engines(Flavour("tcp", "tcp"), [5, 6, 7], Shape(chunk), [CpuPlane, SlowToTake, CpuPlane])
    with contextlib.closing(engines) as ring:
        first, late, after_it = ring.rings
        orders = [AllReduceOrder(KEY, torch.ones(n), torch.empty(n), entry(r)) for r in ring.names]
        works = [ring.submit(i, orders[i]) for i in (0, 2)]
        time.sleep(late_s)
        assert (first.counts, late.counts) == ((1, 0), (0, 0))
        assert (first.awaits, late.awaits, after_it.awaits) == ("left", "", "left")
        assert after_it.inside.seconds > late_s / 2, "counted while it lasts"
        ring.wait([*works, ring.submit(1, orders[1])])
        assert [each.counts for each in ring.rings] == [(1, 1)] * 3
        assert first.blocked_s > max(0.2, late.blocked_s, after_it.blocked_s)
        assert all(each.inside.seconds >= each.blocked_s and not each.awaits for each in ring.rings)
        assert first.newest == KEY


def test_some_all_reduces_are_marked_the_same_in_all_members() -> None:
    ring = alone()
    for _ in range(5 * MARKED + 1):
        ring.all_reduce(AllReduceOrder(KEY, torch.ones(1), torch.empty(1), entry(4)))
    assert [mark.number for mark in ring.marks] == [n * MARKED for n in range(2, 6)]
    assert abs(time.time() - ring.marks[-1].t) < 60


def test_a_ring_in_the_middle_of_a_work_keeps_its_edges_and_has_threads_give_way_quickly() -> None:
    class Held(CpuPlane):
        began, go = threading.Event(), threading.Event()

        def open(
            self, local: Values | None, out: Values, plan: RingPlan, after: object = None, wire: object = None
        ) -> CpuJob:
            self.began.set()
            assert self.go.wait(20)
            return HeldJob(local, out, plan, [], 8)

    class HeldJob(CpuJob):
        def post(self, process: ProcessChunk, chunk: Chunk | None) -> None:
            intervals.append(sys.getswitchinterval())
            super().post(process, chunk)

    intervals: list[float] = []
    usual, plane = sys.getswitchinterval(), Held()
    ring = alone(plane)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(ring.all_reduce, AllReduceOrder(KEY, torch.ones(3), torch.empty(3), entry(4)))
        assert plane.began.wait(20)
        assert ring.retire(StaleEpoch("a newer epoch")) == (None, None)
        assert ring.error is None
        plane.go.set()
        work.result(20)
    assert intervals
    assert intervals == pytest.approx([allreduce.SWITCH_S] * len(intervals))
    assert sys.getswitchinterval() == usual


def test_what_is_not_the_rings_fault_ends_it_all_the_same() -> None:
    class Broken(CpuJob):
        def post(self, *_: object) -> None:
            raise MemoryError("none left")

    class BrokenPlane(CpuPlane):
        def open(
            self, local: Values | None, out: Values, plan: RingPlan, after: object = None, wire: object = None
        ) -> CpuJob:
            return Broken(local, out, plan, [], 64)

    with rig(FLAVOURS[0], 2) as made:
        ring = Ring(1, [5, 6], 0, made.receivers[0], made.senders[0], BrokenPlane(), SETTINGS)
        other = made.submit(1, AllReduceOrder(KEY, torch.ones(3), torch.empty(3), entry(6)))
        with pytest.raises(MemoryError):
            ring.all_reduce(AllReduceOrder(KEY, torch.ones(3), torch.empty(3), entry(5)))
        assert isinstance(other.exception(20), PeerDead)
        with pytest.raises(PeerDead, match="the engine failed"):
            ring.all_reduce(AllReduceOrder(KEY, torch.ones(3), torch.empty(3), entry(5)))
