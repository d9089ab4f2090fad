"""`study`: many variants of one job, each with other failures, trained in one process each (FT-HSDP §6.2).

A process trains what the replicas of a variant would train, one contributor after the other, with the loop, the
sums and the updates of a run (`train.replay.planned`). The lighthouse's own rules deal the units. So a variant
with the memberships of a real run ends with the digest of that run.

A variant that is trained has a file in the folder of the study, and is not trained again.

`python -m ft_hsdp.launch.study FOLDER` is one rank of a variant.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, astuple, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

import ft_hsdp
from ft_hsdp.analysis.studies import (
    RingPeriod,
    VariantResult,
    memberships,
    observed,
    outages,
    variant_name,
)
from ft_hsdp.config import Config, dump, load, parse, public
from ft_hsdp.config.base import Int, PathText, Section, refuse
from ft_hsdp.config.entry import stamped
from ft_hsdp.config.loader import load_as
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.replica_state import other_data
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places, size
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.backend import entry
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import RunDir, read_json, read_jsonl
from ft_hsdp.launch.run.recorder import commits_of
from ft_hsdp.launch.run.replay import free_ports, place, run_ranks
from ft_hsdp.lifetime import leave
from ft_hsdp.train.replay.planned import PlannedSteps, Variant
from lighthouse.quorum.units import apportion
from lighthouse.runtime import policy

VARIED = (("train", "precision"), ("train", "seed"), ("lr", "intervention"), ("quorum", "batch"))
PLAN = TypeAdapter(tuple[PlannedSteps, ...])
LOOK_S = 2.0  # between two looks at how far the variants are


class VariantsConfig(Section):
    """Variants: one for each combination of the values."""

    failures: tuple[Int, ...] = Field((0,), description="in the run, at equal distances")
    steps: tuple[Int, ...] = Field((1,), description="of each failure")
    lost: tuple[Int, ...] = Field((1,), description="replicas that a failure takes at once")
    rate: tuple[Literal["none", "linear", "sqrt", "constant_batch"], ...] = Field(
        ("none",), description="lr.intervention; constant_batch: none, with quorum.batch constant"
    )
    precision: tuple[Literal["float32", "bfloat16"], ...] = Field(("float32",), description="train.precision")
    seeds: tuple[Int, ...] = Field((1,), description="train.seed")
    like: PathText | None = Field(None, description="the folder of a run; its memberships instead of failures")

    @model_validator(mode="after")
    def _one_history(self) -> Self:
        made_up = self.model_fields_set & {"failures", "steps", "lost"}
        if self.like is not None and made_up:
            raise refuse("like", self.like, f"nothing beside {', '.join(sorted(made_up))}: one history")
        return self


class StudyConfig(Section):
    """What a study trains."""

    dir: PathText = Field("runs/study", description="folder of the results")
    job: dict[str, Any] = Field({}, description="keys of a job's configuration, which all variants share")
    variants: tuple[VariantsConfig, ...] = Field(min_length=1, description="lists of variants")


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant with one seed."""

    name: str  # of the variant
    seed: int
    config: Config
    history: tuple[RingPeriod, ...]
    result: Path  # the file of what was found; it is there once the variant is trained

    @property
    def folder(self) -> Path:
        """Where its process works; gone once it is trained."""
        return self.result.with_suffix("")

    @property
    def plan(self) -> tuple[PlannedSteps, ...]:
        return plan(self.config, self.history)

    @property
    def key(self) -> str:
        """What its results depend on, as a hash. The default of a key that a later version adds is not in it."""
        config = stamped(self.config).model_dump(mode="json", exclude_defaults=True)
        what = [ft_hsdp.__version__, config, PLAN.dump_python(self.plan, mode="json")]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def cells(study: StudyConfig) -> list[Cell]:
    """Return what a study trains, each variant once, in the order of the file.

    Raises:
        ConfigError: A variant cannot be trained.
    """
    found: dict[Path, Cell] = {}
    for number, each in enumerate(study.variants):
        axes = each.failures, each.steps, each.lost, each.precision, each.rate, each.seeds
        for count, length, lost, precision, rate, seed in product(*axes):
            config = _config(study.job, precision, rate, seed)
            if each.like is not None:
                history = _like(f"variants.{number}.like", each.like, config)
                name = f"like_{Path(each.like).name}_{rate}"
            else:
                name = variant_name(count, precision, length, lost, rate)
                try:
                    away = outages(count, length, lost, config.replicas, config.train.steps)
                except ValueError as error:
                    raise ConfigError(f"variants.{number}", name, f"failures that fit: {error}") from None
                history = memberships(away, config.replicas)
            result = Path(study.dir) / f"{name}-seed{seed}.json"
            found.setdefault(result, Cell(name, seed, config, history, result))
    return [*found.values()]


def _like(key: str, folder: str, config: Config) -> tuple[RingPeriod, ...]:
    """Return the history of a run, which has to be one that the steps of a study can have.

    Raises:
        ConfigError: On ``key``, if it is not.
    """
    rows = commits_of(RunDir(Path(folder)))
    odd = ("ring_widths", "poisoned", "spoiled")
    strange = any(row["total"] != config.replicas or any(row.get(name) for name in odd) for row in rows)
    if strange or not rows or rows[0]["step"] != 1:
        what = f"the folder of a run from step 1 on, of {config.replicas} replicas with all their ranks"
        raise ConfigError(key, folder, f"{what}, in which each gradient was finite")
    return observed(rows)


def _config(job: dict[str, Any], precision: str, rate: str, seed: int) -> Config:
    for section, key in VARIED:
        value = job.get(section)
        if isinstance(value, dict) and key in value:
            raise ConfigError(f"job.{section}.{key}", value[key], "nothing here: `variants` says it")
    constant = rate == "constant_batch"
    overrides = [
        f"--train.precision={precision}",
        f"--train.seed={seed}",
        f"--lr.intervention={'none' if constant else rate}",
        *(["--quorum.batch=constant"] if constant else []),
    ]
    config = parse(job, overrides)
    if config.train.device != "cpu":
        raise ConfigError("job.train.device", config.train.device, "cpu: a GPU sums in another order")
    other = config.spares or config.chaos or config.memory.shrink_to is not None
    if other or config.train.norm_mads is not None:
        keys = "spares, chaos, memory.shrink_to or train.norm_mads"
        raise ConfigError("job", keys, "none of them: `variants` says who adds to a step")
    return config


def plan(config: Config, history: Sequence[RingPeriod]) -> tuple[PlannedSteps, ...]:
    """Return the steps of a job with such memberships, with the places that the lighthouse deals.

    Args:
        config: The job's configuration.
        history: Who is in the ring, from step 1 on; a replica that is lost was in the ring of the step before.
    """
    rules = policy(config).units
    ring = ("",) * config.ranks_per_replica
    found: list[PlannedSteps] = []
    before: Grant | None = None
    ends = [*(each.first for each in history[1:]), config.train.steps + 1]
    for epoch, (each, end) in enumerate(zip(history, ends, strict=True), 1):
        base = StateId(0 if before is None else before.epoch, each.first - 1, "")
        members = (Member(r, "", "behind" if r in each.behind else "contribute", ring) for r in each.ring)
        grant = Grant(0, epoch, base, tuple(members), config.replicas, "")
        grant = apportion(grant, before, rules, rules.refill == "same_step")
        trained = before.places(each.first) if before is not None and each.late else {}
        takes = {m.replica for m in grant.members if m.role == "contribute"}
        for first, last in ((each.first, each.first), (each.first + 1, end - 1)):
            if first <= min(last, config.train.steps):
                due = {r: where for r, where in grant.places(first).items() if r in takes}
                parts = {r: _parts(trained.get(r, ()), where) for r, where in due.items()}
                found.append(PlannedSteps(first, last, epoch, grant.ring, parts, grant.units))
            trained = {}
        before = grant
    return tuple(found)


def _parts(trained: Places, due: Places) -> tuple[Places, ...]:
    """Return after which places a contributor has reduced its gradients: those that it had, and all."""
    return (trained, due) if 0 < size(trained) < size(due) else (due,)


@dataclass(frozen=True, slots=True)
class StudyProgress:
    done: int  # variants
    of: int
    steps: int  # trained now
    left: int  # still to be trained
    seconds: float  # since the begin

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.done} of {self.of} variants done"
        eta = self.seconds * self.left / self.steps
        return f"{self.done} of {self.of} variants done, {self.left} steps left, about {eta / 60:.0f} min"


def run(study: StudyConfig, jobs: int | None, show: Callable[[StudyProgress], None]) -> list[Cell]:
    """Train what is not trained yet. Blocks.

    Args:
        study: What to train.
        jobs: Variants at once; None: as many as fit on the cores of this process.
        show: Called every `LOOK_S`.

    Returns:
        All variants, whose results are there now.

    Raises:
        ConfigError: A variant cannot be trained, or the folder has results of another study.
        Retryable: The process of a variant has ended otherwise.
    """
    wanted = cells(study)
    if jobs is not None and jobs < 1:
        raise ConfigError("--jobs", jobs, "1 or more")
    ranks = max(cell.config.ranks_per_replica for cell in wanted)
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) // ranks)
    left = [cell for cell in wanted if not _done(cell)]
    _check_data(wanted)
    began, stop = time.monotonic(), threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            running = {pool.submit(_train, cell, stop) for cell in left}
            while running:
                done, running = wait(running, LOOK_S)
                for each in done:
                    each.result()
                    _check_data(wanted)
                ready = sum(trained(cell) for cell in left)
                steps = sum(cell.config.train.steps for cell in left)
                ended = len(wanted) - len(running)
                show(StudyProgress(ended, len(wanted), ready, steps - ready, time.monotonic() - began))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return wanted


def _done(cell: Cell) -> bool:
    """Return whether a variant is trained.

    Raises:
        ConfigError: It was trained with other settings.
    """
    found = read_json(cell.result)
    if found and found.get("key") != cell.key:
        what = "results of this study: another version, or other settings, made these (remove them, or set `dir`)"
        raise ConfigError("dir", str(cell.result), what)
    return bool(found)


def _check_data(wanted: Iterable[Cell]) -> None:
    """Check that the variants with one seed that are trained have read the same data.

    Raises:
        ConfigError: They have not.
    """
    agreed: dict[int, dict[str, str]] = {}
    for cell in wanted:
        data = (read_json(cell.result) or {}).get("data", {})
        if (odd := other_data(data, agreed.setdefault(cell.seed, data))) is not None:
            name, got, other = odd
            what = f"results of the same data, not {name} {got} beside {other} (remove those of one of them)"
            raise ConfigError("dir", str(cell.result), what)


def trained(cell: Cell) -> int:
    """Return how many steps of a variant are trained."""
    if cell.result.exists():
        return cell.config.train.steps
    try:
        return (cell.folder / "steps.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _train(cell: Cell, stop: threading.Event) -> None:
    """Train one variant. Blocks until it is trained, or ``stop`` is set."""
    shutil.rmtree(cell.folder, ignore_errors=True)
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(dump(public(cell.config)), encoding="utf-8")
    (cell.folder / "plan.json").write_bytes(PLAN.dump_json(cell.plan))
    ranks, (port,) = cell.config.ranks_per_replica, free_ports(1)
    places = {f"rank-{rank}.log": place(rank, rank, ranks, port) for rank in range(ranks)}
    began = time.monotonic()
    failed = run_ranks(tied(__name__, str(cell.folder)), cell.folder, places, stop)
    if failed is not None:
        raise failed.error(cell.name)
    rows = read_jsonl(cell.folder / "steps.jsonl")
    replace_json(
        cell.result,
        {
            "key": cell.key,
            "name": cell.name,
            "seed": cell.seed,
            "seconds": round(time.monotonic() - began, 1),
            **read_json(cell.folder / "found.json"),  # digest, and facts of the data
            "history": [asdict(each) for each in cell.history],
            "units": [row["units"] for row in rows],
            "loss": [round(row["loss"], 4) for row in rows],
            "eval": [(row["step"], row["eval"]) for row in rows if "eval" in row],
        },
    )
    shutil.rmtree(cell.folder)


def results(trained: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return what was found of each variant."""
    return [read_json(cell.result) for cell in trained]


def write(folder: Path, found: Iterable[VariantResult]) -> None:
    """Write a line for each variant into a CSV file of ``folder``, for spreadsheets."""
    with (folder / "variants.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(each.name for each in fields(VariantResult))
        table.writerows(astuple(each) for each in found)


def read(path: Path) -> StudyConfig:
    """Return the study in a YAML file. Raises ConfigError."""
    return load_as(StudyConfig, path)


def main(folder: Path) -> int:
    """Run one rank; return its exit code."""
    steps = PLAN.validate_json((folder / "plan.json").read_bytes())
    variant = Variant(steps, folder / "steps.jsonl", folder / "found.json")
    return entry.main(load(folder / "config.yaml"), 0, folder, variant)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
