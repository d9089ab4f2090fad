"""`Loader`: batches of samples of any map-style dataset, each a function of its place in the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from ft_hsdp.core.replica_state import REPLICA_BATCH
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data.prefetch import Reader
from ft_hsdp.train.data.samples import JobShape, SampleReader
from ft_hsdp.train.data.workers import ReadOptions, check_rooms, open_loader

Batch = TypeVar("Batch")

_REFUSED = {
    "sampler": "shuffle, or shuffle=False over torch.utils.data.Subset(dataset, order)",
    "batch_sampler": "batch_size and shuffle: the place decides which samples are in a batch",
    "generator": "seed: no generator is part of the state",
    "pin_memory_device": "pin_memory=True, for the device of the job",
}


def check(dataset: Any, batch_size: int, options: ReadOptions, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if name in ("persistent_workers", "in_order"):  # both are so, whatever is said
            continue
        allowed = _REFUSED.get(name, "an argument that docs/data.md names")
        raise ConfigError(f"job.loader({name})", value, allowed)
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError("job.loader(dataset)", kind, "the dataset of the DataLoader, or job.stream(loader)")
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, m) for m in ("__len__", "__getitem__")):
        allowed = "a dataset with __len__ and __getitem__, or job.stream(...) for one that is read in order"
        raise ConfigError("job.loader(dataset)", kind, allowed)
    for key, value, least in (
        ("batch_size", batch_size, 1),
        ("num_workers", options.num_workers, 0),
        ("prefetch_factor", options.prefetch_factor, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"job.loader({key})", value, f"an integer from {least}")
    check_rooms(options)
    if options.timeout < 0:
        raise ConfigError("job.loader(timeout)", options.timeout, "0, or a number of seconds")


@dataclass(eq=False)
class Loader(Generic[Batch]):
    """Batches of samples of a map-style dataset; `Job.loader` makes it. It is a `Source`.

    Iterating over it is the same as iterating over ``job.batches(loader)``.
    """

    _reader: SampleReader
    _shape: JobShape
    options: ReadOptions
    _batches: Callable[[Loader[Batch]], Iterator[Batch]]

    def __post_init__(self) -> None:
        reader, shape = self._reader, self._shape
        step = shape.shards * shape.ranks * shape.accumulate
        if reader.batches < step:
            allowed = f"more: one step reads {step} batches, and an epoch has {reader.batches}"
            raise ConfigError("job.loader(dataset)", f"{reader.samples} samples", allowed)

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has if all replicas contribute to each: for `train.steps`, and for schedules."""
        return self._reader.batches // (self._shape.replicas * self._shape.ranks * self._shape.accumulate)

    def samples_of(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[int, list[int]]:
        """Return the epoch of a batch, and the indices of its samples in the dataset, in order.

        Raises:
            ValueError: The place is outside the job's layout.
        """
        return self._reader.samples_of(self._shape.number(shard, index, rank, micro))

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Batch:
        """Read a batch in this process, and return it; for example for `Job.warm_up`. Blocks while it is read."""
        return self._reader.read(self._shape.number(shard, index, rank, micro))

    def facts(self, until: float) -> dict[str, str]:
        facts, shape = self._reader.facts(until), self._shape
        return {**facts, REPLICA_BATCH: str(int(facts["batch_size"]) * shape.ranks * shape.accumulate)}

    def reader(self) -> Reader[Batch]:
        return open_loader(self._reader, self._shape, self.options)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self)
