"""Hugging Face's Trainer on a job: `FaultTolerantMixin` in front of `transformers.Trainer` or of a subclass of it.

    job = ft_hsdp.join()
    trainer = FaultTolerantTrainer(job=job, model=model, args=args, train_dataset=dataset)
    trainer.train()

The Trainer keeps its loop. A step of it is a committed step of the job: ``training_step`` trains the micro-batches
that the job deals to this rank, and returns when the step is committed. What the Trainer would do after that to
the gradient, the commit has done, equally on all replicas: clipping, the optimizer, the scheduler. So they do
nothing here, and report what the commit says.

Seams of transformers 5.23: what the Trainer documents for subclasses, and three private methods that only report
numbers (``_clip_grad_norm``, ``_get_grad_norm``, ``_get_learning_rate``), two private counters and ``_save``. What
the Trainer does by itself and what cannot work here is refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer, TrainerCallback
from transformers.optimization import GreedyLR

from ft_hsdp.errors import ConfigError
from ft_hsdp.integrations.epochs import check_epochs
from ft_hsdp.integrations.files import placed_in
from ft_hsdp.train.job import Job, Optimizer
from ft_hsdp.train.loop.user_loop import log_measured

if TYPE_CHECKING:
    from transformers import Trainer as Behind
else:
    Behind = object

# Arguments that would do what a job does, or what a commit cannot do: values that are allowed, and the way out.
_ALLOWED: dict[str, tuple[tuple[object, ...], str]] = {
    "save_strategy": (("no",), "'no': the job writes the checkpoints and resumes from them (checkpoint.every)"),
    "eval_strategy": (("no", "steps"), "'no' or 'steps': a job has no epochs of its own"),
    "logging_strategy": (("no", "steps"), "'no' or 'steps': a job has no epochs of its own"),
    "train_sampling_strategy": (("random", "sequential"), "'random' or 'sequential': samples have fixed places"),
    "fp16": ((False,), "False: a loss scale is no part of the committed state; bf16 needs none"),
    "fsdp": (
        (None, "", False),
        "nothing: job.shard, or your own fully_shard before the Trainer, shards the model",
    ),
    "deepspeed": ((None,), "nothing: the model is sharded with fully_shard"),
    "parallelism_config": ((None,), "nothing: shard the model with fully_shard before the Trainer"),
    "auto_find_batch_size": ((False,), "False: all replicas have one batch size"),
    "torch_compile": ((False,), "False: compile the blocks before the Trainer, block.compile()"),
    "enable_jit_checkpoint": ((False,), "False: on SIGTERM the replica leaves at the next commit"),
    # The Trainer finds out by the name of the model's class how to shift labels, and fully_shard changes the name.
    "label_smoothing_factor": ((0,), "0, or a compute_loss_func that smooths"),
}
_IN_BACKWARD = ("lomo", "layerwise")  # optimizers that update parameters in backward


class CommittedOptimizer(AcceleratedOptimizer):
    """What the Trainer takes for its optimizer: shows the real one's groups and state, and changes nothing."""

    _is_accelerate_prepared = True  # accelerate does not wrap it again

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Show ``optimizer``, whose updates are those of the commits."""
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: object = None) -> None:
        """Do nothing: the commit has updated the parameters. ``closure`` is not called."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing, whatever ``set_to_none`` says: the gradients are dropped when the step is committed."""


class _JobCallback(TrainerCallback):
    """Says where the job stands when a step of the Trainer ends, and hands its logs to the job."""

    def __init__(self, trainer: FaultTolerantMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = self._trainer.epochs
        if not self._trainer.committed:  # the job has ended instead, and the step before had its turn
            control.should_log = control.should_evaluate = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._trainer.log_to_job(logs or {})


class FaultTolerantMixin(Behind):
    """Makes a Trainer one rank of a job. Put it in front: ``class FT(FaultTolerantMixin, SFTTrainer)``."""

    model: Any
    optimizer: Any

    def __init__(self, *args: Any, job: Job, **kwargs: Any) -> None:
        """Make the Trainer, then shard its model unless `fully_shard` has done so, and have the job take it over.

        A collective of the replica's ranks.

        Args:
            job: What `ft_hsdp.join` has returned. Join before `TrainingArguments` are made.

        Raises:
            ConfigError: An argument asks for what a job cannot do, or the model cannot be adopted.
        """
        self.job = job
        self.committed = False  # whether the last step of the Trainer ended with a commit
        self._optim: Optimizer | None = None
        self._batches: Iterator[Any] | None = None
        _check_class(type(self))
        super().__init__(*args, **kwargs)
        _check_arguments(self.args, job)
        if self.model_init is not None:
            raise ConfigError("Trainer(model_init)", self.model_init, "a model: all replicas train the same one")
        # accelerate has set the number of this machine's cores; sums on the CPU would differ between machines.
        torch.set_num_threads(job.config.train.threads)
        # Means over devices are the job's; with this, counts of tokens are those of this rank.
        self.args.average_tokens_across_devices = False
        take_over = job.adopt if isinstance(self.model, FSDPModule) else job.shard
        self.model = take_over(self.model)
        self.is_distributed_loading_by_transformers = True  # accelerate neither wraps nor shards the model
        self.add_callback(_JobCallback(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train until the job ends; the rank joins the job with the first batch, and catches up if it is behind.

        Args:
            resume_from_checkpoint: None or False: the job resumes by itself.

        Returns:
            The Trainer's `TrainOutput`; numbers of samples, seconds and operations are those of this process.

        Raises:
            ConfigError: A checkpoint was given, this is the second call, or a callback has stopped the training.
            Ended: The job ends this replica.
        """
        if resume_from_checkpoint:
            allowed = "nothing: the job resumes by itself, from other replicas or from checkpoint.dir"
            raise ConfigError("trainer.train(resume_from_checkpoint)", resume_from_checkpoint, allowed)
        if self._optim is not None:
            raise ConfigError("trainer.train", "a second call", "one in a job")
        accumulate = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1  # the job says which micro-batch is the last of a step
        try:
            output = super().train(**kwargs)
        finally:
            self.args.gradient_accumulation_steps = accumulate
        if self._batches is not None and next(self._batches, None) is not None:  # waits for the end of the job
            allowed = "train.steps steps: all replicas train to the same end"
            raise ConfigError("control.should_training_stop", f"a stop at step {self.job.step}", allowed)
        return output

    # Data.

    def get_train_dataloader(self) -> Any:
        """Return the job's loader over the dataset, with the Trainer's collator, batch size and workers.

        Raises:
            ConfigError: The dataset is none that the job can deal samples of, or it has less than one step.
        """
        plain = super().get_train_dataloader()
        ahead = {"prefetch_factor": plain.prefetch_factor} if plain.num_workers else {}
        self._loader = self.job.loader(
            plain.dataset,
            self.args.train_batch_size,
            shuffle=self.args.train_sampling_strategy == "random",
            collate_fn=plain.collate_fn,
            drop_last=self.args.dataloader_drop_last,
            num_workers=plain.num_workers,
            pin_memory=plain.pin_memory,
            multiprocessing_context=plain.multiprocessing_context,
            **ahead,
        )
        check_epochs(self._loader)
        return self._loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return one micro-batch, none if the job has ended, and no number of items: the job knows the weights.

        Raises:
            ConfigError: `data.weight` is tokens, and the Trainer does not count the tokens of this model.
            Ended: The job ends this replica.
        """
        if self._batches is None:
            self._warm_up()
            self._batches = epoch_iterator
        samples, items = super().get_batch_samples(epoch_iterator, 1, device)
        if not samples:
            self.control.should_training_stop = True
            self._follow(self.job.step)
        elif self.job.config.data.weight == "tokens":
            if items is None:
                allowed = "units, or batches with labels for a model that takes num_items_in_batch"
                raise ConfigError("data.weight", "tokens", allowed)
            self.job.weigh(int(items))
        return samples, None

    # The step.

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer and its scheduler, and give both to the job; the commits step them.

        Returns:
            What shows them to the Trainer.

        Raises:
            ConfigError: The job cannot use them.
        """
        if self._optim is not None:
            return self.optimizer
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if any(word in name for word in _IN_BACKWARD):
            raise ConfigError("args.optim", name, "an optimizer that updates the parameters in its step")
        optimizer = super().create_optimizer(*args, **kwargs)
        scheduler = super().create_scheduler(self.args.max_steps, optimizer)
        if isinstance(scheduler, ReduceLROnPlateau | GreedyLR):
            allowed = "a scheduler that needs no metric: replicas evaluate at other times"
            raise ConfigError("args.lr_scheduler_type", type(scheduler).__name__, allowed)
        self._optim = self.job.optimizer(optimizer, scheduler)
        self._optim.clip = self.args.max_grad_norm or None
        self.optimizer = CommittedOptimizer(optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the scheduler that was made with the optimizer; the arguments are not used."""
        return self.lr_scheduler

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Train micro-batches until a step is committed, or the job has ended.

        Args:
            model: As the Trainer gives it.
            inputs: The first micro-batch.
            num_items_in_batch: Not used: the loss stays the mean over its own micro-batch.

        Returns:
            The loss of the committed step, the mean over all that contributed; 0 if there was none.

        Raises:
            ConfigError: Weights or optimizer cannot be used.
            Ended: The job ends this replica.
        """
        assert self._optim is not None
        self.committed = False
        while not self.committed:
            held = self.job.step
            loss = super().training_step(model, inputs, None)
            self._optim.step(loss=loss)
            self.committed = self.job.step > held
            if not self.committed:  # one of several micro-batches, or a step that this replica was left behind in
                samples, _ = self.get_batch_samples(self._batches, 1, self.args.device)
                if not samples:
                    break
                (inputs,) = samples
        self._follow(self.job.step, more=1)
        last = self.job.last
        return torch.tensor(last.loss if self.committed and last is not None else 0.0, device=self.args.device)

    def _follow(self, step: int, more: int = 0) -> None:
        """Have the Trainer count as the job does, whose step is ``step``, when it adds ``more`` by itself.

        Means over steps leave out those that this replica was not there for.
        """
        away = step - more - self.state.global_step
        if away > 0:
            self._initial_global_step += away  # private in 5.23: where ``train`` began
            self._globalstep_last_logged += away  # private in 5.23
        self.state.global_step = step - more

    def _warm_up(self) -> None:
        """Train the first micro-batch once before a batch joins the job, if it has labels."""
        inputs = self._loader.batch(0, 0, self.job.data_rank)
        if not self.label_names or any(name not in inputs for name in self.label_names):
            return
        self.current_gradient_accumulation_steps = 1  # the Trainer sets it after `get_batch_samples`
        behind: Any = super()
        self.job.warm_up(lambda: behind.training_step(self.model, inputs, None))

    # What the Trainer reports. These methods are private in transformers 5.23.

    def _clip_grad_norm(self, model: torch.nn.Module) -> float | None:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float | None:
        return None if self.job.last is None else self.job.last.gradient_norm

    def _get_learning_rate(self) -> float:
        last = self.job.last
        return float(self.optimizer.param_groups[0]["lr"]) if last is None else last.lr

    @property
    def epochs(self) -> float:
        """How often the committed steps have gone through the dataset."""
        return self.job.step / self._loader.steps_per_epoch

    def log_to_job(self, logs: dict[str, Any]) -> None:
        """Hand the numbers of the Trainer's ``logs`` to the job's metrics."""
        if self._batches is not None:
            log_measured(self.job, logs)

    # Evaluation, and what is saved.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does; the other replicas do not take it for a hang.

        Returns:
            The Trainer's `EvalLoopOutput`.
        """
        with self.job.announced("evaluation"):
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model for ``from_pretrained``. A collective of the replica's ranks; rank 0 writes.

        Each replica writes the same files. Each file appears as a whole, so replicas may do it at the same time.

        Args:
            output_dir: A directory; None takes ``args.output_dir``.
        """
        with self.job.announced("saving"):
            state = self.job.full_state_dict()
            if self.args.should_save:
                with placed_in(Path(output_dir or self.args.output_dir)) as made:
                    self._save(made, state_dict=state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


class FaultTolerantTrainer(FaultTolerantMixin, Trainer):
    """`transformers.Trainer` on a job."""


def _check_class(kind: type) -> None:
    """Refuse a Trainer behind the mixin with a sampler or a loop of its own, which would be passed over."""
    behind = [each for each in kind.__mro__[kind.__mro__.index(FaultTolerantMixin) + 1 :] if each is not object]
    for name in ("get_train_dataloader", "get_batch_samples", "_get_train_sampler", "_inner_training_loop"):
        owner = next((each for each in behind if name in vars(each)), None)
        if owner is not Trainer:
            got = "no Trainer behind the mixin" if owner is None else f"{owner.__name__}.{name}"
            raise ConfigError("FaultTolerantMixin", got, f"a Trainer that leaves {name} to transformers.Trainer")


def _check_arguments(args: Any, job: Job) -> None:
    """Check what the Trainer was told against what a job can do. Raises ConfigError."""
    train = job.config.train
    equal = {
        "max_steps": (train.steps, "train.steps"),
        "gradient_accumulation_steps": (train.accumulate, "train.accumulate"),
        "world_size": (job.ranks, "the ranks of a replica: use_cpu=True if there is no accelerator"),
    }
    for name, (wanted, what) in equal.items():
        if getattr(args, name) != wanted:
            raise ConfigError(f"args.{name}", getattr(args, name), f"{wanted}, {what}")
    for name, (values, allowed) in _ALLOWED.items():
        value = getattr(args, name, values[0])
        if getattr(value, "value", value) not in values:
            raise ConfigError(f"args.{name}", getattr(value, "value", value), allowed)
