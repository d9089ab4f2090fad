"""Who has which slot of a cluster: a slot belongs to a replica or a spare, or is free, or is kept.

A replica that lost a part of its slot may take that of a spare. What is left of its own slot is kept then, with
the state agents there: until the replica has the state again, they may have the only copy of a shard, although
other replicas seemed to train (`move`, `let_go`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from ft_hsdp.launch.backend.base import WorkerGroup
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.ray.slot import ReplicaSlot

SlotOwner = int | WorkerGroup
"""A replica, by its id, or a spare."""


class ReplicaSlots:
    """All slots of a job, by owner, and the free ones."""

    def __init__(self, make: Callable[[PlacementRequest], ReplicaSlot]) -> None:
        """Start without slots; `make` makes one."""
        self._make = make
        self._slots: dict[SlotOwner, ReplicaSlot] = {}
        self._idle: list[ReplicaSlot] = []
        self._kept: dict[int, ReplicaSlot] = {}  # of replicas that moved: what their agents have may be needed
        self._leaving: dict[asyncio.Task[None], ReplicaSlot] = {}
        self._avoided: tuple[str, ...] = ()  # Ray's ids of nodes that no slot may use

    def of(self, owner: SlotOwner) -> ReplicaSlot | None:
        """Return the slot of an owner; None if it has none."""
        return self._slots.get(owner)

    def avoid(self, node: str) -> list[WorkerGroup]:
        """Use a node no more, and return the spares that are on it."""
        self._avoided = (*self._avoided, node)
        for slot in (*self._slots.values(), *self._idle, *self._kept.values()):
            slot.avoid(node)
        return [spare for spare, slot in self.of_spares() if slot.gone]

    def of_spares(self) -> list[tuple[WorkerGroup, ReplicaSlot]]:
        """Return all spares, each with its slot."""
        return [(owner, slot) for owner, slot in self._slots.items() if isinstance(owner, WorkerGroup)]

    def move(self, spare: WorkerGroup, replica: int) -> ReplicaSlot:
        """Give a spare's slot to a replica, and release the replica's own; if that can be repaired, it is kept."""
        own = self._slots.get(replica)
        if own is not None and own.repairable and replica not in self._kept:  # the one that has committed
            self._kept[replica] = self._slots.pop(replica)
        self.release(replica)
        slot = self._slots[replica] = self._slots.pop(spare)
        return slot

    def take_back(self, replica: int) -> ReplicaSlot | None:
        """Give a replica the slot that is kept for it; None if there is none that can be repaired."""
        slot = self._kept.get(replica)
        if slot is None or not slot.repairable:
            return None
        self._slots[replica] = self._kept.pop(replica)
        return slot

    def let_go(self, replica: int) -> None:
        """Remove the slot that is kept for a replica: its agents are not needed any more."""
        slot = self._kept.pop(replica, None)
        if slot is not None:
            self._remove(slot)

    def reuse(self, owner: SlotOwner, labels: Mapping[str, str] | None = None) -> ReplicaSlot | None:
        """Give a free slot to an owner, and return it; None if there is none.

        Args:
            owner: The replica or spare.
            labels: What the slot must have asked for; None: any.
        """
        lost, self._idle = [b for b in self._idle if b.gone], [b for b in self._idle if not b.gone]
        for slot in lost:
            self._remove(slot)
        fit = next((b for b in self._idle if labels is None or b.request.labels == labels), None)
        if fit is not None:
            self._idle.remove(fit)
            self._slots[owner] = fit
        return fit

    async def new(self, owner: SlotOwner, asked: PlacementRequest) -> ReplicaSlot:
        """Return a new slot, which is not reserved yet. Waits first until slots that are given back are gone."""
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        names = {slot.request.name for slot in (*self._slots.values(), *self._idle, *self._kept.values())}
        number, name = 1, asked.name
        while name in names:  # a slot keeps the name of its first owner
            number += 1
            name = f"{asked.name}:{number}"
        slot = self._slots[owner] = self._make(replace(asked, name=name, avoid=self._avoided))
        return slot

    def release(self, owner: SlotOwner) -> None:
        """Make an owner's slot free for another; remove it if it is lost or not reserved yet."""
        slot = self._slots.pop(owner, None)
        if slot is None:
            return
        if slot.reserved and not slot.gone:
            self._idle.append(slot)
        else:
            self._remove(slot)

    def give_back(self, owner: SlotOwner) -> None:
        """Remove an owner's slot: the cluster gets its resources back."""
        slot = self._slots.pop(owner, None)
        if slot is not None:
            self._remove(slot)

    def give_free_ones_back(self) -> None:
        for slot in self._idle:
            self._remove(slot)
        self._idle.clear()

    async def close(self) -> None:
        """End all actors and their ranks, and give all resources back."""
        for slot in (*self._slots.values(), *self._idle, *self._kept.values()):
            self._remove(slot)
        self._slots.clear()
        self._idle.clear()
        self._kept.clear()
        await asyncio.gather(*self._leaving)

    def _remove(self, slot: ReplicaSlot) -> None:
        task = asyncio.create_task(slot.remove())
        self._leaving[task] = slot
        task.add_done_callback(self._leaving.pop)
