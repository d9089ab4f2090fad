"""`bench adopt`: what it costs to train other people's models and to run in other people's trainers.

- step: a step of an adopted Llama of Hugging Face beside the same loop with PyTorch's own HSDP, 2 replicas of 2
  ranks; of steps that compute, and of steps that mostly wait, as beside an accelerator;
- kill: SIGKILL of random ranks in the examples of the trainers: the others' next commit, and the units of the run.

Frameworks are not installed beside ft_hsdp. Their environments are those of the integrations, and the processes
that need one run with its interpreter; what has none is left out, with a note that says how to make it.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import ft_hsdp
from benchmarks.under_ray import BenchCluster
from benchmarks.whole_job import WholeJob
from ft_hsdp.bench.command import kills_of, measures_of, rounds_of
from ft_hsdp.bench.jobs import SEED, Kill, Setup, hit_at_random
from ft_hsdp.bench.overhead import SETUP, TRANSPORTS, steady
from ft_hsdp.bench.recovery import NEXT_MS, Stall, costs, stalls
from ft_hsdp.bench.results import ProgressLog, ResultRow, Verdicts, begin_result, finish_result, most
from ft_hsdp.config import load
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.run.directory import Row, read_json

TRAINERS = ("fabric", "accelerate", "transformers", "torchtitan", "ray_train")
"""The trainers whose examples are killed; each has examples/NAME/config.yaml and requirements.txt."""

ON_RAY = ("ray_train",)
"""Those that run on a Ray cluster."""

ROOT = Path(ft_hsdp.__file__).parents[1]
SHAPE = replace(SETUP, replicas=2, sections={**SETUP.sections, "optim": {"clip": 1.0}})
STEPS: Mapping[str, Setup] = {
    "computing": replace(SHAPE, steps=2, wait_s=0.0),
    "waiting": replace(SHAPE, wait_s=0.5),
}
ADOPTED_STEP = 1.05  # the goal
LAST_STEPS = 10  # of a job, in which nothing is killed: the others have to commit without the victim
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # nothing is downloaded


@dataclass(frozen=True, slots=True)
class AdoptOptions:
    """What `bench adopt` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs in the example of each trainer
    rounds: int  # of what is interleaved


def options(args: Namespace) -> AdoptOptions:
    """Return what `bench adopt` is to do."""
    return AdoptOptions(measures_of(args, ("step", "kill")), kills_of(args, 7), rounds_of(args, 20))


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench adopt`."""
    for row in result["step"]:
        for name, times in row["times"].items():
            if name.startswith("ft_hsdp"):
                text = f"{row['step']}, {name}: a step, times HSDP's"
                yield most(text, row, ADOPTED_STEP, times["ratio"])
    for row in result["kill"]:
        text = f"{row['trainer']}: SIGKILL to next commit - 1 step, p50 ms"
        yield most(text, row, NEXT_MS[0], row["less_one"]["p50_ms"])
        wrong = row["twice"] + row["skipped"] + row["differ"]
        yield most(f"{row['trainer']}: units twice or skipped, other states", row, 0, wrong)


def run(options: AdoptOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log, wanted = ProgressLog(stream), options.measures
    result, started = begin_result("adopt", log)
    result["step"] = step(options.rounds, log) if "step" in wanted else []
    result["kill"] = kills(options.kills, log) if "kill" in wanted else []
    return finish_result(result, goals(result), log, started)


def interpreter(trainer: str, package: str = "") -> str:
    """Return the Python that can import what a trainer needs; "" if there is none.

    Args:
        trainer: whose environment it is: that which `make .venvs/NAME/.installed` makes.
        package: if this interpreter can import it, this one is taken.
    """
    if package and find_spec(package) is not None:
        return sys.executable
    python = ROOT / ".venvs" / trainer / "bin" / "python"
    return str(python) if python.exists() and python.parents[1].joinpath(".installed").exists() else ""


def step(rounds: int, log: ProgressLog, setups: Mapping[str, Setup] = STEPS) -> list[ResultRow]:
    """Return a row for each kind of step: those of `overhead.steady`. Raises Retryable where a process fails."""
    python = interpreter("transformers", "transformers")
    if not python:
        log.note(
            "transformers is not installed (make .venvs/transformers/.installed): the model is the built-in "
            "Llama, of the same shape"
        )
    rows = []
    for kind, setup in setups.items():
        log.say(f"steps that are {kind}: {setup.replicas} replicas x {setup.ranks} ranks")
        setup = replace(setup, model=f"benchmarks.adopted_models:{'llama' if python else 'built_in'}")
        (row,) = steady(rounds, log, setup, TRANSPORTS, python or sys.executable)
        rows.append({"step": kind, "model": "transformers" if python else "built-in", **row})
    return rows


def kills(count: int, log: ProgressLog, trainers: Sequence[str] = TRAINERS) -> list[ResultRow]:
    """Return a row for each trainer that is installed. Raises Retryable where a job fails."""
    rows = []
    for trainer in trainers:
        if python := interpreter(trainer):
            rows.append(_kill(trainer, python, count, log))
        else:
            log.note(f"{trainer} is left out: not installed (make .venvs/{trainer}/.installed)")
    return rows


@dataclass(frozen=True, slots=True)
class KilledJob:
    """One run of a trainer's example, from its start to its end."""

    step_s: float  # fault-free
    stalls: Sequence[Stall]  # of each kill
    summary: Row


def _kill(trainer: str, python: str, count: int, log: ProgressLog) -> ResultRow:
    """Run a trainer's example as often as it takes for so many kills; an example has a fixed number of steps."""
    setup, chance, jobs = example(trainer), random.Random(SEED), list[KilledJob]()
    with ExitStack() as stack:
        cluster = stack.enter_context(BenchCluster(python)) if trainer in ON_RAY else None
        while (left := count - sum(len(job.stalls) for job in jobs)) > 0 and len(jobs) < count:
            jobs.append(_job(ExampleUnderTest(setup, python, cluster), left, chance))
            log.say(f"{trainer}: {len(jobs[-1].stalls)} kills in a job of {jobs[-1].summary['steps']} steps")
    row = kill_row(trainer, setup, jobs)
    log.say(
        f"{trainer}: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms of {row['kills']} kills; "
        f"{row['trained']} units, {row['twice']} twice, {row['skipped']} skipped"
    )
    return row


def example(trainer: str) -> Setup:
    """Return the job of examples/TRAINER/config.yaml."""
    config = load(ROOT / "examples" / trainer / "config.yaml")
    sections = config.model_dump(mode="json", exclude_unset=True)
    del sections["job"], sections["replicas"], sections["ranks_per_replica"]
    return Setup(config.replicas, config.ranks_per_replica, model="", sections=sections)


class ExampleUnderTest(WholeJob):
    """A job of an example, in a folder that has examples/ as a clone does; what the script writes stays there."""

    def __init__(self, setup: Setup, python: str, cluster: BenchCluster | None = None) -> None:
        """Prepare a job.

        Args:
            setup: the example.
            python: the interpreter of all its processes.
            cluster: where it is submitted to; None: it runs as under `up`.
        """
        self._on_ray = cluster is not None
        launcher = ("up",) if cluster is None else ("submit", "--ray-address", cluster.address)
        super().__init__(setup, launcher, {**OFFLINE, **(cluster.env if cluster else {})}, python)

    def _begin(self, folder: Path) -> None:
        (folder / "examples").symlink_to(ROOT / "examples")
        super()._begin(folder)

    def kill(self, replica: int, rank: int, name: str = "KILL") -> Kill:
        """Send SIGKILL to one rank. `chaos` does not reach into a cluster; this one is on this machine."""
        if not self._on_ray:
            return super().kill(replica, rank, name)
        listed = read_json(self.run.processes(replica))
        (pid,) = (each["pid"] for each in listed["ranks"] if each["rank"] == rank)
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return Kill(now, replica, rank, listed["incarnation"])


def _job(example: ExampleUnderTest, count: int, chance: random.Random) -> KilledJob:
    """Run one job to its end, and kill random ranks in it, ``count`` times if its steps last for that."""
    with example as job:
        last = job.setup.sections["train"]["steps"] - LAST_STEPS
        done = list(hit_at_random(job, count, chance, job.kill, job.wait_for_survivors, last))
        summary = job.finish()
    step_s = job.step_s()
    return KilledJob(step_s, stalls(done, job.rows, step_s), summary)


def kill_row(trainer: str, setup: Setup, jobs: Sequence[KilledJob]) -> ResultRow:
    """Return the row of these jobs.

    Raises:
        Retryable: There was no kill in them.
    """
    found = [each for job in jobs for each in job.stalls]
    if not found:
        raise Retryable(f"bench: {trainer} has too few steps for a kill")
    units = [job.summary["batches"] for job in jobs]
    digests = [{replica["digest"] for replica in job.summary["replicas"].values()} for job in jobs]
    return {
        "trainer": trainer,
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "jobs": len(jobs),
        **costs(found, statistics.median(job.step_s for job in jobs)),
        "trained": sum(each["trained"] for each in units),
        "twice": sum(each["duplicated"] for each in units),
        "skipped": sum(each["skipped"] for each in units),
        "differ": sum(len(each) > 1 for each in digests),  # jobs whose replicas ended with different states
    }
