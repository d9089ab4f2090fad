"""The context manager with which every bench starts its processes and ends them again."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Self


class Scope(ABC):
    """A context: on entry `_begin` starts things one after the other, on exit they end in the opposite order.

    If one of them does not start, those before it end at once.
    """

    prefix = "ft-hsdp-bench-"  # of the temporary folder

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._begin(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=self.prefix))))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @abstractmethod
    def _begin(self, stack: ExitStack, folder: Path) -> None:
        """Start everything, and register on ``stack`` what ends it. ``folder`` is removed at the end."""
