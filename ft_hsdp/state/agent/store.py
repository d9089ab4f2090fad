"""SnapshotStore: the snapshots of all ranks of a replica on this host, in memory that the agent owns. Thread-safe.

Ranks write and recall them through the door, other replicas read them through the server: it is a Shelf. A copy
comes with checksums that the trainer made from its live tensors. They are compared before it is used: when a state
is pinned or first asked for, on a thread of their own, and when its rank takes it back. A copy that differs is
dropped. A rank's staging never waits for a reader or for a checksum.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.messages import Damage
from ft_hsdp.state.agent.slots import CompleteSnapshot, SnapshotSlots
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.source import ServedSnapshot

READY = 2  # slots that a rank has before its first staging
MAX_DAMAGED = 8  # damaged copies that a rank that does not listen is told of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose snapshots: ``rank`` of ``ranks``, of ``nbytes`` bytes each."""

    rank: int
    ranks: int
    nbytes: int


@dataclass(slots=True)
class _Rank:
    """One rank's: descriptors of all slots; headers and manifests of the complete ones."""

    owner: Owner
    slots: SnapshotSlots = field(default_factory=SnapshotSlots)
    fds: dict[int, int] = field(default_factory=dict)
    headers: dict[int, bytes] = field(default_factory=dict)
    sealed: dict[int, Future[tuple[bytes, str]]] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)
    taken: int | None = None


class SnapshotStore:
    """What the agent holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="state-seal")

    def admit(self, owner: Owner) -> None:
        """A rank is here. What it left here has another size: that is of no use, and forgotten."""
        with self._lock:
            mine = self._ranks.get(owner.rank)
            if mine is not None and mine.owner != owner:
                _log.info("rank %d: %s instead of %s: all it had is forgotten", owner.rank, owner, mine.owner)
                mine.slots.forget()
                self._sweep(mine)
                mine.owner = owner
            elif mine is None:
                self._ranks[owner.rank] = _Rank(owner)

    def prepare(self, rank: int) -> None:
        """Have READY slots; takes as long as memory takes to come."""
        while len(self.slots(rank)) < READY and self.grow(rank):
            pass

    def grow(self, rank: int) -> bool:
        """One free slot more; False: there are MAX_SLOTS, or there is no memory for it."""
        mine = self._ranks[rank]
        if mine.slots.full:
            return False
        owner = mine.owner
        try:
            fd = shared_memory.create(owner.nbytes)
        except OSError as error:
            _log.warning("rank %d: no slot of %d bytes: %s", rank, owner.nbytes, error.strerror)
            return False
        with self._lock:
            if mine.slots.full or mine.owner != owner:  # another connection of that rank was faster
                os.close(fd)
                return False
            mine.fds[mine.slots.add()] = fd
        return True

    def stage(self, rank: int, state: StateId) -> int | None:
        """The number of the slot to write ``state`` into; None: it takes one more."""
        with self._lock:
            mine = self._ranks[rank]
            number = mine.slots.stage(state, time.monotonic())
            if number is not None:
                mine.headers.pop(number, None)
                mine.sealed.pop(number, None)
            self._sweep(mine)
            return number

    def why_not(self, rank: int) -> str:
        """Why there is no slot."""
        return "all slots are in use" if self._ranks[rank].slots.full else "no memory for one more slot"

    def slots(self, rank: int) -> dict[int, int]:
        """The descriptors of a rank's slots by number; they stay this object's."""
        with self._lock:
            return dict(self._ranks[rank].fds)

    def staged(self, rank: int, state: StateId, header: bytes) -> None:
        """``state`` is complete in its slot.

        Raises:
            ValueError: it was not being written.
        """
        with self._lock:
            mine = self._ranks[rank]
            number = mine.slots.staged(state)
            mine.headers[number] = header
            if mine.slots.pinned(time.monotonic()) == state:
                self._sealing(mine, number, state)

    def mark_settled(self, rank: int, state: StateId, everywhere: bool = True) -> None:
        """All ranks of the replica have staged ``state``, or (not ``everywhere``) some have left it out."""
        with self._lock:
            self._ranks[rank].slots.mark_settled(state, everywhere)

    def pin(self, rank: int, state: StateId, seconds: float) -> None:
        """Keep ``state``, if it is here or comes, and be ready to serve it."""
        with self._lock:
            mine = self._ranks[rank]
            mine.slots.pin(state, time.monotonic() + seconds)
            number = mine.slots.find(state)
            if number is not None:
                if number in mine.sealed and mine.sealed[number].done():
                    del mine.sealed[number]  # that was for members that have fetched since: compare it once more
                self._sealing(mine, number, state)

    def unpin(self, rank: int) -> None:
        """Keep nothing for anybody."""
        with self._lock:
            mine = self._ranks[rank]
            mine.slots.unpin()
            self._end_take(mine)

    def list(self, rank: int) -> tuple[CompleteSnapshot, ...]:
        """The complete snapshots of a rank, newest first."""
        with self._lock:
            return self._ranks[rank].slots.held()

    def acquire(self, rank: int, state: StateId) -> tuple[int, bytes] | None:
        """(descriptor, header) of a complete snapshot for its own rank, which has one at a time.

        None: it is not here, or it is damaged. Takes as long as its checksums take.
        """
        with self._lock:
            mine = self._ranks[rank]
            self._end_take(mine)
            number = mine.slots.find(state)
            if number is None:
                return None
            mine.slots.borrow(number)
            owner, fd, header = mine.owner, mine.fds[number], mine.headers[number]
        try:
            _check(header, shared_memory.attach(fd, owner.nbytes, writable=False), state, owner)
        except (DataCorruption, OSError, ValueError) as error:
            with self._lock:
                self._damage(mine, number, state, error)
                self._put_back(mine, number)
            return None
        with self._lock:
            mine.taken = number
        return fd, header

    def damaged(self, rank: int) -> tuple[Damage, ...]:
        """The copies of a rank that were found damaged since it was last told."""
        with self._lock:
            mine = self._ranks[rank]
            found, mine.damaged = tuple(mine.damaged), []
            return found

    def forget(self, rank: int) -> None:
        """Drop all that a rank has."""
        with self._lock:
            mine = self._ranks[rank]
            mine.slots.forget()
            self._end_take(mine)
            self._sweep(mine)

    def left(self, rank: int, *, dead: bool) -> None:
        """A rank hung up: what it was writing stays incomplete. Unless it is ``dead`` it may write there yet."""
        with self._lock:
            mine = self._ranks[rank]
            mine.slots.abandon(reuse=dead)
            self._end_take(mine)
            self._sweep(mine)

    def borrow(self, state: StateId, rank: int) -> ServedSnapshot | None:
        """See Shelf. None as well for a snapshot that is damaged, which is dropped: that is logged."""
        with self._lock:
            mine = self._ranks.get(rank)
            number = None if mine is None else mine.slots.find(state)
            if mine is None or number is None:
                return None
            mine.slots.borrow(number)
            sealed = self._sealing(mine, number, state)
            fd, nbytes = mine.fds[number], mine.owner.nbytes
        try:
            manifest, digest = sealed.result()
        except Exception:
            with self._lock:
                self._put_back(mine, number)
            return None
        return ServedSnapshot(fd, nbytes, manifest, digest)

    def give_back(self, served: ServedSnapshot) -> None:
        """See Shelf."""
        with self._lock:
            whose = {fd: (mine, number) for mine in self._ranks.values() for number, fd in mine.fds.items()}
            self._put_back(*whose[served.fd])

    def close(self) -> None:
        """Compute nothing more."""
        self._readers.shutdown(cancel_futures=True)

    def _put_back(self, mine: _Rank, number: int) -> None:
        mine.slots.give_back(number)
        self._sweep(mine)

    def _end_take(self, mine: _Rank) -> None:
        if mine.taken is not None:
            number, mine.taken = mine.taken, None
            self._put_back(mine, number)

    def _sealing(self, mine: _Rank, number: int, state: StateId) -> Future[tuple[bytes, str]]:
        """The manifest of a complete slot, which is read, and so kept, while it is computed."""
        if number not in mine.sealed:
            mine.slots.borrow(number)
            mine.sealed[number] = self._readers.submit(
                self._sealed, mine, number, state, mine.owner, mine.fds[number], mine.headers[number]
            )
        return mine.sealed[number]

    def _sealed(
        self, mine: _Rank, number: int, state: StateId, owner: Owner, fd: int, header: bytes
    ) -> tuple[bytes, str]:
        try:
            _check(header, shared_memory.attach(fd, owner.nbytes, writable=False), state, owner)
            return header, shard_manifest.digest(header)
        except Exception as error:
            with self._lock:
                self._damage(mine, number, state, error)
            raise
        finally:
            with self._lock:
                self._put_back(mine, number)

    def _damage(self, mine: _Rank, number: int, state: StateId, error: Exception) -> None:
        """A copy cannot be used: nobody gets it any more, and its memory is not used again."""
        _log.error("rank %d: the copy of state %s is dropped: %s", mine.owner.rank, state, error)
        if number in mine.slots.numbers and mine.slots.find(state) == number:
            mine.slots.drop(number)
            mine.damaged = [*mine.damaged, Damage(state, str(error))][-MAX_DAMAGED:]

    def _sweep(self, mine: _Rank) -> None:
        """Free what has no slot any more."""
        for number in mine.fds.keys() - mine.slots.numbers:
            os.close(mine.fds.pop(number))
            mine.headers.pop(number, None)
            mine.sealed.pop(number, None)


def _check(header: bytes, data: Bytes, state: StateId, owner: Owner) -> None:
    """Compare a snapshot with its header.

    Raises:
        DataCorruption: the header is not valid, or is not of that snapshot.
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
