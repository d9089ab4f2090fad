"""ProcessGroupFTAR: what goes through FTAR and what through gloo, sums, errors, and their end."""

import gc
import os
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    ReduceScatterOptions,
)
from torch.nn.parallel import DistributedDataParallel

from ft_hsdp.compat.torchft import ProcessGroupFTAR
from ft_hsdp.compat.torchft.work import BUNDLE_BYTES
from ft_hsdp.ftar.lane import GroupState
from tests.support.ftar.torchft_ranks import Ranks
from tests.support.ftar.torchft_ranks import of_module as of_module
from tests.support.ftar.torchft_ranks import three as three
from tests.support.waiting import until

WITHIN_S = 30.0


def average() -> AllreduceOptions:
    opts = AllreduceOptions()
    opts.reduceOp = ReduceOp.AVG
    return opts


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def no_gloo(ranks: Ranks) -> None:
    """From here on, a collective of the plain backend is an error."""
    for group in ranks.groups:
        assert group._quorum is not None
        group._quorum._gloo = None


def test_a_list_of_all_kinds_of_tensors_is_summed_in_place_and_not_by_gloo(three: Ranks) -> None:
    no_gloo(three)

    def reduce(group: ProcessGroupFTAR, rank: int) -> list[torch.Tensor]:
        whole = torch.full((8, 8), rank + 1.0)
        tensors = [
            torch.full((5,), rank + 1.0),
            torch.full((1,), rank + 1, dtype=torch.int64),
            torch.full((4, 6), rank + 1.0).t(),  # not contiguous
            torch.full((2, 3), rank + 1.0, dtype=torch.bfloat16),
            torch.full((BUNDLE_BYTES // 4 + 1,), rank + 1.0),
            whole[:, 2:5],  # every third value is somebody else's
            torch.empty(0),
            torch.tensor(rank + 1.0),
        ]
        before = [t.data_ptr() for t in tensors]
        work = group.allreduce(tensors, ReduceOp.SUM)
        assert work.wait()
        assert work.is_completed()
        assert work.get_future().wait() == tensors
        assert [t.data_ptr() for t in tensors] == before
        assert whole.sum() == 6 * 24 + (64 - 24) * (rank + 1)
        return tensors

    for tensors in three.each(reduce):
        assert all(bool((t == 6).all()) for t in tensors)


def test_average_and_coalesced_and_parameters_that_need_gradients(three: Ranks) -> None:
    no_gloo(three)

    def reduce(group: ProcessGroupFTAR, rank: int) -> list[torch.Tensor]:
        one, two = torch.full((3,), float(rank)), nn.Parameter(torch.full((4,), float(rank)))
        group.allreduce([one, two], average()).wait()
        three, four = torch.full((3,), float(rank)), torch.full((2,), rank, dtype=torch.int32)
        group.allreduce_coalesced([three, four], AllreduceCoalescedOptions()).wait()
        assert "floating" in raised(lambda: group.allreduce([four], average()))
        return [one, two.detach(), three / 3, four // 3]

    for tensors in three.each(reduce):
        assert all(bool((t == 1).all()) for t in tensors)


def test_other_operations_and_types_go_through_gloo_tensor_by_tensor(three: Ranks) -> None:
    def reduce(group: ProcessGroupFTAR, rank: int) -> tuple[torch.Tensor, ...]:
        a, b, c = torch.tensor([rank]), torch.tensor([10 * rank]), torch.tensor([rank], dtype=torch.uint8)
        group.allreduce([a, b], ReduceOp.MAX).wait()
        group.allreduce([c], ReduceOp.SUM).wait()
        return a, b, c

    for a, b, c in three.each(reduce):
        assert (a, b, c) == (2, 20, 3)


def test_several_sums_may_be_under_way_and_follow_each_other(three: Ranks) -> None:
    def reduce(group: ProcessGroupFTAR, rank: int) -> list[float]:
        tensors = [torch.full((1000 * (i + 1),), float(rank * i)) for i in range(20)]
        works = [group.allreduce([t], ReduceOp.SUM) for t in tensors]
        futures = [w.get_future().then(lambda f: f.value()[0].sum().item()) for w in works]
        return [f.wait() for f in futures]

    expected = [3.0 * i * 1000 * (i + 1) for i in range(20)]
    assert three.each(reduce) == [expected] * 3


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_the_end_of_one_rank_is_an_error_at_all_until_they_are_configured(three: Ranks, end: str) -> None:
    begun = threading.Barrier(3)

    def reduce(group: ProcessGroupFTAR, rank: int) -> str:
        if rank == 2:
            begun.wait(WITHIN_S)
            getattr(group, end)()
            return "Connection closed by peer"
        work = group.allreduce([torch.ones(1000)], ReduceOp.SUM)
        assert group.errored() is None
        begun.wait(WITHIN_S)
        told = raised(work.wait)
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            work.get_future().wait()
        assert str(group.errored()).startswith("aborted: Connection closed by peer")
        for call in (
            lambda: group.allreduce([torch.ones(1)], ReduceOp.SUM),
            lambda: group.barrier(BarrierOptions()),
        ):
            assert raised(call) == str(group.errored())
        return told

    assert all("Connection closed by peer" in told for told in three.each(reduce))
    last = three.groups[2]
    if end == "abort":
        assert str(last.errored()) == "aborted"
        assert raised(lambda: last.allreduce([torch.ones(1)], ReduceOp.SUM)) == "aborted"
    else:
        assert last.errored() is None
        assert "not initialized" in raised(last.barrier)
    three.configure(three.groups)
    assert all(g.errored() is None for g in three.groups)
    three.each(lambda g, r: g.allreduce([torch.ones(1)], ReduceOp.SUM).wait())


def test_a_rank_that_leaves_right_after_a_sum_breaks_it_for_nobody(three: Ranks) -> None:
    def reduce_and_leave(group: ProcessGroupFTAR, rank: int) -> float:
        tensor = torch.ones(50_000 * (rank + 1))[:50_000]
        group.allreduce([tensor], ReduceOp.SUM).wait()
        group.shutdown()
        return tensor[-1].item()

    for _ in range(10):
        assert three.each(reduce_and_leave) == [3.0] * 3
        three.configure(three.groups)


def test_a_rank_that_does_not_call_is_waited_for_only_as_long_as_asked() -> None:
    with closing(Ranks(2, timeout_s=30.0)) as ranks:
        tensor = torch.ones(10)
        work = ranks.groups[0].allreduce([tensor], ReduceOp.SUM)
        assert "timed out after 0.05 s" in raised(lambda: work.wait(timedelta(seconds=0.05)))
        assert "aborted: timed out" in str(ranks.groups[0].errored())
        # The ring ends on the control loop. Until then this rank's data may still complete the other one's sum.
        left = ranks.groups[0]._member._communicator
        until(lambda: left is None or left.state is GroupState.BROKEN, "the ring ends")
        other = ranks.groups[1].allreduce([torch.ones(10)], ReduceOp.SUM)
        assert "Connection closed by peer" in raised(other.wait), "the other one hears of it"


def test_the_timeout_of_the_group_ends_a_sum_without_a_wait_of_its_own() -> None:
    with closing(Ranks(2, timeout_s=30.0)) as ranks:
        for group in ranks.groups:
            group.set_timeout(timedelta(seconds=2.0))
        ranks.configure(ranks.groups)
        future = ranks.groups[0].allreduce([torch.ones(10)], ReduceOp.SUM).get_future()
        with pytest.raises(RuntimeError, match=r"Timed out waiting.*rank 1"):
            future.wait()


def test_sizes_that_differ_are_an_error_and_not_the_end_of_the_group(three: Ranks) -> None:
    three.each(lambda g, r: raised(g.allreduce([torch.ones(10 + r)], ReduceOp.SUM).wait))
    three.configure(three.groups)
    three.each(lambda g, r: g.allreduce([torch.ones(1)], ReduceOp.SUM).wait())


def test_configure_ends_when_ranks_do_not_come() -> None:
    with closing(Ranks(1)) as ranks:
        (group,) = ranks.groups
        group.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*timeout after 300ms"):
            group.configure(ranks.prefix(), "0", 0, 2)
        assert "not initialized" in raised(lambda: group.allreduce([torch.ones(1)], ReduceOp.SUM))
        group.set_timeout(timedelta(seconds=WITHIN_S))
        ranks.configure([group])
        assert group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_configure_can_be_cancelled(end: str) -> None:
    with closing(Ranks(1)) as ranks:
        (group,) = ranks.groups
        said: list[str] = []
        before = ranks.store.num_keys()
        thread = threading.Thread(
            target=lambda: said.append(raised(lambda: group.configure(ranks.prefix(), "0", 0, 2)))
        )
        thread.start()
        until(lambda: ranks.store.num_keys() > before, "it began")
        getattr(group, end)()
        thread.join(WITHIN_S)
        assert said
        assert said[0].startswith("aborted")


def test_where_gloo_has_no_future_there_is_one_that_was_waited_for(three: Ranks) -> None:
    def scatter(group: ProcessGroupFTAR, rank: int) -> list[float]:
        out, ins = torch.zeros(2), [torch.full((2,), float(i)) for i in range(3)]
        group.reduce_scatter([out], [ins], ReduceScatterOptions()).get_future().wait()
        return out.tolist()

    assert three.each(scatter) == [[0.0, 0.0], [3.0, 3.0], [6.0, 6.0]]


def test_the_reducer_of_torchs_ddp_gets_its_sums_and_its_errors() -> None:
    ranks = Ranks(2)

    def train(group: ProcessGroupFTAR, rank: int) -> torch.Tensor:
        model = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        ddp = DistributedDataParallel(model, process_group=group, init_sync=False)
        ddp(torch.full((3, 4), float(rank + 1))).sum().backward()
        assert model.weight.grad is not None
        grad = model.weight.grad.clone()
        if rank == 1:
            group.shutdown()
            return grad
        raised(lambda: ddp(torch.ones(3, 4)).sum().backward())
        return grad

    try:
        for grad in ranks.each(train):
            assert grad.flatten().tolist() == [9.0] * 8  # torch's DDP divides by the size that C++ knows, 1
    finally:
        ranks.close()


def test_nothing_is_left_after_the_last_shutdown_or_drop() -> None:
    def kept() -> tuple[list[str], int]:
        names = [t.name for t in threading.enumerate() if t.name.startswith("ftar")]
        return names, len(os.listdir("/proc/self/fd"))

    Ranks(1).close()
    gc.collect()
    until(lambda: not any(n == "ftar-gloo-end" for n in kept()[0]), "gloo ends")
    before = kept()
    ranks = Ranks(2)
    ranks.each(lambda g, r: g.allreduce([torch.ones(100)], ReduceOp.SUM).wait())
    ranks.configure(ranks.groups)
    assert len(kept()[0]) > len(before[0])
    ranks.groups[0].shutdown()
    ranks.groups.clear()  # the other one is dropped without a word
    ranks.close()
    del ranks
    gc.collect()
    until(lambda: kept() == before, f"left: {kept()}, not {before}")
