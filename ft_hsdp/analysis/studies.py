"""Studies: histories of failures, and what training under them has come to.

A history says who is in the ring of each step. It is made up, or that of a run. A study names its variants as
FT-HSDP §6.2 does, `freq_fp_len_con_lr`: d2x_fp32_for200_3reps_lr_sqrt has two failures in the run, computes in
fp32, each failure lasts 200 steps and takes three replicas, and the learning rate is scaled by the square root.

Variants train different numbers of units in a step. So they are compared at equal units: the loss of a run without
failures is interpolated between its evaluations (FT-HSDP Figures 8 and 9 have tokens as their axis, too).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median, stdev
from typing import Any

FIRST = 0.1  # of the time between two failures, the part before the first one
END = 0.95  # of the steps: all replicas are there after that
LAST = 3  # evaluations at the end, whose mean counts
# Two-sided 95 % of Student's t, by degrees of freedom from 1; the last one is a bound for more.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Point = tuple[int, int, float]  # step, units so far, evaluation loss


@dataclass(frozen=True, slots=True)
class Outage:
    """Steps to which a replica contributes nothing."""

    replica: int  # replica id
    first: int  # step; the replica is lost in the middle of it
    steps: int  # how many


@dataclass(frozen=True, slots=True)
class RingPeriod:
    """Who is in the ring from a step on."""

    first: int  # step
    ring: tuple[int, ...]  # replica ids, in ring order
    behind: tuple[int, ...] = ()  # those of them that add nothing
    late: bool = True  # in the first step the others had trained their share when a replica was lost


def outages(count: int, length: int, at_once: int, replicas: int, steps: int) -> tuple[Outage, ...]:
    """Return failures at equal distances, of other replicas each time.

    Args:
        count: Failures in all.
        length: Steps of each.
        at_once: Replicas that each takes.
        replicas: Of the job.
        steps: Of the job.

    Raises:
        ValueError: They do not fit: one would begin before the one before it has ended, or take all replicas.
    """
    if at_once >= replicas:
        raise ValueError(f"{at_once} of {replicas} replicas are lost at once; at least one has to be left")
    apart = steps * END / count if count else 0.0
    if count and length >= apart:
        raise ValueError(f"{count} failures of {length} steps each do not fit into {steps} steps")
    found = []
    for number in range(count):
        first = round((number + FIRST) * apart) + 1
        found += [Outage((number * at_once + k) % replicas, first, length) for k in range(at_once)]
    return tuple(found)


def memberships(lost: Iterable[Outage], replicas: int) -> tuple[RingPeriod, ...]:
    """Return who is in the ring, in order of steps, when some replicas are away."""
    lost = tuple(lost)
    changes = sorted({1, *(o.first for o in lost), *(o.first + o.steps for o in lost)})
    found = []
    for step in changes:
        away = {o.replica for o in lost if o.first <= step < o.first + o.steps}
        found.append(RingPeriod(step, tuple(r for r in range(replicas) if r not in away)))
    return tuple(found)


def observed(rows: Iterable[Mapping[str, Any]]) -> tuple[RingPeriod, ...]:
    """Return who was in the ring of a run, from its canonical commits."""
    found: list[RingPeriod] = []
    for row in rows:
        ring = tuple(row.get("ring", row["contributors"]))
        behind = tuple(r for r in ring if r not in row["contributors"])
        if not found or (found[-1].ring, found[-1].behind) != (ring, behind):
            late = any(each.get("part") for each in row["contributions"])
            found.append(RingPeriod(row["step"], ring, behind, late))
    return tuple(found)


def variant_name(count: int, precision: str, length: int, at_once: int, rate: str) -> str:
    """Return a variant's name, `freq_fp_len_con_lr`; without failures, its fp and "fault_free"."""
    short = {"float32": "fp32", "bfloat16": "bf16"}[precision]
    if not count:
        return f"{short}_fault_free"
    how = "batch_constant" if rate == "constant_batch" else f"lr_{rate}"
    return f"d{count}x_{short}_for{length}_{at_once}reps_{how}"


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One variant with one seed, beside the run of that seed without failures."""

    name: str
    seed: int
    units: int  # trained in all
    away: float  # part of the units that the run without failures has trained, and this one has not
    loss: float  # evaluation at the end
    gap: float  # to the run without failures, after as many units; 0 for that run itself
    worst: float  # largest such gap while replicas are away
    gone_after: (
        int | None
    )  # steps after a failure until the gap is within the spread of seeds, median; None: never
    digest: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over seeds of the difference of two variants, at the end of training."""

    name: str
    than: str
    mean: float
    half: float  # of the 95 % confidence interval; infinite with one seed
    seeds: int

    @property
    def differs(self) -> bool:
        return abs(self.mean) > self.half


def points(result: Mapping[str, Any]) -> list[Point]:
    """Return the evaluations of a variant."""
    units = [*accumulate(result["units"])]
    return [(step, units[step - 1], loss) for step, loss in result["eval"]]


def at_units(curve: Sequence[Point], units: int) -> float:
    """Return the loss of a run after so many units, between evaluations; outside, that of the nearest."""
    after = bisect_left([u for _, u, _ in curve], units)
    if after in (0, len(curve)):
        return curve[min(after, len(curve) - 1)][2]
    (_, a, low), (_, b, high) = curve[after - 1 : after + 1]
    return low + (high - low) * (units - a) / (b - a)


def spread(curves: Sequence[Sequence[Point]]) -> float:
    """Return the standard deviation between seeds, pooled over the later half of evaluations; 0 for one."""
    if len(curves) < 2:
        return 0.0
    columns = [*zip(*curves, strict=True)]
    late = columns[len(columns) // 2 :]
    return math.sqrt(fmean(stdev(loss for _, _, loss in column) ** 2 for column in late))


def judge(results: Iterable[Mapping[str, Any]]) -> list[VariantResult]:
    """Return what was found of each variant; those that have no evaluations or no reference are left out.

    The reference of a variant has its seed and precision, and no failures.
    """
    results = [each for each in results if points(each)]
    whole = {(r["name"].split("_")[0], r["seed"]): points(r) for r in results if r["name"].endswith("_fault_free")}
    found = []
    for result in results:
        precision = next((p for p in result["name"].split("_") if p in ("fp32", "bf16")), "fp32")
        reference = whole.get((precision, result["seed"]))
        if reference is None:
            continue
        sigma = spread([curve for (p, _), curve in whole.items() if p == precision])
        curve = points(result)
        gaps = [(step, loss - at_units(reference, units)) for step, units, loss in curve]
        lost = _lost(result["history"])
        found.append(
            VariantResult(
                result["name"],
                result["seed"],
                curve[-1][1],
                1 - curve[-1][1] / reference[-1][1],
                fmean(loss for _, _, loss in curve[-LAST:]),
                fmean(gap for _, gap in gaps[-LAST:]),
                max((gap for step, gap in gaps if any(a <= step < b for a, b in lost)), default=0.0),
                _gone(gaps, [end for _, end in lost], 2 * sigma),
                result["digest"],
            )
        )
    return found


def _lost(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the times without a replica: the first step of each, and the first one after it."""
    most = max(len(each["ring"]) for each in history)
    found = []
    for each, after in pairwise(history):
        if len(each["ring"]) < most:
            found.append((each["first"], after["first"]))
    return found


def _gone(gaps: Sequence[tuple[int, float]], ends: Sequence[int], within: float) -> int | None:
    waits = [next((step - end for step, gap in gaps if step >= end and abs(gap) <= within), None) for end in ends]
    known = [wait for wait in waits if wait is not None]
    return round(median(known)) if waits and len(known) == len(waits) else None


def differences(found: Sequence[VariantResult]) -> list[Difference]:
    """Return how rates differ from `lr_none` with the same failures, by seeds that both have, at the end."""
    of = {(each.name, each.seed): each for each in found}
    result = []
    for name in dict.fromkeys(each.name for each in found):
        kind = next((k for k in ("lr_linear", "lr_sqrt", "batch_constant") if name.endswith(k)), None)
        if kind is None:
            continue
        than = name.removesuffix(kind) + "lr_none"
        pairs = [(e, of[than, e.seed]) for (n, _), e in of.items() if n == name and (than, e.seed) in of]
        apart = [a.gap - b.gap for a, b in pairs]
        if apart:
            result.append(Difference(name, than, fmean(apart), _half(apart), len(apart)))
    return result


def _half(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of a mean."""
    count = len(values)
    return T95[min(count - 1, len(T95)) - 1] * stdev(values) / math.sqrt(count) if count > 1 else math.inf


def table(found: Sequence[VariantResult]) -> list[str]:
    """Return lines for people."""
    width = max((len(each.name) for each in found), default=0)
    head = f"{'variant':<{width}}  seed  away  loss    gap      worst    gone after"
    lines = [head]
    for each in found:
        gone = "-" if each.gone_after is None else f"{each.gone_after} steps"
        lines.append(
            f"{each.name:<{width}}  {each.seed:>4}  {each.away:4.0%}  {each.loss:.4f}  {each.gap:+.4f}  "
            f"{each.worst:+.4f}  {gone}"
        )
    for apart in differences(found):
        half = "one seed" if math.isinf(apart.half) else f"+- {apart.half:.4f}, {apart.seeds} seeds"
        lines.append(f"{apart.name} - {apart.than.rpartition('_lr_')[2]}: {apart.mean:+.4f} ({half})")
    return lines


def document(found: Sequence[VariantResult]) -> dict[str, Any]:
    """Return all that was found as JSON values."""
    apart = [asdict(d) | {"half": None if math.isinf(d.half) else d.half} for d in differences(found)]
    return {"variants": [asdict(each) for each in found], "differences": apart}
