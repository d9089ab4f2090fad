"""torchtitan 0.3 on ft_hsdp: a `Trainer` whose step is a committed step of the job.

    def llama3() -> FtHsdpTrainer.Config:
        return FtHsdpTrainer.Config(model_spec=model_registry("8B"), ...)

In a configuration registry it takes the place of torchtitan's `Trainer`; ``torchtitan.train:main`` is the `entry`
of the job. torchtitan builds, shards and initialises the model, the optimizers, the schedulers and the
data. To it, one replica is the whole world. The other replicas are reached where a batch is asked for and where a
step is committed. torchtitan's ``train_step`` and ``train`` are replaced: clipping, the optimizers and the
schedulers belong to the commit.

torchtitan averages over the valid tokens of a step. So `data.weight` has to be tokens: the loss of a micro-batch
is the mean over its own valid tokens, and the job weighs it by their number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from ft_hsdp.errors import ConfigError
from ft_hsdp.integrations.epochs import translate
from ft_hsdp.train.job import Job, Optimizer
from ft_hsdp.train.join import join
from ft_hsdp.train.loop.user_loop import log_measured

# Settings that would do what a job does, or what a commit cannot do: the value that is allowed, and the way out.
_ALLOWED: dict[str, tuple[object, str]] = {
    "training.disable_cuda_graphs": (True, "True: a graph that is replayed hands no gradients to the job"),
    "parallelism.pipeline_parallel_degree": (1, "1: a bucket of gradients is ready once in each backward"),
    "parallelism.context_parallel_degree": (
        1,
        "1; tensor_parallel_degree divides the activations of long sequences, too",
    ),
    "parallelism.expert_parallel_degree": (
        1,
        "1; a loop of your own can have experts on several ranks (docs/library.md#tensor-and-expert-parallelism)",
    ),
    "metrics.enable_tensorboard": (
        False,
        "False: the job writes the numbers once for all replicas (docs/metrics.md)",
    ),
    "metrics.enable_wandb": (False, "False: the job writes the numbers once for all replicas (docs/metrics.md)"),
    "profiler.enable_profiling": (False, "False: all replicas would write into the same files"),
    "profiler.enable_memory_snapshot": (False, "False: all replicas would write into the same files"),
}


@dataclass(kw_only=True, slots=True)
class FtHsdpTrainerConfig(Trainer.Config):
    """The settings of torchtitan's `Trainer`, without any more; in a registry, `FtHsdpTrainer.Config`."""


class FtHsdpTrainer(Trainer):
    """torchtitan's `Trainer` for the ranks of one replica of a job."""

    Config = FtHsdpTrainerConfig
    job: Job

    def __init__(self, config: FtHsdpTrainerConfig) -> None:
        """Join the job (`ft_hsdp.join`), have torchtitan build everything, and give the job what it commits.

        A collective of the replica's ranks.

        Args:
            config: torchtitan's.

        Raises:
            ConfigError: A setting asks for what a job cannot do, or the job cannot take the model or an optimizer.
        """
        super().__init__(config)
        self.gradient_accumulation_steps = self.job.config.train.accumulate
        self._optim = self._give_to_job()
        self.metrics_processor.logger = _JobLogger(self.job)

    def init_distributed(self) -> ParallelDims:
        """Join the job, whose process group has the ranks of this replica; return the dimensions of their mesh.

        Raises:
            ConfigError: A setting asks for what a job cannot do, or the process cannot join.
        """
        logging.getLogger("httpx").setLevel(logging.WARNING)  # torchtitan has all loggers write what they are told
        self.job = join()
        _check(self.config, self.job)
        if self.config.debug.seed is None:  # or each replica would throw dice
            self.config.debug.seed = self.job.config.train.seed
        # torchtitan does so before it forms a process group: recomputation looks for its mesh in this thread.
        torch.autograd.set_multithreading_enabled(False)
        return ParallelDims.from_config(self.config.parallelism, self.job.ranks)

    def _give_to_job(self) -> Optimizer:
        """Give the model, the optimizers and the schedulers to the job. Raises ConfigError."""
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        if self.step:
            allowed = "weights to begin with: initial_load_path, with initial_load_model_only"
            raise ConfigError("checkpoint", f"a state of step {self.step}", allowed)
        (model,) = self.model_parts
        self.job.adopt(model)
        if self.optimizers._optimizer_step_pre_hooks or self.optimizers._optimizer_step_post_hooks:
            allowed = "none (load_balance_coeff=None for experts): a replica that catches up would not run it"
            raise ConfigError("optimizers", "a hook of step", allowed)
        optim = self.job.optimizer(self.optimizers.optimizers, self.lr_schedulers.schedulers)
        optim.clip = float(self.config.training.max_norm)
        return optim

    # Data.

    def _source(self) -> Any:
        """Return the data of the job: what torchtitan's dataloader gives.

        One over a dataset with an index is built as for a single rank, and the job deals its samples.
        """
        mine = self.dataloader
        if isinstance(mine, DataLoader) and not isinstance(mine.dataset, IterableDataset):
            return translate(self.job, self._dataloader(0, 1))
        return self.job.stream(self._stream)

    def _dataloader(self, shard: int, shards: int) -> Any:
        return self.config.dataloader.build(
            dp_world_size=shards,
            dp_rank=shard,
            tokenizer=self.tokenizer,
            seq_len=self.config.training.seq_len,
            local_batch_size=self.config.training.local_batch_size,
            snapshot_every_n_steps=1,
        )

    def _stream(self, shard: int, shards: int) -> Any:
        dataloader = self._dataloader(shard, shards)
        return _TorchdataState(dataloader) if isinstance(dataloader, StatefulDataLoader) else dataloader

    # The loop.

    def train(self) -> None:
        """Train until the job ends; the rank joins it with the first batch, and catches up if it is behind.

        Raises:
            Ended: The job ends this replica.
        """
        source = self._source()
        self._warm_up()
        batches = self.batch_generator(self.job.batches(source))
        while True:
            try:
                self.train_step(batches)
            except DataloaderExhaustedError:
                return
            self.gc_handler.run(self.step)
            if self.config.validator.enable and self.validator.should_validate(self.step):
                with self.job.pause("validation"):
                    self.validator.validate(self.model_parts, self.step)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Train micro-batches until a step is committed, and log it.

        Args:
            data_iterator: The micro-batches that the job deals to this rank.

        Raises:
            ConfigError: The optimizers were changed so that the job cannot commit their step.
            DataloaderExhaustedError: The job has ended.
        """
        committed, rates = False, {}
        while not committed:
            batch = next(data_iterator)
            held = self.job.step  # after a replica that was behind has caught up
            rates = self.lr_schedulers.get_metrics()
            loss = self._forward_backward(*batch)
            self._optim.step(loss=loss)
            committed = self.job.step > held
        self.step = self.job.step
        last = self.job.last
        if last is not None and self.metrics_processor.should_log(self.step):
            norm = float("nan") if last.gradient_norm is None else last.gradient_norm
            self.metrics_processor.log(self.step, last.loss, last.loss, norm, rates)

    def _forward_backward(self, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """Run forward and backward; return the mean loss over the valid tokens of the micro-batch."""
        valid = (labels != IGNORE_INDEX).sum()
        self.job.weigh(int(valid))
        return self.forward_backward_step(
            input_dict=inputs, labels=labels, global_valid_tokens=valid.clamp(min=1)
        ).detach()

    def _warm_up(self) -> None:
        """Run forward and backward once before the first batch joins the job, on what this rank would read."""
        for inputs, labels in self.dataloader:
            placed = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            targets = labels.to(self.device)

            def once(placed: dict[str, Any] = placed, targets: torch.Tensor = targets) -> None:
                self._forward_backward(placed, targets)

            self.job.warm_up(once)
            return


class _TorchdataState:
    """A dataloader of torchtitan that gives torchdata's state, a dict: torchtitan's own is a pickle of it."""

    def __init__(self, dataloader: StatefulDataLoader[Any]) -> None:
        self._dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataloader)

    def state_dict(self) -> dict[str, Any]:
        return StatefulDataLoader.state_dict(self._dataloader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self._dataloader, state)


class _JobLogger(BaseLogger):
    """Hands what torchtitan measures to the metrics of the job; the loss and what is like it are there already."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def log(self, metrics: dict[str, Any], step: int) -> None:
        own = {k: v for k, v in metrics.items() if k != "grad_norm" and not k.startswith("loss_metrics/")}
        log_measured(self._job, own)


def _check(config: Trainer.Config, job: Job) -> None:
    """Check torchtitan's settings against what a job can do. Raises ConfigError."""
    for key, (value, allowed) in _ALLOWED.items():
        section, name = key.split(".")
        got = getattr(getattr(config, section), name)
        if got != value:
            raise ConfigError(key, got, allowed)
    if config.checkpoint.enable and not config.checkpoint.load_only:
        allowed = "False, or load_only=True for weights to begin with: the job writes checkpoints (checkpoint.dir)"
        raise ConfigError("checkpoint.enable", True, allowed)
    train, ours = job.config.train, config.training
    if ours.steps != train.steps:
        raise ConfigError("training.steps", ours.steps, f"train.steps, which is {train.steps}")
    degree, together = config.parallelism.tensor_parallel_degree, job.config.ranks_per_unit
    if degree != together:
        allowed = f"ranks_per_unit, which is {together}: the ranks that train one micro-batch together"
        raise ConfigError("parallelism.tensor_parallel_degree", degree, allowed)
    whole = ours.local_batch_size * job.data_ranks * job.config.replicas * train.accumulate
    if ours.global_batch_size not in (-1, whole):
        allowed = f"-1, or {whole}: local_batch_size x data ranks x replicas x train.accumulate"
        raise ConfigError("training.global_batch_size", ours.global_batch_size, allowed)
    if job.config.data.weight != "tokens":
        allowed = "tokens: torchtitan's loss is the mean over the valid tokens of a step"
        raise ConfigError("data.weight", job.config.data.weight, allowed)
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        allowed = "the loss that it wraps: it runs backward by itself, so that the job cannot weigh the gradients"
        raise ConfigError("loss", "ChunkedLossWrapper", allowed)
    if config.optimizer.implementation == "fused_opt_states_bf16":
        allowed = "fused, foreach or for-loop: a hook of step would make the optimizer's state"
        raise ConfigError("optimizer.implementation", config.optimizer.implementation, allowed)
