"""Followers: whoever reads rows as they come. One buffer for all; who falls behind it reads from the archive."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Any

from lighthouse.http.rate_limits import STREAMS, TooMany
from lighthouse.journal.database import Database
from lighthouse.overview.rows import JournalEntry

KEPT = 2048  # newest rows in memory
PAGE = 500  # rows that are read from the archive at once

Row = dict[str, Any]


class Subscribers:
    """Gives every follower all rows, in order, each once."""

    def __init__(self, archive: Database) -> None:
        self._archive = archive
        self._kept: list[JournalEntry] = []
        self._gone = archive.last  # number of the newest row that is not in memory
        self._new = asyncio.Event()
        self._open = 0
        self._closed = False

    @property
    def last(self) -> int:
        """The number of the newest row."""
        return self._kept[-1].seq if self._kept else self._gone

    @property
    def full(self) -> bool:
        """Whether no more may follow."""
        return self._open >= STREAMS

    def publish(self, entries: Sequence[JournalEntry]) -> None:
        """Rows that are in the archive, or that it lost."""
        self._kept.extend(entries)
        if len(self._kept) > 2 * KEPT:
            self._gone = self._kept[-KEPT - 1].seq
            del self._kept[:-KEPT]
        self._wake()

    def close(self) -> None:
        """Every follower ends."""
        self._closed = True
        self._wake()

    async def follow(self, after: int | None) -> AsyncIterator[tuple[int, str, Row]]:
        """The rows above number ``after`` (None: those to come), until `close`.

        Raises TooMany: there are too many followers. DatabaseFailed: what is asked for cannot be read.
        """
        if self.full:
            raise TooMany("followers", 5.0)
        self._open += 1
        try:
            at = self.last if after is None or after > self.last else max(0, after)
            while not self._closed:
                new = self._new
                page = self._after(at)
                for entry in page:
                    at = entry.seq
                    yield entry.seq, entry.kind, entry.row
                if not page:
                    await new.wait()
        finally:
            self._open -= 1

    def _after(self, seq: int) -> list[JournalEntry]:
        """A piece of what follows a number; empty at the end."""
        if seq < self._gone:
            page = self._archive.read(seq, PAGE)
            if page and page[0].seq <= self._gone:
                return [entry for entry in page if entry.seq <= self._gone]
        start = bisect_right(self._kept, seq, key=lambda entry: entry.seq)
        return self._kept[start : start + PAGE]

    def _wake(self) -> None:
        self._new.set()
        self._new = asyncio.Event()
