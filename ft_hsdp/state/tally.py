"""Tally: which manifest the donors of one state agree on. Pure.

Donors that hold the same state hold the same bits (FT-HSDP §4.4), so their manifests have one digest. A donor
whose digest is another one is broken, and a vote tells which one, as long as there is a strict majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ft_hsdp.errors import DataCorruption


class Tally:
    """The votes of ``donors`` (replica ids). One that does not have the state (yet) does not vote."""

    def __init__(self, donors: Iterable[int]) -> None:
        self._unheard = set(donors)
        self._absent: set[int] = set()
        self._votes: dict[int, str] = {}

    def vote(self, donor: int, digest: str) -> None:
        """``donor`` has the state, with this digest."""
        self._forget(donor)
        self._votes[donor] = digest

    def absent(self, donor: int) -> None:
        """``donor`` does not have it now; it may vote later."""
        self._forget(donor)
        self._absent.add(donor)

    def failed(self, donor: int) -> None:
        """``donor`` is out of it. What it has voted stands: it was one of those that were asked."""
        self._unheard.discard(donor)
        self._absent.discard(donor)

    @property
    def unheard(self) -> frozenset[int]:
        """Those that have not said anything."""
        return frozenset(self._unheard)

    def verdict(self, *, patient: bool) -> str | None:
        """The digest of a strict majority of the votes; None: there is none, or ``patient`` and some are unheard.

        Raises:
            DataCorruption: the donors disagree and nobody is left who could decide.
        """
        if not self._votes or (patient and self._unheard):
            return None
        digest, count = Counter(self._votes.values()).most_common(1)[0]
        if 2 * count > len(self._votes):
            return digest
        if self._unheard or self._absent:
            return None
        raise DataCorruption(self.disagreement())

    def voted(self, donor: int) -> str | None:
        """The digest that ``donor`` has, if it has said so."""
        return self._votes.get(donor)

    def minority(self, digest: str) -> list[int]:
        """Who voted for something else than ``digest``."""
        return sorted(donor for donor, voted in self._votes.items() if voted != digest)

    def disagreement(self) -> str:
        """Who voted for what, in one line."""
        said = ", ".join(f"replica {donor} has {voted[:12]}" for donor, voted in sorted(self._votes.items()))
        return f"the donors' manifests differ and there is no majority: {said}"

    def _forget(self, donor: int) -> None:
        self._unheard.discard(donor)
        self._absent.discard(donor)
