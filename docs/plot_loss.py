"""Plot the losses of several runs: python docs/plot_loss.py OUT.svg RUN [RUN ...] (needs matplotlib).

With --mean N a point is the mean of N steps; with --units the lower panel shows units, not contributors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    """Loss per step of each run above, contributors or units below."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--mean", type=int, default=1)
    parser.add_argument("--units", action="store_true")
    args = parser.parse_args()
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, height_ratios=[3, 1])
    for folder in args.runs:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [r["step"] for r in rows]
        losses = _means([r["loss"] for r in rows], args.mean)
        above.plot(steps[args.mean - 1 :], losses, label=folder.name, linewidth=1.3)
        counts = [r["units"] if args.units else len(r["contributors"]) for r in rows]
        below.step(steps, counts, where="mid", linewidth=1.3)
    above.set_ylabel("loss" if args.mean == 1 else f"loss, mean of {args.mean}")
    above.legend(frameon=False)
    below.set_ylabel("units" if args.units else "contributors")
    below.set_xlabel("step")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out)


def _means(values: Sequence[float], count: int) -> list[float]:
    """The mean of each value and those before it, `count` values in all."""
    return [fmean(values[n - count : n]) for n in range(count, len(values) + 1)]


if __name__ == "__main__":
    main()
