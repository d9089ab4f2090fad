"""Explore: visit every state of a bounded world, breadth first, and print the shortest way to a violation."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from ft_hsdp.sim import moves
from ft_hsdp.sim.invariants import Violation
from ft_hsdp.sim.model import Model
from ft_hsdp.sim.world import Bounds, World


@dataclass(frozen=True, slots=True)
class Result:
    """What an exploration found. ``exhausted`` says that no state was left out."""

    states: int
    transitions: int
    seconds: float
    exhausted: bool
    violation: str = ""
    transcript: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.states:,} states, {self.transitions:,} transitions, {self.seconds:.1f} s"
        if not self.violation:
            return f"{head}, {'exhausted' if self.exhausted else 'stopped early'}, no violation"
        lines = "\n".join(f"{i:3d}. {line}" for i, line in enumerate(self.transcript, 1))
        return f"{head}\n{lines}\n     => {self.violation}"


def explore(bounds: Bounds, limit_s: float = 110.0, liveness: bool = True) -> Result:
    """Visit all worlds within ``bounds``, or as many as ``limit_s`` seconds allow.

    A world in which nothing can happen must be one in which everybody ended at one final state; without
    ``liveness`` such a world is passed over, so that a violation of safety behind it is found.
    """
    model = Model(bounds)
    start = model.initial()
    parents: dict[World, tuple[World, str] | None] = {start: None}
    frontier, transitions, began = [start], 0, time.monotonic()

    def result(exhausted: bool, violation: str = "", last: World | None = None, label: str = "") -> Result:
        seconds = time.monotonic() - began
        return Result(len(parents), transitions, seconds, exhausted, violation, _path(parents, last, label))

    while frontier:
        following: list[World] = []
        for world in frontier:
            ways = list(moves.successors(model, world))
            stalled = not ways and not model.finished(world)
            moved = False
            for label, happen in ways or (moves.patience(model, world) if stalled else ()):
                transitions += 1
                try:
                    after = happen()
                except Violation as violation:
                    return result(False, str(violation), world, label)
                moved = moved or after != world
                if after not in parents:
                    parents[after] = (world, label)
                    following.append(after)
            if liveness and stalled and not moved:
                return result(False, "stuck: nothing can happen and not everybody has the final state", world)
            if time.monotonic() - began > limit_s:
                return result(False)
        frontier = following
    return result(True)


def _path(parents: dict[World, tuple[World, str] | None], last: World | None, label: str) -> tuple[str, ...]:
    lines = [label] if label else []
    while last is not None and (step := parents[last]) is not None:
        lines.append(step[1])
        last = step[0]
    return tuple(reversed(lines))


def main() -> None:
    """Explore with the default bounds and print what was found."""
    sys.stdout.write(f"{explore(Bounds())}\n")


if __name__ == "__main__":
    main()
