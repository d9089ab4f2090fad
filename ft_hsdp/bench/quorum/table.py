"""The result of `bench quorum` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from ft_hsdp.bench import table
from ft_hsdp.bench.quorum.goals import times, verdicts


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = table.begin(result, stream)
    for name, text in result["kinds"].items():
        console.print(f"  {name:<8} {text}")
    for row in result["rounds"]:
        title = f"{row['members']} members ask at once: {row['rounds']['torchft']['count']} rounds of each"
        grid = table.columns(title, "", "p50, ms", "min", "max", "times torchft", "server's CPU, ms")
        for kind, each in row["rounds"].items():
            figures = (f"{each[key]:.3g}" for key in ("p50_ms", "min_ms", "max_ms"))
            ratio = "" if kind == "torchft" else f"{times(row, kind):.2f}"
            grid.add_row(kind, *figures, ratio, f"{row['cpu_ms'][kind]:.2f}")
        console.print(grid)
    table.end(result, verdicts(result["rounds"]), console)
