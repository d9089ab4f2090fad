"""A torch DataLoader as the data of the job: which samples, in which batches, and passes of one epoch.

Trainers take a DataLoader and go over it once an epoch. A job has no passes: `Job.batches` yields until the last
committed step. `EpochLoader` cuts it into epochs by the committed step, so that all replicas end an epoch at the
same step, whatever they missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ft_hsdp.errors import ConfigError

if TYPE_CHECKING:
    from ft_hsdp.train.data.loader import Loader
    from ft_hsdp.train.job import Job

_OVER = object()


def translate(job: Job, dataloader: DataLoader[Any]) -> Loader[Any]:
    """Return `Job.loader` with the arguments that ``dataloader`` was made with.

    Args:
        job: Whose data it becomes.
        dataloader: Over a map-style dataset, with the sampler that ``shuffle`` gives it.

    Raises:
        ConfigError: It has a sampler of its own, or arguments that `Job.loader` refuses.
    """
    dataset: Any = dataloader.dataset
    if not isinstance(dataset, IterableDataset):  # the job refuses that, with the way out
        _check(dataloader, len(dataset))
    others: dict[str, Any] = {"batch_size": dataloader.batch_size}
    if dataloader.num_workers:
        others["prefetch_factor"] = dataloader.prefetch_factor
    if dataloader.generator is not None:
        others["generator"] = dataloader.generator  # the job refuses that, too
    return job.loader(
        dataset,
        shuffle=isinstance(dataloader.sampler, RandomSampler),
        collate_fn=dataloader.collate_fn,
        drop_last=dataloader.drop_last,
        num_workers=dataloader.num_workers,
        pin_memory=dataloader.pin_memory,
        timeout=dataloader.timeout,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
        **others,
    )


def _check(dataloader: DataLoader[Any], samples: int) -> None:
    """Check that a DataLoader takes the samples in an order that the job has, too. Raises ConfigError."""
    if dataloader.batch_size is None:
        given, key = (
            dataloader.batch_sampler,
            "batch_size" if dataloader.batch_sampler is None else "batch_sampler",
        )
        raise ConfigError(f"DataLoader({key})", given and type(given).__name__, "batch_size, and shuffle")
    sampler = dataloader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
        allowed = "shuffle, or shuffle=False over torch.utils.data.Subset(dataset, order)"
        raise ConfigError("DataLoader(sampler)", type(sampler).__name__, allowed)
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != samples):
        allowed = "each sample once per epoch: shuffle=True"
        raise ConfigError("DataLoader(sampler)", "RandomSampler with replacement or num_samples", allowed)


def open_epochs(
    job: Job, data: DataLoader[Any] | Loader[Any], begin: Callable[[], None] = lambda: None
) -> EpochLoader:
    """Make ``data`` the data that is trained, in epochs.

    Args:
        job: Whose data it becomes.
        data: A DataLoader over a map-style dataset; or what `Job.loader` has returned.
        begin: As in `EpochLoader`.

    Raises:
        ConfigError: The job cannot read it.
    """
    return EpochLoader(job, translate(job, data) if isinstance(data, DataLoader) else data, begin)


def check_epochs(loader: Loader[Any]) -> None:
    """Check that an epoch of ``loader`` has a step. Raises ConfigError."""
    if not loader.steps_per_epoch:
        allowed = "enough for a step of all replicas: a smaller batch_size, or more samples"
        raise ConfigError("DataLoader(batch_size)", "an epoch of less than one step", allowed)


class EpochLoader:
    """The batches of a job in epochs: each pass over it is one, and ``len`` of it says how many batches that has.

    A pass begins where the job is. So the first pass of a replica that came back is the rest of an epoch, and its
    passes are fewer than those of the others; `epochs` numbers them. A pass after the last step is empty.
    """

    def __init__(self, job: Job, loader: Loader[Any], begin: Callable[[], None] = lambda: None) -> None:
        """Cut the batches of ``loader`` into epochs.

        Args:
            job: Whose committed steps count.
            loader: Of `Job.loader`.
            begin: Called before the first batch is asked for, which joins the job.

        Raises:
            ConfigError: An epoch has less than one step.
        """
        check_epochs(loader)
        self._job = job
        self._loader = loader
        self._begin = begin
        self._batches: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # a batch that was asked for, and not yielded yet
        self._empty = 0  # passes after the last step
        self._numbered = False  # `epochs` asks for what follows a pass, so also for the end of the job

    def __len__(self) -> int:
        return self._loader.steps_per_epoch * self._job.config.train.accumulate

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank in the epoch that the job is in, or in the rest of it.

        Raises:
            ConfigError: The job is over for longer than it could have epochs: the loop would never end.
        """
        first, end = True, 0
        while (batch := self._next()) is not _OVER:
            if first:
                first, end = (
                    False,
                    (self._job.step // self._loader.steps_per_epoch + 1) * self._loader.steps_per_epoch,
                )
            elif self._job.step >= end:  # this replica was away while the epoch ended
                self._ahead.append(batch)
                return
            yield batch
            if end <= self._job.step and (self._numbered or self._job.step < self._job.config.train.steps):
                return
        if first:
            self._empty += 1
            steps = self._job.config.train.steps
            if self._empty > steps:
                raise ConfigError(
                    "a pass over the data", "one after the last step", f"a loop that ends: train.steps is {steps}"
                )

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the number of each epoch that is not over yet, from 0; make one pass over this for each.

        The job ends in this call, after the last pass: what follows a pass may log values of its last step.

        Args:
            number: How many epochs the job has.

        Raises:
            ConfigError: `train.steps` is not what they have.
        """
        each, steps = self._loader.steps_per_epoch, self._job.config.train.steps
        if steps != number * each:
            allowed = f"{number * each}, for {number} epochs of {each} steps"
            raise ConfigError("train.steps", steps, allowed)
        self._numbered = True
        while (batch := self._next()) is not _OVER:
            self._ahead.append(batch)
            yield self._job.step // each

    def _next(self) -> Any:
        """Return the next batch of this rank, or `_OVER` after the last step. Blocks."""
        if self._ahead:
            return self._ahead.pop()
        if self._batches is None:
            self._begin()
            self._batches = iter(self._loader)
        return next(self._batches, _OVER)
