"""What the user asked `bench overhead` for.

The goals of `bench overhead`, and how what was seen stands to them.

The result of `bench overhead` as tables, readable at 80 columns.

Several crews on this machine, all alive; one of them trains at a time, in turn.

A step of ft_hsdp beside the same step of PyTorch's HSDP, which survives nothing.

A snapshot of every step beside none: where a step computes, and where it waits as beside an accelerator.

`bench overhead`: runs the measures and puts the result together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from ft_hsdp.bench.goals import GoalVerdict, begin_result, finish_result, most
from ft_hsdp.bench.goals import verdicts as of_ftar
from ft_hsdp.bench.hsdp import processes as crews
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.processes import Loopback
from ft_hsdp.bench.hsdp.scene import HsdpScene
from ft_hsdp.bench.options import ProgressLog, ResultRow, count_of, measures_of
from ft_hsdp.bench.overhead.ray import ray
from ft_hsdp.bench.results import interleave, ratio_interval, spread
from ft_hsdp.bench.tables import begin_tables, columns, end_tables, link_table
from ft_hsdp.config import Config

ROUNDS = {"steady": 70, "snapshot": 30, "ray": 6, "link": 20}
"""How often each measure is repeated where the user does not say."""
MEASURES = tuple(ROUNDS)
USUAL = ("steady", "snapshot", "ray")


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    """rounds: of each measure that is wanted: steps of each crew, or turns of each launcher."""

    rounds: Mapping[str, int]


def parse(measure: str | None, *, rounds: int | None) -> OverheadOptions:
    """Options from the words of a command line; without a measure the usual ones. Raises ConfigError."""
    wanted = measures_of(measure, MEASURES) if measure else USUAL
    given = None if rounds is None else count_of("--rounds", rounds)
    return OverheadOptions({name: given or ROUNDS[name] for name in wanted})


STEADY = 1.02
RAY = 1.02
SNAPSHOT = {"computing": 1.10, "waiting": 1.02}


def verdicts(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[GoalVerdict]:
    """Every goal for which there is a figure; `measured` has the rows of each measure."""
    found: list[GoalVerdict] = []
    for row in measured.get("steady", ()):
        for name, times in row["times"].items():
            if name.startswith("ft_hsdp"):
                found.append(most(f"{name}: a step, times HSDP's", _at(row), STEADY, times["ratio"]))
    for row in measured.get("snapshot", ()):
        text = f"snapshot each step, {row['step']}: times as long"
        found.append(most(text, _at(row), SNAPSHOT[row["step"]], row["times"]["with"]["ratio"]))
    for row in measured.get("ray", ()):
        found.append(most("under Ray: a step, times that under up", _at(row), RAY, row["times"]["ray"]["ratio"]))
    return found + of_ftar({"link": measured.get("link", ())})


def _at(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"members": row["replicas"]}


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = begin_tables(result, stream)
    for row in result["steady"]:
        _steps(f"A step of {_shape(row)}", row["crews"], row["times"], console)
    for row in result["snapshot"]:
        title = f"A step of {_shape(row)}, {row['step']}, with a snapshot and without"
        _steps(title, row["modes"], row["times"], console)
    for row in result["ray"]:
        title = f"A step of {_shape(row)}, that mostly waits: medians of {row['steps']} steps"
        _steps(title, row["launchers"], row["times"], console, "turns")
    for row in result["link"]:
        link_table(row, console)
    end_tables(result, verdicts(result), console)


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


@dataclass(frozen=True, slots=True)
class TurnEntry:
    """A crew: its kind ("hsdp" or "ft_hsdp") and what it trains."""

    kind: str
    scene: HsdpScene


def turns(entries: Mapping[str, TurnEntry], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of `rounds` blocks of each crew, per step (ABAB). Raises Retryable where a process fails."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        place = Loopback(max(entry.scene.replicas for entry in entries.values()))
        team = []
        for number, (name, entry) in enumerate(entries.items()):
            own = folder / str(number)
            own.mkdir()
            if entry.kind == crews.PRODUCT:
                crews.lighthouse(place, entry.scene, own, stack)
            team.append(crews.start(name, entry.kind, number, place, entry.scene, own, stack))
            team[-1].ready()  # one after the other: two dozen imports at once take longer than a crew waits
        steps = {name: entry.scene.steps for name, entry in entries.items()}
        return interleave({crew.name: partial(crew.train, steps[crew.name]) for crew in team}, rounds)


TRANSPORTS = ("tcp", "shm")
SCENE = HsdpScene(
    sections={"train": {"micro_batch": 2, "seq_len": 128}, "model": {"dim": 192, "layers": 6, "heads": 6}}
)


def steady(
    rounds: int, log: ProgressLog, scene: HsdpScene = SCENE, transports: tuple[str, ...] = TRANSPORTS
) -> list[ResultRow]:
    """A row: steps of HSDP, of a second HSDP (what the method itself is good for), of ft_hsdp over each transport.

    Between machines it is TCP, as HSDP's gloo always is. Raises Retryable where a process fails.
    """
    entries = {"hsdp": TurnEntry("hsdp", scene), "hsdp again": TurnEntry("hsdp", scene)}
    for transport in transports:
        sections = {**scene.sections, "ftar": {"transport": transport}}
        entries[f"ft_hsdp, {transport}"] = TurnEntry("ft_hsdp", replace(scene, sections=sections))
    took = turns(entries, rounds)
    row: ResultRow = {
        "replicas": scene.replicas,
        "ranks": scene.ranks,
        "rounds": rounds,
        "crews": {name: spread(seconds) for name, seconds in took.items()},
        "times": {name: ratio_interval(seconds, took["hsdp"]) for name, seconds in took.items() if name != "hsdp"},
    }
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times HSDP's step ({found['low']:.3f} to {found['high']:.3f})")
    return [row]


MODES: Mapping[str, str] = {"without": "on_demand", "without again": "on_demand", "with": "every_step"}
SCENES: Mapping[str, HsdpScene] = {"computing": SCENE, "waiting": replace(SCENE, waiting=(1 << 18, 0.5))}


def snapshot(rounds: int, log: ProgressLog, scenes: Mapping[str, HsdpScene] = SCENES) -> list[ResultRow]:
    """A row for each kind of step. None, and a note, where there are no such snapshots.

    Raises Retryable where a process fails.
    """
    if "state" not in Config.model_fields:
        log.note("snapshot is left out: not in this version (state.snapshot)")
        return []
    rows = []
    for kind, scene in scenes.items():
        entries = {
            name: TurnEntry("ft_hsdp", replace(scene, sections={**scene.sections, "state": {"snapshot": mode}}))
            for name, mode in MODES.items()
        }
        took = turns(entries, rounds)
        row: ResultRow = {
            "step": kind,
            "replicas": scene.replicas,
            "ranks": scene.ranks,
            "rounds": rounds,
            "modes": {name: spread(seconds) for name, seconds in took.items()},
            "times": {
                name: ratio_interval(each, took["without"]) for name, each in took.items() if name != "without"
            },
        }
        rows.append(row)
        found = row["times"]["with"]
        log.say(f"{kind}: a snapshot each step makes it {found['ratio']:.3f} times as long")
    return rows


def run(options: OverheadOptions, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("overhead", log)
    rounds = options.rounds  # of the measures that are wanted
    result["steady"] = steady(rounds["steady"], log) if "steady" in rounds else []
    result["snapshot"] = snapshot(rounds["snapshot"], log) if "snapshot" in rounds else []
    result["ray"] = ray(rounds["ray"], log) if "ray" in rounds else []
    result["link"] = link(HsdpScene(rounds=rounds["link"]), log) if "link" in rounds else []
    return finish_result(result, verdicts(result), log, started)
