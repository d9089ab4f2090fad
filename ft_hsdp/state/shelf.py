"""Shelf: where the state server finds complete snapshots; the agent and the in-memory shelf are two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ft_hsdp.core.state_id import StateId


@dataclass(frozen=True, slots=True)
class Served:
    """A complete snapshot of one rank, borrowed.

    ``fd`` is a memfd of at least ``nbytes`` bytes that keep their content while it is borrowed; ``manifest`` is
    wire.encode of its manifest, checksums and digest included; ``digest`` is the manifest's, 64 hex digits.
    """

    fd: int
    nbytes: int
    manifest: bytes
    digest: str


class Shelf(Protocol):
    """Complete snapshots by state and rank. Thread-safe."""

    def borrow(self, state: StateId, rank: int) -> Served | None:
        """The snapshot of ``state`` and ``rank``, until it is given back; None: it is not here (yet).

        Waits for checksums that are being computed at most.
        """
        ...

    def give_back(self, served: Served) -> None:
        """End a borrow; once for each."""
        ...
