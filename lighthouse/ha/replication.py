"""A standby's copy of the leader's journal, so that the job's history survives the leader's machine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import httpx

from lighthouse.journal.database import DatabaseFailed, SqliteDatabase
from lighthouse.overview.overview import JournalEntry

POLL_S = 0.25  # between two looks at who leads
RETRY_S = 1.0  # after a stream that ended
SILENCE_S = 30.0  # a leader has something to say every 10 s
MAX_PENDING = 4 << 20  # bytes of one row

_log = logging.getLogger(__name__)


class JournalMirror:
    """Follows GET /v1/stream of the leader, and keeps each row under the number that it has there.

    Args:
        database: Where the rows are kept.
        leader: Returns the leader's URL, or None while there is no leader.
        key: A viewer's.
        client: Closed by the caller.
    """

    def __init__(
        self, database: SqliteDatabase, leader: Callable[[], str | None], key: str, client: httpx.AsyncClient
    ) -> None:
        self._database = database
        self._leader = leader
        self._headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
        self._client = client

    async def run(self) -> None:
        """Follow the leader, also from one to the next, until cancelled."""
        while True:
            url = self._leader()
            if url is None:
                await asyncio.sleep(POLL_S)
                continue
            following = asyncio.create_task(self._follow(url))
            try:
                while not following.done() and self._leader() == url:
                    await asyncio.wait({following}, timeout=POLL_S)
            finally:
                following.cancel()
                (ended,) = await asyncio.gather(following, return_exceptions=True)
            if isinstance(ended, httpx.HTTPError | DatabaseFailed):
                _log.info("the journal of %s: %s %s", url, type(ended).__name__, str(ended).partition("\n")[0])
            elif isinstance(ended, Exception):
                raise ended
            if self._leader() == url:
                await asyncio.sleep(RETRY_S)

    async def _follow(self, url: str) -> None:
        """Keep what the leader at ``url`` sends after the newest row that is here, until the stream ends."""
        after = {"after": str(self._database.last)}
        timeout = httpx.Timeout(SILENCE_S, connect=RETRY_S)
        async with self._client.stream(
            "GET", f"{url}/v1/stream", params=after, headers=self._headers, timeout=timeout
        ) as response:
            response.raise_for_status()
            pending = b""
            async for piece in response.aiter_bytes():
                *whole, pending = (pending + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                if len(pending) > MAX_PENDING:
                    raise httpx.DecodingError(f"a row of more than {MAX_PENDING} bytes")
                await asyncio.to_thread(self._database.append, list(_entries(whole)))


def _entries(blocks: list[bytes]) -> Iterator[JournalEntry]:
    """Yield the rows in blocks of server-sent events. Raises httpx.DecodingError for anything else."""
    for block in blocks:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line[1:])
        if b"data" not in fields:
            continue
        try:
            row = json.loads(fields[b"data"])
            kind = fields[b"event"].decode()
            shown = {k: v for k, v in row.items() if k not in ("seq", "said")}
            entry = JournalEntry(int(fields[b"id"]), kind, shown)  # type: ignore[arg-type]
            float(entry.row["t"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise httpx.DecodingError(f"not a row: {error}") from error
        if kind in ("event", "commit", "logged"):
            yield entry
