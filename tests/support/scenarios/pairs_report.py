import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The jobs in a report, one a line; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, job: Row) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(job) + "\n")


def done(jobs: Sequence[Row], seed: int) -> set[int]:
    """The numbers of the pairs of this seed that were run."""
    return {pair["number"] for job in jobs if job["seed"] == seed for pair in job["pairs"]}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share lies; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def spread(values: Sequence[float]) -> str:
    """p50, p99 and max."""
    p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
    return f"p50 {p50:.2f}, p99 {p99:.2f}, max {max(values, default=0.0):.2f} s"


def lines(jobs: Sequence[Row]) -> list[str]:
    pairs = [pair for job in jobs for pair in job["pairs"]]
    kinds = Counter(fault["name"] for pair in pairs for fault in pair["faults"] if not fault["missed"])
    missed = sum(fault["missed"] != "" for pair in pairs for fault in pair["faults"])
    wall, useful = sum(job["wall_s"] for job in jobs), sum(job["useful_s"] for job in jobs)
    back = [pair["recovered_s"] for pair in pairs if pair["recovered_s"] is not None]
    told = [
        f"{len(pairs)} pairs of faults in {len(jobs)} jobs, {wall / 60:.1f} minutes; seeds "
        f"{', '.join(map(str, sorted({job['seed'] for job in jobs})))}",
        f"faults    {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}; {missed} found nobody to hit",
        f"stall     {spread([pair['stalled_s'] for pair in pairs])} without a commit after the later fault",
        f"recovery  {spread(back)} until all contribute again ({len(back)} of {len(pairs)} pairs)",
        f"goodput   {useful / wall:.3f} of the time trained" if wall else "goodput   -",
        f"steps     {sum(job['steps'] for job in jobs)}",
    ]
    breaches = [(job, breach) for job in jobs for breach in job["breaches"]]
    told.append(f"breaches  {len(breaches)}")
    told += [f"  seed {job['seed']}, pairs {_numbers(job)}, commit {job['commit']}: {b}" for job, b in breaches]
    return told


def _numbers(job: Mapping[str, Any]) -> str:
    return ", ".join(str(pair["number"]) for pair in job["pairs"])
