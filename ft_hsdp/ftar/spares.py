"""Spares: edges that outlive their ring, until the next one has taken them or does not want them."""

from __future__ import annotations

from ft_hsdp.errors import StaleEpoch
from ft_hsdp.ftar.engine import Ring
from ft_hsdp.ftar.formation import Formation
from ft_hsdp.ftar.neighbour import Neighbour


class Spares:
    """The spare edges of one group; on the control loop."""

    def __init__(self) -> None:
        self._edges: list[Neighbour] = []

    def keep(self, old: Formation, new: Formation, ring: Ring, error: StaleEpoch) -> bool:
        """End ``ring`` and keep those of its edges that have the same members in ``new``; whether it was idle.

        ``old`` has them no more.
        """
        inlet, outlet = ring.retire(error)
        if inlet is None or outlet is None:
            return False
        for neighbour, side in ((old.left, -1), (old.right, +1)):
            same = neighbour is not None and neighbour.member == new.neighbour(side)
            if neighbour is not None and same and not neighbour.gone:
                self._edges.append(neighbour)
        old.left = None if old.left in self._edges else old.left
        old.right = None if old.right in self._edges else old.right
        return True

    def to(self, member: object) -> Neighbour | None:
        """Take the edge to the right that leads to ``member``."""
        for spare in self._edges:
            if spare.outlet is not None and spare.member == member and not spare.gone:
                self._edges.remove(spare)
                return spare
        return None

    def remove(self, neighbour: Neighbour) -> bool:
        """Take this edge; whether it was one of them."""
        if neighbour not in self._edges:
            return False
        self._edges.remove(neighbour)
        return True

    def drain(self) -> list[Neighbour]:
        """Take all that are left."""
        spares, self._edges = self._edges, []
        return spares
