"""Calling: how a process learns which incarnation of which replica it is: at once, or as a spare when needed.

All that does not depend on it is done before: a spare waits with its model built, sharded and warmed up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """An incarnation: `run_id` and `restarts` are TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT."""

    replica: int
    run_id: str
    restarts: int

    @property
    def lives(self) -> tuple[str, ...]:
        """The names of all incarnations under this run id, this one last."""
        return tuple(f"{self.replica}-{self.run_id}-{n}" for n in range(self.restarts + 1))


class Calling(Protocol):
    """Where a process is told."""

    def heard(self) -> Call | None:
        """What it was told, if it was; does not wait."""

    def wait(self) -> Call:
        """Say that all is warm, and wait to be told: for as long as it takes, for nothing else is to be done."""


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """Somebody else's launcher: the replica is an argument, the rest stands in torchrun's variables."""

    replica: int

    def heard(self) -> Call:
        """Known from the start."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        return Call(self.replica, run_id, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    wait = heard
