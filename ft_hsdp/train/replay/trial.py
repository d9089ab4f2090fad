"""A loop, run on a replica that is alone, with the digests of its state after each step: `launcher.py sdc-check`.

Two trials of one configuration have the same initial weights, data and deterministic operators (FT-HSDP §2.2). So
each tensor has the same bits after each step, or one of them was computed or kept wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ft_hsdp import fault_injection
from ft_hsdp.config import Config
from ft_hsdp.core.commit import AttemptId, CommitRecord
from ft_hsdp.core.effects import Exit, Reduce, RunBatch
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_OK
from ft_hsdp.jsonl import replace_json
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.data.prefetch import Reader
from ft_hsdp.train.device import numerics
from ft_hsdp.train.identity import RankPlace
from ft_hsdp.train.orders import ApplyOrder, Order
from ft_hsdp.train.replay.job import Recorded, ReplayJob, Script
from ft_hsdp.train.step_driver import StepDriver


@dataclass(frozen=True, slots=True)
class Trial:
    """How one rank is tried."""

    steps: int
    number: int  # of the pass, from 0; failpoints take it for the life of a rank
    outcome: Path  # where the rank writes what it has found


@dataclass(eq=False)
class TrialScript(Script):
    """Takes the place of a leader whose replica is alone in the ring."""

    steps: int = 0
    # By step, from 0, which is before the first one: the digest of each tensor of this rank.
    digests: list[dict[str, str]] = field(default_factory=list)

    def _run(self) -> Iterator[Order]:
        self.digests.append(self._live_state.tensor_digests())
        for step in range(1, self.steps + 1):
            yield from self._alone(step)
            self.digests.append(self._live_state.tensor_digests())  # the loop has applied it
        self.ended = True
        yield Exit(EXIT_OK, "the steps of the trial are done")

    def _alone(self, step: int) -> Iterator[Order]:
        state = self._live_state.state
        assert state is not None
        places = ((0, self._config.train.accumulate * self._width),)
        yield RunBatch(step, places)
        yield Reduce(AttemptId(1, step, 0), "contribute", state.lineage, places)
        flats, mine = self._gradients.take()
        record = CommitRecord(1, 0, step, state.lineage, (0,), self._config.replicas, mine, "")
        reduced, votes = self._lanes.sums(record, {0: flats})
        record = self._counted(record, mine, votes)
        yield ApplyOrder(record if math.isfinite(record.norm) else replace(record, poisoned=(0,)), reduced)


class TrialJob(ReplayJob):
    """A rank's part in a trial."""

    def __init__(
        self, config: Config, place: RankPlace, device: torch.device, trial: Trial, close_group: Callable[[], None]
    ) -> None:
        nothing = Recorded((), (place.ranks,), trial.outcome, trial.outcome.parent)
        super().__init__(config, place, device, nothing, close_group)
        self._trial = trial

    def _join(self, driver: StepDriver, reader: Reader[Any]) -> None:
        fault_injection.arm(self.config.debug.failpoints, 0, self._place.local_rank, self._trial.number)
        self._group = ReplicaGroup(self.config.timeouts.ranks_s)
        self._live_state.state = StateId(0, 0, "trial")
        self._live_state.describe_frozen(self._group)
        self._begin(driver, partial(TrialScript, steps=self._trial.steps))

    def _tell(self, script: Script) -> None:
        assert isinstance(script, TrialScript)
        found = {"numerics": numerics(self.device), "data": self._facts, "digests": script.digests}
        replace_json(self._trial.outcome, found)
