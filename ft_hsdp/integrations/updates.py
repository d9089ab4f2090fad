"""The optimizers and learning rate schedulers of a trainer, whose steps become committed steps of the job.

A replica that catches up applies steps that its loop never sees. So all that a step depends on is given to the job
before the first batch: the optimizers, the schedulers, and the largest norm. What the loop says later is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ft_hsdp.errors import ConfigError

if TYPE_CHECKING:
    from ft_hsdp.train.job import Job, Optimizer


class Updates:
    """What updates the model of a job, collected until the first batch, and stepped by the loop from then on."""

    def __init__(self, job: Job, max_norm: float | None, setup_scheduler: str) -> None:
        """Begin without any.

        Args:
            job: Which commits the steps.
            max_norm: Largest norm of the reduced gradient; None does not clip.
            setup_scheduler: How a user gives a scheduler to `add_scheduler`, for messages.
        """
        self._job = job
        self._max_norm = max_norm
        self._setup_scheduler = setup_scheduler
        self.model: nn.Module | None = None  # that is trained
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[LRScheduler] = []
        self._optimizer: Optimizer | None = None  # from the first batch on
        self._stepped: set[int] = set()  # the optimizers that were stepped since the last batch
        self._loss: Tensor | None = None  # of backward, since the last step

    def check_not_begun(self, what: str, value: object) -> None:
        """Refuse what would change this replica alone.

        Raises:
            ConfigError: The first batch was asked for.
        """
        if self._optimizer is not None:
            name = value if isinstance(value, str) else type(value).__name__
            raise ConfigError(what, name, "a call before the first batch")

    def adopt(self, what: str, model: nn.Module) -> nn.Module:
        """Give the job the model that is trained; ``what`` names the call in messages.

        Raises:
            ConfigError: There is one already, or the job cannot take it.
        """
        if self.model is not None:
            allowed = f"one module that is trained; {type(self.model).__name__} is there (requires_grad_(False))"
            raise ConfigError(what, type(model).__name__, allowed)
        self.model = self._job.adopt(model)
        return self.model

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)

    def add_scheduler(self, scheduler: LRScheduler) -> None:
        """Add a scheduler; from the first batch on its ``step()`` does nothing, because the commits step it.

        Args:
            scheduler: Of one of the optimizers, or of a wrapper that has one as ``optimizer``.

        Raises:
            ConfigError: It is of another optimizer.
        """
        inner = getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)
        if not any(inner is each for each in self._optimizers):
            allowed = "a scheduler of an optimizer that was set up before"
            raise ConfigError(self._setup_scheduler, type(scheduler).__name__, allowed)
        if inner is not scheduler.optimizer:
            scheduler.optimizer = inner
            _mark_as_scheduled(inner)
        self._schedulers.append(scheduler)

    def begin(self) -> None:
        """Give all to the job, before the first batch.

        Raises:
            ConfigError: There is no optimizer, one has a scheduler that is not known here, or the job refuses it.
        """
        if not self._optimizers:
            raise ConfigError("the first batch", None, "an optimizer that is set up before it")
        scheduled = {id(scheduler.optimizer) for scheduler in self._schedulers}
        for optimizer in self._optimizers:
            if id(optimizer) not in scheduled and any("initial_lr" in group for group in optimizer.param_groups):
                allowed = f"one without a learning rate scheduler, or {self._setup_scheduler} for that"
                raise ConfigError("the first batch", type(optimizer).__name__, allowed)
        self._optimizer = self._job.optimizer(self._optimizers, self._schedulers or None)
        self._optimizer.clip = self._max_norm

    def add_loss(self, loss: Tensor) -> None:
        """Note a loss before its backward, for the metrics; several of a micro-batch are added up."""
        if loss.numel() == 1:
            loss = loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss

    def step(self, optimizer: torch.optim.Optimizer, setup_dataloader: str, given: str = "") -> None:
        """Commit a step in the call for the last of the optimizers (`train.job.Optimizer.step`).

        Args:
            optimizer: Which one the loop steps.
            setup_dataloader: How a user gives the data to the job, for messages.
            given: Names of the arguments that the loop has given to the step.

        Raises:
            ConfigError: There was no batch of the job, there is an argument such as a closure, or the optimizer is
                stepped out of turn.
        """
        name = type(optimizer).__name__
        if given:
            allowed = "no argument: the optimizer is stepped when the step commits"
            raise ConfigError("optimizer.step", f"{given} for {name}", allowed)
        if self._optimizer is None:
            allowed = f"a batch of {setup_dataloader} before it: that is the data which counts exactly once"
            raise ConfigError("optimizer.step", name, allowed)
        if id(optimizer) in self._stepped:
            allowed = f"one step of each of the {len(self._optimizers)} optimizers for each batch"
            raise ConfigError("optimizer.step", f"a second one of {name}", allowed)
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            loss, self._loss = self._loss, None
            self._optimizer.step(loss=loss)

    def check_norm(self, what: str, max_norm: float, norm_type: float) -> None:
        """Check that the job clips as the loop says: it does so in the step, when the gradient is reduced.

        Raises:
            ConfigError: It does not.
        """
        if norm_type != 2.0:
            raise ConfigError(f"{what}(norm_type)", norm_type, "2.0")
        if max_norm != self._max_norm:
            allowed = f"what the constructor was given as max_norm, which is {self._max_norm}"
            raise ConfigError(f"{what}(max_norm)", max_norm, allowed)


def _mark_as_scheduled(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as torch's schedulers do when they are made for it; they warn about others."""
    step: Any = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    def marked(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]
