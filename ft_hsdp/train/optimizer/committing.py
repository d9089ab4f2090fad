"""What `Job.optimizer` gives to the user's loop, and the error that ends the loop early."""

from __future__ import annotations

import torch

from ft_hsdp.errors import FtHsdpError
from ft_hsdp.train.step_driver import StepDriver


class Ended(FtHsdpError):
    """Raised in the user's loop when the job ends this replica before the end of training."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = code


class Optimizer:
    """The optimizer that `Job.optimizer` returns; use it in place of the wrapped one."""

    def __init__(self, driver: StepDriver) -> None:
        """Make the optimizer of a job, whose steps are those of ``driver``; only `Job.optimizer` calls this."""
        self._driver = driver

    @property
    def clip(self) -> float | None:
        """The largest norm of the reduced gradient; None does not clip.

        Set it before the first batch, on all ranks. Gradients are not reduced yet after backward, so clipping has
        to happen inside ``step``.
        """
        return self._driver.clip

    @clip.setter
    def clip(self, norm: float | None) -> None:
        self._driver.clip = norm

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Reduce, vote, commit and apply one step (FT-HSDP §4.1).

        Blocks until the step is committed, with or without this replica's gradient, until this replica is left
        behind, or until the job ends it. With accumulation, all but the last micro-batch of a step return at once.

        Args:
            loss: Mean loss of this rank's micro-batch, for metrics: a number, or a tensor of one element. None
                takes what the model's forward has returned, if that is a scalar or has one under ``loss``.

        Returns:
            True if the gradient of this replica is in the committed step.

        Raises:
            ConfigError: The optimizer was changed so that its state would not be part of the committed one, or the
                loss is no scalar.
        """
        contributed = self._driver.end(loss)
        self._driver.groups.note_loop(contributed)
        return contributed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, whatever ``set_to_none`` says: the gradients are dropped when the step is committed."""
