"""The result of any bench as tables: the figures of each row, then the goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ft_hsdp.bench.goals import GoalVerdict, Row, where
from ft_hsdp.bench.results import size_name


def show(result: Row, stream: TextIO) -> None:
    """Print a result: where and with what it was measured, the figures, the goals, the notes."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    machine = result["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    console.print(
        escape(
            f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min_before']} "
            f"before; {versions}; TCP congestion control {machine['tcp_congestion_default']} by default"
        )
    )
    for name, text in {**result.get("contenders", {}), **result.get("kinds", {})}.items():
        console.print(escape(f"  {name:<10} {text}"))
    for measure, rows in result.items():
        for row in rows if isinstance(rows, list) and measure not in ("goals", "notes") else ():
            _row(measure, row, console)
    if result["goals"]:
        goals = []
        for verdict in (GoalVerdict(**each) for each in result["goals"]):
            met = "[green]met[/]" if verdict.met else "[red]missed[/]"
            wanted = f"{verdict.bound} {verdict.limit:g}"
            goals.append((escape(verdict.text), where(verdict), wanted, f"{verdict.seen:.3g}", met))
        print_table(console, "Goals", ("goal", "", "wanted", "seen", ""), goals)
    for note in result["notes"]:
        console.print(escape(f"note: {note}"))


def _row(title: str, row: Row, console: Console) -> None:
    """Print one row: its plain values in a line, and a table for each group of figures that have the same names.

    A mapping of plain values is one line of a table; a mapping of mappings is a table of its own.
    """
    plain = [f"{key} {_text(key, value)}" for key, value in row.items() if not isinstance(value, Mapping | list)]
    console.print(escape(f"\n{title}: {', '.join(plain)}"), soft_wrap=False)
    tables: dict[object, dict[str, Row]] = {}
    for key, value in row.items():
        if not isinstance(value, Mapping) or not value:
            continue
        if not any(isinstance(each, Mapping) for each in value.values()):
            tables.setdefault(tuple(value), {})[key] = value
        elif all(isinstance(each, Mapping) and not _nested(each) for each in value.values()):
            tables[key] = dict(value)
        else:
            for name, each in value.items():
                _row(f"{title}, {name}", each if isinstance(each, Mapping) else {name: each}, console)
    for key_, lines in tables.items():
        heads = list(
            dict.fromkeys(head for line in lines.values() for head in line if not isinstance(line[head], list))
        )
        cells = [[name, *(_text(head, line.get(head)) for head in heads)] for name, line in lines.items()]
        print_table(console, "", (key_ if isinstance(key_, str) else "", *heads), cells)


def _nested(row: Row) -> bool:
    return any(isinstance(each, Mapping) for each in row.values())


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "bytes":
        return size_name(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(console: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first are figures."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
