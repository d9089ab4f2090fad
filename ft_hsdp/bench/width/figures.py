"""The figures of `bench width` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ft_hsdp.bench.results import size_name
from ft_hsdp.bench.table_parts import LIMITS, figures_of, interval_of, print_table

Row = Mapping[str, Any]


def width_figures(result: Row, console: Console) -> None:
    """Print what was measured."""
    for row in result["reshape"]:
        title = f"{size_name(row['bytes'])} from {row['from']} ranks to {row['to']}: median of {row['rounds']}"
        rows = [(name, *figures_of(found, LIMITS, 4)) for name, found in row["contenders"].items()]
        print_table(console, title, ("", "p50, ms", "min", "max"), rows)
        read, fewest = row["read_bytes"], row["least_bytes"]
        console.print(f"{read} bytes read, {row['times_least']:.4f} times the least possible ({fewest})")
    if rows := [
        (
            str(row["hosts"]),
            *(f"{row[k]['times']:.2f} ({row[k]['times_printed']:.2f})" for k in ("scattered", "consecutive")),
            f"{row['apart']:.1f}",
            f"{row['scattered']['senders']} / {row['scattered']['senders_formula']}",
        )
        for row in result["blocks"]
    ]:
        title = "busiest sender of a lost host's blocks, times ReStore's formula (as printed)"
        print_table(
            console, title, ("hosts", "scattered", "consecutive", "apart, times", "senders / formula"), rows
        )
    for row in result["loads"]:
        _loads(row, console)
    for row in result["allreduce"]:
        title = f"all-reduce of {size_name(row['bytes'])} by ranks of two replicas: median of {row['rounds']}"
        rows = [(name, *figures_of(found, LIMITS, 4)) for name, found in row["contenders"].items()]
        print_table(console, title, ("", "p50, ms", "min", "max"), rows)
        console.print(
            f"{row['times']:.2f} times as long in {row['lanes']} lanes, with the same bits at all members"
        )
    for row in result["rate"]:
        each = ", ".join(f"{name} {value:.2f}" for name, value in row["units_per_s"].items())
        where = f"one of {row['replicas']} replicas at {row['left']} of {row['ranks']} ranks"
        console.print(f"units per second, {where}:\n{each}: {row['of_share']:.3f} of {row['share']:g} of the rate")
    for row in result["shrink"]:
        title = f"What the other replica waits for, steps of {row['step_ms']:.0f} ms, {row['losses']} lost hosts"
        rows = [(name, *figures_of(each, LIMITS, 3)) for name, each in row["waits"].items()]
        print_table(console, title, ("", "p50, ms", "min", "max"), rows)
        console.print(f"{row['repeated']} steps were repeated to grow")
    for row in result["lone"]:
        _lone(row, console)
    if result["losses"]:
        heads = ("replicas, batch", "lost", "shrunk", "grown", "steps", "narrow", "twice", "skipped", "replay")
        keys = ("job", "losses", "shrunk", "grown", "steps", "narrow_steps", "twice", "skipped")
        equal = {True: "equal", False: "DIFFERS"}
        table = [[*(str(row[key]) for key in keys), equal[row["replayed"]]] for row in result["losses"]]
        print_table(console, "Random hosts are lost at random moments", heads, table)


def _loads(row: Row, console: Console) -> None:
    rate = row["bytes_per_s"]
    link = "over loopback" if rate is None else f"links of {rate / 1e6:g} MB/s"
    title = f"the same, {size_name(row['bytes'])} a host from {row['hosts']} servers on this machine, {link}"
    heads = ("", "p50, ms", "min", "max", "busiest sends, bytes / formula", "senders / formula")
    found = [
        (
            way,
            *figures_of(each, LIMITS, 4),
            f"{each['busiest_bytes']} / {each['formula_bytes']}",
            f"{each['senders']} / {each['senders_formula']}",
        )
        for way, each in row["loads"].items()
    ]
    print_table(console, title, heads, found)
    console.print(f"scattered beside single: {interval_of(row['times'], ' times as fast')}")
    if rate is not None:
        console.print(f"The busiest link of single carries {row['expected']:.2f} times the bytes")


def _lone(row: Row, console: Console) -> None:
    heads = ("ms", "p50", "min", "max")
    rows = [
        ("to the next new step", *figures_of(row["new"], LIMITS, 4)),
        ("the same less one step", *figures_of(row["beyond"], LIMITS, 4)),
        ("the host is back: from the last step of fewer ranks", *figures_of(row["grow"]["pause"], LIMITS, 4)),
    ]
    title = f"One replica of {row['ranks']} ranks on {row['hosts']} hosts loses one, {row['kills']} times"
    print_table(console, title, heads, rows)
    phases = ", ".join(f"{name} {ms:.0f}" for name, ms in row["phases"].items())
    console.print(
        f"of that, p50 ms: {phases}\n"
        f"steps again: {row['lost_steps']['p50']:g} / {row['lost_steps']['max']} (p50 / max) to shrink, "
        f"{row['grow']['repeated']} to grow"
    )
