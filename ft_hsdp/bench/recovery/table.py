"""The result of `bench recovery` as tables, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console

from ft_hsdp.bench.options import size_name
from ft_hsdp.bench.recovery.back import LAST
from ft_hsdp.bench.recovery.goals import verdicts
from ft_hsdp.bench.table import begin, columns, end

SPANS = {
    "next": "{signal} to the next commit",
    "less_one": "the same less one step",
    "stall": "all of the step hit, less one",
    "repeat": "new grant to commit, computed",
    "rejoin": "{signal} to contributing again",
    "rejoin_wait": "the others' waits for that",
}

RETURNS = ("a step", "less one", "p99", "max", "all of it", "contributes", "of")
STARTS = {
    "warm": "a process that waits, its model built",
    "cold": "forked from one that has imported torch",
    "torchft": "from nothing: interpreter, torch, torchft",
}
"""What a killed replica begins with: this is no race of equals, and a user meets it as it is."""


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = begin(result, stream)
    for row in result["kill"]:
        _kill(row, result["torchft"], console)
    if not result["kill"] and result["torchft"]:
        _spans([("torchft, " + row["setting"], row) for row in result["torchft"]], console)
    for row in result["stop"]:
        _kill(row, result["torchft_stop"], console, "SIGSTOP")
    for row in result["rejoin"]:
        _spans([("ft_hsdp, long steps", row)], console)
    for row in result["return"]:
        _return(row, console)
    for row in result["readers"]:
        _readers(row, console)
    if result["local"]:
        _local(result["local"], console)
    end(result, verdicts(result), console)


def _kill(
    row: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], console: Console, signal: str = "SIGKILL"
) -> None:
    _spans([("ft_hsdp", row), *(("torchft, " + peer["setting"], peer) for peer in peers)], console, signal)
    if row["phases"]:
        table = columns("Where it goes until the last survivor's commit, ms", "", "p50", "p99", "max")
        for name, span in row["phases"].items():
            table.add_row(name, *_three(span))
        console.print(table)


def _spans(rows: Sequence[tuple[str, Mapping[str, Any]]], console: Console, signal: str = "SIGKILL") -> None:
    for who, row in rows:
        title = f"{who}: {row['kills']} {signal}s, {row['replicas']} replicas, steps of {row['step_ms']:.3g} ms"
        table = columns(title, "ms", "p50", "p99", "max", "of")
        for key, text in SPANS.items():
            if row.get(key):
                table.add_row(text.format(signal=signal), *_three(row[key]), str(row[key]["count"]))
        console.print(table)


def _return(row: Mapping[str, Any], console: Console) -> None:
    title = f"SIGKILL to the victim's own next commit, s: {row['model']}, {row['replicas']} replicas"
    table = columns(title, "", *RETURNS)
    for who, found in row["contenders"].items():
        less_one = [f"{found['less_one'][key] / 1e3:.2f}" for key in ("p50_ms", "p99_ms", "max_ms")]
        others = [f"{found[key]['p50_ms'] / 1e3:.2f}" for key in ("commit", "contribute")]
        table.add_row(who, f"{found['step_ms'] / 1e3:.2f}", *less_one, *others, str(found["kills"]))
    console.print(table)
    for who, found in row["contenders"].items():
        starts = ", ".join(f"{count} {how}" for how, count in found["starts"].items())
        console.print(f"{who:<8} {STARTS[who]}{starts and f' ({starts})'}")
    table = columns("Where it goes until that commit, median ms", "", *row["contenders"])
    names = dict.fromkeys(name for found in row["contenders"].values() for name in found["phases"])
    for name in sorted(names, key=lambda name: name == LAST):
        spans = [found["phases"].get(name) for found in row["contenders"].values()]
        table.add_row(name, *(f"{span['p50_ms']:.3g}" if span else "" for span in spans))
    console.print(table)
    for who, times in row["times"].items():
        console.print(
            f"{who}: {times['ratio']:.3f} times torchft's (95 %: {times['low']:.3f} to {times['high']:.3f})"
        )


def _readers(row: Mapping[str, Any], console: Console) -> None:
    crowd = ", ".join(f"{count} {kind}" for kind, count in row["readers"].items())
    table = columns(f"A step beside readers of state ({crowd}), ms", "", "p50", "min", "max", "steps")
    for name, steps in row["steps"].items():
        table.add_row(name, *(f"{steps[key]:.4g}" for key in ("p50_ms", "min_ms", "max_ms")), str(steps["count"]))
    console.print(table)
    times = row["times"]
    console.print(f"{times['ratio']:.3f} times as long (95 %: {times['low']:.3f} to {times['high']:.3f})")


def _local(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = columns(
        "A killed rank's state on its host: median ms",
        *("size", "agent: write", "read", "torch.save", "load", "times as fast"),
    )
    for row in rows:
        times = [f"{row['times'][key]['p50_ms']:.3g}" for key in ("stage", "agent", "save", "file")]
        table.add_row(size_name(row["bytes"]), *times, f"{row['times_as_fast']:.3g}")
    console.print(table)


def _three(span: Mapping[str, float]) -> list[str]:
    return [f"{span[key]:.3g}" for key in ("p50_ms", "p99_ms", "max_ms")]
