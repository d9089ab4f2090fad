"""The result of `bench overhead` as tables, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console

from ft_hsdp.bench.overhead.goals import verdicts
from ft_hsdp.bench.table import begin, columns, end, link


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = begin(result, stream)
    for row in result["steady"]:
        _steps(f"A step of {_shape(row)}", row["crews"], row["times"], console)
    for row in result["snapshot"]:
        title = f"A step of {_shape(row)}, {row['step']}, with a snapshot and without"
        _steps(title, row["modes"], row["times"], console)
    for row in result["ray"]:
        title = f"A step of {_shape(row)}, that mostly waits: medians of {row['steps']} steps"
        _steps(title, row["launchers"], row["times"], console, "turns")
    for row in result["link"]:
        link(row, console)
    end(result, verdicts(result), console)


def _steps(
    title: str,
    steps: Mapping[str, Mapping[str, float]],
    times: Mapping[str, Mapping[str, float]],
    console: Console,
    what: str = "steps",
) -> None:
    table = columns(title, "", *("p50, ms", "min", "max", what, "times", "95 %"))
    for name, step in steps.items():
        figures = [f"{step[key]:.4g}" for key in ("p50_ms", "min_ms", "max_ms")]
        found = times.get(name)
        shares = [f"{found['ratio']:.3f}", f"{found['low']:.3f} to {found['high']:.3f}"] if found else ["", ""]
        table.add_row(name, *figures, str(step["count"]), *shares)
    console.print(table)


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['replicas']} replicas of {row['ranks']} ranks"
