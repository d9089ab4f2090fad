"""What the main thread trains when the quota of a step becomes known, changes, or never comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import parse
from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.effects import DropGradient, Reduce, RunBatch, WriteCheckpoint
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.identity import RankIdentity
from ft_hsdp.train.job import Job
from ft_hsdp.train.orders import Mailbox, Order
from ft_hsdp.train.step_driver import Joined
from tests.train.test_job import made, shard

STEP = 4
DROP = DropGradient("left behind")


class Waits(Exception):
    """Nothing is in the mailbox: the main thread would wait."""


class Orders(Mailbox):
    """A mailbox that says so instead of waiting."""

    def get(self) -> Order:
        if not self._orders:
            raise Waits
        return super().get()


class Loop:
    """A rank of a job of one rank whose training loop does nothing but count."""

    def __init__(self, job: Job) -> None:
        shard(job)
        job.optimizer(torch.optim.SGD(list(job._adopted.params.values()), lr=0.1))
        job._identity = RankIdentity(0, "0-x-0", (), None, 0.0)
        assert job._driver is not None
        self.driver = job._driver
        self.driver._mailbox = self.orders = Orders()
        self.driver._joined = Joined(mock.Mock(), mock.Mock(), None, False)
        job._adopted.sync = self.synced = mock.Mock()  # type: ignore[method-assign]
        job._adopted.finish = mock.Mock()  # type: ignore[method-assign]
        job._adopted.trained = self.backward = mock.Mock(return_value=True)  # type: ignore[method-assign]
        self.job, self._batches = job, iter(())

    def begin(self, *places: tuple[int, int]) -> None:
        self.prefetcher: Any = mock.Mock()
        self.prefetcher.batch.return_value = torch.zeros(1)
        self._batches = self.driver.feed(self.prefetcher, RunBatch(STEP, places, 0))

    def micro_batch(self) -> bool:
        """Train one more; whether there was one."""
        return next(self._batches, None) is not None

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
def loop(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Made]:
    contexts = []

    def make(accumulate: int, batch: str = "constant") -> Loop:
        settings = {"train": {"accumulate": accumulate}, "quorum": {"batch": batch}}
        context = made(mesh, tmp_path, parse({"replicas": 2, "ranks_per_replica": 1, **settings}))
        contexts.append(context)
        return Loop(context.__enter__())

    yield make
    for context in contexts:
        context.__exit__(None, None, None)


def test_an_adapting_batch_waits_for_nothing(loop: Made) -> None:
    one = loop(3, "adapt")
    one.begin((0, 3))
    assert [one.micro_batch() for _ in range(4)] == [True, True, True, False]
    assert one.reduced == [False, False, True]


@pytest.mark.parametrize("passed_over", [0, 1])
def test_a_loop_that_passes_over_a_batch_is_told_so_at_once(loop: Made, passed_over: int) -> None:
    """It would leave the others waiting, or count a batch as trained that was not."""
    one = loop(2, "adapt")
    one.begin((0, 2))
    assert all(one.micro_batch() for _ in range(1 + passed_over))
    one.backward.return_value = False
    with pytest.raises(ConfigError, match=rf"^job.batches: got 'no backward for batch 0 .*unit {passed_over}\)'"):
        one.micro_batch()


def test_stop_iteration_of_the_data_is_told_with_its_batch(loop: Made) -> None:
    one = loop(1, "adapt")
    one.begin((5, 1))
    one.prefetcher.batch.side_effect = StopIteration
    with pytest.raises(RuntimeError, match="the data raised StopIteration for batch 5 of data shard 0"):
        one.micro_batch()


def test_the_second_micro_batch_waits_for_the_quota(loop: Made) -> None:
    one = loop(2)
    one.begin((0, 2))
    assert one.micro_batch()
    with pytest.raises(Waits):
        one.micro_batch()


@pytest.mark.parametrize(("quota", "reduced"), [(2, [False, True]), (3, [False, False, True])])
def test_the_quota_may_differ_from_the_one_before(loop: Made, quota: int, reduced: list[bool]) -> None:
    one = loop(2)
    one.begin((0, 2))
    assert one.micro_batch()
    one.reduce((0, 9), step=STEP - 1)
    one.reduce((0, quota))
    while one.micro_batch():
        pass
    assert one.reduced == reduced
    assert one.trained == [(quota, 0)]


@pytest.mark.parametrize("quota", [1, 2])
def test_with_one_micro_batch_each_the_first_one_waits_while_there_are_more(loop: Made, quota: int) -> None:
    """Else its backward would not reduce anything, and the quota might be that one."""
    one = loop(1)
    one.begin((0, 2))
    with pytest.raises(Waits):
        one.micro_batch()
    one.begin((0, 2))
    one.reduce((0, quota))
    while one.micro_batch():
        pass
    assert one.reduced == [False] * (quota - 1) + [True]
    assert one.trained == [(quota, 0)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_refill_waits_for_no_other_order(loop: Made, accumulate: int) -> None:
    """A loss asks for one more micro-batch, and another loss for two more."""
    one = loop(accumulate)
    one.begin((0, accumulate))
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
    one.begin((0, 3))
    assert [one.micro_batch() for _ in range(begun)] == [True] * begun
    written: Order = WriteCheckpoint(StateId(1, 3, "ab" * 16))
    saver = mock.Mock()
    one.driver._joined = replace(one.driver.here, saver=saver)
    one.orders.put(written)
    one.orders.put(DROP)
    assert [one.micro_batch() for _ in range(begun + 1)] == [True] * begun + [False]
    saver.save.assert_called_once()
    assert one.reduced == [False, True][: 2 * begun]
    assert one.orders.get() == DROP, "it is carried out after backward"


def test_the_wait_for_a_quota_is_told_as_the_quorum_s(loop: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    one = loop(2)
    one.begin((0, 2))
    assert one.micro_batch()
    one.reduce((0, 2))
    clock = iter([10.0, 12.5])  # for the driver alone: threads of other tests read the true clock
    monkeypatch.setattr("ft_hsdp.train.step_driver.time", mock.Mock(monotonic=lambda: next(clock)))
    assert one.micro_batch()
    assert one.driver._awaited_s == 2.5
