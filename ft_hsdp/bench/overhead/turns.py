"""Several crews on this machine, all alive; one of them trains at a time, in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ft_hsdp.bench.hsdp import crew as crews
from ft_hsdp.bench.hsdp.place import Loopback
from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.rounds import interleave


@dataclass(frozen=True, slots=True)
class Entry:
    """A crew: its kind ("hsdp" or "ft_hsdp") and what it trains."""

    kind: str
    scene: Scene


def turns(entries: Mapping[str, Entry], rounds: int) -> dict[str, list[float]]:
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
