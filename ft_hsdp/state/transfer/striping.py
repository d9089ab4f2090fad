"""What the threads of a fetch share: which manifest the donors agree on, and which chunks are still to be fetched.

Both are plain data structures, which are used under the fetch's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ft_hsdp.errors import DataCorruption


class ChunkQueue:
    """The numbers of the ``chunks`` that are still to be fetched. Not thread-safe.

    They are handed out in runs of ``most`` at most, which get shorter towards the end, so that all ``takers``
    finish at about the same time.
    """

    def __init__(self, chunks: Sequence[int], takers: int, most: int = 16) -> None:
        self._left = list(reversed(chunks))  # the next one at the end
        self._takers = max(1, takers)
        self._most = most
        self._unverified = len(chunks)

    @property
    def done(self) -> bool:
        """Whether all chunks are verified."""
        return self._unverified == 0

    def take(self) -> range:
        """Remove and return the next run of consecutive chunks. Empty if none is left now."""
        if not self._left:
            return range(0)
        most = max(1, min(self._most, len(self._left) // (2 * self._takers)))
        first = end = self._left[-1]
        while self._left and self._left[-1] == end and end - first < most:
            self._left.pop()
            end += 1
        return range(first, end)

    def put_back(self, chunks: Iterable[int]) -> None:
        """Return chunks that have to be fetched again. They are handed out next."""
        self._left += sorted(chunks, reverse=True)

    def verified(self, count: int) -> None:
        """Count ``count`` chunks that arrived and have their checksums."""
        self._unverified -= count


class ManifestVotes:
    """Counts which digest the manifests of ``donors`` (replica ids) have. Pure. Not thread-safe.

    A donor that does not have the state has no vote until it has.
    """

    def __init__(self, donors: Iterable[int]) -> None:
        self._unheard = set(donors)
        self._absent: set[int] = set()
        self._votes: dict[int, str] = {}

    def vote(self, donor: int, digest: str) -> None:
        """Record that ``donor`` has the state, with this digest."""
        self.failed(donor)
        self._votes[donor] = digest

    def absent(self, donor: int) -> None:
        """Record that ``donor`` does not have the state now. It may vote later."""
        self.failed(donor)
        self._absent.add(donor)

    def failed(self, donor: int) -> None:
        """Expect no vote from ``donor`` any more. A vote that it has cast still counts: it was asked."""
        self._unheard.discard(donor)
        self._absent.discard(donor)

    @property
    def unheard(self) -> frozenset[int]:
        """The donors that have not answered."""
        return frozenset(self._unheard)

    def verdict(self, *, patient: bool) -> str | None:
        """Return the digest of a strict majority of the votes, or None if there is none yet.

        A ``patient`` caller gets None as long as a donor has not answered.

        Raises:
            DataCorruption: The donors disagree, and no donor is left whose vote could decide.
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
        """Return the digest that ``donor`` voted for, or None."""
        return self._votes.get(donor)

    def minority(self, digest: str) -> list[int]:
        """Return the donors that voted for another digest than ``digest``, sorted."""
        return sorted(donor for donor, voted in self._votes.items() if voted != digest)

    def disagreement(self) -> str:
        """Return one line that says which donor has which digest."""
        said = ", ".join(f"replica {donor} has {voted[:12]}" for donor, voted in sorted(self._votes.items()))
        return f"the donors' manifests differ and there is no majority: {said}"
