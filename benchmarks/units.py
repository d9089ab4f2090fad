"""`bench units`: what a step that is counted in units keeps when replicas are lost.

- constant: one of 4 replicas is away for 100 steps: does each step have the wanted units?
- rate: the time of a unit of three survivors, with a constant batch beside one that adapts; in turns;
- refill: with `same_step`, what the step of a loss takes beyond its units' own time;
- loss: curves with failures, with both kinds of batch, beside 5 seeds without failures;
- tokens: with `data.weight: tokens`, gradient and loss beside those of one big batch in fp64;
- kills: SIGKILL of random ranks at random moments; units trained twice or skipped, and the replay.

Steps of constant, rate and refill wait instead of computing; the others train the built-in trainer's model.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TextIO

from benchmarks.unit_figures import beyond, constancy, curve, micro_batch_s, outside, unit_seconds
from benchmarks.whole_job import WholeJob
from ft_hsdp.analysis.commits import canonical
from ft_hsdp.bench.command import kills_of, measures_of, rounds_of
from ft_hsdp.bench.jobs import ENDLESS, RECENT, SEED, JobUnderTest, Kill, Setup, gone, hit_at_random
from ft_hsdp.bench.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    milliseconds,
    most,
    ratio,
    ratio_interval,
    spread,
)
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.run.directory import Row, read_jsonl
from ft_hsdp.launch.run.verify import verify

MEASURES = ("constant", "rate", "refill", "loss", "tokens", "kills")
UNIT_TIMES, REFILL_STEPS, TOKEN_MEAN = 1.03, 0.15, 1e-6  # the goals
ACCUMULATE = 3  # micro-batches of a rank in a step, of the jobs that wait
VICTIM = 1
LOST_AT, AWAY, AFTER = 10, 100, 60  # steps before the loss, without the victim, and after its return
RATE_STEPS = 40  # of each turn
REFILL_KILLS = 20
LONG_S = 0.1  # of a micro-batch: a loss costs milliseconds, whatever the step
BUILT_IN: Mapping[str, Any] = {
    "model": {"dim": 64, "layers": 2, "heads": 2},
    "data": {"path": "stdlib", "max_bytes": 1 << 20, "assignment": "global"},
}
SMALL: Mapping[str, Any] = {"threads": 1, "micro_batch": 2, "seq_len": 32, "accumulate": 2}
SEEDS = (1, 2, 3, 4, 5)
LOSS_STEPS, BLOCK = 200, 20  # a point of a curve is the mean of a block
LAST = 4  # blocks at the end, whose mean is compared: over fewer, the order of a few units counts
AWAY_IN_TURN = [
    {"at_step": at, "replicas": [replica], "rank": 0, "down_steps": down}
    for at, replica, down in ((10, 1, 50), (30, 2, 40), (75, 3, 50), (90, 0, 50), (145, 2, 50), (150, 1, 45))
]
WITH_FAILURES: Mapping[str, Mapping[str, Any]] = {
    "constant": {"quorum": {"batch": "constant"}},
    "adapt": {},
    "adapt, lr x sqrt(share)": {"lr": {"intervention": "sqrt"}},
}
GAP = 5  # mean number of steps between two kills
STEPS_A_KILL, CALM = 10, 30  # steps of a job for each kill, and besides
KILLS: Mapping[str, tuple[int, int, Mapping[str, Any]]] = {  # replicas, ranks, sections
    "next_step": (4, 1, {"quorum": {"batch": "constant", "refill": "next_step"}}),
    "same_step": (3, 2, {"quorum": {"batch": "constant", "refill": "same_step"}}),
    "tokens": (4, 1, {"data": {**BUILT_IN["data"], "weight": "tokens"}}),
}


@dataclass(frozen=True, slots=True)
class UnitsOptions:
    """What `bench units` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs of each kind of batch; refill gets fewer
    rounds: int  # of what is interleaved


def options(args: Namespace) -> UnitsOptions:
    """Return what `bench units` is to do."""
    return UnitsOptions(measures_of(args, MEASURES), kills_of(args, 50), rounds_of(args, 4))


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench units`."""
    for row in result["constant"]:
        short = len(row["others"]) + (row["refill"] == "same_step" and row["at_loss"] != row["wanted"])
        text = f"{row['refill']}, {row['assignment']}: short steps"
        yield most(text, row, 0, short)
    for row in result["rate"]:
        yield most("time of a unit, constant / adapt", row, UNIT_TIMES, row["times"]["constant"]["ratio"])
    for row in result["refill"]:
        yield most("refill: beyond its units, p50, of a step", row, REFILL_STEPS, row["steps"]["p50"])
    for row in result["loss"]:
        seen = row["with_failures"]["constant"]["outside_last"]
        yield most("loss with failures, outside the seeds", row, 0, seen)
    for row in result["tokens"]:
        seen = max(row["gradient"], row["loss"]) if row["alike"] else math.inf
        yield most("token mean beside one big batch", row, TOKEN_MEAN, seen)
    for row in result["kills"]:
        wrong = row["twice"] + row["skipped"] + (not row["replayed"]) + len(row["breaches"])
        yield most(f"{row['batch']}, {row['kills']} kills: what is wrong", row, 0, wrong)


def run(options: UnitsOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        Retryable: A process fails.
        ConfigError: A run cannot be replayed.
    """
    log, wanted = ProgressLog(stream), options.measures
    result, started = begin_result("units", log)
    result["constant"] = constant(log) if "constant" in wanted else []
    result["rate"] = rate(options.rounds, log) if "rate" in wanted else []
    result["refill"] = refill(min(options.kills, REFILL_KILLS), log) if "refill" in wanted else []
    result["loss"] = loss(log) if "loss" in wanted else []
    result["tokens"] = tokens(log) if "tokens" in wanted else []
    result["kills"] = kills(options.kills, log) if "kills" in wanted else []
    return finish_result(result, goals(result), log, started)


def waiting(wait_s: float, quorum: Mapping[str, Any], **more: Any) -> Setup:
    """Return a job of 4 replicas whose micro-batches wait, with A = 3.

    Args:
        wait_s: How long a micro-batch waits.
        quorum: The section.
        more: Other sections; "steps" and "assignment" are keys of train and data.
    """
    train = {"steps": more.pop("steps", ENDLESS), "threads": 1, "accumulate": ACCUMULATE}
    data = {"assignment": more.pop("assignment", "global")}
    return Setup(wait_s=wait_s, sections={"train": train, "data": data, "quorum": dict(quorum), **more})


def constant(log: ProgressLog, away: int = AWAY) -> list[ResultRow]:
    """Return a row for each refill and assignment; ``away``: steps without the victim. Raises Retryable."""
    rows = []
    for refill_ in ("next_step", "same_step"):
        for assignment in ("global", "per_replica"):
            setup = waiting(
                0.01,
                {"batch": "constant", "refill": refill_},
                steps=LOST_AT + away + AFTER,
                assignment=assignment,
                chaos=[{"at_step": LOST_AT, "replicas": [VICTIM], "rank": 0, "down_steps": away}],
            )
            with WholeJob(setup) as job:
                job.finish()
            found = constancy(canonical(job.rows.values(), ()), VICTIM)
            if found["away"] < away:
                raise Retryable(f"bench: replica {VICTIM} was away for {found['away']} steps, not {away}")
            rows.append({"replicas": setup.replicas, "refill": refill_, "assignment": assignment, **found})
            short = f"{len(found['others'])} of {found['steps'] - 1} steps short of {found['wanted']} units"
            where = f"{found['away']} without replica {VICTIM}; {found['at_loss']} units at the loss"
            log.say(f"{refill_}, {assignment}: {short}, {where}")
    return rows


def rate(turns: int, log: ProgressLog, steps: int = RATE_STEPS) -> list[ResultRow]:
    """Return a row: seconds of a unit of the survivors of 4 replicas, by kind of batch. Raises Retryable.

    One job runs at a time, in the order ABBA. The time of a unit is that of a step by the micro-batches that a
    rank trained in it.
    """
    took: dict[str, list[float]] = {"constant": [], "adapt": []}
    for number in range(turns):
        for name in took if number % 2 == 0 else reversed(took):
            chaos = [{"at_step": 5, "replicas": [VICTIM], "rank": 0, "down_steps": 10**6}]
            setup = waiting(0.03, {"batch": name}, chaos=chaos)
            with JobUnderTest(setup) as job:
                mine = job.rows[0]

                def without(mine: list[Row] = mine) -> list[Row]:
                    return [row for row in mine if VICTIM not in row["contributors"]][2:]

                job.wait(lambda: len(without()) >= steps, f"{steps} steps without replica {VICTIM}")
                took[name].append(statistics.median(unit_seconds(without(), 0, setup.ranks)))
            log.say(f"turn {number + 1} of {turns}, {name}: a unit takes {1e3 * took[name][-1]:.4g} ms")
    return [
        {
            "replicas": setup.replicas,
            "survivors": setup.replicas - 1,
            "rounds": turns,
            "steps": steps,
            "unit": {name: spread(seconds) for name, seconds in took.items()},
            "times": {"constant": ratio_interval(took["constant"], took["adapt"])},
        }
    ]


def refill(count: int, log: ProgressLog, wait_s: float = LONG_S) -> list[ResultRow]:
    """Return a row: steps in whose middle a replica was lost, and refilled by the others. Raises Retryable."""
    setup = waiting(wait_s, {"batch": "constant", "refill": "same_step"})
    done: list[Kill] = []
    with JobUnderTest(setup) as job:
        for kill in hit_at_random(job, count, random.Random(SEED), job.kill, job.wait_for_survivors):
            done.append(kill)
        step_s = job.step_s()
        micro_s = micro_batch_s(read_jsonl(job.run.fed(0)))
    found = [beyond(kill, job.rows, micro_s, setup.ranks) for kill in done]
    seconds = [each for each in found if each is not None]
    if len(seconds) < len(done):
        raise Retryable("bench: a survivor did not log its next commit")
    short = [row for row in canonical(job.rows.values(), ()) if row["units"] != row["units_wanted"]]
    row: ResultRow = {
        "replicas": setup.replicas,
        "kills": len(done),
        "step_ms": milliseconds(step_s),
        "micro_batch_ms": milliseconds(micro_s),
        "beyond": spread(seconds),
        "steps": {
            "p50": ratio(statistics.median(seconds), step_s),
            "min": ratio(min(seconds), step_s),
            "max": ratio(max(seconds), step_s),
        },
        "short_steps": len(short),
    }
    log.say(f"refill: {len(done)} kills, {row['beyond']['p50_ms']:.3g} ms beyond the units of the step")
    return [row]


def built_in(ranks: int, replicas: int, train: Mapping[str, Any], sections: Mapping[str, Any]) -> Setup:
    """Return a job of the built-in trainer; ``train`` and ``sections`` are added to the small configuration."""
    merged = {**BUILT_IN, **sections, "train": {**SMALL, **train}}
    return Setup(replicas=replicas, ranks=ranks, model="", sections=merged)


def loss(log: ProgressLog, steps: int = LOSS_STEPS, seeds: Sequence[int] = SEEDS) -> list[ResultRow]:
    """Return a row: curves of several seeds without failures, and of one of these seeds with failures.

    The runs with failures have the seed whose run without failures ends in the middle of all: a seed at the border
    would leave the spread by any difference.

    Args:
        log: Takes the progress.
        steps: Of each run.
        seeds: Of the runs without failures.

    Raises:
        Retryable: A process fails.
    """
    clean = {seed: _curve(steps, seed, {}, log, f"seed {seed}") for seed in seeds}
    middle = sorted(seeds, key=lambda seed: clean[seed]["last"])[len(seeds) // 2]
    band = [run["curve"] for run in clean.values()]
    ends = [[run["last"]] for run in clean.values()]
    failed: dict[str, ResultRow] = {}
    for name, sections in WITH_FAILURES.items():
        found = _curve(steps, middle, {**sections, "chaos": AWAY_IN_TURN}, log, f"{name}, with failures")
        (out,) = outside([found["last"]], ends)
        failed[name] = {**found, "outside_last": out, "outside_most": max(outside(found["curve"], band))}
    return [
        {
            "replicas": 4,
            "steps": steps,
            "block": BLOCK,
            "of_last": LAST * BLOCK,
            "seed": middle,
            "clean": {str(seed): run for seed, run in clean.items()},
            "with_failures": failed,
        }
    ]


def _curve(steps: int, seed: int, sections: Mapping[str, Any], log: ProgressLog, name: str) -> ResultRow:
    """Train one run to its end; return its curve, the loss at its end, and how many units it trained."""
    with WholeJob(built_in(1, 4, {"steps": steps, "seed": seed}, sections)) as job:
        job.finish()
    rows = canonical(job.rows.values(), ())
    points = curve([row["loss"] for row in rows], BLOCK)
    found = {"curve": points, "last": statistics.fmean(points[-LAST:]), "units": sum(row["units"] for row in rows)}
    log.say(f"loss, {name}: {found['last']:.4f} at the end, {found['units']} units")
    return found


def tokens(log: ProgressLog) -> list[ResultRow]:
    """Return a row: how far means over tokens are from those of one big batch. Raises Retryable."""
    from benchmarks import token_mean  # imports torch

    found = token_mean.measure()
    log.say(f"tokens: the gradient differs by {found.gradient:.2g} from that of one big batch in fp64")
    return [{"replicas": token_mean.SETTINGS["replicas"], **asdict(found)}]


def kills(count: int, log: ProgressLog, names: Sequence[str] = tuple(KILLS)) -> list[ResultRow]:
    """Return a row for each name in `KILLS`: random kills, the audit, the replay and the check of the logs.

    If the steps do not last for ``count`` kills, the row says how many there were.

    Raises:
        Retryable: A process fails.
        ConfigError: A run cannot be replayed.
    """
    from ft_hsdp.launch.run.replay import replay  # imports torch

    rows = []
    for name in names:
        replicas, ranks, sections = KILLS[name]
        setup = built_in(ranks, replicas, {"steps": CALM + STEPS_A_KILL * count}, sections)
        with WholeJob(setup) as job:
            done = _kill_at_random(job, count, random.Random(SEED))
            summary = job.finish()
            verdict, found = replay(job.run), verify(job.run)
        units = summary["batches"]
        row: ResultRow = {
            "batch": name,
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "kills": done,
            "steps": summary["steps"],
            "trained": units["trained"],
            "twice": units["duplicated"],
            "skipped": units["skipped"],
            "replayed": verdict.equal,
            "breaches": found.breaches,
        }
        rows.append(row)
        for breach in found.breaches:
            log.note(f"{name}: {breach}")
        same = "bit-identical" if verdict.equal else f"DIFFERENT at step {verdict.differs_at}"
        log.say(
            f"{name}: {done} kills in {row['steps']} steps, {row['trained']} units trained, {row['twice']} twice, "
            f"{row['skipped']} skipped; replayed {same}; {len(found.breaches)} breaches"
        )
    return rows


def _kill_at_random(job: JobUnderTest, count: int, chance: random.Random) -> int:
    """Kill random ranks, while another replica contributes and steps are left; return how often."""

    def newest() -> Row:
        return max((rows[-1] for rows in job.rows.values() if rows), key=lambda row: row["step"])

    def reached(step: int) -> bool:
        return newest()["step"] >= step and len(newest()["contributors"]) > 1

    def lost(kill: Kill) -> bool:
        newest_ = (row for rows in job.rows.values() for row in rows[-RECENT:])
        return any(row["t"] > kill.t and gone(row, kill) for row in newest_)

    job.wait_for_all()
    for number in range(count):
        goal = newest()["step"] + chance.randint(1, 2 * GAP - 1)
        if goal > job.setup.sections["train"]["steps"] - GAP:
            return number
        job.wait(partial(reached, goal), f"step {goal}, by two replicas")
        time.sleep(chance.uniform(0, job.step_s()))
        kill = job.kill(chance.choice(newest()["contributors"]), chance.randrange(job.setup.ranks))
        job.wait(partial(lost, kill), f"a step without replica {kill.replica}")
    return count
