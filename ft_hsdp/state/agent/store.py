"""The snapshots of all ranks of a replica on this host, in memory that the state agent owns.

The ranks write and read them through the agent's socket. Other replicas read them through the state server, for
which `SnapshotStore` is a `SnapshotSource`. It is thread-safe.

`SnapshotSlots` decides which of a rank's memory segments is written next, and which snapshots are kept. It is
pure. A slot is one segment. In the steady state two slots are enough: one is written while the other keeps the
newest complete snapshot, which all ranks of the replica have. A newer snapshot that some rank left out gives
way to the next one. Readers and pins need more slots, up to MAX_SLOTS; a writer never waits for a reader.

A snapshot comes with checksums that the trainer made from its live tensors. They are compared before it is used:
when it is pinned or first borrowed, on a thread of its own, and when its own rank acquires it. A snapshot that
differs is dropped. `stage` never waits for a reader or for a checksum.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.messages import CompleteSnapshot, Damage
from ft_hsdp.state.shared_memory import Bytes, ServedSnapshot
from ft_hsdp.state.transfer import shard_manifest

MAX_SLOTS = 4
SPARE_STAGES = 8  # after so many calls of `stage` in a row that had a slot to spare, the spare slots are freed


class SlotPhase(Enum):
    """What a slot contains."""

    FREE = "free"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass(slots=True)
class _Slot:
    number: int
    phase: SlotPhase = SlotPhase.FREE
    state: StateId | None = None
    order: int = 0  # counts completions: the largest is the newest
    settled: bool = False  # all ranks of the replica have a snapshot of this state
    passed: bool = False  # not settled when some rank left out this snapshot or a later one
    readers: int = 0
    doomed: bool = False  # freed when its last reader gives it back


class SnapshotSlots:
    """The slots of one rank, by number. A number is never reused.

    ``now`` and ``until`` are seconds of one monotonic clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._count = 0
        self._completed = 0
        self._spare = 0
        self._pin: tuple[StateId, float] | None = None

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the slots that exist. The caller frees the memory of every other number."""
        return frozenset(self._slots)

    @property
    def full(self) -> bool:
        """Whether MAX_SLOTS slots exist."""
        return len(self._slots) >= MAX_SLOTS

    def add(self) -> int:
        """Add a free slot and return its number.

        Raises:
            ValueError: MAX_SLOTS slots exist already.
        """
        if self.full:
            raise ValueError(f"there are {MAX_SLOTS} slots")
        self._count += 1
        self._slots[self._count] = _Slot(self._count)
        return self._count

    def stage(self, state: StateId, now: float) -> int | None:
        """Return the number of the slot to write ``state`` into, or None if every slot is in use.

        Some slots are never chosen: the newest settled one, the newest complete one (unless some rank left it out
        and another one is settled), the pinned one, and those that are being read. A snapshot that was being
        written is abandoned together with its slot, because its writer may still be writing.
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

    def mark_settled(self, state: StateId, everywhere: bool = True) -> None:
        """Record whether all ranks of the replica have a snapshot of ``state``.

        If ``everywhere``, it is settled. Otherwise some rank left it out: complete snapshots that are not settled
        give way to the next one.
        """
        for slot in self._complete():
            if not everywhere:
                slot.passed = not slot.settled
            elif slot.state == state:
                slot.settled = True

    def pin(self, state: StateId, until: float) -> None:
        """Keep ``state``, which may also complete later, until the time ``until``. Replaces the pin before."""
        self._pin = state, until

    def unpin(self) -> None:
        """Remove the pin, if there is one."""
        self._pin = None

    def pinned(self, now: float) -> StateId | None:
        """Return the pinned state, or None."""
        if self._pin is None or now >= self._pin[1]:
            return None
        return self._pin[0]

    def find(self, state: StateId) -> int | None:
        """Return the number of the complete slot of ``state``, or None."""
        return next((slot.number for slot in self._complete() if slot.state == state), None)

    def held(self) -> tuple[CompleteSnapshot, ...]:
        """Return the complete snapshots, newest first."""
        return tuple(
            CompleteSnapshot(slot.state, slot.settled) for slot in self._complete() if slot.state is not None
        )

    def drop(self, number: int) -> None:
        """Remove a slot. One that is being read is removed when its last reader gives it back."""
        self._drop([self._slots[number]])

    def borrow(self, number: int) -> None:
        """Add a reader to a complete slot."""
        slot = self._slots[number]
        assert slot.phase is SlotPhase.COMPLETE, slot
        slot.readers += 1

    def give_back(self, number: int) -> None:
        """Remove a reader from a slot."""
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

    def _usable(self, now: float) -> list[_Slot]:
        """Return the free slots, then the complete ones that may be overwritten, oldest first."""
        complete = self._complete()
        settled = [slot for slot in complete if slot.settled][:1]
        kept = settled + [slot for slot in complete[:1] if not (slot.passed and settled)]
        pinned = self.pinned(now)
        old = [s for s in reversed(complete) if s not in kept and s.state != pinned and not s.readers]
        return [s for s in self._slots.values() if s.phase is SlotPhase.FREE and not s.doomed] + old


INITIAL_SLOTS = 2  # slots that a rank has before its first staging
MAX_DAMAGED = 8  # damaged snapshots that are remembered for a rank that sends no orders

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The rank whose snapshots are kept."""

    rank: int
    ranks: int  # of the replica
    nbytes: int  # of each snapshot


@dataclass(slots=True)
class _Rank:
    """The slots of one rank and, by slot number, what belongs to them."""

    owner: Owner
    slots: SnapshotSlots = field(default_factory=SnapshotSlots)
    fds: dict[int, int] = field(default_factory=dict)  # of all slots
    headers: dict[int, bytes] = field(default_factory=dict)  # encoded manifests of complete slots
    verified: dict[int, Future[tuple[bytes, str]]] = field(default_factory=dict)  # (manifest, its digest)
    damaged: list[Damage] = field(default_factory=list)  # not yet reported to the rank
    acquired: int | None = None  # the slot that the rank itself reads


class SnapshotStore:
    """The snapshots of the ranks on this host. Its methods may be called from any thread.

    ``rank`` must have been admitted in every method but `borrow`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="state-seal")

    def admit(self, owner: Owner) -> None:
        """Register a rank. If its snapshots had another size or number of ranks before, they are dropped."""
        with self._lock:
            entry = self._ranks.get(owner.rank)
            if entry is not None and entry.owner != owner:
                _log.info("rank %d: %s instead of %s: its snapshots are dropped", owner.rank, owner, entry.owner)
                entry.slots.forget()
                self._sweep(entry)
                entry.owner = owner
            elif entry is None:
                self._ranks[owner.rank] = _Rank(owner)

    def prepare(self, rank: int) -> None:
        """Allocate INITIAL_SLOTS slots. Blocks for as long as the kernel takes to provide the memory."""
        while len(self.slots(rank)) < INITIAL_SLOTS and self.grow(rank):
            pass

    def grow(self, rank: int) -> bool:
        """Allocate one more free slot. Blocks for as long as the kernel takes to provide the memory.

        Returns:
            False if the rank has MAX_SLOTS slots, or there is no memory for another one.
        """
        entry = self._ranks[rank]
        if entry.slots.full:
            return False
        owner = entry.owner
        try:
            fd = shared_memory.create(owner.nbytes)
        except OSError as error:
            _log.warning("rank %d: no slot of %d bytes: %s", rank, owner.nbytes, error.strerror)
            return False
        with self._lock:
            # Meanwhile another connection of that rank may have added a slot, or changed the size.
            if entry.slots.full or entry.owner != owner:
                os.close(fd)
                return False
            entry.fds[entry.slots.add()] = fd
        return True

    def stage(self, rank: int, state: StateId) -> int | None:
        """Return the number of the slot to write ``state`` into, or None if another slot has to be added first."""
        with self._lock:
            entry = self._ranks[rank]
            number = entry.slots.stage(state, time.monotonic())
            if number is not None:
                entry.headers.pop(number, None)
                entry.verified.pop(number, None)
            self._sweep(entry)
            return number

    def busy_reason(self, rank: int) -> str:
        """Return why `stage` and `grow` found no slot."""
        return "all slots are in use" if self._ranks[rank].slots.full else "no memory for one more slot"

    def slots(self, rank: int) -> dict[int, int]:
        """Return the file descriptors of a rank's slots by slot number. They stay owned by the store."""
        with self._lock:
            return dict(self._ranks[rank].fds)

    def staged(self, rank: int, state: StateId, header: bytes) -> None:
        """Mark ``state`` as complete. ``header`` is its encoded manifest.

        Raises:
            ValueError: ``state`` was not being written.
        """
        with self._lock:
            entry = self._ranks[rank]
            number = entry.slots.staged(state)
            entry.headers[number] = header
            if entry.slots.pinned(time.monotonic()) == state:
                self._verification(entry, number, state)

    def mark_settled(self, rank: int, state: StateId, everywhere: bool = True) -> None:
        """Record whether all ranks of the replica have a snapshot of ``state``; see `SnapshotSlots`."""
        with self._lock:
            self._ranks[rank].slots.mark_settled(state, everywhere)

    def pin(self, rank: int, state: StateId, seconds: float) -> None:
        """Keep ``state`` for ``seconds``, now or once it is complete, and compare its checksums in advance."""
        with self._lock:
            entry = self._ranks[rank]
            entry.slots.pin(state, time.monotonic() + seconds)
            number = entry.slots.find(state)
            if number is not None:
                if number in entry.verified and entry.verified[number].done():
                    # That comparison served an earlier fetch, and bits may have flipped since: compare again.
                    del entry.verified[number]
                self._verification(entry, number, state)

    def unpin(self, rank: int) -> None:
        """Remove the rank's pin and release the snapshot that it acquired."""
        with self._lock:
            entry = self._ranks[rank]
            entry.slots.unpin()
            self._release_acquired(entry)

    def list(self, rank: int) -> tuple[CompleteSnapshot, ...]:
        """Return the complete snapshots of a rank, newest first."""
        with self._lock:
            return self._ranks[rank].slots.held()

    def acquire(self, rank: int, state: StateId) -> tuple[int, bytes] | None:
        """Verify a complete snapshot and keep it unchanged for its own rank until `unpin` or the next `acquire`.

        Blocks while the checksums are computed.

        Returns:
            (file descriptor, encoded manifest), or None if there is no such snapshot or it is damaged.
        """
        with self._lock:
            entry = self._ranks[rank]
            self._release_acquired(entry)
            number = entry.slots.find(state)
            if number is None:
                return None
            entry.slots.borrow(number)
            owner, fd, header = entry.owner, entry.fds[number], entry.headers[number]
        try:
            _check(header, shared_memory.attach(fd, owner.nbytes, writable=False), state, owner)
        except (DataCorruption, OSError, ValueError) as error:
            with self._lock:
                self._damage(entry, number, state, error)
                self._put_back(entry, number)
            return None
        with self._lock:
            entry.acquired = number
        return fd, header

    def damaged(self, rank: int) -> tuple[Damage, ...]:
        """Return the snapshots of a rank that were found damaged since the last call."""
        with self._lock:
            entry = self._ranks[rank]
            found, entry.damaged = tuple(entry.damaged), []
            return found

    def forget(self, rank: int) -> None:
        """Drop all snapshots of a rank."""
        with self._lock:
            entry = self._ranks[rank]
            entry.slots.forget()
            self._release_acquired(entry)
            self._sweep(entry)

    def disconnect(self, rank: int, *, dead: bool) -> None:
        """Release what a rank used over its connection, which has ended.

        The snapshot that it was writing is abandoned. Its slot is reused only if the rank is ``dead``: a living
        process may still write into it.
        """
        with self._lock:
            entry = self._ranks[rank]
            entry.slots.abandon(reuse=dead)
            self._release_acquired(entry)
            self._sweep(entry)

    def borrow(self, state: StateId, rank: int) -> ServedSnapshot | None:
        """Return the snapshot of ``state`` and ``rank`` for reading until `give_back`.

        Blocks while its checksums are computed. Returns None if there is no such snapshot, or if it is damaged:
        then it is dropped, and the damage is logged.
        """
        with self._lock:
            entry = self._ranks.get(rank)
            number = None if entry is None else entry.slots.find(state)
            if entry is None or number is None:
                return None
            entry.slots.borrow(number)
            verification = self._verification(entry, number, state)
            fd, nbytes = entry.fds[number], entry.owner.nbytes
        try:
            manifest, digest = verification.result()
        except Exception:
            with self._lock:
                self._put_back(entry, number)
            return None
        return ServedSnapshot(fd, nbytes, manifest, digest)

    def give_back(self, served: ServedSnapshot) -> None:
        """End a borrow. Call it once for each."""
        with self._lock:
            slots = {fd: (entry, number) for entry in self._ranks.values() for number, fd in entry.fds.items()}
            self._put_back(*slots[served.fd])

    def close(self) -> None:
        """Cancel the checksums that have not begun."""
        self._verifier.shutdown(cancel_futures=True)

    def _put_back(self, entry: _Rank, number: int) -> None:
        entry.slots.give_back(number)
        self._sweep(entry)

    def _release_acquired(self, entry: _Rank) -> None:
        if entry.acquired is not None:
            number, entry.acquired = entry.acquired, None
            self._put_back(entry, number)

    def _verification(self, entry: _Rank, number: int, state: StateId) -> Future[tuple[bytes, str]]:
        """Return the future (encoded manifest, digest) of a complete slot, which stays borrowed until then."""
        if number not in entry.verified:
            entry.slots.borrow(number)
            entry.verified[number] = self._verifier.submit(
                self._verified, entry, number, state, entry.owner, entry.fds[number], entry.headers[number]
            )
        return entry.verified[number]

    def _verified(
        self, entry: _Rank, number: int, state: StateId, owner: Owner, fd: int, header: bytes
    ) -> tuple[bytes, str]:
        try:
            _check(header, shared_memory.attach(fd, owner.nbytes, writable=False), state, owner)
            return header, shard_manifest.digest(header)
        except Exception as error:
            with self._lock:
                self._damage(entry, number, state, error)
            raise
        finally:
            with self._lock:
                self._put_back(entry, number)

    def _damage(self, entry: _Rank, number: int, state: StateId, error: Exception) -> None:
        """Drop a snapshot that is damaged. Its memory is not used again."""
        _log.error("rank %d: the copy of state %s is dropped: %s", entry.owner.rank, state, error)
        if number in entry.slots.numbers and entry.slots.find(state) == number:
            entry.slots.drop(number)
            entry.damaged = [*entry.damaged, Damage(state, str(error))][-MAX_DAMAGED:]

    def _sweep(self, entry: _Rank) -> None:
        """Free the memory of slots that were removed."""
        for number in entry.fds.keys() - entry.slots.numbers:
            os.close(entry.fds.pop(number))
            entry.headers.pop(number, None)
            entry.verified.pop(number, None)


def _check(header: bytes, data: Bytes, state: StateId, owner: Owner) -> None:
    """Compare a snapshot with its header.

    Raises:
        DataCorruption: The header is not valid, belongs to another snapshot, or a checksum differs.
    """
    manifest = shard_manifest.decode(header)
    claims = (manifest.state, manifest.rank, manifest.ranks, manifest.nbytes)
    if claims != (state, owner.rank, owner.ranks, owner.nbytes):
        raise DataCorruption(f"its header is of {claims}")
    wrong = shard_manifest.damaged(manifest, data.data)
    if wrong:
        raise DataCorruption(
            f"chunk {wrong[0]} ({len(wrong)} of {len(manifest.checksums)}) changed since it was written"
        )
