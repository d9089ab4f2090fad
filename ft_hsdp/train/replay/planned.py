"""Steps that are planned before, with replicas that are away for a while: `launcher.py study`, and `sdc-check`.

A plan says who is in the ring of each step, and which places each contributor trains, as the lighthouse deals
them. Everything else is found now: the loop, sums, divisors, learning rates and updates are those of a run.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from ft_hsdp.config import Config
from ft_hsdp.core.commit import CommitRecord, lr_scale
from ft_hsdp.core.effects import Exit
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places
from ft_hsdp.errors import EXIT_OK, ConfigError
from ft_hsdp.jsonl import replace_json
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.data import facts
from ft_hsdp.train.data.prefetch import Reader
from ft_hsdp.train.identity import RankPlace
from ft_hsdp.train.orders import ApplyOrder, Order
from ft_hsdp.train.replay.job import Recorded, ReplayJob, Script
from ft_hsdp.train.step_driver import StepDriver


@dataclass(frozen=True, slots=True)
class PlannedSteps:
    """Steps that follow each other, of one ring."""

    first: int  # step
    last: int  # step
    epoch: int
    ring: tuple[int, ...]  # replica ids
    # What each contributor trains in each of the steps, by replica id: after each part, all places until then.
    places: dict[int, tuple[Places, ...]]
    wanted: int  # units of a step to which all replicas contribute


@dataclass(frozen=True, slots=True)
class Variant:
    """What a rank trains, and where it writes what it has found."""

    steps: tuple[PlannedSteps, ...]
    rows: Path  # a line of JSON for each step; rank 0 writes it on the way
    outcome: Path  # rank 0 writes it at the end


@dataclass(eq=False)
class PlannedScript(Script):
    """Takes the place of the leaders of all replicas."""

    steps: tuple[PlannedSteps, ...] = ()

    def _run(self) -> Iterator[Order]:
        self._applied(None)
        for steps in self.steps:
            for step in range(steps.first, steps.last + 1):
                record = yield from self._planned(step, steps)
                self._applied(record)
        self.ended = True
        yield Exit(EXIT_OK, "the planned steps are done")

    def _planned(self, step: int, steps: PlannedSteps) -> Generator[Order, None, CommitRecord]:
        state = self._live_state.state
        assert state is not None
        record = CommitRecord(
            epoch=steps.epoch,
            attempt=0,
            step=step,
            prev=state.lineage,
            ring=steps.ring,
            total=self._config.replicas,
            contributions=(),
            digest="",
            wanted=steps.wanted,
        )
        record, reduced = yield from self._sum(record, steps.places)
        if not math.isfinite(record.norm):
            record = replace(record, poisoned=record.contributors)
        scale = lr_scale(self._config.lr.intervention, record.units, steps.wanted)
        record = replace(record, lr_scale=scale)
        yield ApplyOrder(record, reduced)
        return record

    def _applied(self, record: CommitRecord | None) -> None:
        """Note what a step has led to; None: what there was before the first one."""


@dataclass(eq=False)
class VariantScript(PlannedScript):
    """Writes a row for each step."""

    rows: TextIO | None = None  # on rank 0
    losses: dict[int, float] = field(default_factory=dict)  # of the evaluation, by step

    def _applied(self, record: CommitRecord | None) -> None:
        if record is None:
            return
        if record.skipped:  # the lighthouse's ring would reduce again without it
            raise ConfigError("study", f"step {record.step}", "steps in which each gradient is finite")
        loss = self.losses.pop(record.step, None)
        row = {"step": record.step, "loss": record.loss, "units": record.units}
        if self.rows is not None:
            self.rows.write(json.dumps(row if loss is None else row | {"eval": loss}) + "\n")


class PlannedJob(ReplayJob):
    """A rank's part in steps that are planned."""

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        device: torch.device,
        outcome: Path,
        close_group: Callable[[], None],
        take: Callable[[StateId, float], object] | None = None,
    ) -> None:
        """Make the part of one rank.

        Args:
            outcome: Where it writes what it has found.
            take: Takes the losses of evaluations; None: nothing is evaluated.
        """
        self._take = take
        nothing = Recorded((), (place.ranks,), outcome, outcome.parent)
        super().__init__(config, place, device, nothing, close_group)

    def _join(self, driver: StepDriver, reader: Reader[Any]) -> None:
        self._group = ReplicaGroup(self.config.timeouts.ranks_s)
        self._live_state.state = StateId(0, 0, "planned")
        self._live_state.describe_frozen(self._group)
        self._begin(driver, self._script(), self._take)

    def _script(self) -> Callable[..., Script]:
        """Return what makes the script."""
        raise NotImplementedError


class VariantJob(PlannedJob):
    """A rank's part in a variant of a study."""

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        device: torch.device,
        variant: Variant,
        close_group: Callable[[], None],
    ) -> None:
        super().__init__(config, place, device, variant.outcome, close_group, self._note)
        self._variant = variant
        self._rows = variant.rows.open("w", buffering=1, encoding="utf-8") if place.rank == 0 else None
        self._losses: dict[int, float] = {}

    def _script(self) -> Callable[..., Script]:
        return partial(VariantScript, steps=self._variant.steps, rows=self._rows, losses=self._losses)

    def _note(self, state: StateId, loss: float) -> None:
        self._losses[state.step] = loss

    def _tell(self, script: Script) -> None:
        digest = self._live_state.digest()
        if self._rows is not None:
            self._rows.close()
            data = dict(self._facts)
            if self._evaluated is not None:
                with contextlib.suppress(TypeError):  # batches of a type that has no digest
                    data["evaluation"] = facts.digest(self._evaluated[1].batch(0, 0, 0, 0))
            replace_json(self._variant.outcome, {"digest": digest, "data": data})
