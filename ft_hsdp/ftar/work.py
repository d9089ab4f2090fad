"""Work: an all-reduce that was asked for: pending, done, or failed in one of three ways."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

from torch import Tensor

from ft_hsdp.errors import RecoverableError, Skipped
from ft_hsdp.ftar.engine import Result

Status = Literal["PENDING", "SUCCESS", "RETRYABLE", "FATAL", "SKIPPED"]


class Work(Future[Result]):
    """A future of a `Result`. RETRYABLE: the input is whole, ask again under a larger epoch (FT-HSDP §4.2)."""

    @property
    def status(self) -> Status:
        """How it stands."""
        if not self.done():
            return "PENDING"
        error = self.exception()
        if error is None:
            return "SUCCESS"
        if isinstance(error, Skipped):
            return "SKIPPED"
        return "RETRYABLE" if isinstance(error, RecoverableError) else "FATAL"

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """The sum.

        Raises:
            FTARError: what became of it.
            TimeoutError: it is not done after ``timeout_s``; it goes on.
        """
        return self.result(timeout_s).out
