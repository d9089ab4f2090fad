"""Pipeline: the counters of one all-reduce at one member, and what may be done next (FT-HSDP §4.2).

No bytes and no clock: what happened goes in, what to do comes out. Each operation counts the rounds that are
ready, posted and done; chunks of one operation come in order, operations overlap as they like.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_hsdp.core.partition import Plan
from ft_hsdp.core.ring import Kind, Operation, operations


@dataclass(frozen=True, slots=True)
class Process:
    """Give the chunk of ``round`` to the data plane: copy, reduce or store it. ``empty``: it is no sum yet."""

    operation: Operation
    round: int
    empty: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Send the outcome of ``operation`` for ``round`` to the right neighbour; ``empty``: without a payload."""

    operation: Operation
    round: int
    empty: bool


Step = Process | Send


class OutOfOrder(ValueError):
    """A chunk came that is not the next one of its operation."""


@dataclass(slots=True)
class Counter:
    """Rounds of one operation: arrived (or given locally), handed to the data plane, finished by it."""

    ready: int = 0
    posted: int = 0
    done: int = 0


class Pipeline:
    """One all-reduce of ``plan`` at ``position``. A member that does not contribute relays what it gets.

    ``depth`` is how many chunks the data plane takes at once. Invariant: done <= posted <= ready <= rounds.
    """

    def __init__(self, plan: Plan, position: int, contributes: bool, depth: int = 1) -> None:
        self.plan = plan
        self.operations = operations(position, plan.members)
        self.counters = tuple(Counter() for _ in self.operations)
        self._contributes = contributes
        self._rounds = plan.rounds
        self._room = depth
        self._waiting = 0
        self._empty: set[tuple[int, int]] = set()

    @property
    def finished(self) -> bool:
        """Whether every operation has done every round; sends may still be on their way."""
        return all(c.done == self._rounds for c in self.counters)

    @property
    def frames(self) -> int:
        """How many chunks come from the left neighbour in all."""
        return self._rounds * (len(self.operations) - 1)

    def start(self) -> list[Step]:
        """What to do before anything has arrived: as many own chunks as there are slots."""
        alone = self.plan.members == 1
        for _ in range(self._rounds if alone else min(self.plan.slots, self._rounds)):
            self._ready(0, not self._contributes)
        return self._post()

    def arrived(self, number: int, round_: int, empty: bool) -> list[Step]:
        """The left neighbour's chunk for operation ``number`` is here.

        A first chunk from there lets one more of our own go: nobody runs ahead of the ring by more than the slots.

        Raises:
            OutOfOrder: it is not the next chunk of that operation, or it is empty where sums are final.
        """
        if not 0 < number < len(self.operations):
            raise OutOfOrder(f"no operation {number} receives in a ring of {self.plan.members}")
        if round_ != self.counters[number].ready or round_ >= self._rounds:
            raise OutOfOrder(
                f"operation {number} got round {round_} of {self._rounds}, next is {self.counters[number].ready}"
            )
        if empty and not self.operations[number].kind.reduces:
            raise OutOfOrder(f"operation {number} got an empty chunk of a final sum")
        self._ready(number, empty)
        if number == 1 and self.counters[0].ready < self._rounds:
            self._ready(0, not self._contributes)
        return self._post()

    def processed(self, number: int) -> list[Step]:
        """The data plane has finished the next round of operation ``number``."""
        counter, operation = self.counters[number], self.operations[number]
        round_ = counter.done
        if round_ >= counter.posted:
            raise OutOfOrder(f"operation {number} finished round {round_} before it was posted")
        counter.done += 1
        self._room += 1
        steps: list[Step] = []
        if operation.kind.sends:
            steps.append(Send(operation, round_, self._sends_nothing(operation, round_)))
        return steps + self._post()

    def _sends_nothing(self, operation: Operation, round_: int) -> bool:
        """A partial sum stays empty until somebody contributes; a final one without contributors is zeros."""
        if (operation.number, round_) not in self._empty:
            return False
        self._empty.discard((operation.number, round_))
        return operation.kind is not Kind.REDUCE_STORE_SEND and not self._contributes

    def _ready(self, number: int, empty: bool) -> None:
        counter = self.counters[number]
        if empty:
            self._empty.add((number, counter.ready))
        counter.ready += 1
        self._waiting += 1

    def _post(self) -> list[Step]:
        """Hand chunks to the data plane while it takes them, those that are nearest to their end first."""
        steps: list[Step] = []
        while self._room and self._waiting:
            number = max(n for n, c in enumerate(self.counters) if c.posted < c.ready)
            counter = self.counters[number]
            steps.append(Process(self.operations[number], counter.posted, (number, counter.posted) in self._empty))
            counter.posted += 1
            self._room -= 1
            self._waiting -= 1
        return steps
