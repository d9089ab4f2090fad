"""A loop, run on a replica that is alone, with the digests of its state after each step: `launcher.py sdc-check`.

Two trials of one configuration have the same initial weights, data and deterministic operators (FT-HSDP §2.2). So
each tensor has the same bits after each step, or one of them was computed or kept wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ft_hsdp import fault_injection
from ft_hsdp.config import Config
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.jsonl import replace_json
from ft_hsdp.train.data.prefetch import Reader
from ft_hsdp.train.device import numerics
from ft_hsdp.train.identity import RankPlace
from ft_hsdp.train.replay.job import Script
from ft_hsdp.train.replay.planned import PlannedJob, PlannedScript, PlannedSteps
from ft_hsdp.train.step_driver import StepDriver


@dataclass(frozen=True, slots=True)
class Trial:
    """How one rank is tried."""

    steps: int
    number: int  # of the pass, from 0; failpoints take it for the life of a rank
    outcome: Path  # where the rank writes what it has found


@dataclass(eq=False)
class TrialScript(PlannedScript):
    """Takes the place of a leader whose replica is alone in the ring."""

    # By step, from 0, which is before the first one: the digest of each tensor of this rank.
    digests: list[dict[str, str]] = field(default_factory=list)

    def _applied(self, record: CommitRecord | None) -> None:
        self.digests.append(self._live_state.tensor_digests())


class TrialJob(PlannedJob):
    """A rank's part in a trial."""

    def __init__(
        self, config: Config, place: RankPlace, device: torch.device, trial: Trial, close_group: Callable[[], None]
    ) -> None:
        super().__init__(config, place, device, trial.outcome, close_group)
        self._trial = trial

    def _join(self, driver: StepDriver, reader: Reader[Any]) -> None:
        fault_injection.arm(self.config.debug.failpoints, 0, self._place.local_rank, self._trial.number)
        super()._join(driver, reader)

    def _script(self) -> Callable[..., Script]:
        units = self.config.train.accumulate * self.data_ranks
        steps = PlannedSteps(1, self._trial.steps, 1, (0,), {0: (((0, units),),)}, wanted=units)
        return partial(TrialScript, steps=(steps,))

    def _tell(self, script: Script) -> None:
        assert isinstance(script, TrialScript)
        found = {"numerics": numerics(self.device), "data": self._facts, "digests": script.digests}
        replace_json(self._trial.outcome, found)
