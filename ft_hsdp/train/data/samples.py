"""The batches of a map-style dataset, by number.

The batches of an epoch are numbered, and those of the epochs follow each other: number n is batch n mod M of
epoch n div M, if an epoch has M. `JobShape` says which number a place of the job has; `SampleReader` reads the
batch with a number. Which samples are in it follows from the number, the seed and the length of the dataset. What
is random about a sample follows from the seed, the epoch and the sample: neither the process that reads it nor
what that has read before matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, default_collate, get_worker_info

from ft_hsdp.core.randomness import Permutation, stream
from ft_hsdp.core.replica_state import RANDOM, TOGETHER
from ft_hsdp.train.data.facts import first_samples, generators_kept, read_twice, sample_facts, seed_generators


@dataclass(frozen=True, slots=True)
class JobShape:
    replicas: int  # that the job wants
    shards: int  # data shards
    ranks: int  # data ranks of a replica
    accumulate: int  # micro-batches of a rank in a batch

    def number(self, shard: int, index: int, rank: int, micro: int) -> int:
        """Return the number of a micro-batch among all of the job; ValueError outside its layout."""
        for name, value, end in (
            ("shard", shard, self.shards),
            ("rank", rank, self.ranks),
            ("micro", micro, self.accumulate),
        ):
            if not 0 <= value < end:
                raise ValueError(f"{name} is {value}; it must be from 0 to {end - 1}")
        if index < 0:
            raise ValueError(f"index is {index}; it must be at least 0")
        return ((index * self.shards + shard) * self.ranks + rank) * self.accumulate + micro


@dataclass(frozen=True, slots=True)
class FailedRead:
    error: Exception | ExceptionWrapper  # torch's wrapper brings the traceback from a worker

    def reraise(self) -> None:
        if isinstance(self.error, ExceptionWrapper):
            self.error.reraise()
        else:
            raise self.error


class SampleReader(Dataset[Any]):
    """Reads the batch with a number from a dataset; workers have a copy of it."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        shuffle: bool,
        drop_last: bool,
        seed: int,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = default_collate if collate_fn is None else collate_fn
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self.samples = len(dataset)
        self.batches = self.samples // batch_size if drop_last else -(-self.samples // batch_size)  # of an epoch

    def samples_of(self, number: int) -> tuple[int, list[int]]:
        """Return the epoch of a batch, and the samples in it, in order."""
        epoch, place = divmod(number, self.batches)
        first = place * self._batch_size
        places = range(first, min(first + self._batch_size, self.samples))
        if not self._shuffle:
            return epoch, list(places)
        order = Permutation(self.samples, self._seed, epoch)
        return epoch, [order[p] for p in places]

    def read(self, number: int) -> Any:
        """Return a batch. The generators of torch, numpy and random are as before afterwards."""
        epoch, samples = self.samples_of(number)
        with generators_kept():
            if callable(together := getattr(self._dataset, "__getitems__", None)):
                seed_generators(stream(self._seed, "samples", number))
                items = together(samples)
            else:
                items = [self._item(epoch, sample) for sample in samples]
            seed_generators(stream(self._seed, "collate", number))
            return self._collate(items)

    def _item(self, epoch: int, sample: int) -> Any:
        seed_generators(stream(self._seed, "sample", epoch, sample))
        return self._dataset[sample]

    def facts(self, until: float) -> dict[str, str]:
        kept = {"batch_size": self._batch_size, "drop_last": self._drop_last, "shuffle": self._shuffle}
        facts = {name: str(value) for name, value in kept.items()}
        facts |= {"length": str(self.samples), "seed": str(self._seed)}
        if time.monotonic() >= until:
            return facts
        facts |= sample_facts(self.samples, lambda sample: self._items([sample])[0], until)
        some = first_samples(self.samples)
        if RANDOM not in facts.values() and time.monotonic() < until:
            with generators_kept():
                facts[TOGETHER] = read_twice(lambda: self._collate(self._items(some)))
        return facts

    def _items(self, samples: list[int]) -> Any:
        together = getattr(self._dataset, "__getitems__", None)
        return together(samples) if callable(together) else [self._dataset[sample] for sample in samples]

    def __getitem__(self, number: int | None) -> Any:
        """Return a batch, or a `FailedRead`: whether the batch is wanted is not known here."""
        if number is None:
            return None
        try:
            return self.read(number)
        except Exception as error:
            worker = get_worker_info()
            if worker is None:
                return FailedRead(error)
            return FailedRead(ExceptionWrapper(where=f"in DataLoader worker process {worker.id}"))
