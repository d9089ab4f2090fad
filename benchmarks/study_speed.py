"""`python -m benchmarks.study_speed`: contributions per second of `study`, beside the job of as many replicas.

In each round the job of configs/study.yaml trains with 12 rank processes, then two variants of it train at once.
It prints rates and the ratio of medians as JSON. Starts do not count: of the job the steps after the first one to
which all contribute, of the variants those after the first rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from ft_hsdp.launch import study
from ft_hsdp.launch.run.directory import read_jsonl

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
LOOK_S = 0.05


def real(job: dict[str, Any], folder: Path) -> float:
    """Return contributions per second of the job."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job | {"job": {"name": "job", "runs_dir": str(folder)}}))
    command = [sys.executable, str(ROOT / "launcher.py"), "up", str(folder / "job.yaml")]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    rows = read_jsonl(folder / "job" / "metrics.jsonl")
    whole = next(n for n, row in enumerate(rows) if len(row["contributors"]) == job["replicas"])
    return sum(len(row["contributors"]) for row in rows[whole + 1 :]) / (rows[-1]["t"] - rows[whole]["t"])


def shortened(steps: int) -> dict[str, Any]:
    """Return the keys of the study's job with so many steps, none of which is evaluated."""
    job = study.read(ROOT / "configs" / "study.yaml").job
    return job | {"train": job["train"] | {"steps": steps}, "eval": job["eval"] | {"every": 0}}


def two_variants(job: dict[str, Any], folder: Path) -> study.StudyConfig:
    return study.StudyConfig.model_validate({"dir": str(folder), "job": job, "variants": [{"seeds": [1, 2]}]})


def studied(job: dict[str, Any], folder: Path) -> float:
    """Return contributions per second of two variants at once."""
    wanted = two_variants(job, folder)
    cells = study.cells(wanted)
    threading.Thread(target=study.run, args=(wanted, 2, lambda _: None), daemon=True).start()
    seen, until = list[tuple[float, int]](), time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        counts = [study.trained(cell) for cell in cells]
        if all(counts) and (not seen or sum(counts) > seen[-1][1]):
            seen.append((time.monotonic(), sum(counts)))
        if min(counts) == job["train"]["steps"]:
            break
        time.sleep(LOOK_S)
    # While both train, and not after the first of them has ended.
    both = [each for each in seen if each[1] <= 2 * job["train"]["steps"] - 10] or seen
    return job["replicas"] * (both[-1][1] - both[0][1]) / (both[-1][0] - both[0][0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    job = shortened(args.steps)
    found: dict[str, list[float]] = {"job": [], "study": []}
    for _ in range(args.rounds):
        for name, measure in (("job", real), ("study", studied)):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(measure(job, Path(folder)))
            sys.stderr.write(f"{name}: {found[name][-1]:.1f} contributions/s\n")
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    sys.stdout.write(json.dumps(found | {"ratio": medians["study"] / medians["job"]}) + "\n")


if __name__ == "__main__":
    main()
