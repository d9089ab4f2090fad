"""What a host keeps in memory that the state agent owns: snapshots of the replica's ranks, copies, slices.

The ranks write and read them through the agent's socket. Other replicas read them through the state server, for
which `SnapshotStore` is a `SnapshotSource`. It is thread-safe. `slots` decides which memory a rank writes next.

The store also has the copies of other hosts' shards, which `copies` fetches. They lie in slots of the same kind,
and are served under their owner's replica and rank. If the owner comes to this host, they are its snapshots. And
it has the slices of block stores, which a rank writes from its source, or `copies` fetches. A slice does not
change until it is dropped or found damaged.

A snapshot comes with checksums that the trainer made from its live tensors. They are compared before it is used:
when it is pinned or first borrowed, on a thread of its own, and when its own rank acquires it. A snapshot that
differs is dropped. `stage` never waits for a reader or for a checksum.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory.copies import MAX_COPIES
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.messages import CompleteSnapshot, Damage, HeldSlice, ShardIndex, SliceIndex
from ft_hsdp.state.agent.shard import INITIAL_SLOTS, Owner, Shard, SlotMemory, check_memory, compare
from ft_hsdp.state.agent.slots import Content, SnapshotSlots
from ft_hsdp.state.shared_memory import Bytes, ServedSnapshot
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import HeldShard, SliceManifest, SliceName

NO_REPLICA = -1  # of a slice
ShardKey = tuple[int, int, int]  # replica, rank, ranks of the replica
Key = ShardKey | SliceIndex

_log = logging.getLogger(__name__)


class SnapshotStore:
    """The snapshots of the ranks on this host. Its methods may be called from any thread.

    ``key`` is the (replica, rank, ranks) of a shard, or the (store, number) of a slice. It must have been
    admitted, by `admit`, `admit_copy` or `admit_slice`.
    """

    def __init__(self, replica: int = 0, host: str = "") -> None:
        self._replica = replica
        self._host = host
        self._lock = threading.Lock()
        # None is ever removed, so that slot numbers stay unique.
        self._shards: dict[Key, Shard] = {}
        self._budget: int | None = None  # bytes for copies of other hosts' shards, and for slices
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="state-seal")

    @contextlib.contextmanager
    def _entry(self, key: Key) -> Iterator[Shard]:
        with self._lock:
            yield self._shards[key]

    def admit(self, owner: Owner) -> ShardKey:
        """Register a rank of this host, and return the key of its shard.

        If its snapshots had another size before, they are dropped. Those of another number of ranks stay until a
        state of this one is settled. If they were copies that another rank had ordered, they are its own now.
        """
        with self._lock:
            key, entry = self._fitted(self._replica, owner, own=True)
            if not entry.own:
                entry.abandon(reuse=False)  # a fetch may still write into it
            entry.own, entry.connected, entry.keeper = True, True, None
        return key

    def admit_copy(self, replica: int, owner: Owner, keeper: int, budget: int | None) -> ShardKey:
        """Register a shard of another host, of which a copy is to be kept, and return its key.

        Args:
            replica: The owner's.
            owner: The owner. If its copies had another size before, they are dropped.
            keeper: The rank of this host that orders it.
            budget: Bytes for all copies of other hosts' shards; None: no limit.

        Raises:
            ValueError: It is the shard of a rank of this host, or there is no room for it. Says which.
        """
        with self._lock:
            same = self._of(replica, owner.rank)
            if any(each.connected for each in same):
                raise ValueError("it is the shard of a rank of this host")
            others = [each for each in self._shards.values() if not each.own and each not in same]
            if sum(each.keeper is not None for each in others) >= MAX_COPIES:
                raise ValueError(f"copies of {MAX_COPIES} shards are kept here already")
            self._check_room(INITIAL_SLOTS * owner.nbytes, others, budget)
            if not any(each.owner == owner and each.memory for each in same):
                check_memory(INITIAL_SLOTS * owner.nbytes)
            key, entry = self._fitted(replica, owner, own=False)
            entry.own, entry.keeper, self._budget = False, keeper, budget
        return key

    def _of(self, replica: int, rank: int) -> list[Shard]:
        """Return the shards of a rank in all widths."""
        return [each for each in self._shards.values() if (each.replica, each.owner.rank) == (replica, rank)]

    def _fitted(self, replica: int, owner: Owner, *, own: bool) -> tuple[ShardKey, Shard]:
        """Return the shard with this owner; what it had with another number of ranks is set aside."""
        for each in self._of(replica, owner.rank):
            if each.owner.ranks != owner.ranks:
                each.set_aside()
        key = replica, owner.rank, owner.ranks
        entry = self._shards.setdefault(key, Shard(replica, owner, own))
        entry.fit(owner)
        entry.aside = False
        return key, entry

    def _drop_other_widths(self, entry: Shard) -> None:
        for each in self._shards.values():
            if each.replica == entry.replica and each.owner.ranks != entry.owner.ranks and not each.connected:
                each.clear()

    def _check_room(self, nbytes: int, others: Iterable[Shard], budget: int | None) -> None:
        used = sum(each.needed_bytes for each in others if not each.own and not each.aside)
        if budget is not None and used + nbytes > budget:
            raise ValueError(f"{nbytes} bytes are needed; {used} of {budget} bytes of memory.budget_gb are taken")

    def admit_slice(self, about: SliceName, budget: int | None) -> SliceIndex:
        """Register a slice that is to be kept here, instead of one that was not completed; return its key.

        Raises:
            ValueError: It is there already, or there is no room for it. Says which.
        """
        key = about.store, about.slice
        owner = Owner(about.slice, about.slices, about.nbytes)
        with self._lock:
            entry = self._shards.setdefault(key, Shard(NO_REPLICA, owner, own=False, slots=SnapshotSlots(2)))
            if entry.slots.find(about.store) is not None:
                raise ValueError(f"slice {about.slice} is here already")
            entry.abandon(reuse=False)
            self._check_room(about.nbytes, self._shards.values(), budget)
            check_memory(about.nbytes)
            entry.fit(owner)
            entry.slice, self._budget = about, budget
        return key

    def slices(self, store: str, name: str) -> tuple[HeldSlice, ...]:
        """Return the complete slices of a store by number. Blocks.

        Older stores of the same name are dropped. Every checksum is compared, and a slice that differs is
        dropped.

        Args:
            store: The digest of what the store is.
            name: That the user gave it.
        """
        with self._lock:
            all_ = [each.slice for each in self._shards.values() if each.slice is not None]
        for each in all_:
            if each.name == name and each.store != store:
                self.drop_slices(each.store, [each.slice])
        rows: list[HeldSlice] = []
        for number in sorted(each.slice for each in all_ if each.store == store):
            with self._lock:
                entry = self._shards[store, number]
                self._compare_again(entry, entry.slots.find(store))
            if (served := self.borrow(store, number)) is not None:
                about = shard_manifest.decode(served.manifest, SliceManifest).about
                rows.append(HeldSlice(number, about.slices, about.parts, served.digest))
                self.give_back(served)
        return tuple(rows)

    def drop_slices(self, store: str, numbers: Iterable[int]) -> None:
        """Free slices. The memory of one that is being read is freed when its last reader has ended."""
        with self._lock:
            for number in numbers:
                if (entry := self._shards.get((store, number))) is not None:
                    entry.clear()

    def descriptor(self, key: Key, number: int) -> int:
        """Return a descriptor of a slot, which the caller has to close.

        Raises:
            LookupError: The slot was dropped meanwhile.
            OSError: There is no descriptor left.
        """
        with self._lock:
            return os.dup(self._shards[key].memory[number].fd)

    def copies(self, keeper: int) -> dict[ShardIndex, ShardKey]:
        """Return what a rank of this host has ordered, by owner."""
        with self._lock:
            kept = [each for each in self._shards.values() if each.keeper == keeper]
            return {(e.replica, e.owner.rank): (e.replica, e.owner.rank, e.owner.ranks) for e in kept}

    def drop_copies(self, key: ShardKey) -> None:
        with self._entry(key) as entry:
            if not entry.own:
                entry.keeper = None
                entry.clear()

    def prepare(self, key: Key) -> None:
        """Allocate the slots of the steady state. Blocks for as long as the kernel takes to provide the memory."""
        while len(self.slots(key)) < self._shards[key].initial and self.grow(key):
            pass

    def allocate(self, key: Key, content: Content, *, copy: bool = False) -> int | None:
        """Do as `stage` does, and add another slot if that is what it needs. Blocks."""
        number = self.stage(key, content, copy=copy)
        if number is None:
            number = self.stage(key, content, copy=copy, last=not self.grow(key))
        return number

    def grow(self, key: Key) -> bool:
        """Allocate one more free slot. Blocks for as long as the kernel takes to provide the memory.

        Returns:
            False if the shard has MAX_SLOTS slots, or there is no memory for another one.
        """
        with self._entry(key) as entry:
            owner, copy = entry.owner, not entry.own
            if entry.slots.full or (copy and not self._may_grow(entry)):
                return False
            entry.growing += 1
        fd, why = None, ""
        try:
            check_memory(owner.nbytes)
            fd = shared_memory.create(owner.nbytes)
        except (OSError, ValueError) as error:
            why = str(error)
        with self._lock:
            entry.growing -= 1
            if why and not entry.short:  # it is tried again for each snapshot
                _log.warning("%s: no slot of %d bytes: %s", entry, owner.nbytes, why)
            entry.short = bool(why)
            if fd is None:
                return False
            # Meanwhile another connection of that rank may have added a slot, or changed the size.
            if entry.slots.full or entry.owner != owner or entry.own == copy or not entry.wanted:
                os.close(fd)
                return False
            number = entry.slots.add()
            entry.memory[number] = SlotMemory(number, fd)
        return True

    def _may_grow(self, entry: Shard) -> bool:
        others = [each for each in self._shards.values() if each is not entry]
        try:
            self._check_room(entry.held_bytes + entry.owner.nbytes, others, self._budget)
        except ValueError:
            return False
        return entry.wanted

    def stage(self, key: Key, content: Content, *, copy: bool = False, last: bool = False) -> int | None:
        """Return the number of the slot to write ``content`` into, or None if another slot has to be added first.

        Args:
            copy: It is fetched from another host: None if that is no longer to be kept here.
            last: As `SnapshotSlots.stage` takes it.
        """
        with self._entry(key) as entry:
            if copy and (entry.own or not entry.wanted):
                return None
            number = entry.slots.stage(content, time.monotonic(), last=last)
            if number is not None:
                entry.memory[number].written_anew()
            entry.sweep()
            return number

    def busy_reason(self, key: Key) -> str:
        return "all slots are in use" if self._shards[key].slots.full else "no memory for one more slot"

    def slots(self, key: Key) -> dict[int, int]:
        """Return the file descriptors of a rank's slots by slot number. They stay owned by the store."""
        with self._lock:
            return {number: slot.fd for number, slot in self._shards[key].memory.items()}

    def staged(self, key: Key, content: Content, header: bytes, number: int | None = None) -> None:
        """Mark ``content`` as complete. ``header`` is its encoded manifest.

        Args:
            number: The slot that it was written into; None: that of the last `stage`.

        Raises:
            ValueError: ``content`` was not being written.
        """
        with self._entry(key) as entry:
            if number not in (None, entry.slots.written):
                raise ValueError("its slot was dropped meanwhile")
            number = entry.slots.staged(content)
            entry.memory[number].header = header
            if entry.slots.pinned(time.monotonic()) == content:
                self._verification(entry, number, content)

    def writable(self, key: Key, number: int) -> Bytes:
        """Return the memory of a slot that this process writes.

        Raises:
            LookupError: The slot was dropped meanwhile.
            OSError: It cannot be mapped.
        """
        with self._lock:
            return self._shards[key].view(number)

    def abandon(self, key: Key, number: int | None) -> None:
        """Free a slot whose writer has ended without completing it."""
        with self._entry(key) as entry:
            if entry.slots.written == number:
                entry.abandon(reuse=entry.slice is None)

    def keeps(self, key: ShardKey, state: StateId) -> bool:
        with self._lock:
            return self._shards[key].slots.find(state) is not None

    def mark_settled(self, key: ShardKey, state: StateId, everywhere: bool | None = True) -> None:
        with self._entry(key) as entry:
            entry.slots.mark_settled(state, everywhere)
            if everywhere or len(entry.memory) < INITIAL_SLOTS:  # or its own memory might never come
                self._drop_other_widths(entry)

    def pin(self, key: ShardKey, state: StateId, seconds: float) -> None:
        """Keep ``state`` for ``seconds``, now or once it is complete, and compare its checksums in advance."""
        with self._entry(key) as entry:
            entry.slots.pin(state, time.monotonic() + seconds)
            number = entry.slots.find(state)
            if number is not None:
                self._compare_again(entry, number)
                self._verification(entry, number, state)

    @staticmethod
    def _compare_again(entry: Shard, number: int | None) -> None:
        """Forget a comparison that served an earlier reader: bits may have flipped since."""
        slot = entry.memory[number] if number is not None else None
        if slot is not None and slot.verified is not None and slot.verified.done():
            slot.verified = None

    def unpin(self, key: ShardKey) -> None:
        with self._entry(key) as entry:
            entry.slots.unpin()
            entry.release_acquired()

    def list(self, key: ShardKey) -> tuple[CompleteSnapshot, ...]:
        with self._lock:
            return self._shards[key].slots.held()

    def acquire(self, key: ShardKey, state: StateId) -> tuple[int, bytes] | None:
        """Verify a complete snapshot and keep it unchanged for its own rank until `unpin` or the next `acquire`.

        Blocks while the checksums are computed.

        Returns:
            (file descriptor, encoded manifest), or None if there is no such snapshot or it is damaged.
        """
        with self._entry(key) as entry:
            entry.release_acquired()
            number = entry.slots.find(state)
            if number is None:
                return None
            entry.slots.borrow(number)
            owner, fd, header = entry.owner, entry.memory[number].fd, entry.memory[number].header
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

    def damaged(self, key: ShardKey) -> tuple[Damage, ...]:
        with self._entry(key) as entry:
            found, entry.damaged = tuple(entry.damaged), []
            return found

    def forget(self, key: ShardKey) -> None:
        """Drop all snapshots of a rank, and what its replica has left in other widths."""
        with self._entry(key) as entry:
            entry.clear()
            entry.release_acquired()
            self._drop_other_widths(entry)

    def disconnect(self, key: ShardKey, *, dead: bool) -> None:
        """Release what a rank used over its connection, which has ended.

        The snapshot that it was writing is abandoned. Its slot is reused only if the rank is ``dead``: a living
        process may still write into it.
        """
        with self._entry(key) as entry:
            entry.connected = False
            entry.abandon(reuse=dead)
            entry.release_acquired()

    def borrow(
        self, content: Content, rank: int, ranks: int | None = None, *, verify: bool = True
    ) -> ServedSnapshot | None:
        """Return the snapshot of a state and ``rank``, of any replica, for reading until `give_back`.

        Or the slice ``rank`` of a store. A state has one content, so the shards of all replicas with ``ranks``
        ranks are equal; None: any number. Blocks while checksums are computed. Returns None if there is no such
        snapshot. One that is damaged is dropped, and the damage is logged. Without ``verify`` nothing is computed:
        the reader finds the damage.
        """
        while True:
            with self._lock:
                shards = [
                    e for e in self._shards.values() if e.owner.rank == rank and ranks in (None, e.owner.ranks)
                ]
                shards.sort(key=lambda each: not each.own)
                found = ((each, number) for each in shards if (number := each.slots.find(content)) is not None)
                entry, number = next(found, (None, None))
                if entry is None or number is None:
                    return None
                entry.slots.borrow(number)
                slot, nbytes = entry.memory[number], entry.owner.nbytes
                digest = shard_manifest.digest(slot.header)
                served = ServedSnapshot(slot.fd, nbytes, slot.header, digest, room=(entry, number))
                if not verify:
                    return served
                verification = self._verification(entry, number, content)
            try:
                verification.result()
            except Exception:
                with self._lock:
                    dropped = entry.slots.find(content) != number
                    entry.put_back(number)
                if not dropped:  # the agent ends
                    return None
                continue
            return served

    def held(self) -> tuple[HeldShard, ...]:
        with self._lock:
            found = [
                (entry, kept, entry.memory[number], entry.memory[number].header)
                for entry in self._shards.values()
                for kept in entry.slots.held()
                if (number := entry.slots.find(kept.state)) is not None
            ]
        rows: dict[tuple[StateId, int, Owner], HeldShard] = {}
        for entry, kept, slot, header in found:
            owner, layout = entry.owner, slot.layout
            if not layout:
                try:
                    layout = shard_manifest.decode_header(header).layout
                except DataCorruption as error:
                    _log.error("%s: the manifest of %s cannot be used: %s", entry, kept.state, error)
                    continue
                with self._lock:
                    if slot.header is header:
                        slot.layout = layout
            row = HeldShard(
                kept.state, entry.replica, owner.rank, owner.ranks, layout, owner.nbytes, kept.settled, self._host
            )
            rows.setdefault((kept.state, entry.replica, owner), row)
        return tuple(rows.values())

    def drop_damaged(self, served: ServedSnapshot, content: Content, error: Exception) -> None:
        with self._lock:
            entry, number = served.room
            entry.damage(number, content, error)

    def give_back(self, served: ServedSnapshot) -> None:
        with self._lock:
            entry, number = served.room
            entry.put_back(number)

    def close(self) -> None:
        self._verifier.shutdown(cancel_futures=True)

    def _verification(self, entry: Shard, number: int, content: Content) -> Future[None]:
        """Have a complete slot verified, which stays borrowed until then."""
        slot = entry.memory[number]
        if slot.verified is None:
            entry.slots.borrow(number)
            slot.verified = self._verifier.submit(self._verify, entry, number, content, entry.owner, slot.header)
        return slot.verified

    def _verify(self, entry: Shard, number: int, content: Content, owner: Owner, header: bytes) -> None:
        try:
            with self._lock:
                view = entry.view(number)
            compare(header, view, content, owner)
        except Exception as error:
            with self._lock:
                entry.damage(number, content, error)
            raise
        finally:
            with self._lock:
                entry.put_back(number)
