"""How a job's loop says what its data is: `DataSources`, the part of `Job` that makes sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Literal

import torch

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data.batches import Batches
from ft_hsdp.train.data.facts import PROBE_S, sample_facts
from ft_hsdp.train.data.loader import Loader, check
from ft_hsdp.train.data.prefetch import Prefetcher, Reader
from ft_hsdp.train.data.samples import JobShape, SampleReader
from ft_hsdp.train.data.step_plan import MicroBatch
from ft_hsdp.train.data.stream import BatchStream
from ft_hsdp.train.data.workers import ReadOptions
from ft_hsdp.train.identity import RankPlace


def facts_of(
    source: Any, reader: Reader[Any], check: bool | Literal["auto"], rank: int, ranks: int
) -> dict[str, str]:
    """Return what the batches of a source depend on. Blocks for about `PROBE_S` at most.

    Args:
        source: The data.
        reader: Of ``source``. Its workers are started: they inherit nothing of what is opened here.
        check: Whether samples are read: `data.check`.
        rank: Of the replica; of a user's own source, others than rank 0 may hold their own part alone.
        ranks: Data ranks of the replica. A user's own source may be cut for them, so its facts are compared only
            where they are as many.
    """
    until = time.monotonic() + (PROBE_S if check else -1)
    facts = {"kind": type(source).__name__}
    if isinstance(source, BatchStream):
        return {"kind": "stream", **(source.facts(until) if check is True and rank == 0 else {})}
    if isinstance(source, Loader | Batches):
        return {**facts, **source.facts(until)}
    own: dict[str, str] = {}
    if rank == 0 and hasattr(type(source), "__len__"):
        own["length"] = str(len(source))
    if rank == 0 and isinstance(reader, Prefetcher):
        read = partial(reader.read, MicroBatch(0, 0, 0, 0), PROBE_S)
        found = sample_facts(1, lambda _: read(), until)
        own |= {name.replace("sample", "batch"): value for name, value in found.items()}
    return facts | {f"{name} with {ranks} data ranks": value for name, value in own.items()}


class OneLoop:
    """What `Job.batches` yields over all its calls: a loop that breaks leaves the rest to the next one."""

    def __init__(self) -> None:
        self._source: object = None
        self._batches: Generator[Any, None, None] | None = None  # of the source
        self._busy = False  # they are being asked for one; for good if they have raised an error, or are closed

    def rest(
        self, source: object, begin: Callable[[], Generator[Any, None, None]], over: bool = False
    ) -> Iterator[Any]:
        """Yield the batches that no call has yielded yet.

        Args:
            source: What they are of.
            begin: Makes all of them, in the first call.
            over: The last step is committed: the source of a later epoch may be any.

        Raises:
            ConfigError: The first call had another source.
            RuntimeError: They have raised an error, or are closed.
        """
        if self._busy:
            raise RuntimeError("job.batches has raised an error before, or the job is closed")
        if self._batches is None:
            self._source, self._batches = source, begin()
        if source is not self._source and not over:
            allowed = "the source of the first call, for all epochs"
            raise ConfigError("job.batches", f"another {type(source).__name__}", allowed)
        self._busy = True
        for batch in self._batches:
            self._busy = False
            yield batch
            self._busy = True
        self._busy = False

    def close(self) -> None:
        """Let nothing follow, after a ``break``. Without effect where they are being asked for a batch."""
        if self._batches is not None and not self._busy:
            self._busy = True
            self._batches.close()


class DataSources:
    """Makes the data of a job: `Job` inherits it."""

    device: torch.device  # of the rank

    def __init__(self, config: Config, place: RankPlace) -> None:
        """Make sources for one rank.

        Args:
            config: The job's configuration.
            place: Where this rank runs.
        """
        self.config = config
        self.data_rank = place.rank // config.ranks_per_unit  # ranks with one data rank train the same batches
        self.data_ranks = place.ranks // config.ranks_per_unit
        self._place = place

    @property
    def _data_shape(self) -> JobShape:
        config = self.config
        return JobShape(config.replicas, config.data_shards, config.data_ranks, config.train.accumulate)

    def _open_reader(self, source: Any) -> Reader[Any]:
        """Return what reads the batches of ``source``.

        Raises:
            ConfigError: It is no source.
        """
        if isinstance(source, Loader):
            return source.reader()
        if isinstance(source, BatchStream):
            return source.reader(self.data_rank)
        if not callable(getattr(source, "batch", None)):
            allowed = (
                "job.loader(dataset, ...), job.stream(iterable), or what has batch(shard, index, rank, micro)"
            )
            raise ConfigError("job.batches", type(source).__name__, allowed)
        return Prefetcher(source, pinned=self.device.type == "cuda")

    def batches(self, source: Any, accumulate: int | None = None) -> Iterator[Any]:
        """Yield the batches of ``source`` that this replica has to train, ``accumulate`` in a step: `Job` does."""
        raise NotImplementedError

    def loader(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = True,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        seed: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        **others: Any,
    ) -> Loader[Any]:
        """Return the batches of a map-style dataset, for `batches`: each sample counts once per epoch of the job.

        The arguments are those of `torch.utils.data.DataLoader`. Does not read anything yet, and does not block.

        Args:
            dataset: With ``__len__`` and ``__getitem__`` or ``__getitems__``; the same on all ranks.
            batch_size: Samples of a micro-batch of one rank.
            shuffle: Whether each epoch has a random order of its own; else the order is that of the dataset.
            collate_fn: Makes a batch of a list of samples; None takes torch's `default_collate`.
            drop_last: Whether the samples that do not fill the last batch of an epoch are left out; else that
                batch is smaller. No batch has samples of two epochs.
            seed: Of the order, and of what is random about a sample; None takes `train.seed`.
            num_workers: Processes that read, which live as long as `batches`; with 0 the main thread reads.
            prefetch_factor: Batches that each worker reads ahead.
            pin_memory: Whether batches are copied into pinned memory.
            timeout: The longest wait for a worker's batch, in seconds; with 0 only `timeouts.step_s` bounds it.
            worker_init_fn: Called in each worker with its number.
            multiprocessing_context: How workers are started.
            others: Other arguments of a DataLoader; those that make no sense here are refused.

        Returns:
            The source. ``for batch in loader`` is ``for batch in job.batches(loader)``.

        Raises:
            ConfigError: An argument cannot be used, or the dataset has too few samples for one step.
        """
        options = ReadOptions(
            num_workers, prefetch_factor, pin_memory, timeout, worker_init_fn, multiprocessing_context
        )
        check(dataset, batch_size, options, others)
        seed = self.config.train.seed if seed is None else seed
        reader = SampleReader(dataset, batch_size, collate_fn, shuffle, drop_last, seed)
        return Loader(reader, self._data_shape, options, self.batches)

    def stream(self, source: Any) -> BatchStream[Any]:
        """Return the batches of an iterable, for `batches`: each data rank of each replica reads its own.

        Each batch counts once if the iterable gives the same batches in each process, or has the methods
        ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader and Hugging Face's streaming
        datasets have. Does not read anything yet, and does not block.

        Args:
            source: The iterable of this rank, or a function of (shard, shards) that returns it: shard is a number
                from 0 that only this data rank of this replica has. With `spares` it has to be a function.

        Returns:
            The source. ``for batch in stream`` is ``for batch in job.batches(stream)``.

        Raises:
            ConfigError: ``source`` is neither, `data.assignment` is global, or `memory.shrink_to` is set.
        """
        if self.config.memory.shrink_to is not None:
            allowed = "null with job.stream: fewer ranks cannot go on with what each rank reads by itself"
            raise ConfigError("memory.shrink_to", self.config.memory.shrink_to, allowed)
        if self.config.data.assignment == "global":
            raise ConfigError(
                "data.assignment", "global", "per_replica, with job.stream: each replica reads its own"
            )
        return BatchStream(source, self._data_shape, self._place.run, self._place.rank, self.batches)
