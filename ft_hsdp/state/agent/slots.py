"""Which of a rank's memory segments is written next, and which snapshots are kept. Pure.

A slot is one segment. In the steady state two slots are enough: one is written while the other keeps the newest
complete snapshot, which all ranks of the replica have. A newer snapshot that some rank left out gives way to the
next one. Where only some states are settled (`memory.every`), the newest of them stays in a third slot; without
memory for it, the newest snapshot that is none of them gives way. Readers and pins need more slots, up to
MAX_SLOTS; a writer never waits for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ft_hsdp.core.state_id import StateId, newer
from ft_hsdp.state.agent.messages import CompleteSnapshot

MAX_SLOTS = 4
SPARE_STAGES = 8  # after so many calls of `stage` in a row that had a slot to spare, the spare slots are freed


Content = StateId | str
"""What is in a slot: the state of a shard, or the store of a slice."""


class SlotPhase(Enum):
    FREE = "free"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass(slots=True)
class _Slot:
    number: int
    phase: SlotPhase = SlotPhase.FREE
    state: Content | None = None
    order: int = 0  # counts completions: the largest is the newest
    settled: bool = False  # all ranks of the replica have a snapshot of this state
    passed: bool = False  # not settled when some rank left out this snapshot or a later one
    never: bool = False  # its state is settled by no commit
    readers: int = 0
    doomed: bool = False  # freed when its last reader gives it back


class SnapshotSlots:
    """The slots of one rank, or of one slice, by number. A number is never reused.

    ``now`` and ``until`` are seconds of one monotonic clock. Not thread-safe.
    """

    def __init__(self, most: int = MAX_SLOTS) -> None:
        self._most = most
        self._slots: dict[int, _Slot] = {}
        self.numbered = 0  # the highest number that was given to a slot
        self._completed = 0
        self._spare = 0
        self._pin: tuple[StateId, float] | None = None

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the slots that exist. The caller frees the memory of every other number."""
        return frozenset(self._slots)

    @property
    def full(self) -> bool:
        return len(self._slots) >= self._most

    def add(self) -> int:
        """Add a free slot and return its number.

        Raises:
            ValueError: As many as there may be exist already.
        """
        if self.full:
            raise ValueError(f"there are {self._most} slots")
        self.numbered += 1
        self._slots[self.numbered] = _Slot(self.numbered)
        return self.numbered

    @property
    def written(self) -> int | None:
        slot = self._written()
        return None if slot is None else slot.number

    def stage(self, state: Content, now: float, *, last: bool = False) -> int | None:
        """Return the number of the slot to write ``state`` into, or None if every slot is in use.

        Some slots are never chosen: the newest settled one, the newest complete one (unless some rank left it
        out and another one is settled), the pinned one, and those that are being read. A snapshot that was being
        written is abandoned together with its slot, because its writer may still be writing.

        Args:
            last: There can be no other slot: the newest complete one is chosen, too, if no commit settles it and
                another one is settled.
        """
        self.abandon(reuse=False)
        usable = self._usable(now, last)
        if not usable:
            self._spare = 0
            return None
        slot, *spare = usable
        self._spare = self._spare + 1 if spare else 0
        if self._spare >= SPARE_STAGES:
            self._spare = 0
            self._drop(spare)
        slot.phase, slot.state, slot.settled = SlotPhase.WRITING, state, False
        slot.passed = slot.never = False
        return slot.number

    def staged(self, state: Content) -> int:
        """Mark the slot that ``state`` was written into as complete, and return its number.

        Raises:
            ValueError: ``state`` is not being written.
        """
        slot = self._written()
        if slot is None or slot.state != state:
            raise ValueError(f"state {state} is not being written")
        self._completed += 1
        slot.phase, slot.order = SlotPhase.COMPLETE, self._completed
        return slot.number

    def abandon(self, *, reuse: bool) -> None:
        """Abandon the snapshot that is being written, if there is one.

        Args:
            reuse: The writer is dead, so its slot can be used again. Otherwise the slot is dropped.
        """
        slot = self._written()
        if slot is None:
            return
        if reuse:
            slot.phase, slot.state = SlotPhase.FREE, None
        else:
            self._drop([slot])

    def mark_settled(self, state: StateId, everywhere: bool | None = True) -> None:
        """Record whether all ranks of the replica have a snapshot of ``state``.

        If ``everywhere``, it is settled. If not, some rank left it out: complete snapshots that are not settled
        give way to the next one. None: no commit settles it, nor any older one that is not settled yet.
        """
        for slot in self._complete():
            if everywhere is None:
                slot.never |= isinstance(slot.state, StateId) and not newer(slot.state, state)
            elif not everywhere:
                slot.passed = not slot.settled
            elif slot.state == state:
                slot.settled = True

    def pin(self, state: StateId, until: float) -> None:
        self._pin = state, until

    def unpin(self) -> None:
        self._pin = None

    def pinned(self, now: float) -> StateId | None:
        if self._pin is None or now >= self._pin[1]:
            return None
        return self._pin[0]

    def find(self, state: Content) -> int | None:
        return next((slot.number for slot in self._complete() if slot.state == state), None)

    def held(self) -> tuple[CompleteSnapshot, ...]:
        return tuple(
            CompleteSnapshot(slot.state, slot.settled)
            for slot in self._complete()
            if isinstance(slot.state, StateId)
        )

    def drop(self, number: int) -> None:
        """Remove a slot. One that is being read is removed when its last reader gives it back."""
        self._drop([self._slots[number]])

    def borrow(self, number: int) -> None:
        slot = self._slots[number]
        assert slot.phase is SlotPhase.COMPLETE, slot
        slot.readers += 1

    def give_back(self, number: int) -> None:
        slot = self._slots[number]
        assert slot.readers > 0, slot
        slot.readers -= 1
        if slot.doomed:
            self._drop([slot])

    def forget(self) -> None:
        """Remove the pin and all slots. A slot that is being read is removed once it is given back."""
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
        """Return the complete slots in reverse order of completion: the rank held the last one last."""
        complete = [s for s in self._slots.values() if s.phase is SlotPhase.COMPLETE and not s.doomed]
        return sorted(complete, key=lambda slot: slot.order, reverse=True)

    def _usable(self, now: float, last: bool) -> list[_Slot]:
        """Return the free slots, then the complete ones that may be overwritten, oldest first."""
        complete = self._complete()
        settled = [slot for slot in complete if slot.settled][:1]
        newest = [slot for slot in complete[:1] if not (settled and (slot.passed or (last and slot.never)))]
        kept = settled + newest
        pinned = self.pinned(now)
        old = [s for s in reversed(complete) if s not in kept and s.state != pinned and not s.readers]
        return [s for s in self._slots.values() if s.phase is SlotPhase.FREE and not s.doomed] + old
