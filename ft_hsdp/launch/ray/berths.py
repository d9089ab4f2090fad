"""Berths: who has which place in the cluster: a replica, a spare, or nobody for the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from ft_hsdp.launch.crew import Crew
from ft_hsdp.launch.ray.berth import Berth
from ft_hsdp.launch.ray.placement import Request

Holder = int | Crew
"""A replica, by its id, or a spare."""


class Berths:
    """All berths of a job. make: a new one."""

    def __init__(self, make: Callable[[Request], Berth]) -> None:
        self._make = make
        self._held: dict[Holder, Berth] = {}
        self._idle: list[Berth] = []
        self._leaving: dict[asyncio.Task[None], Berth] = {}

    def of(self, holder: Holder) -> Berth | None:
        """What it has."""
        return self._held.get(holder)

    def labels_of_spares(self) -> list[Mapping[str, str]]:
        """What the spares asked for."""
        return [berth.request.labels for holder, berth in self._held.items() if isinstance(holder, Crew)]

    def move(self, spare: Crew, replica: int) -> Berth:
        """Have a replica take the berth of a spare; its own is another's then, if it lives."""
        self.release(replica)
        berth = self._held[replica] = self._held.pop(spare)
        return berth

    def reuse(self, holder: Holder, labels: Mapping[str, str] | None = None) -> Berth | None:
        """One that nobody has, with these labels, if they matter."""
        lost, self._idle = [b for b in self._idle if b.gone], [b for b in self._idle if not b.gone]
        for berth in lost:
            self._remove(berth)
        fit = next((b for b in self._idle if labels is None or b.request.labels == labels), None)
        if fit is not None:
            self._idle.remove(fit)
            self._held[holder] = fit
        return fit

    async def new(self, holder: Holder, asked: Request) -> Berth:
        """One that has still to find its place; what is being given back is free before that."""
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        names = {berth.request.name for berth in (*self._held.values(), *self._idle)}
        number, name = 1, asked.name
        while name in names:  # who it was made for may have moved
            number += 1
            name = f"{asked.name}:{number}"
        berth = self._held[holder] = self._make(replace(asked, name=name))
        return berth

    def release(self, holder: Holder) -> None:
        """Whoever has it needs it no more: it serves another, or is given back if it is lost or not found yet."""
        berth = self._held.pop(holder, None)
        if berth is None:
            return
        if berth.settled and not berth.gone:
            self._idle.append(berth)
        else:
            self._remove(berth)

    def give_back(self, holder: Holder) -> None:
        """Whoever has it needs it no more, and nobody else is to have it."""
        berth = self._held.pop(holder, None)
        if berth is not None:
            self._remove(berth)

    async def close(self) -> None:
        """End all actors, and with them whatever they run; give all resources back."""
        for berth in (*self._held.values(), *self._idle):
            self._remove(berth)
        self._held.clear()
        self._idle.clear()
        await asyncio.gather(*self._leaving)

    def _remove(self, berth: Berth) -> None:
        task = asyncio.create_task(berth.remove())
        self._leaving[task] = berth
        task.add_done_callback(self._leaving.pop)
