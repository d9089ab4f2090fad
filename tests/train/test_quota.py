import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import parse
from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.effects import DropGradient, Reduce, WriteCheckpoint
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places
from ft_hsdp.train.gradients import Traffic
from ft_hsdp.train.orders import Order
from ft_hsdp.train.state.copies import CopyCost
from tests.support.refused import refused
from tests.support.train.one_rank import STEP, OneRank, Waits

DROP = DropGradient("left behind")


class Loop(OneRank):
    """A training loop that does nothing but count."""

    def __init__(self, mesh: DeviceMesh, accumulate: int, batch: str) -> None:
        settings = {"train": {"accumulate": accumulate}, "quorum": {"batch": batch}}
        super().__init__(mesh, parse({"replicas": 2, "ranks_per_replica": 1, **settings}))
        self.synced, self.backward = mock.Mock(), mock.Mock(return_value=True)
        self.adopted.sync = self.synced  # type: ignore[method-assign]
        self.adopted.finish = mock.Mock()  # type: ignore[method-assign]
        self.adopted.trained = self.backward  # type: ignore[method-assign]

    def train(self) -> int:
        """Train to the wait for the end of the step; return how many micro-batches that were."""
        count = 0
        while self.micro_batch():
            count += 1
            with contextlib.suppress(Waits):
                self.driver.end()
        return count

    def reduce(self, *places: tuple[int, int], step: int = STEP) -> None:
        self.orders.put(Reduce(AttemptId(2, step, 0), "contribute", "ab" * 16, places))

    @property
    def trained(self) -> list[tuple[int, int]]:
        """The number of units in each part, with the part."""
        assert self.driver.plan is not None
        return [(c.units, c.part) for c in self.driver.plan.contributions(0)]

    @property
    def reduced(self) -> list[bool]:
        """Of each micro-batch: whether its backward reduces gradients inside the replica."""
        return [call.args[0] for call in self.synced.call_args_list]


Made = Callable[..., Loop]


@pytest.fixture
def loop(mesh: DeviceMesh) -> Made:
    return lambda accumulate, batch="constant": Loop(mesh, accumulate, batch)


def test_an_adapting_batch_waits_for_nothing(loop: Made) -> None:
    one = loop(3, "adapt")
    one.feed((0, 3))
    assert one.train() == 3
    assert one.reduced == [False, False, True]


@pytest.mark.parametrize("passed_over", [0, 1])
def test_a_loop_that_passes_over_a_batch_is_told_so_at_once(loop: Made, passed_over: int) -> None:
    """It would leave the others waiting, or count a batch as trained that was not."""
    one = loop(2, "adapt")
    one.feed((0, 2))
    assert all(one.micro_batch() for _ in range(1 + passed_over))
    one.backward.return_value = False
    refused(one.micro_batch, rf"^job.batches: got 'no backward for batch 0 .*unit {passed_over}\)'")


def test_stop_iteration_of_the_data_is_told_with_its_batch(loop: Made) -> None:
    one = loop(1, "adapt")
    one.feed((5, 1))
    one.source.batch.side_effect = StopIteration
    with pytest.raises(RuntimeError, match="the data raised StopIteration for batch 5 of data shard 0"):
        one.micro_batch()


def test_the_second_micro_batch_waits_for_the_quota(loop: Made) -> None:
    one = loop(2)
    one.feed((0, 2))
    assert one.micro_batch()
    with pytest.raises(Waits):
        one.micro_batch()


@pytest.mark.parametrize(("quota", "reduced"), [(2, [False, True]), (3, [False, False, True])])
def test_the_quota_may_differ_from_the_one_before(loop: Made, quota: int, reduced: list[bool]) -> None:
    one = loop(2)
    one.feed((0, 2))
    assert one.micro_batch()
    one.reduce((0, 9), step=STEP - 1)
    one.reduce((0, quota))
    one.train()
    assert one.reduced == reduced
    assert one.trained == [(quota, 0)]


@pytest.mark.parametrize("quota", [1, 2])
def test_with_one_micro_batch_each_the_first_one_waits_while_there_are_more(loop: Made, quota: int) -> None:
    """Else its backward would not reduce anything, and the quota might be that one."""
    one = loop(1)
    one.feed((0, 2))
    with pytest.raises(Waits):
        one.micro_batch()
    one.feed((0, 2))
    one.reduce((0, quota))
    one.train()
    assert one.reduced == [False] * (quota - 1) + [True]
    assert one.trained == [(quota, 0)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_refill_waits_for_no_other_order(loop: Made, accumulate: int) -> None:
    """A loss asks for one more micro-batch, and another loss for two more."""
    one = loop(accumulate)
    one.feed((0, accumulate))
    one.reduce((0, accumulate))
    while one.micro_batch():
        if one.driver.plan is not None and not one.driver.plan.left:
            break
    expected = [(accumulate, 0)]
    for part, more in ((1, 1), (2, 2)):
        places: Places = ((0, sum(n for n, _ in expected) + more),)
        one.reduce(*places)
        assert not one.driver.end()
        assert [one.micro_batch() for _ in range(more)] == [True] * more
        expected.append((more, part))
        assert one.trained == expected
    assert sum(one.reduced) == 3, "each part ends with a backward that reduces it"
    with pytest.raises(Waits):
        one.driver.end()


@pytest.mark.parametrize(("accumulate", "begun"), [(1, 0), (3, 1)])
def test_an_end_of_the_step_in_place_of_the_quota(loop: Made, accumulate: int, begun: int) -> None:
    """What is trained and not reduced yet cannot be dropped, so one more micro-batch is trained first."""
    one = loop(accumulate)
    one.feed((0, 3))
    assert [one.micro_batch() for _ in range(begun)] == [True] * begun
    written: Order = WriteCheckpoint(StateId(1, 3, "ab" * 16))
    one.orders.put(written)
    one.orders.put(DROP)
    assert one.micro_batch() == bool(begun)
    one.saver.save.assert_called_once()
    assert one.reduced == [False, True][: 2 * begun]
    assert one.orders.get() == DROP, "it is carried out after backward"


def test_the_wait_for_a_quota_is_told_as_the_quorum_s(loop: Made) -> None:
    one, log = loop(2), mock.Mock()
    one.driver.begin(replace(one.joined, log=log))
    one.runtime.reducer.traffic = Traffic()
    one.runtime.copies.cost.return_value = CopyCost()
    one.runtime.facts.data = {}
    one.feed((0, 2))
    assert one.micro_batch()
    one.reduce((0, 2))
    get, late_s = one.orders.get, 0.05

    def late() -> Order:
        time.sleep(late_s)
        return get()

    one.orders.get = late  # type: ignore[method-assign]
    assert one.micro_batch()
    one.commit()
    timing: Any = log.committed.call_args.args[3]
    assert timing.waits["quorum"] >= late_s
