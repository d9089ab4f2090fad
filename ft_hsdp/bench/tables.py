"""The result as tables, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ft_hsdp.bench.goals import GoalVerdict, verdicts, where
from ft_hsdp.bench.options import size_name

ANCHORS = ("gloo", "torchft", "openmpi")


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = begin_tables(result, stream)
    for name, text in result["contenders"].items():
        console.print(f"  {name:<8} {text}")
    rows: Sequence[Mapping[str, Any]] = result["bandwidth"]
    for members in dict.fromkeys(row["members"] for row in rows):
        _bandwidth([row for row in rows if row["members"] == members], members, console)
    if result["spin"]:
        _spin(result["spin"], console)
    if result["kill"]:
        _kill(result["kill"], console)
    if result["reconfigure"]:
        _reconfigure(result["reconfigure"], console)
    for row in result.get("link", ()):
        link_table(row, console)
    end_tables(result, verdicts(result), console)


def begin_tables(result: Mapping[str, Any], stream: TextIO) -> Console:
    """Print where and with what was measured; the console for the tables."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    machine = result["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    console.print(
        escape(
            f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min_before']} "
            f"before; {versions}; TCP congestion control {machine['tcp_congestion_default']} by default"
        )
    )
    return console


def end_tables(result: Mapping[str, Any], found: Sequence[GoalVerdict], console: Console) -> None:
    """Print the goals, as far as there are figures for them, and the notes."""
    if found:
        table = columns("Goals", "goal", "", "wanted", "seen", "")
        for verdict in found:
            met = "[green]met[/]" if verdict.met else "[red]missed[/]"
            table.add_row(
                verdict.text, where(verdict), f"{verdict.bound} {verdict.limit:g}", f"{verdict.seen:.3g}", met
            )
        console.print(table)
    for note in result["notes"]:
        console.print(escape(f"note: {note}"))


def _bandwidth(rows: Sequence[Mapping[str, Any]], members: int, console: Console) -> None:
    names = list(rows[0]["contenders"])
    sizes = [size_name(row["bytes"]) for row in rows]
    table = columns(f"All-reduce of fp32, {members} members: median ms of {rows[0]['rounds']}", "", *sizes)
    for name in names:
        table.add_row(name, *(f"{row['contenders'][name]['p50_ms']:.3g}" for row in rows))
    console.print(table)
    for anchor in (anchor for anchor in ANCHORS if anchor in names and len(names) > 1):
        table = columns(f"Times as fast as {anchor}, {members} members", "", *sizes)
        for name in (name for name in names if name != anchor):
            table.add_row(name, *(f"{row['times_as_fast'][name][anchor]:.2f}" for row in rows))
        console.print(table)


def _spin(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = columns(
        "Beside a spinning Python thread: median ms (share of idle speed)",
        *("", "N", "size", "idle", "in a rank", "own process"),
    )
    for row in rows:
        modes, share = row["modes"], row["share_of_idle"]
        spinning = [f"{modes[mode]['p50_ms']:.3g} ({share[mode]:.2f})" for mode in ("thread", "process")]
        idle = f"{modes['idle']['p50_ms']:.3g}"
        table.add_row(row["contender"], str(row["members"]), size_name(row["bytes"]), idle, *spinning)
    console.print(table)


def _kill(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = columns(
        "SIGKILL of a member: p50 / max ms",
        *("", "N", "size", "kills", "to the raise", "to the next sum", "less one sum"),
    )
    for row in rows:
        spans = [
            f"{s['p50_ms']:.3g} / {s['max_ms']:.3g}" for s in (row["raise"], row["next"], row["next_less_one"])
        ]
        table.add_row(row["contender"], str(row["members"]), size_name(row["bytes"]), str(row["kills"]), *spans)
    console.print(table)


def _reconfigure(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = columns("Reconfigure: p50 / max ms", "", "N", "order", "time")
    for row in rows:
        span = f"{row['p50_ms']:.3g} / {row['max_ms']:.3g}"
        table.add_row(row["contender"], str(row["members"]), row["change"], span)
    console.print(table)


def link_table(row: Mapping[str, Any], console: Console) -> None:
    """Print a row of `hsdp.measure`."""
    shape = f"{row['members']} replicas of {row['ranks']} ranks, links of {row['rate']}"
    table = columns(
        f"A step of {shape}: median of {row['rounds']}", *("", "step, ms", "cost, ms", "CPU, ms", "MB sent")
    )
    for name, crew in row["crews"].items():
        cost = f"{row['cost_ms'][name]:.0f}" if name in row["cost_ms"] else ""
        figures = f"{crew['step']['p50_ms']:.0f}", cost, f"{crew['cpu_ms_per_step']:.0f}"
        table.add_row(name, *figures, f"{crew['link_bytes_per_step'] / 1e6:.1f}")
    console.print(table)
    own = row["ft_hsdp"]
    console.print(
        f"ft_hsdp's exchange takes {own['exchange_ms']:.0f} ms (the link alone: {row['least_exchange_ms']:.0f}); "
        f"{own['exposed_ms']:.0f} of it\nare left after backward, then {own['commit_ms']:.0f} to commit"
    )


def columns(title: str, first: str, *others: str) -> Table:
    """An empty table; all columns but the first are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
