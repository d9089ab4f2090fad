"""Accelerate 1.15 on ft_hsdp: an `Accelerator` whose ``optimizer.step()`` commits a step (docs/accelerate.md).

To Accelerate, one replica is the whole world: its processes, its collectives, its main process. The other replicas
are reached in ``optimizer.step()`` and in the loader alone. The model is sharded by Accelerate's own FSDP2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ft_hsdp.errors import ConfigError
from ft_hsdp.integrations.epochs import EpochLoader, open_epochs
from ft_hsdp.integrations.files import placed_at, placed_in
from ft_hsdp.integrations.updates import Updates
from ft_hsdp.train.data.loader import Loader
from ft_hsdp.train.job import Job
from ft_hsdp.train.join import join
from ft_hsdp.train.loop.user_loop import log_measured

_LOADER = "accelerator.prepare_train_loader(...)"


class FtHsdpAccelerator(Accelerator):
    """Accelerate's `Accelerator` for the ranks of one replica of a job."""

    def __init__(
        self,
        *,
        max_norm: float | None = None,
        job: Job | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **settings: Any,
    ) -> None:
        """Join the job (`ft_hsdp.join`), which is a collective of the replica's ranks.

        Args:
            max_norm: Largest norm of the reduced gradient, which ``accelerator.clip_grad_norm_`` has to name, too.
                None does not clip.
            job: What `ft_hsdp.join` has returned; None joins without arguments.
            fsdp_plugin: How Accelerate shards the model, with ``fsdp_version=2``. None makes each of the model's
                ``_no_split_modules`` a bucket of its own.
            settings: Other arguments of `Accelerator`.

        Raises:
            ConfigError: A setting is not that of the job, or the process cannot join.
        """
        self.job = join() if job is None else job
        on_cpu = self.job.device.type == "cpu"
        if settings.pop("cpu", on_cpu) != on_cpu:
            raise ConfigError("Accelerator(cpu)", not on_cpu, f"train.device, which is {self.job.device.type}")
        if fsdp_plugin is None:
            fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        if fsdp_plugin.fsdp_version != 2:
            raise ConfigError(
                "Accelerator(fsdp_plugin)", f"fsdp_version={fsdp_plugin.fsdp_version}", "fsdp_version=2"
            )
        super().__init__(cpu=on_cpu, fsdp_plugin=fsdp_plugin, **settings)
        if self.scaler is not None or self.mixed_precision not in ("no", "bf16"):
            allowed = "no or bf16: the scale of a loss is not part of the committed state"
            raise ConfigError("Accelerator(mixed_precision)", self.mixed_precision, allowed)
        if self.gradient_accumulation_steps != 1:
            allowed = "1; set train.accumulate, and call optimizer.step() after each micro-batch"
            raise ConfigError(
                "Accelerator(gradient_accumulation_steps)", self.gradient_accumulation_steps, allowed
            )
        if on_cpu:  # Accelerate uses FSDP on accelerators only, though FSDP2 works on CPUs, too
            self.state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
        self._updates = Updates(self.job, max_norm, "accelerator.prepare(scheduler)")

    # What a user calls while setting up.

    def prepare_train_loader(self, dataloader: DataLoader[Any] | Loader[Any]) -> EpochLoader:
        """Make a DataLoader the data that is trained: each sample counts once an epoch, whatever is lost.

        ``accelerator.prepare`` is for other data, such as that of an evaluation: each replica reads it all.

        Args:
            dataloader: Over a map-style dataset; or what `Job.loader` has returned.

        Returns:
            The batches of this rank, on its device; each pass is an epoch.

        Raises:
            ConfigError: The job cannot read it.
        """
        return open_epochs(self.job, dataloader, self._updates.begin)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare as Accelerate does, and give the model, its optimizer and its schedulers to the job.

        Raises:
            ConfigError: The first batch was asked for, the job cannot take one of them, or a scheduler is not
                stepped once for each step.
        """
        self._updates.check_not_begun("accelerator.prepare", "a call")
        prepared = super().prepare(*args, device_placement=device_placement)
        for each in prepared if isinstance(prepared, tuple | list) else (prepared,):
            if isinstance(each, nn.Module) and any(p.requires_grad for p in each.parameters()):
                self._updates.adopt("accelerator.prepare", each)
            elif isinstance(each, AcceleratedScheduler):
                if self.step_scheduler_with_optimizer:
                    allowed = "False: each committed step is one step of the scheduler, not one for each process"
                    raise ConfigError("Accelerator(step_scheduler_with_optimizer)", True, allowed)
                self._updates.add_scheduler(each.scheduler)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> CommittingOptimizer:
        """Wrap an optimizer so that its step commits."""
        if isinstance(optimizer, CommittingOptimizer):
            return optimizer
        made = CommittingOptimizer(optimizer, self._updates)
        self._updates.add_optimizer(optimizer)
        self._optimizers.append(made)
        return made

    # The loop.

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, and keep the loss for the metrics of the job; several of a micro-batch are added up."""
        self._updates.add_loss(loss)
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> None:
        """Check that the job clips so in ``optimizer.step()``; before it, the gradient is not reduced yet.

        ``accelerator.job.last.gradient_norm`` is the norm, after the step.

        Raises:
            ConfigError: It does not.
        """
        self._updates.check_norm("accelerator.clip_grad_norm_", max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refuse to clip by value. Raises ConfigError."""
        raise ConfigError(
            "accelerator.clip_grad_value_", clip_value, "clip_grad_norm_: the gradient is not reduced yet"
        )

    def no_sync(self, model: nn.Module) -> Any:
        """Refuse to skip FSDP2's reduction. Raises ConfigError."""
        allowed = "train.accumulate in the configuration, and optimizer.step() after each micro-batch"
        raise ConfigError("accelerator.no_sync", type(model).__name__, allowed)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Have the job write values of the newest committed step, once (`Job.log`), whatever ``step`` says."""
        log_measured(self.job, values)

    # What is saved.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Gather the whole model in host memory. A collective of the replica's ranks.

        Args:
            model: What `prepare` has returned.
            unwrap: As in `Accelerator`, for a model that is not trained.

        Returns:
            On rank 0 the unsharded tensors by name, {} on the others (`Job.full_state_dict`).
        """
        if model is self._updates.model:
            return self.job.full_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_model(self, model: nn.Module, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the whole model as Accelerate does. A collective of the replica's ranks; rank 0 writes.

        Each replica writes the same files. Each file appears as a whole, so replicas may do it at the same time.
        """
        with self.job.announced("saving"), placed_in(Path(save_directory)) as made:
            super().save_model(model, made, *args, **kwargs)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save an object as Accelerate does, on rank 0 of each replica; the file appears as a whole."""
        with self.job.announced("saving"), placed_at(Path(f)) as part:
            super().save(obj, part, safe_serialization)

    # What the job does itself.

    def init_trackers(self, project_name: str, *args: Any, **kwargs: Any) -> None:
        """Refuse trackers, which each replica would have. Raises ConfigError."""
        raise ConfigError(
            "accelerator.init_trackers", project_name, "accelerator.log, and the sinks of docs/metrics.md"
        )

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Refuse Accelerate's checkpoints. Raises ConfigError."""
        raise ConfigError("accelerator.save_state", output_dir, "checkpoint.dir and checkpoint.every of the job")

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Refuse Accelerate's checkpoints. Raises ConfigError."""
        raise ConfigError(
            "accelerator.load_state", input_dir, "checkpoint.dir of the job, which resumes by itself"
        )


class CommittingOptimizer(AcceleratedOptimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates) -> None:
        super().__init__(optimizer, device_placement=False)
        self._updates = updates

    def step(self, closure: Any = None) -> None:
        """Commit a step of the job (`Updates.step`).

        Raises:
            ConfigError: There was no batch of the job, there is a closure, or an optimizer is stepped out of turn.
        """
        self._updates.step(self.optimizer, _LOADER, "closure" if closure is not None else "")
