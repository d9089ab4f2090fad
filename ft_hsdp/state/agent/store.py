"""The snapshots of all ranks of a replica on this host, in memory that the state agent owns.

The ranks write and read them through the agent's socket. Other replicas read them through the state server, for
which `SnapshotStore` is a `SnapshotSource`. It is thread-safe. `slots` decides which memory a rank writes next.

A snapshot comes with checksums that the trainer made from its live tensors. They are compared before it is used:
when it is pinned or first borrowed, on a thread of its own, and when its own rank acquires it. A snapshot that
differs is dropped. `stage` never waits for a reader or for a checksum.
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
from ft_hsdp.state.agent.messages import CompleteSnapshot, Damage
from ft_hsdp.state.agent.slots import SnapshotSlots
from ft_hsdp.state.shared_memory import Bytes, ServedSnapshot
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import HeldShard

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
    layouts: dict[int, str] = field(default_factory=dict)  # of complete slots, once they were listed
    verified: dict[int, Future[tuple[bytes, str]]] = field(default_factory=dict)  # (manifest, its digest)
    damaged: list[Damage] = field(default_factory=list)  # not yet reported to the rank
    acquired: int | None = None  # the slot that the rank itself reads


class SnapshotStore:
    """The snapshots of the ranks on this host. Its methods may be called from any thread.

    ``rank`` must have been admitted in every method but `borrow`.

    Args:
        replica: Whose ranks they are.
        host: The name of this host.
    """

    def __init__(self, replica: int = 0, host: str = "") -> None:
        self._replica = replica
        self._host = host
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
                entry.layouts.pop(number, None)
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

    def held(self) -> tuple[HeldShard, ...]:
        """Return the complete snapshots of all ranks, newest first for each. Their checksums are not compared."""
        with self._lock:
            found = [
                (entry, kept, number, entry.headers[number])
                for entry in self._ranks.values()
                for kept in entry.slots.held()
                if (number := entry.slots.find(kept.state)) is not None
            ]
        rows: dict[tuple[StateId, int], HeldShard] = {}
        for entry, kept, number, header in found:
            owner, layout = entry.owner, entry.layouts.get(number)
            if layout is None:
                try:
                    layout = shard_manifest.decode_header(header).layout
                except DataCorruption as error:
                    _log.error("rank %d: the manifest of %s cannot be used: %s", owner.rank, kept.state, error)
                    continue
                with self._lock:
                    if entry.headers.get(number) is header:
                        entry.layouts[number] = layout
            row = HeldShard(
                kept.state, self._replica, owner.rank, owner.ranks, layout, owner.nbytes, kept.settled, self._host
            )
            rows.setdefault((kept.state, owner.rank), row)
        return tuple(rows.values())

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
            entry.layouts.pop(number, None)
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
