"""Which samples are in which batch, and what is random about them. Nothing here starts a worker."""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data.loader import Loader, check
from ft_hsdp.train.data.samples import JobShape, SampleReader
from ft_hsdp.train.data.workers import ReadOptions
from tests.support.refused import refused


class Noisy(Dataset[Any]):
    """Each sample is its index, and a number of each generator."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


def loader(dataset: Any, batch_size: int = 1, shape: JobShape | None = None, **arguments: Any) -> Loader[Any]:
    chosen = {"collate_fn": None, "shuffle": True, "drop_last": True, "seed": 7, **arguments}
    reader = SampleReader(dataset, batch_size, **chosen)
    return Loader(reader, shape or JobShape(1, 1, 1, 1), ReadOptions(), lambda loader: iter(()))


shapes = st.builds(JobShape, st.just(1), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


def places(shape: JobShape, batches: int) -> Iterator[tuple[int, int, int, int]]:
    """The places of the first batches of all shards, in the order of the whole data."""
    for number in range(batches):
        for rank in range(shape.ranks):
            for micro in range(shape.accumulate):
                yield number % shape.shards, number // shape.shards, rank, micro


@given(shape=shapes, size=st.integers(1, 4), extra=st.integers(0, 40), seed=st.integers(0, 9), drop=st.booleans())
def test_each_sample_is_in_each_epoch_once(shape: JobShape, size: int, extra: int, seed: int, drop: bool) -> None:
    step = shape.shards * shape.ranks * shape.accumulate
    samples = step * size + extra
    data = loader(Noisy(samples), size, shape, seed=seed, drop_last=drop)
    each = samples // size if drop else -(-samples // size)
    batches = -(-3 * each // (shape.ranks * shape.accumulate))
    read = [data.samples_of(*place) for place in places(shape, batches)]
    assert [epoch for epoch, _ in read[: 3 * each]] == [0] * each + [1] * each + [2] * each
    for epoch in range(3):
        found = Counter(sample for e, some in read for sample in some if e == epoch)
        assert set(found.values()) == {1}
        assert len(found) == (each * size if drop else samples)
        assert set(found) <= set(range(samples))
        sizes = [len(some) for e, some in read if e == epoch]
        assert set(sizes[:-1]) <= {size}, "only the last batch of an epoch is smaller"
        assert sizes[-1] == (size if drop else samples - (each - 1) * size)


@given(ranks=st.integers(1, 3), accumulate=st.integers(1, 3), other=shapes)
@settings(max_examples=20)
def test_the_order_of_the_whole_data_does_not_depend_on_the_shape(ranks, accumulate, other) -> None:
    one = JobShape(1, 2, ranks, accumulate)
    orders = []
    for shape in (one, other):
        data = loader(Noisy(144), 2, shape)
        orders.append([s for p in places(shape, 150) for s in data.samples_of(*p)[1]])
    common = min(map(len, orders))
    assert orders[0][:common] == orders[1][:common]


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    data = loader(Noisy(7), 2, shuffle=False, drop_last=False)
    assert [data.samples_of(0, i, 0) for i in range(5)] == [
        *((0, [0, 1]), (0, [2, 3]), (0, [4, 5]), (0, [6])),
        (1, [0, 1]),
    ]


def test_epochs_and_seeds_differ_in_order() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        data = loader(Noisy(50), 1, seed=seed)
        return [data.samples_of(0, 50 * epoch + i, 0)[1][0] for i in range(50)]

    assert order(0, 7) == order(0, 7)
    assert order(0, 7) != order(1, 7)
    assert order(0, 7) != order(0, 8)
    assert order(0, 7) != sorted(order(0, 7))


@given(shape=shapes, size=st.integers(1, 3), missing=st.integers(1, 30), drop=st.booleans())
def test_a_dataset_that_is_smaller_than_a_step_is_refused(shape, size, missing, drop) -> None:
    step = shape.shards * shape.ranks * shape.accumulate
    enough = step * size if drop else (step - 1) * size + 1
    assert loader(Noisy(enough), size, shape, drop_last=drop).samples_of(0, 0, 0)[0] == 0
    samples = max(0, enough - missing)
    few = f"got '{samples} samples';"
    refused(lambda: loader(Noisy(samples), size, shape, drop_last=drop), few, "job.loader(dataset)")


def test_the_steps_of_an_epoch_are_those_of_all_replicas() -> None:
    assert loader(Noisy(1000), 4, JobShape(3, 5, 2, 2)).steps_per_epoch == 20
    assert loader(Noisy(1000), 4, JobShape(3, 1, 2, 2)).steps_per_epoch == 20


def test_what_is_random_about_a_sample_is_drawn_anew_in_each_epoch_and_alike_in_each_read() -> None:
    data = loader(Noisy(20), 4)
    drawn: dict[tuple[int, int], list[float]] = {}
    for index in range(10):
        epoch, samples = data.samples_of(0, index, 0)
        batch = data.batch(0, index, 0)
        assert batch[0].tolist() == samples
        for row, sample in enumerate(samples):
            drawn[epoch, sample] = [float(column[row]) for column in batch[1:]]
        torch.manual_seed(index)
        assert all(torch.equal(a, b) for a, b in zip(data.batch(0, index, 0), batch, strict=True))
    flat = [number for numbers in drawn.values() for number in numbers]
    assert len(set(flat)) == len(flat) == 3 * 40
    by_ones = loader(Noisy(20), 1)
    for index in range(20):
        epoch, samples = by_ones.samples_of(0, index, 0)
        assert [float(x) for x in by_ones.batch(0, index, 0)[1:]] == drawn[epoch, samples[0]]


def test_reading_leaves_the_generators_as_they_are() -> None:
    data = loader(Noisy(20), 4)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    seed()
    expected = draw()
    seed()
    data.batch(0, 3, 0)
    with pytest.raises(IndexError):
        loader(Noisy(20), collate_fn=lambda items: [][0]).batch(0, 0, 0)
    assert draw() == expected


def test_a_place_outside_the_layout_is_refused() -> None:
    data = loader(Noisy(90), 1, JobShape(1, 2, 3, 2))
    for place in ((2, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 3, 0), (0, 0, 0, 2), (0, -1, 0, 0)):
        with pytest.raises(ValueError, match="it must be"):
            data.batch(*place)


class Together(Noisy):
    """Samples are read a batch at a time, as datasets of Hugging Face read them."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        assert all(type(i) is int for i in indices)
        return [{"index": i, "noise": float(torch.rand(()))} for i in indices]


def test_samples_are_read_together_where_the_dataset_can_do_that() -> None:
    data = loader(Together(12), 3)
    first, again, next_epoch = (data.batch(0, i, 0) for i in (1, 1, 5))
    assert first["index"].tolist() == data.samples_of(0, 1, 0)[1]
    assert torch.equal(first["noise"], again["noise"])
    assert not set(first["noise"].tolist()) & set(next_epoch["noise"].tolist())


def test_collation_is_the_users_and_may_draw_numbers() -> None:
    def masked(items: list[Any]) -> dict[str, Any]:
        return {"index": [item[0] for item in items], "mask": torch.rand(len(items))}

    data = loader(Noisy(12), 3, collate_fn=masked)
    first, again = data.batch(0, 1, 0), data.batch(0, 1, 0)
    assert first["index"] == again["index"] == data.samples_of(0, 1, 0)[1]
    assert torch.equal(first["mask"], again["mask"])


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("dataset", "changed", "argument"),
    [
        (Noisy(9), {"batch_size": 0}, "batch_size"),
        (Noisy(9), {"batch_size": None}, "batch_size"),
        (Noisy(9), {"num_workers": -1}, "num_workers"),
        (Noisy(9), {"prefetch_factor": 0}, "prefetch_factor"),
        (Noisy(9), {"timeout": -1}, "timeout"),
        (Noisy(9), {"generator": 3}, "generator"),
        (Noisy(9), {"color": 1}, "color"),
        (Noisy(9), {"sampler": object()}, "sampler"),
        (Noisy(9), {"batch_sampler": object()}, "batch_sampler"),
        (Endless(), {}, "dataset"),
        (iter([1]), {}, "dataset"),
        (DataLoader(Noisy(9)), {}, "dataset"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(dataset: Any, changed: dict[str, Any], argument: str) -> None:
    options = ReadOptions(**{k: v for k, v in changed.items() if k in ReadOptions.__slots__})
    others = {k: v for k, v in changed.items() if k not in (*ReadOptions.__slots__, "batch_size")}
    refused(lambda: check(dataset, changed.get("batch_size", 1), options, others), key=f"job.loader({argument})")


def test_workers_need_rooms(tmp_path: Path) -> None:
    """A socket in a folder of a long name cannot be made, and torch's workers would wait for it without an end."""
    with pytest.raises(ConfigError, match=r"num_workers\): got 1000000; allowed: at most [0-9]+: /dev/shm"):
        check(Noisy(9), 1, ReadOptions(num_workers=1_000_000), {})
    long = tmp_path / ("t" * 150)
    long.mkdir()
    with mock.patch.object(tempfile, "tempdir", str(long)):
        check(Noisy(9), 1, ReadOptions(), {})
        refused(lambda: check(Noisy(9), 1, ReadOptions(num_workers=1), {}), r"^TMPDIR: got .*at most 75 bytes")


def test_arguments_that_hold_anyway_are_taken() -> None:
    check(Noisy(9), 1, ReadOptions(), {"persistent_workers": True, "in_order": True})
