"""The snapshots of all ranks of a replica on this host, in memory that the state agent owns.

The ranks write and read them through the agent's socket. Other replicas read them through the state server, for
which `SnapshotStore` is a `SnapshotSource`. It is thread-safe. `slots` decides which memory a rank writes next.

The store also has the copies of other hosts' shards, which `copies` fetches. They lie in slots of the same kind,
and are served under their owner's replica and rank. If the owner comes to this host, they are its snapshots.

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

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory.copies import MAX_COPIES
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.messages import CompleteSnapshot, Damage, ShardIndex
from ft_hsdp.state.agent.shard import INITIAL_SLOTS, Owner, Shard, check_memory, compare
from ft_hsdp.state.shared_memory import Bytes, ServedSnapshot
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import HeldShard

_log = logging.getLogger(__name__)


class SnapshotStore:
    """The snapshots of the ranks on this host. Its methods may be called from any thread.

    ``key`` is the (replica, rank) of a shard. It must have been admitted, by `admit` or `admit_copy`.

    Args:
        replica: Whose ranks they are.
        host: The name of this host.
    """

    def __init__(self, replica: int = 0, host: str = "") -> None:
        self._replica = replica
        self._host = host
        self._lock = threading.Lock()
        self._shards: dict[ShardIndex, Shard] = {}  # none is ever removed, so that slot numbers stay unique
        # Shards of another width than their replica has now, until a state is settled in that one.
        self._former: list[Shard] = []
        self._budget: int | None = None  # bytes for copies of other hosts' shards
        self._reserved = 0  # bytes of the same budget that something else has, which is not in ``_shards``
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="state-seal")

    def admit(self, owner: Owner) -> ShardIndex:
        """Register a rank of this host, and return the key of its shard.

        If its snapshots had another size before, they are dropped. Those of another number of ranks stay until a
        state of this one is settled. If they were copies that another rank had ordered, they are its own now.
        """
        key = self._replica, owner.rank
        with self._lock:
            entry = self._fitted(key, owner, own=True)
            if not entry.own:
                entry.slots.abandon(reuse=False)  # a fetch may still write into it
                entry.sweep()
            entry.own, entry.connected, entry.keeper = True, True, None
        return key

    def admit_copy(self, replica: int, owner: Owner, keeper: int, budget: int | None) -> None:
        """Register a shard of another host, of which a copy is to be kept.

        Args:
            replica: The owner's.
            owner: The owner. If its copies had another size before, they are dropped.
            keeper: The rank of this host that orders it.
            budget: Bytes for all copies of other hosts' shards; None: no limit.

        Raises:
            ValueError: It is the shard of a rank of this host, or there is no room for it. Says which.
        """
        key = replica, owner.rank
        with self._lock:
            entry = self._shards.get(key)
            if entry is not None and entry.connected:
                raise ValueError("it is the shard of a rank of this host")
            others = [each for k, each in self._shards.items() if not each.own and k != key]
            if sum(each.keeper is not None for each in others) >= MAX_COPIES:
                raise ValueError(f"copies of {MAX_COPIES} shards are kept here already")
            used = self._reserved + sum(each.needed_bytes for each in others)
            if budget is not None and used + INITIAL_SLOTS * owner.nbytes > budget:
                raise ValueError(
                    f"{INITIAL_SLOTS} slots of {owner.nbytes} bytes are needed; {used} of {budget} bytes of "
                    "memory.budget_gb are taken"
                )
            if entry is None or entry.owner != owner or not entry.fds:
                check_memory(INITIAL_SLOTS * owner.nbytes)
            entry = self._fitted(key, owner, own=False)
            entry.own, entry.keeper, self._budget = False, keeper, budget

    @property
    def _all(self) -> list[Shard]:
        """All shards, also those of another width than their replica has now."""
        return [*self._shards.values(), *self._former]

    def _fitted(self, key: ShardIndex, owner: Owner, *, own: bool) -> Shard:
        """Return the shard of a key with this owner; what it had with another number of ranks is set aside."""
        entry = self._shards.get(key)
        if entry is not None and entry.owner.ranks != owner.ranks:
            entry.set_aside()
            back = next((e for e in self._former if e.replica == key[0] and e.owner == owner), None)
            if back is not None:
                self._former.remove(back)
                back.own = own
            numbers = entry.slots.numbered if back is None else max(entry.slots.numbered, back.slots.numbered)
            if entry.slots.held():
                self._former.append(entry)
            entry = self._shards[key] = back or Shard(key[0], owner, own)
            entry.slots.numbered = numbers
        entry = self._shards.setdefault(key, Shard(key[0], owner, own))
        entry.fit(owner)
        return entry

    def _drop_other_widths(self, entry: Shard) -> None:
        for each in self._all:
            if each.replica == entry.replica and each.owner.ranks != entry.owner.ranks and not each.connected:
                each.slots.forget()
                each.sweep()
        self._former = [each for each in self._former if each.fds]

    def reserve(self, nbytes: int, budget: int | None) -> None:
        """Take ``nbytes`` of the budget for copies, for something that is kept elsewhere in this process.

        Raises:
            ValueError: The budget has less.
        """
        with self._lock:
            used = self._reserved + sum(each.needed_bytes for each in self._shards.values() if not each.own)
            if budget is not None and used + nbytes > budget:
                raise ValueError(
                    f"{nbytes} bytes are needed; {used} of {budget} bytes of memory.budget_gb are taken"
                )
            self._reserved += nbytes

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def copies(self, keeper: int) -> list[ShardIndex]:
        with self._lock:
            return [key for key, entry in self._shards.items() if entry.keeper == keeper]

    def drop_copies(self, key: ShardIndex) -> None:
        with self._lock:
            entry = self._shards[key]
            if not entry.own:
                entry.keeper = None
                entry.slots.forget()
                entry.sweep()

    def prepare(self, key: ShardIndex) -> None:
        """Allocate INITIAL_SLOTS slots. Blocks for as long as the kernel takes to provide the memory."""
        while len(self.slots(key)) < INITIAL_SLOTS and self.grow(key):
            pass

    def grow(self, key: ShardIndex) -> bool:
        """Allocate one more free slot. Blocks for as long as the kernel takes to provide the memory.

        Returns:
            False if the shard has MAX_SLOTS slots, or there is no memory for another one.
        """
        with self._lock:
            entry = self._shards[key]
            owner, copy = entry.owner, not entry.own
            if entry.slots.full or (copy and not self._may_grow(entry)):
                return False
            entry.growing += 1
        fd = None
        try:
            fd = shared_memory.create(owner.nbytes)
        except OSError as error:
            _log.warning("%s: no slot of %d bytes: %s", entry, owner.nbytes, error.strerror)
        with self._lock:
            entry.growing -= 1
            if fd is None:
                return False
            # Meanwhile another connection of that rank may have added a slot, or changed the size.
            gone = copy and entry.keeper is None
            if entry.slots.full or entry.owner != owner or entry.own == copy or gone:
                os.close(fd)
                return False
            entry.fds[entry.slots.add()] = fd
        return True

    def _may_grow(self, entry: Shard) -> bool:
        if entry.keeper is None:
            return False
        kept = [each for each in self._shards.values() if not each.own and each is not entry]
        others = self._reserved + sum(each.needed_bytes for each in kept)
        return self._budget is None or others + entry.held_bytes + entry.owner.nbytes <= self._budget

    def stage(self, key: ShardIndex, state: StateId, *, copy: bool = False) -> int | None:
        """Return the number of the slot to write ``state`` into, or None if another slot has to be added first.

        Args:
            copy: It is fetched from another host: None if that shard is no longer to be kept here.
        """
        with self._lock:
            entry = self._shards[key]
            if copy and entry.keeper is None:
                return None
            number = entry.slots.stage(state, time.monotonic())
            if number is not None:
                entry.headers.pop(number, None)
                entry.layouts.pop(number, None)
                entry.verified.pop(number, None)
            entry.sweep()
            return number

    def busy_reason(self, key: ShardIndex) -> str:
        return "all slots are in use" if self._shards[key].slots.full else "no memory for one more slot"

    def slots(self, key: ShardIndex) -> dict[int, int]:
        """Return the file descriptors of a rank's slots by slot number. They stay owned by the store."""
        with self._lock:
            return dict(self._shards[key].fds)

    def staged(self, key: ShardIndex, state: StateId, header: bytes, number: int | None = None) -> None:
        """Mark ``state`` as complete. ``header`` is its encoded manifest.

        Args:
            number: The slot that it was written into; None: that of the last `stage`.

        Raises:
            ValueError: ``state`` was not being written.
        """
        with self._lock:
            entry = self._shards[key]
            if number not in (None, entry.slots.written):
                raise ValueError("its slot was dropped meanwhile")
            number = entry.slots.staged(state)
            entry.headers[number] = header
            if entry.slots.pinned(time.monotonic()) == state:
                self._verification(entry, number, state)

    def writable(self, key: ShardIndex, number: int) -> Bytes:
        """Return the memory of a slot that this process writes.

        Raises:
            LookupError: The slot was dropped meanwhile.
            OSError: It cannot be mapped.
        """
        with self._lock:
            return self._shards[key].view(number)

    def abandon(self, key: ShardIndex, number: int) -> None:
        """Free a slot whose writer has ended without completing it."""
        with self._lock:
            entry = self._shards[key]
            if entry.slots.written == number:
                entry.slots.abandon(reuse=True)

    def keeps(self, key: ShardIndex, state: StateId) -> bool:
        with self._lock:
            return self._shards[key].slots.find(state) is not None

    def mark_settled(self, key: ShardIndex, state: StateId, everywhere: bool = True) -> None:
        with self._lock:
            entry = self._shards[key]
            entry.slots.mark_settled(state, everywhere)
            if everywhere or len(entry.fds) < INITIAL_SLOTS:  # or its own memory might never come
                self._drop_other_widths(entry)

    def pin(self, key: ShardIndex, state: StateId, seconds: float) -> None:
        """Keep ``state`` for ``seconds``, now or once it is complete, and compare its checksums in advance."""
        with self._lock:
            entry = self._shards[key]
            entry.slots.pin(state, time.monotonic() + seconds)
            number = entry.slots.find(state)
            if number is not None:
                if number in entry.verified and entry.verified[number].done():
                    # That comparison served an earlier fetch, and bits may have flipped since: compare again.
                    del entry.verified[number]
                self._verification(entry, number, state)

    def unpin(self, key: ShardIndex) -> None:
        with self._lock:
            entry = self._shards[key]
            entry.slots.unpin()
            entry.release_acquired()

    def list(self, key: ShardIndex) -> tuple[CompleteSnapshot, ...]:
        with self._lock:
            return self._shards[key].slots.held()

    def acquire(self, key: ShardIndex, state: StateId) -> tuple[int, bytes] | None:
        """Verify a complete snapshot and keep it unchanged for its own rank until `unpin` or the next `acquire`.

        Blocks while the checksums are computed.

        Returns:
            (file descriptor, encoded manifest), or None if there is no such snapshot or it is damaged.
        """
        with self._lock:
            entry = self._shards[key]
            entry.release_acquired()
            number = entry.slots.find(state)
            if number is None:
                return None
            entry.slots.borrow(number)
            owner, fd, header = entry.owner, entry.fds[number], entry.headers[number]
        try:
            compare(header, shared_memory.attach(fd, owner.nbytes, writable=False), state, owner)
        except (DataCorruption, OSError, ValueError) as error:
            with self._lock:
                entry.damage(number, state, error)
                entry.put_back(number)
            return None
        with self._lock:
            entry.acquired = number
        return fd, header

    def damaged(self, key: ShardIndex) -> tuple[Damage, ...]:
        with self._lock:
            entry = self._shards[key]
            found, entry.damaged = tuple(entry.damaged), []
            return found

    def forget(self, key: ShardIndex) -> None:
        """Drop all snapshots of a rank, and what its replica has left in other widths."""
        with self._lock:
            entry = self._shards[key]
            entry.slots.forget()
            entry.release_acquired()
            entry.sweep()
            self._drop_other_widths(entry)

    def disconnect(self, key: ShardIndex, *, dead: bool) -> None:
        """Release what a rank used over its connection, which has ended.

        The snapshot that it was writing is abandoned. Its slot is reused only if the rank is ``dead``: a living
        process may still write into it.
        """
        with self._lock:
            entry = self._shards[key]
            entry.connected = False
            entry.slots.abandon(reuse=dead)
            entry.release_acquired()
            entry.sweep()

    def borrow(
        self, state: StateId, rank: int, ranks: int | None = None, *, verify: bool = True
    ) -> ServedSnapshot | None:
        """Return the snapshot of ``state`` and ``rank``, of any replica, for reading until `give_back`.

        A state has one content, so the shards of all replicas with ``ranks`` ranks are equal; None: any number.
        Blocks while checksums are computed. Returns None if there is no such snapshot. One that is damaged is
        dropped, and the damage is logged. Without ``verify`` nothing is computed: the reader finds the damage.
        """
        while True:
            with self._lock:
                shards = [e for e in self._all if e.owner.rank == rank and ranks in (None, e.owner.ranks)]
                shards.sort(key=lambda each: not each.own)
                found = ((each, number) for each in shards if (number := each.slots.find(state)) is not None)
                entry, number = next(found, (None, None))
                if entry is None or number is None:
                    return None
                entry.slots.borrow(number)
                fd, nbytes, header = entry.fds[number], entry.owner.nbytes, entry.headers[number]
                if not verify:
                    return ServedSnapshot(fd, nbytes, header, shard_manifest.digest(header))
                verification = self._verification(entry, number, state)
            try:
                manifest, digest = verification.result()
            except Exception:
                with self._lock:
                    dropped = entry.slots.find(state) != number
                    entry.put_back(number)
                if not dropped:  # the agent ends
                    return None
                continue
            return ServedSnapshot(fd, nbytes, manifest, digest)

    def held(self) -> tuple[HeldShard, ...]:
        with self._lock:
            found = [
                (entry, kept, number, entry.headers[number])
                for entry in self._all
                for kept in entry.slots.held()
                if (number := entry.slots.find(kept.state)) is not None
            ]
        rows: dict[tuple[StateId, int, Owner], HeldShard] = {}
        for entry, kept, number, header in found:
            owner, layout = entry.owner, entry.layouts.get(number)
            if layout is None:
                try:
                    layout = shard_manifest.decode_header(header).layout
                except DataCorruption as error:
                    _log.error("%s: the manifest of %s cannot be used: %s", entry, kept.state, error)
                    continue
                with self._lock:
                    if entry.headers.get(number) is header:
                        entry.layouts[number] = layout
            row = HeldShard(
                kept.state, entry.replica, owner.rank, owner.ranks, layout, owner.nbytes, kept.settled, self._host
            )
            rows.setdefault((kept.state, entry.replica, owner), row)
        return tuple(rows.values())

    def drop_damaged(self, served: ServedSnapshot, state: StateId, error: Exception) -> None:
        with self._lock:
            entry, number = self._borrowed(served)
            entry.damage(number, state, error)

    def _borrowed(self, served: ServedSnapshot) -> tuple[Shard, int]:
        slots = {fd: (entry, number) for entry in self._all for number, fd in entry.fds.items()}
        return slots[served.fd]

    def give_back(self, served: ServedSnapshot) -> None:
        with self._lock:
            entry, number = self._borrowed(served)
            entry.put_back(number)
            self._former = [each for each in self._former if each.fds]

    def close(self) -> None:
        self._verifier.shutdown(cancel_futures=True)

    def _verification(self, entry: Shard, number: int, state: StateId) -> Future[tuple[bytes, str]]:
        """Return the future (encoded manifest, digest) of a complete slot, which stays borrowed until then."""
        if number not in entry.verified:
            entry.slots.borrow(number)
            entry.verified[number] = self._verifier.submit(
                self._verified, entry, number, state, entry.owner, entry.headers[number]
            )
        return entry.verified[number]

    def _verified(
        self, entry: Shard, number: int, state: StateId, owner: Owner, header: bytes
    ) -> tuple[bytes, str]:
        try:
            with self._lock:
                view = entry.view(number)
            compare(header, view, state, owner)
            return header, shard_manifest.digest(header)
        except Exception as error:
            with self._lock:
                entry.damage(number, state, error)
            raise
        finally:
            with self._lock:
                entry.put_back(number)
