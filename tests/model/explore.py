"""Visits every state of a bounded world, breadth first, and prints the shortest way to a violation."""

import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from tests.model import moves
from tests.model.invariants import Violation
from tests.model.model import Model
from tests.model.world import Bounds, World

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Exploration:
    states: int  # worlds that were visited
    transitions: int  # moves that were tried
    seconds: float
    exhausted: bool  # no world was left out
    violation: str = ""  # what does not hold; "": nothing was found
    transcript: tuple[str, ...] = ()  # the labels of the moves to it

    def __str__(self) -> str:
        head = f"{self.states:,} states, {self.transitions:,} transitions, {self.seconds:.1f} s"
        if not self.violation:
            return f"{head}, {'exhausted' if self.exhausted else 'stopped early'}, no violation"
        lines = "\n".join(f"{i:3d}. {line}" for i, line in enumerate(self.transcript, 1))
        return f"{head}\n{lines}\n     => {self.violation}"


class Space(Protocol[Place]):
    def initial(self) -> Place: ...

    def successors(self, world: Place) -> Iterable[tuple[str, Callable[[], Place]]]:
        """Return what can happen in a world: a label, and a function that returns the world after it."""
        ...

    def patience(self, world: Place) -> Iterable[tuple[str, Callable[[], Place]]]:
        """Return what the passing of time brings when nothing else can happen."""
        ...

    def finished(self, world: Place) -> bool:
        """Whether a world in which nothing happens any more is a good end."""
        ...


class _Replicas:
    """The replicas of a job and its lighthouse, as a space."""

    def __init__(self, bounds: Bounds) -> None:
        self._model = Model(bounds)
        self.initial = self._model.initial
        self.finished = self._model.finished

    def successors(self, world: World) -> Iterator[moves.Move]:
        return self._looked_at(moves.successors(self._model, world))

    def patience(self, world: World) -> Iterator[moves.Move]:
        return self._looked_at(moves.patience(self._model, world))

    def _looked_at(self, ways: Iterable[moves.Move]) -> Iterator[moves.Move]:
        return ((label, partial(self._look, happen)) for label, happen in ways)

    def _look(self, happen: Callable[[], World]) -> World:
        return self._model.look(happen())


def explore(bounds: Bounds, limit_s: float = 110.0, liveness: bool = True) -> Exploration:
    """Visit all worlds within `bounds`, or as many as `limit_s` seconds allow.

    Args:
        bounds: what may go wrong.
        limit_s: seconds after which the search stops early.
        liveness: see `search`.

    Returns:
        What was found.
    """
    return search(_Replicas(bounds), limit_s, liveness)


def search(space: Space[Place], limit_s: float, liveness: bool = True) -> Exploration:
    """Visit all worlds of a space, or as many as `limit_s` seconds allow.

    A world in which nothing can happen must be a good end (all replicas have one final state), and from every
    world such an end must be within reach: otherwise its members could repeat the same states without an end.

    Args:
        space: the first world, and what can happen in each.
        limit_s: seconds after which the search stops early.
        liveness: False: neither of the two is checked, so that a violation of safety behind one is found.

    Returns:
        What was found.
    """
    graph, began = _Graph[Place](), time.monotonic()
    frontier = [graph.add(space.initial(), 0, "")]

    def result(exhausted: bool, violation: str = "", last: int = 0, label: str = "") -> Exploration:
        seconds = time.monotonic() - began
        ways = graph.path(last, label) if violation else ()
        return Exploration(len(graph.worlds), len(graph.ways), seconds, exhausted, violation, ways)

    while frontier:
        following: list[int] = []
        for here in frontier:
            world = graph.worlds[here]
            ways = list(space.successors(world))
            ended = not ways and space.finished(world)
            moved = False
            for label, happen in ways or (() if ended else space.patience(world)):
                try:
                    after = happen()
                except Violation as violation:
                    return result(False, str(violation), here, label)
                moved = moved or after != world
                known = graph.ids.get(after)
                if known is None:
                    known = graph.add(after, here, label)
                    following.append(known)
                graph.ways.append((here << 32) | known)
            if not moved and (ended or space.finished(world)):
                graph.ends.append(here)
            elif liveness and not (ways or moved):
                return result(False, "stuck: nothing can happen and not all replicas have the final state", here)
            if time.monotonic() - began > limit_s:
                return result(False)
        frontier = following
    trapped = graph.trapped() if liveness else None
    if trapped is not None:
        return result(
            False, "trapped: whatever happens from here on, not all replicas get the final state", trapped
        )
    return result(True)


class _Graph(Generic[Place]):
    """The worlds by number, how each was reached first, and every move between two."""

    def __init__(self) -> None:
        self.worlds: list[Place] = []
        self.ids: dict[Place, int] = {}
        self.ends: list[int] = []  # worlds in which all have ended well
        self.ways = array("Q")  # from << 32 | to
        self._from: list[tuple[int, str]] = []

    def add(self, world: Place, before: int, label: str) -> int:
        """Add a new world and return its number."""
        number = self.ids[world] = len(self.worlds)
        self.worlds.append(world)
        self._from.append((before, label))
        return number

    def path(self, last: int, label: str) -> tuple[str, ...]:
        """Return what happened up to world `last`, and then `label`."""
        lines = [label] if label else []
        while last:
            last, how = self._from[last]
            lines.append(how)
        return tuple(reversed(lines))

    def trapped(self) -> int | None:
        """Return the first world from which no end can be reached; None if there is none."""
        back = sorted((way & 0xFFFFFFFF) << 32 | way >> 32 for way in self.ways)
        saved = bytearray(len(self.worlds))
        todo = list(self.ends)
        while todo:
            here = todo.pop()
            if saved[here]:
                continue
            saved[here] = True
            first = bisect_left(back, here << 32)
            while first < len(back) and back[first] >> 32 == here:
                todo.append(back[first] & 0xFFFFFFFF)
                first += 1
        lost = saved.find(0)
        return None if lost < 0 else lost


def main() -> None:
    """Explore with the default bounds and print what was found."""
    sys.stdout.write(f"{explore(Bounds())}\n")


if __name__ == "__main__":
    main()
