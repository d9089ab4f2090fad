"""Lightning Fabric 2.6 on ft_hsdp: a strategy whose ``optimizer.step()`` commits a step (docs/fabric.md).

To Fabric, one replica is the whole world: its ranks, its collectives, its rank 0. The other replicas are reached
in ``optimizer.step()`` and in the loader alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.loggers import Logger
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ft_hsdp.errors import ConfigError
from ft_hsdp.integrations.epochs import EpochLoader, open_epochs
from ft_hsdp.integrations.files import placed_at
from ft_hsdp.integrations.updates import Updates
from ft_hsdp.train.job import Job
from ft_hsdp.train.join import join
from ft_hsdp.train.loop.user_loop import log_measured

if TYPE_CHECKING:
    from ft_hsdp.train.data.loader import Loader


class FtHsdpStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` for the ranks of one replica of a job."""

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        *,
        max_norm: float | None = None,
        tensor_parallel_size: int = 1,
        job: Job | None = None,
    ) -> None:
        """Join the job (`ft_hsdp.join`), which is a collective of the replica's ranks.

        Args:
            parallelize_fn: ``parallelize_fn(module, mesh)`` shards a module with FSDP2 over
                ``mesh["data_parallel"]`` and returns it, as for Lightning's strategy.
            max_norm: Largest norm of the reduced gradient. ``fabric.clip_gradients`` has to name the same one.
                None does not clip.
            tensor_parallel_size: Ranks over which ``mesh["tensor_parallel"]`` goes: `ranks_per_unit` of the
                configuration.
            job: What `ft_hsdp.join` has returned; None joins without arguments.

        Raises:
            ConfigError: A process cannot join, or the size is another one.
        """
        self.job = join() if job is None else job
        ranks_per_unit = self.job.ranks // self.job.data_ranks
        if tensor_parallel_size != ranks_per_unit:
            allowed = f"ranks_per_unit, which is {ranks_per_unit}"
            raise ConfigError("FtHsdpStrategy(tensor_parallel_size)", tensor_parallel_size, allowed)
        super().__init__(
            parallelize_fn,
            data_parallel_size=self.job.data_ranks,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=False,
        )
        self.cluster_environment = TorchElasticEnvironment()  # all launchers of a rank set torchrun's variables
        self._backward_sync_control = _OneReductionEach()
        self.logger = JobLogger(self.job)
        self._updates = Updates(self.job, max_norm, "strategy.setup_scheduler(...)")

    # What Fabric calls while it sets up.

    def setup_environment(self) -> None:
        """Check that Fabric was told of the ranks that the job has; they have met already.

        Raises:
            ConfigError: Fabric's devices, nodes, accelerator or precision are not those of the job.
        """
        found, ranks = self.num_processes * self.num_nodes, self.job.ranks
        if found != ranks:
            said = f"{self.num_processes} devices on {self.num_nodes} nodes"
            raise ConfigError("Fabric(devices, num_nodes)", said, f"ranks_per_replica, which is {ranks}, in all")
        if self.root_device.type != self.job.device.type:
            allowed = f"train.device, which is {self.job.device.type}"
            raise ConfigError("Fabric(accelerator)", self.root_device.type, allowed)
        if getattr(self.precision, "scaler", None) is not None:
            allowed = "32-true, bf16-mixed or bf16-true: the scale of a loss is not part of the committed state"
            raise ConfigError("Fabric(precision)", "a loss scaler", allowed)
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module, and give it to the job if it is to be trained.

        Raises:
            ConfigError: There is one that is trained already, or the job cannot take it.
        """
        module = super().setup_module(module)
        trained = any(p.requires_grad for p in module.parameters())
        return self._updates.adopt("fabric.setup_module", module) if trained else module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Refuse to set up both at once, because FSDP2 puts other parameters into the module."""
        allowed = "fabric.setup_module(module), then an optimizer of its parameters, and fabric.setup_optimizers"
        raise ConfigError("fabric.setup", f"{type(module).__name__} with optimizers", allowed)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Note an optimizer of the job.

        Raises:
            ConfigError: The first batch was asked for.
        """
        self._updates.check_not_begun("fabric.setup_optimizers", optimizer)
        self._updates.add_optimizer(optimizer)
        return optimizer

    # What a user calls while setting up.

    def setup_scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """Have the committed steps step a scheduler, and return it; its ``step()`` in the loop does nothing then.

        Args:
            scheduler: Of an optimizer that Fabric has set up; one step of it is one committed step.

        Raises:
            ConfigError: The first batch was asked for, or it is of another optimizer.
        """
        self._updates.check_not_begun("strategy.setup_scheduler", scheduler)
        self._updates.add_scheduler(scheduler)
        return scheduler

    def setup_dataloader(self, dataloader: DataLoader[Any] | Loader[Any]) -> EpochLoader:
        """Make a DataLoader the data that is trained: each sample counts once an epoch, whatever is lost.

        ``fabric.setup_dataloaders`` is for other data, such as that of an evaluation: each replica reads it all.

        Args:
            dataloader: Over a map-style dataset; or what `Job.loader` has returned.

        Returns:
            The batches of this rank, on its device; each pass is an epoch.

        Raises:
            ConfigError: The job cannot read it.
        """
        return open_epochs(self.job, dataloader, self._updates.begin)

    # The loop.

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward, and keep the loss for the metrics of the job; several of a micro-batch are added up."""
        self._updates.add_loss(tensor)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """Commit a step of the job, in the last call if there are several optimizers (`train.job.Optimizer.step`).

        Raises:
            ConfigError: There was no batch of the job, there is a closure, or an optimizer is stepped out of turn.
        """
        self._updates.step(optimizer, "strategy.setup_dataloader(...)", ", ".join(kwargs))

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Check that the job clips so in ``optimizer.step()``; before it, the gradient is not reduced yet.

        Returns:
            Nothing: ``strategy.job.last.gradient_norm`` is the norm, after the step.

        Raises:
            ConfigError: It does not.
        """
        self._updates.check_norm("fabric.clip_gradients", max_norm, norm_type)
        return None  # type: ignore[return-value] # the annotation of `Fabric.clip_gradients` has it

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Refuse to clip by value. Raises ConfigError."""
        raise ConfigError("fabric.clip_gradients(clip_val)", clip_val, "max_norm: the gradient is not reduced yet")

    # Files.

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write one file with the whole model, and the optimizers if ``state`` has them.

        A collective of the replica. Every replica may write the file at the same step: all write the same
        content, and each puts it in place at once.
        """
        with self.job.announced("saving"), placed_at(Path(self.broadcast(str(path)))) as part:
            super().save_checkpoint(part, state, *args, **kwargs)  # rank 0 writes

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load weights, and the state of optimizers, with which the job begins at step 0.

        Raises:
            ConfigError: The first batch was asked for.
        """
        self._updates.check_not_begun("fabric.load", str(path))
        return super().load_checkpoint(path, state, *args, **kwargs)


class JobLogger(Logger):
    """Has the job write what ``fabric.log`` is given, once: ``Fabric(loggers=strategy.logger)``."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def name(self) -> str:
        return self._job.config.job.name

    @property
    def version(self) -> None:
        """None: a run has no versions."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log values of the newest committed step (`Job.log`), whatever ``step`` says."""
        log_measured(self._job, metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse hyper-parameters. Raises ConfigError."""
        allowed = "args of the configuration, which is in the run's directory"
        raise ConfigError("logger.log_hyperparams", type(params).__name__, allowed)


class _OneReductionEach:
    """Refuses to skip FSDP2's reduction: the job accumulates, with train.accumulate."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled:
            allowed = "train.accumulate in the configuration, and optimizer.step() after each micro-batch"
            raise ConfigError("fabric.no_backward_sync", enabled, allowed)
        return nullcontext()
