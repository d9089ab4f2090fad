"""The result of `bench fetch` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console

from ft_hsdp.bench import table
from ft_hsdp.bench.fetch.goals import PEERS, times, verdicts
from ft_hsdp.bench.options import size_name


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = table.begin(result, stream)
    for name, text in result["contenders"].items():
        console.print(f"  {name:<10} {text}")
    for row in (*result["large"], *result["small"]):
        _row(row, console)
    table.end(result, verdicts(result), console)


def _row(row: Mapping[str, Any], console: Console) -> None:
    title = f"{size_name(row['bytes'])} in {row['tensors']} tensors: median of {row['rounds']}"
    anchors = [name for name in ("raw", *PEERS) if name in row["contenders"]]
    heads = ("ms", "GB/s", *(f"times {name}" for name in anchors), "memory, times state (growth)")
    grid = table.columns(title, "", *heads)
    for name, found in row["contenders"].items():
        ratios = ["" if name == anchor else f"{times(row, name, anchor):.2f}" for anchor in anchors]
        memory = row["memory"][name]
        room = f"{memory['times_state']:.2f} ({memory['growth_times_state']:.2f})"
        grid.add_row(name, f"{found['p50_ms']:.4g}", f"{row['gb_per_s'][name]:.2f}", *ratios, room)
    console.print(grid)
