"""Subscribers: readers that get every row as it comes.

One buffer serves all of them. A subscriber that is slower than the buffer reads from the database, so a slow one
costs no memory.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence

from lighthouse.http.rate_limits import STREAMS, TooMany
from lighthouse.journal.database import SqliteDatabase
from lighthouse.overview.overview import JournalEntry, Row

KEPT = 2048  # newest rows in memory
PAGE = 500  # rows that one read takes from the database


class Subscribers:
    """Gives every subscriber all rows, in order, each once. It belongs to one event loop."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._kept: list[JournalEntry] = []
        self._gone = database.last  # number of the newest row that is not in memory
        self._new = asyncio.Event()
        self._open = 0
        self._closed = False

    @property
    def last(self) -> int:
        return self._kept[-1].seq if self._kept else self._gone

    @property
    def full(self) -> bool:
        return self._open >= STREAMS

    def publish(self, entries: Sequence[JournalEntry]) -> None:
        """Pass on rows that were stored, or that the database failed to store."""
        self._kept.extend(entries)
        if len(self._kept) > 2 * KEPT:
            self._gone = self._kept[-KEPT - 1].seq
            del self._kept[:-KEPT]
        self._wake()

    def close(self) -> None:
        """End every `follow` that is open."""
        self._closed = True
        self._wake()

    async def follow(self, after: int | None = None) -> AsyncIterator[tuple[int, str, Row]]:
        """Yield the rows above number ``after`` until `close`; None: only rows that are still to come.

        Raises:
            TooMany: there are too many subscribers.
            DatabaseFailed: rows cannot be read.
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
        """Return the next rows above a number, at most `PAGE`; none at the end."""
        if seq < self._gone:
            page = self._database.read(seq, PAGE)
            if page and page[0].seq <= self._gone:
                return [entry for entry in page if entry.seq <= self._gone]
        start = bisect_right(self._kept, seq, key=lambda entry: entry.seq)
        return self._kept[start : start + PAGE]

    def _wake(self) -> None:
        self._new.set()
        self._new = asyncio.Event()
