"""What the tables of all benches are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

LIMITS = ("p50_ms", "min_ms", "max_ms")


def print_table(console: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def figures_of(span: Mapping[str, float], keys: Sequence[str], digits: int = 3) -> list[str]:
    """Return the figures of ``span`` under ``keys``, with so many digits."""
    return [f"{span[key]:.{digits}g}" for key in keys]


def interval_of(times: Mapping[str, float], of: str = " times as long") -> str:
    """Return a ratio and its interval in words."""
    return f"{times['ratio']:.3f}{of} (95 %: {times['low']:.3f} to {times['high']:.3f})"
