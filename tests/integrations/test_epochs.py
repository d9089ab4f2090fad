from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from ft_hsdp.integrations.epochs import EpochLoader, translate
from ft_hsdp.integrations.files import placed_at, placed_in
from tests.support.refused import refused

PER_EPOCH = 3


class Stub:
    """A job, and the loader of it: each batch is the number of the step that it is trained in.

    at: the step at which the job stands when it is joined.
    away: while it stands at a step (key), so many steps are committed without this replica.
    """

    steps_per_epoch = PER_EPOCH

    def __init__(self, steps: int, at: int = 0, away: dict[int, int] | None = None, accumulate: int = 1) -> None:
        self.config = SimpleNamespace(train=SimpleNamespace(steps=steps, accumulate=accumulate))
        self.step, self.at, self.away = 0, at, away or {}
        self.asked = 0  # how often a batch was asked for
        self.ended = False

    def __iter__(self) -> Iterator[int]:
        self.step = self.at
        while self.step < self.config.train.steps:
            self.step += self.away.pop(self.step, 0)
            for _ in range(self.config.train.accumulate):
                self.asked += 1
                yield self.step + 1
        self.ended = True


def one_pass(job: Stub, loader: EpochLoader) -> list[int]:
    """Train the batches of one pass; the last micro-batch of a step commits it."""
    trained: list[int] = []
    for batch in loader:
        trained.append(batch)
        if trained.count(batch) == job.config.train.accumulate:
            job.step += 1
    return trained


def passes(job: Stub, loader: EpochLoader, number: int) -> list[list[int]]:
    return [one_pass(job, loader) for _ in range(number)]


def epochs_of(job: Any) -> EpochLoader:
    return EpochLoader(job, job)


@pytest.mark.parametrize(
    ("job", "batches", "expected"),
    [
        (Stub(6), PER_EPOCH, [[1, 2, 3], [4, 5, 6], []]),
        (Stub(6, accumulate=2), 2 * PER_EPOCH, [[1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]]),
        (Stub(9, at=4), PER_EPOCH, [[5, 6], [7, 8, 9], []]),  # it comes back in an epoch of the job
        (Stub(9, away={1: 3}), PER_EPOCH, [[1], [5, 6], [7, 8, 9]]),  # at step 2 the others went on to step 4
    ],
    ids=["two epochs", "micro-batches", "back", "away"],
)
def test_a_pass_is_an_epoch_of_the_job(job: Stub, batches: int, expected: list[list[int]]) -> None:
    loader = epochs_of(job)
    assert len(loader) == batches
    assert passes(job, loader, len(expected)) == expected


def test_the_last_pass_ends_with_the_job() -> None:
    job = Stub(6)
    loader = epochs_of(job)
    one_pass(job, loader)
    assert job.asked == PER_EPOCH, "a batch was asked for, and so a step begun, before the pass that trains it"
    one_pass(job, loader)
    assert job.ended, "the job was not left in order"


def test_epochs_are_numbered_by_the_job() -> None:
    job = Stub(9, at=4)
    loader = epochs_of(job)
    assert [(epoch, one_pass(job, loader)) for epoch in loader.epochs(3)] == [(1, [5, 6]), (2, [7, 8, 9])]


def test_what_follows_the_last_pass_is_still_in_the_job() -> None:
    job = Stub(6)
    loader = epochs_of(job)
    ended = [(one_pass(job, loader), job.ended)[1] for _ in loader.epochs(2)]
    assert ended == [False, False], "a value of the last step could not be logged any more"
    assert job.ended, "the job was not left in order"


def test_a_job_of_another_length_is_refused() -> None:
    job = Stub(8)
    refused(lambda: next(epochs_of(job).epochs(3)), r"train\.steps: got 8; allowed: 9, for 3 epochs of 3 steps")


def test_a_loop_without_an_end_is_refused() -> None:
    job = Stub(3)
    loader = epochs_of(job)
    endless = (one_pass(job, loader) for _ in iter(int, 1))
    refused(lambda: list(endless), "a loop that ends")


def test_the_job_takes_what_the_dataloader_was_made_with() -> None:
    given: dict[str, Any] = {}

    def loader(dataset: object, **more: object) -> None:
        given.update(more, dataset=dataset)

    data = TensorDataset(torch.arange(8))
    job: Any = SimpleNamespace(loader=loader)
    translate(job, DataLoader(data, 2, shuffle=True, drop_last=True, collate_fn=list))
    assert (given["dataset"], given["batch_size"], given["shuffle"], given["drop_last"]) == (data, 2, True, True)
    assert given["collate_fn"] is list
    assert "prefetch_factor" not in given
    translate(job, DataLoader(data, num_workers=2, prefetch_factor=3))
    assert (given["shuffle"], given["num_workers"], given["prefetch_factor"]) == (False, 2, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda data: DataLoader(data, sampler=DistributedSampler(data, 1, 0)), "sampler.*DistributedSampler"),
        (lambda data: DataLoader(data, sampler=RandomSampler(data, replacement=True)), "sampler.*each sample"),
        (lambda data: DataLoader(data, sampler=RandomSampler(data, num_samples=3)), "sampler.*each sample once"),
        (lambda data: DataLoader(data, batch_sampler=BatchSampler(range(8), 2, False)), "batch_sampler"),
        (lambda data: DataLoader(data, batch_size=None), "batch_size"),
    ],
)
def test_a_sampler_of_its_own_is_refused(make: Callable[[Any], Any], words: str) -> None:
    job: Any = SimpleNamespace()
    refused(lambda: translate(job, make(TensorDataset(torch.arange(8)))), words)


def test_what_a_killed_writer_left_is_removed_and_what_another_one_writes_stays(tmp_path: Path) -> None:
    (tmp_path / ".saving-killed").mkdir()
    with placed_in(tmp_path) as made, placed_at(tmp_path / "b") as part, placed_at(Path(made) / "a") as inner:
        inner.write_text("whole")
        part.write_text("whole")
        assert {Path(made), part.parent} == set(tmp_path.glob(".saving-*"))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a": "whole", "b": "whole"}
