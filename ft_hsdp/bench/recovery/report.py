"""What the user asked `bench recovery` for.

The goals of `bench recovery`, and how what was seen stands to them.

The result of `bench recovery` as tables, readable at 80 columns.

`bench recovery`: runs the measures and puts the result together.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from rich.console import Console

from ft_hsdp.bench.goals import GoalVerdict, begin_result, finish_result, least, most
from ft_hsdp.bench.options import MIB, ProgressLog, count_of, measures_of, size_name, sizes_of
from ft_hsdp.bench.recovery.analysis import LAST
from ft_hsdp.bench.recovery.kills import MOST, kills, stops
from ft_hsdp.bench.recovery.local import local
from ft_hsdp.bench.recovery.readers import readers
from ft_hsdp.bench.recovery.returns import returns
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.recovery.torchft_under_test import KILLED, STOPPED, peer
from ft_hsdp.bench.tables import begin_tables, columns, end_tables

MEASURES = ("kill", "torchft", "rejoin", "return", "stop", "readers", "local")
SIZES = (256 * MIB,)


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """measures: which; kills: SIGKILLs, of which torchft, long steps, returns and stops get fewer.

    rounds: of what is interleaved; sizes: of a state that is recovered locally, in bytes.
    """

    measures: tuple[str, ...]
    kills: int
    rounds: int
    sizes: tuple[int, ...]


def parse(measure: str, *, kills: int, rounds: int, sizes: str | None) -> RecoveryOptions:
    """Options from the words of a command line. Raises ConfigError."""
    return RecoveryOptions(
        measures_of(measure, MEASURES),
        count_of("--kills", kills),
        count_of("--rounds", rounds),
        sizes_of(sizes) or SIZES,
    )


NEXT = {"less_one": "SIGKILL to next commit - 1 step", "stall": "all of the step hit - 1 step"}
NEXT_P50_MS, NEXT_P99_MS = 100.0, 300.0
STOP_P50_MS, STOP_P99_MS = 1200.0, 2000.0
REPEAT_SHARE = 0.3
REJOIN_STEPS = 0.1
WARM_MS = 500.0
COLD_TIMES = 1.0
READERS_TIMES = 1.0
LOCAL_TIMES = 5.0


def verdicts(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[GoalVerdict]:
    """Every goal for which there is a figure; `measured` has the rows of each measure."""
    found: list[GoalVerdict] = []
    for row in measured.get("kill", ()):
        at = {"members": row["replicas"]}
        for key, text in NEXT.items():
            found.append(most(f"{text}, p50 ms", at, NEXT_P50_MS, row[key]["p50_ms"]))
            found.append(most(f"{text}, p99 ms", at, NEXT_P99_MS, row[key]["p99_ms"]))
        if row["repeat"] is not None:
            found.append(most("reducing again, of a whole step", at, REPEAT_SHARE, row["repeat"]["steps"]))
        found += _rejoin(row)
    for row in measured.get("rejoin", ()):
        found += _rejoin(row)
    for row in measured.get("stop", ()):
        at, text = {"members": row["replicas"]}, "SIGSTOP to next commit - 1 step"
        found.append(most(f"{text}, p50 ms", at, STOP_P50_MS, row["less_one"]["p50_ms"]))
        found.append(most(f"{text}, p99 ms", at, STOP_P99_MS, row["less_one"]["p99_ms"]))
    for row in measured.get("return", ()):
        found += _return_goal(row)
    for row in measured.get("readers", ()):
        text = "a step beside bad readers, times, at least"
        found.append(most(text, {"members": row["replicas"]}, READERS_TIMES, row["times"]["low"]))
    for row in measured.get("local", ()):
        text = "from the agent vs save + load, times as fast"
        found.append(least(text, {"bytes": row["bytes"]}, LOCAL_TIMES, row["times_as_fast"]))
    return found


def _rejoin(row: Mapping[str, Any]) -> list[GoalVerdict]:
    if row["rejoin_wait"] is None:
        return []
    text = f"others' waits for a rejoin, steps of {row['step_ms']:.0f} ms"
    return [most(text, {"members": row["replicas"]}, REJOIN_STEPS, row["rejoin_wait"]["steps"])]


def _return_goal(row: Mapping[str, Any]) -> Iterator[GoalVerdict]:
    at, text = {"members": row["replicas"]}, "SIGKILL to own commit - 1 step"
    warm_ms = row["contenders"]["warm"]["less_one"]["p50_ms"]
    yield most(f"{text}, warm, p50 ms", at, WARM_MS, warm_ms)
    if "cold" in row["times"]:
        yield most(f"{text}, cold / torchft's", at, COLD_TIMES, row["times"]["cold"]["ratio"])


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
    console = begin_tables(result, stream)
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
    end_tables(result, verdicts(result), console)


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
        *("size", "agent: write", "read", "file: write", "read", "times as fast"),
    )
    for row in rows:
        times = [f"{row['times'][key]['p50_ms']:.3g}" for key in ("stage", "agent", "save", "file")]
        table.add_row(size_name(row["bytes"]), *times, f"{row['times_as_fast']:.3g}")
    console.print(table)


def _three(span: Mapping[str, float]) -> list[str]:
    return [f"{span[key]:.3g}" for key in ("p50_ms", "p99_ms", "max_ms")]


LONG_S = (
    0.4  # of waiting in the steps beside which a rejoin is measured again: what it costs is no matter of steps
)
LONG_KILLS = 10


def run(options: RecoveryOptions, stream: TextIO, scene: RecoveryScene | None = None) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`. `scene` is trained while replicas are killed.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a process fails,
    DataCorruption where a state comes back as another one.
    """
    log, scene = ProgressLog(stream), scene or RecoveryScene()
    result, started = begin_result("recovery", log)
    wanted = options.measures
    result["kill"] = kills(scene, options.kills, log) if "kill" in wanted else []
    result["torchft"] = peer(scene, options.kills, log, KILLED, signal.SIGKILL) if "torchft" in wanted else []
    if "rejoin" in wanted:
        result["rejoin"] = kills(replace(scene, wait_s=LONG_S), min(options.kills, LONG_KILLS), log)
    else:
        result["rejoin"] = []
    result["return"] = returns(options.kills, log) if "return" in wanted else []
    stopped = min(options.kills, MOST) if "stop" in wanted else 0
    result["stop"] = stops(scene, stopped, log) if stopped else []
    result["torchft_stop"] = peer(scene, stopped, log, STOPPED, signal.SIGSTOP) if stopped else []
    result["readers"] = readers(options.rounds, log) if "readers" in wanted else []
    result["local"] = local(options.sizes, options.rounds, log) if "local" in wanted else []
    return finish_result(result, verdicts(result), log, started)
