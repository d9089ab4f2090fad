"""Chunks: the queue of what is still to be fetched, and what is verified. Not thread-safe."""

from __future__ import annotations

from collections.abc import Iterable

MAX_RUN = 16  # chunks of one request


class Chunks:
    """``count`` chunks, handed out in runs that get shorter towards the end, so that all donors end together."""

    def __init__(self, count: int, takers: int) -> None:
        self._left = list(range(count - 1, -1, -1))  # the next one at the end
        self._takers = max(1, takers)
        self._unverified = count

    @property
    def done(self) -> bool:
        """Whether all are verified."""
        return self._unverified == 0

    def take(self) -> range:
        """The next run of consecutive chunks; empty if there is none now."""
        if not self._left:
            return range(0)
        most = max(1, min(MAX_RUN, len(self._left) // (2 * self._takers)))
        first = end = self._left[-1]
        while self._left and self._left[-1] == end and end - first < most:
            self._left.pop()
            end += 1
        return range(first, end)

    def put_back(self, chunks: Iterable[int]) -> None:
        """These have to be fetched again: next of all."""
        self._left += sorted(chunks, reverse=True)

    def verified(self) -> None:
        """One more is here and right."""
        self._unverified -= 1
