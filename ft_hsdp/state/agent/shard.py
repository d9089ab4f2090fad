"""The memory of one shard in a state agent: its slots, and by slot number what belongs to them.

The shard is of a rank of this host, or it is a copy of another host's shard. A slice of a block store is kept in
the same way; it has one content. `store` keeps all of them, and calls everything here with its lock held.
"""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass, field

from ft_hsdp.control_groups import allowance
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent.messages import Damage
from ft_hsdp.state.agent.slots import Content, SnapshotSlots
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest, SliceManifest, SliceName

INITIAL_SLOTS = 2  # slots that a shard has before its first staging
MAX_DAMAGED = 8  # damaged snapshots that are remembered for a rank that sends no orders

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    rank: int  # of a slice: its number
    ranks: int  # of the replica; of a slice: those of its store
    nbytes: int  # of each snapshot, or of the slice


@dataclass(eq=False, slots=True)
class SlotMemory:
    """The memory of a slot, and what is said of its content."""

    number: int
    fd: int
    view: Bytes | None = None  # of what this process has written or verified
    header: bytes = b""  # the encoded manifest of what is complete
    layout: str = ""  # the fingerprint that it names, once it was listed
    verified: Future[None] | None = None

    def written_anew(self) -> None:
        self.header, self.layout, self.verified = b"", "", None


@dataclass(eq=False, slots=True)
class Shard:
    """The slots of one shard and, by slot number, their memory. Not thread-safe."""

    replica: int
    owner: Owner
    own: bool  # a rank of this host writes it; False: a copy of another host's shard
    connected: bool = False  # the rank that writes it
    keeper: int | None = None  # the rank of this host that has ordered the copy
    slots: SnapshotSlots = field(default_factory=SnapshotSlots)
    memory: dict[int, SlotMemory] = field(default_factory=dict)  # of all slots
    damaged: list[Damage] = field(default_factory=list)  # not yet reported to the rank
    acquired: int | None = None  # the slot that the rank itself reads
    growing: int = 0  # slots whose memory is being allocated
    short: bool = False  # there was no memory for the last one
    slice: SliceName | None = None
    aside: bool = False  # its replica has another number of ranks now

    def __str__(self) -> str:
        if self.slice is not None:
            return f"slice {self.slice.slice} of {self.slice.name}"
        return f"rank {self.owner.rank}" if self.own else f"rank {self.owner.rank} of replica {self.replica}"

    @property
    def wanted(self) -> bool:
        return self.own or self.slice is not None or self.keeper is not None

    @property
    def initial(self) -> int:
        return INITIAL_SLOTS if self.slice is None else 1

    @property
    def held_bytes(self) -> int:
        return (len(self.memory) + self.growing) * self.owner.nbytes

    @property
    def needed_bytes(self) -> int:
        """The memory of all slots of a copy; if it is still to be kept, at least that of the steady state."""
        return max(self.held_bytes, INITIAL_SLOTS * self.owner.nbytes if self.keeper is not None else 0)

    def fit(self, owner: Owner) -> None:
        """Drop all snapshots if they have another size than those of ``owner``."""
        if self.owner != owner:
            _log.info("%s: %s instead of %s: its snapshots are dropped", self, owner, self.owner)
            self.clear()
            self.owner = owner

    def set_aside(self) -> None:
        """Keep what is complete and nothing else: the replica has another number of ranks now."""
        self.abandon(reuse=False)
        self.slots.unpin()
        self.release_acquired()
        self.connected, self.keeper, self.aside = False, None, True

    def view(self, number: int) -> Bytes:
        """Map a slot, writable if it is for copies, and keep the mapping: each new one costs its page faults anew.

        Raises:
            LookupError: There is no such slot any more.
            OSError: It cannot be mapped.
        """
        slot = self.memory[number]
        if slot.view is None or slot.view.flags.writeable == self.own:
            slot.view = shared_memory.attach(slot.fd, self.owner.nbytes, writable=not self.own)
        return slot.view

    def abandon(self, *, reuse: bool) -> None:
        self.slots.abandon(reuse=reuse)
        self.sweep()

    def clear(self) -> None:
        """Drop all snapshots, or the slice. What is read is dropped when its last reader gives it back."""
        self.slots.forget()
        self.sweep()

    def put_back(self, number: int) -> None:
        self.slots.give_back(number)
        self.sweep()

    def release_acquired(self) -> None:
        if self.acquired is not None:
            number, self.acquired = self.acquired, None
            self.put_back(number)

    def damage(self, number: int, content: Content, error: Exception) -> None:
        """Drop what is damaged. Its memory is not used again."""
        _log.error("%s: the copy of %s is dropped: %s", self, content, error)
        if number in self.slots.numbers and self.slots.find(content) == number:
            self.slots.drop(number)
            if isinstance(content, StateId):
                self.damaged = [*self.damaged, Damage(content, str(error))][-MAX_DAMAGED:]

    def sweep(self) -> None:
        for number in self.memory.keys() - self.slots.numbers:
            os.close(self.memory.pop(number).fd)


def compare(header: bytes, data: Bytes, content: Content, owner: Owner) -> None:
    """Compare a snapshot or a slice with its header.

    Raises:
        DataCorruption: The header is not valid, belongs to something else, or a checksum differs.
    """
    manifest: ShardManifest | SliceManifest
    if isinstance(content, str):
        manifest = shard_manifest.decode(header, SliceManifest)
        claims: tuple[object, ...] = (manifest.about.store, manifest.about.slice, manifest.about.slices)
    else:
        manifest = shard_manifest.decode(header)
        claims = (manifest.state, manifest.rank, manifest.ranks)
    if (*claims, manifest.nbytes) != (content, owner.rank, owner.ranks, owner.nbytes):
        raise DataCorruption(f"its header is of {claims}")
    wrong = shard_manifest.damaged(manifest, data.data)
    if wrong:
        raise DataCorruption(
            f"chunk {wrong[0]} ({len(wrong)} of {len(manifest.checksums)}) changed since it was written"
        )


def check_memory(nbytes: int) -> None:
    """Compare what is wanted with the memory that the host, and the agent's container, have left.

    Raises:
        ValueError: One has less. An agent that takes more is killed by the kernel, with all that it keeps.
    """
    has_left = {"container": allowance().memory}
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        has_left["host"] = None if kib is None else int(kib) << 10
    for whose, left in has_left.items():
        if left is not None and nbytes > left:
            raise ValueError(f"{nbytes} bytes are needed; this {whose} has {left} left")
