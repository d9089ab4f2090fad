"""Plot the losses of several runs: python docs/plot_loss.py OUT.svg RUN [RUN ...] (needs matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def main(out: str, *runs: str) -> None:
    """Loss per step of each run above, contributors below."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, height_ratios=[3, 1])
    for name in runs:
        folder = Path(name)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [r["step"] for r in rows]
        above.plot(steps, [r["loss"] for r in rows], label=folder.name, linewidth=1.3)
        below.step(steps, [len(r["contributors"]) for r in rows], where="mid", linewidth=1.3)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    below.set_ylabel("contributors")
    below.set_xlabel("step")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
