"""Slots: which of a rank's segments is written next, which are complete, and which may be used again. Pure.

Two are enough in the steady state: while one is written, the newest complete one, which all ranks of the replica
hold too, stays. A newer one that some rank has left out gives way to the next. Readers and pins cost more of them,
at most MAX_SLOTS; a writer never waits for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ft_hsdp.core.state_id import StateId

MAX_SLOTS = 4
SPARE_STAGES = 8  # a slot that was not needed by so many stagings in a row is given up


class SlotPhase(Enum):
    """What is in a slot."""

    FREE = "free"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass(slots=True)
class _Slot:
    number: int
    phase: SlotPhase = SlotPhase.FREE
    state: StateId | None = None
    order: int = 0  # of completion
    settled: bool = False
    passed: bool = False  # some rank has left it out, or one that came after it
    readers: int = 0
    doomed: bool = False  # goes when its last reader does


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A complete snapshot; ``settled``: all ranks of the replica have it."""

    state: StateId
    settled: bool


def newest_common(recalls: Sequence[Sequence[CompleteSnapshot]]) -> StateId | None:
    """The newest state that is complete on every rank; ``recalls`` are what each holds, newest first."""
    everywhere = set.intersection(*({held.state for held in recall} for recall in recalls))
    return next((held.state for held in recalls[0] if held.state in everywhere), None)


class SnapshotSlots:
    """One rank's slots. A number is used once; ``now`` is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._count = 0
        self._completed = 0
        self._spare = 0
        self._pin: tuple[StateId, float] | None = None

    @property
    def numbers(self) -> frozenset[int]:
        """The slots that there are; what is not here any more is to be freed."""
        return frozenset(self._slots)

    @property
    def full(self) -> bool:
        """Whether no more may be made."""
        return len(self._slots) >= MAX_SLOTS

    def add(self) -> int:
        """A new free slot.

        Raises:
            ValueError: there are MAX_SLOTS already.
        """
        if self.full:
            raise ValueError(f"there are {MAX_SLOTS} slots")
        self._count += 1
        self._slots[self._count] = _Slot(self._count)
        return self._count

    def stage(self, state: StateId, now: float) -> int | None:
        """The slot to write ``state`` into; None: none may be reused.

        Never the newest settled one, the newest complete one (unless some rank has left it out and another is
        settled), the pinned one, or one that is being read. What was being written is given up, and its slot too:
        whoever wrote into it may not have stopped yet.
        """
        self.abandon(reuse=False)
        usable = self._usable(now)
        if not usable:
            self._spare = 0
            return None
        slot, *spare = usable
        self._spare = self._spare + 1 if spare else 0
        if self._spare >= SPARE_STAGES:
            self._spare = 0
            self._drop(spare)
        slot.phase, slot.state, slot.settled, slot.passed = SlotPhase.WRITING, state, False, False
        return slot.number

    def staged(self, state: StateId) -> int:
        """The slot that ``state`` was written into is complete; its number.

        Raises:
            ValueError: that state is not being written.
        """
        slot = self._written()
        if slot is None or slot.state != state:
            raise ValueError(f"state {state} is not being written")
        self._completed += 1
        slot.phase, slot.order = SlotPhase.COMPLETE, self._completed
        return slot.number

    def abandon(self, *, reuse: bool) -> None:
        """What is being written will not be completed; ``reuse``: nobody writes into its slot any more."""
        slot = self._written()
        if slot is None:
            return
        if reuse:
            slot.phase, slot.state = SlotPhase.FREE, None
        else:
            self._drop([slot])

    def mark_settled(self, state: StateId, everywhere: bool = True) -> None:
        """All ranks of the replica have ``state``, or (not ``everywhere``) some have left it out."""
        for slot in self._complete():
            if not everywhere:
                slot.passed = not slot.settled
            elif slot.state == state:
                slot.settled = True

    def pin(self, state: StateId, until: float) -> None:
        """Keep ``state``, if it is here or comes, until then. It replaces the pin before."""
        self._pin = state, until

    def unpin(self) -> None:
        """Keep nothing for a member that is behind."""
        self._pin = None

    def pinned(self, now: float) -> StateId | None:
        """What is pinned."""
        if self._pin is None or now >= self._pin[1]:
            return None
        return self._pin[0]

    def find(self, state: StateId) -> int | None:
        """The slot that holds ``state``."""
        return next((slot.number for slot in self._complete() if slot.state == state), None)

    def held(self) -> tuple[CompleteSnapshot, ...]:
        """The complete snapshots, newest first."""
        return tuple(
            CompleteSnapshot(slot.state, slot.settled) for slot in self._complete() if slot.state is not None
        )

    def drop(self, number: int) -> None:
        """Hold a slot no longer, nor its memory; who reads it goes on."""
        self._drop([self._slots[number]])

    def borrow(self, number: int) -> None:
        """Somebody reads a complete slot."""
        slot = self._slots[number]
        assert slot.phase is SlotPhase.COMPLETE, slot
        slot.readers += 1

    def give_back(self, number: int) -> None:
        """A reader has done."""
        slot = self._slots[number]
        assert slot.readers > 0, slot
        slot.readers -= 1
        if slot.doomed:
            self._drop([slot])

    def forget(self) -> None:
        """Hold nothing any more, promise nothing; slots that are being read stay until they are given back."""
        self._pin = None
        self._drop(list(self._slots.values()))

    def _drop(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            if slot.readers:
                slot.doomed = True
            else:
                del self._slots[slot.number]

    def _written(self) -> _Slot | None:
        return next((slot for slot in self._slots.values() if slot.phase is SlotPhase.WRITING), None)

    def _complete(self) -> list[_Slot]:
        """Newest first: the one completed last, for that is what the rank held last."""
        complete = [s for s in self._slots.values() if s.phase is SlotPhase.COMPLETE and not s.doomed]
        return sorted(complete, key=lambda slot: slot.order, reverse=True)

    def _usable(self, now: float) -> list[_Slot]:
        """Free slots, then those whose content nobody needs, oldest first."""
        complete = self._complete()
        settled = [slot for slot in complete if slot.settled][:1]
        kept = settled + [slot for slot in complete[:1] if not (slot.passed and settled)]
        pinned = self.pinned(now)
        old = [s for s in reversed(complete) if s not in kept and s.state != pinned and not s.readers]
        return [s for s in self._slots.values() if s.phase is SlotPhase.FREE and not s.doomed] + old
