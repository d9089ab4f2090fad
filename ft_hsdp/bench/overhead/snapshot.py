"""A snapshot of every step beside none: where a step computes, and where it waits as beside an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.interval import times
from ft_hsdp.bench.overhead.steady import SCENE
from ft_hsdp.bench.overhead.turns import Entry, turns
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.spread import spread
from ft_hsdp.config import Config

MODES: Mapping[str, str] = {"without": "on_demand", "without again": "on_demand", "with": "every_step"}
SCENES: Mapping[str, Scene] = {"computing": SCENE, "waiting": replace(SCENE, waiting=(1 << 18, 0.5))}


def snapshot(rounds: int, log: Log, scenes: Mapping[str, Scene] = SCENES) -> list[Row]:
    """A row for each kind of step. None, and a note, where there are no such snapshots.

    Raises Retryable where a process fails.
    """
    if "state" not in Config.model_fields:
        log.note("snapshot is left out: not in this version (state.snapshot)")
        return []
    rows = []
    for kind, scene in scenes.items():
        entries = {
            name: Entry("ft_hsdp", replace(scene, sections={**scene.sections, "state": {"snapshot": mode}}))
            for name, mode in MODES.items()
        }
        took = turns(entries, rounds)
        row: Row = {
            "step": kind,
            "replicas": scene.replicas,
            "ranks": scene.ranks,
            "rounds": rounds,
            "modes": {name: spread(seconds) for name, seconds in took.items()},
            "times": {name: times(each, took["without"]) for name, each in took.items() if name != "without"},
        }
        rows.append(row)
        found = row["times"]["with"]
        log.say(f"{kind}: a snapshot each step makes it {found['ratio']:.3f} times as long")
    return rows
