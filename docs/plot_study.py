"""Plot a study: python docs/plot_study.py OUT.svg docs/study CASE [CASE ...] (needs matplotlib).

A CASE is a variant's name without its rate, such as d6x_fp32_for200_3reps. Above: the evaluation loss over units,
as in FT-HSDP's Figure 8. Below, for each case: how far each rate is from the run without failures after as many
units, the mean over seeds, and grey where replicas are away (Figure 9).
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from ft_hsdp.analysis.studies import at_units, points

RATES = {"lr_none": "none", "lr_sqrt": "sqrt", "lr_linear": "linear", "batch_constant": "constant batch"}


def main() -> None:
    """Losses above, distances below."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    found: dict[str, dict[int, Any]] = {}
    for path in sorted(args.folder.glob("*-seed*.json")):
        each = json.loads(path.read_text())
        found.setdefault(each["name"], {})[each["seed"]] = each
    figure, panels = plt.subplots(1 + len(args.cases), 1, figsize=(8, 3 + 2.2 * len(args.cases)))
    whole = found[f"{args.cases[0].split('_')[1]}_fault_free"]
    above = panels[0]
    above.plot(*_losses(whole[1]), label="no failures", color="black", linewidth=1.3)
    for color, (rate, label) in enumerate(RATES.items()):
        name = f"{args.cases[0]}_{rate}"
        if name in found:
            above.plot(*_losses(found[name][1]), label=label, color=f"C{color}", linewidth=1.0)
    above.set_xlabel("units trained")
    above.set_ylabel("evaluation loss")
    above.legend(frameon=False)
    for panel, case in zip(panels[1:], args.cases, strict=True):
        for color, (rate, label) in enumerate(RATES.items()):
            seeds = found.get(f"{case}_{rate}", {})
            gaps = [_gaps(each, whole[seed]) for seed, each in seeds.items() if seed in whole]
            if gaps:
                steps = [step for step, _ in gaps[0]]
                means = [fmean(gap for _, gap in column) for column in zip(*gaps, strict=True)]
                panel.plot(steps, means, label=f"{label} ({len(gaps)})", color=f"C{color}", linewidth=1.2)
                history = next(iter(seeds.values()))["history"]
        most = max(len(each["ring"]) for each in history)
        for now, then in pairwise(history):
            if len(now["ring"]) < most:
                panel.axvspan(now["first"], then["first"], color="0.5", alpha=0.12, linewidth=0)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_ylabel("loss - no failures")
        panel.set_xlabel(f"step of {case}")
        panel.legend(frameon=False, ncols=4, fontsize="small")
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out)


def _losses(each: Any) -> tuple[list[int], list[float]]:
    return [units for _, units, _ in points(each)], [loss for _, _, loss in points(each)]


def _gaps(each: Any, whole: Any) -> list[tuple[int, float]]:
    return [(step, loss - at_units(points(whole), units)) for step, units, loss in points(each)]


if __name__ == "__main__":
    main()
