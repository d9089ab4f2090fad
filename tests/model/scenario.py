"""Shared by the tests of the simulator: play a scenario line by line, then let the world run out."""

from __future__ import annotations

from tests.model import moves
from tests.model.model import Model
from tests.model.world import Bounds, World

FAULTS = ("is killed", "a link of", "the lighthouse restarts", "the grace", "are evicted", "no answer in time")


class Scenario:
    """A world in which one thing after another happens."""

    def __init__(self, bounds: Bounds) -> None:
        self.model = Model(bounds)
        self.world: World = self.model.initial()

    def options(self) -> list[str]:
        """The labels of all that could happen now."""
        return [label for label, _ in moves.successors(self.model, self.world)]

    def can(self, beginning: str) -> bool:
        """Whether something can happen now whose label starts like that."""
        return any(label.startswith(beginning) for label in self.options())

    def play(self, *lines: str) -> Scenario:
        """Let each of ``lines`` happen: the only move whose label starts with it."""
        for line in lines:
            found = {
                label: happen
                for label, happen in moves.successors(self.model, self.world)
                if label.startswith(line)
            }
            assert found, f"{line!r} cannot happen; what can:\n" + "\n".join(self.options())
            self.world = found[min(found, key=len)]()
        return self

    def run_out(self) -> Scenario:
        """No more faults: whatever is on its way arrives, and time passes, until everybody has ended."""
        trace: list[str] = []
        for _ in range(400):
            if not self._next(trace):
                assert self.model.finished(self.world), "stuck after:\n" + "\n".join(trace[-30:])
                return self
        raise AssertionError("no end within 400 moves; the last were:\n" + "\n".join(trace[-30:]))

    def _next(self, trace: list[str]) -> bool:
        """Take the first move, without a fault, that changes anything."""
        ways = [m for m in moves.successors(self.model, self.world) if not any(f in m[0] for f in FAULTS)]
        for label, happen in [*ways, *moves.patience(self.model, self.world)]:
            after = happen()
            if after != self.world:
                self.world = after
                trace.append(label)
                return True
        return False
