"""Steps that are planned before, with replicas that are away for a while: `launcher.py study`, and `sdc-check`.

A plan says who is in the ring of each step, and which places each contributor trains, as the lighthouse deals
them. Everything else is found now: the loop, sums, divisors, learning rates and updates are those of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ft_hsdp.config import Config
from ft_hsdp.core.commit import CommitRecord, lr_scale
from ft_hsdp.core.effects import Exit
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places
from ft_hsdp.errors import EXIT_OK
from ft_hsdp.jsonl import replace_json
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.data.prefetch import Reader
from ft_hsdp.train.identity import RankPlace
from ft_hsdp.train.orders import ApplyOrder, Order
from ft_hsdp.train.replay.job import Recorded, ReplayJob, Script
from ft_hsdp.train.step_driver import StepDriver

SHOWN_STEPS = 10  # of which the rows are written at once


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

    @staticmethod
    def read(path: Path, rows: Path, outcome: Path) -> Variant:
        """Return what `write` has written."""
        found = []
        for row in json.loads(path.read_bytes()):
            places = {
                int(replica): tuple(tuple((first, count) for first, count in part) for part in parts)
                for replica, parts in row["places"].items()
            }
            found.append(PlannedSteps(**row | {"ring": tuple(row["ring"]), "places": places}))
        return Variant(tuple(found), rows, outcome)

    @staticmethod
    def write(path: Path, steps: list[PlannedSteps]) -> None:
        path.write_text(json.dumps([asdict(each) for each in steps]))


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

    write: Callable[[str], object] = str  # takes lines
    losses: dict[int, float] = field(default_factory=dict)  # of the evaluation, by step
    _lines: list[str] = field(default_factory=list)

    def _applied(self, record: CommitRecord | None) -> None:
        if record is not None:
            row: dict[str, Any] = {"step": record.step, "loss": record.loss, "units": record.units}
            row |= {"norm": record.norm, "contributors": len(record.contributors)}
            if record.step in self.losses:
                row["eval"] = self.losses.pop(record.step)
            self._lines.append(json.dumps(row) + "\n")
        if record is None or record.step % SHOWN_STEPS == 0 or record.step == self.steps[-1].last:
            self.write("".join(self._lines))
            self._lines.clear()


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
        self._rows = variant.rows.open("w") if place.rank == 0 else None
        self._losses: dict[int, float] = {}

    def _script(self) -> Callable[..., Script]:
        write = str if self._rows is None else self._show
        return partial(VariantScript, steps=self._variant.steps, write=write, losses=self._losses)

    def _note(self, state: StateId, loss: float) -> None:
        self._losses[state.step] = loss

    def _show(self, lines: str) -> None:
        assert self._rows is not None
        self._rows.write(lines)
        self._rows.flush()

    def _tell(self, script: Script) -> None:
        digest = self._live_state.digest()
        if self._rows is not None:
            self._rows.close()
            replace_json(self._variant.outcome, {"digest": digest, "data": self._facts})
