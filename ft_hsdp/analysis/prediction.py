"""What a job's effective training time will be: the model of a job, with settings from JSON or from a run.

A row of settings has fields of `System`. A duration is a number, samples, or median and mean of a lognormal one.
systems.json beside this module has such rows, published rates of failures, and where each figure comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from statistics import NormalDist, fmean
from typing import Any

from ft_hsdp.analysis.failures import Failures
from ft_hsdp.analysis.goodput import Goodput
from ft_hsdp.analysis.incarnations import parts_of
from ft_hsdp.analysis.job_model import Hazard, Hit, Outcome, Samples, System, Tier, simulate

Row = dict[str, Any]

FAILURES, SENSED = 1000, 100  # of a prediction, and of one for the sensitivity to an input
PHASES = ("stall", "silent", "back", "swap", "join", "restart")
PLACES = ("replicas", "per_rack", "per_zone", "replace_s")  # what a rate says of jobs with replicas
NORMAL = [NormalDist().inv_cdf((n + 0.5) / 201) for n in range(201)]
SPARE = "spare"  # how an incarnation was started whose processes were in reserve


def samples(value: float | Sequence[float] | Mapping[str, float]) -> Samples:
    """Return seconds as samples; for a median and a mean, those of a lognormal distribution."""
    if isinstance(value, Mapping):
        sigma = math.sqrt(2 * math.log(max(1.0, value["mean"] / value["median"])))
        return tuple(value["median"] * math.exp(sigma * normal) for normal in NORMAL)
    return tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)


def system_of(row: Mapping[str, Any]) -> System:
    """Return a system from its row of settings. By default a restart is a stall and a return."""
    row = {"restart": {**row.get("stall", {}), **row.get("back", {})}, **row}
    found = {each.name: row[each.name] for each in fields(System) if each.name in row}
    for name, value in found.items():
        if name in PHASES:
            found[name] = {phase: samples(seconds) for phase, seconds in value.items()}
        elif name in ("memory", "disk"):
            found[name] = Tier(**value)
        elif name in ("step_s", "replace_s"):
            found[name] = samples(value)
        elif name == "kept":
            found[name] = frozenset(value)
    return System(**found)


def settings(goodput: Goodput, failures: Failures) -> Row:
    """Return the row of settings that a run tells: how long its phases and its steps took."""
    ways: dict[str, list[dict[str, float]]] = {"back": [], "swap": []}
    usual = goodput.steps.median or 1e-9
    for failure in failures.losses():
        over, life = failures.over(failure), failure.next
        if over is None or life is None:
            continue
        parts = {"down": max(0.0, (life.started or life.first) - failure.t), **parts_of(life)}
        # It misses the step in which it is lost from the start, and contributes to one before that is over.
        parts["first step"] = max(0.0, over - usual / 2 - failure.t - sum(parts.values()))
        ways["swap" if SPARE in life.how else "back"].append(parts)
    returns = sum(map(len, ways.values()))
    mean = goodput.calm_s / goodput.calm if goodput.calm else usual
    found = {
        "step_s": {"median": usual, "mean": max(mean, usual)},
        "stall": _samples(goodput.stalls),
        "join": {cause: seconds / returns for cause, seconds in goodput.joins.items()} if returns else {},
        **{way: _samples(rows) for way, rows in ways.items()},
        "restart": {"restart": [*goodput.restarts]} if goodput.restarts else {},
    }
    return {name: each for name, each in found.items() if each}


def _samples(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, 0.0) for row in rows] for name in names}


def of_run(goodput: Goodput, failures: Failures, job: Row, row: Row) -> Outcome:
    """Return what the model makes of a run with the failures that it had, from its first step to its last.

    Args:
        job: settings that its configuration gives.
        row: settings of this run, or of another; the length of a step is that of this run.
    """
    steps = goodput.steps
    hits = []
    for failure in failures.losses():
        fell_back = failure.next is not None and failure.next.rung == "checkpoint"
        hits.append(Hit(failure.t - steps.began, failure.replica, "host" if fell_back else "process"))
    own = {"step_s": settings(goodput, failures)["step_s"], "kept": ["process"]}
    system = system_of({**row, **job, **own})
    return simulate(system, Hazard(hits=tuple(hits)), max(steps.wall_s - steps.startup_s, 1e-9))


def rates(document: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what each system of a document like systems.json makes of each rate of failures in it.

    The first system is the one whose sensitivity to its inputs is told.
    """
    mix: dict[str, float] = {}
    for _, count, scope in document["mix"]:
        mix[scope] = mix.get(scope, 0.0) + count
    for rate in document["rates"]:
        hazard = Hazard(every_s=rate["every_s"], mix=mix if rate["mix"] else {"process": 1.0})
        systems = {}
        for name, row in document["systems"].items():
            apart = row.get("replicas") != 1
            given = {key: rate[key] for key in ("step_s", *PLACES) if key in rate and (apart or key == "step_s")}
            for way, more in rate.get("add", {}).items() if apart else ():
                given[way] = row.get(way, {}) | more
            systems[name] = system_of({**row, **given})
        yield {
            **rate,
            "systems": {name: asdict(_often(system, hazard)) for name, system in systems.items()},
            "sensitivity": [*sensitivity(next(iter(systems.values())), hazard)],
        }


def _often(system: System, hazard: Hazard, failures: int = FAILURES) -> Outcome:
    return simulate(system, hazard, failures * hazard.every_s)


def sensitivity(system: System, hazard: Hazard) -> Iterator[Row]:
    """Yield by how much the ratio changes if one input is half of it, or half as much again; all others stay."""

    def ratio(name: str, phase: str, factor: float) -> float:
        if name == "every_s":
            return _often(system, replace(hazard, every_s=hazard.every_s * factor), SENSED).with_replay
        value: Any = getattr(system, name)
        if name == "disk":
            value = replace(value, every=max(1, round(value.every * factor)))
        else:
            scaled = tuple(factor * each for each in (value[phase] if phase else value))
            value = {**value, phase: scaled} if phase else scaled
        return _often(replace(system, **{name: value}), hazard, SENSED).with_replay

    usual = ratio("every_s", "", 1.0)
    inputs = [("every_s", ""), ("step_s", ""), ("replace_s", ""), ("disk", "")]
    for name, phase in inputs + [(way, phase) for way in PHASES for phase in getattr(system, way)]:
        less, more = (ratio(name, phase, factor) - usual for factor in (0.5, 1.5))
        yield {"input": f"{name}.{phase}" if phase else name, "less": less, "more": more}


def restart_parts(document: Mapping[str, Any]) -> list[Row]:
    """Return of what a restart is made: the parts of FT-HSDP's Figure 2, and the same of the first system's."""
    row = next(iter(document["systems"].values()))
    ours = {f"{way}.{phase}": fmean(samples(s)) for way in PHASES for phase, s in row.get(way, {}).items()}
    return [part | {"ours_s": sum(ours.get(name, 0.0) for name in part["of"])} for part in document["restart"]]
