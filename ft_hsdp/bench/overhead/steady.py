"""A step of ft_hsdp beside the same step of PyTorch's HSDP, which survives nothing."""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.interval import times
from ft_hsdp.bench.overhead.turns import Entry, turns
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.spread import spread

TRANSPORTS = ("tcp", "shm")
SCENE = Scene(
    sections={"train": {"micro_batch": 2, "seq_len": 128}, "model": {"dim": 192, "layers": 6, "heads": 6}}
)


def steady(rounds: int, log: Log, scene: Scene = SCENE, transports: tuple[str, ...] = TRANSPORTS) -> list[Row]:
    """A row: steps of HSDP, of a second HSDP (what the method itself is good for), of ft_hsdp over each transport.

    Between machines it is TCP, as HSDP's gloo always is. Raises Retryable where a process fails.
    """
    entries = {"hsdp": Entry("hsdp", scene), "hsdp again": Entry("hsdp", scene)}
    for transport in transports:
        sections = {**scene.sections, "ftar": {"transport": transport}}
        entries[f"ft_hsdp, {transport}"] = Entry("ft_hsdp", replace(scene, sections=sections))
    took = turns(entries, rounds)
    row: Row = {
        "replicas": scene.replicas,
        "ranks": scene.ranks,
        "rounds": rounds,
        "crews": {name: spread(seconds) for name, seconds in took.items()},
        "times": {name: times(seconds, took["hsdp"]) for name, seconds in took.items() if name != "hsdp"},
    }
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times HSDP's step ({found['low']:.3f} to {found['high']:.3f})")
    return [row]
