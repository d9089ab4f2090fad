"""A standby's copy of the leader's journal, so that the job's history survives the leader's machine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import httpx

from ft_hsdp.http_proof import HEADER, MARK, NONE, STALE, SignedRequest
from lighthouse.journal.database import DatabaseFailed, SqliteDatabase
from lighthouse.journal.journal import WORDED
from lighthouse.overview.overview import JournalEntry

POLL_S = 0.25  # between two looks at who leads
RETRY_S = 1.0  # after a stream that ended
SILENCE_S = 30.0  # a leader has something to say every 10 s
MAX_PENDING = 4 << 20  # bytes of one row

_log = logging.getLogger(__name__)


class JournalMirror:
    """Follows GET /v1/stream of the leader, and keeps each row under the number that it has there.

    Only rows that are proved to come from a lighthouse of the job are kept.

    Args:
        leader: Returns the leader's URL, or None while there is no leader.
        token: The worker's.
        client: Closed by the caller.
    """

    def __init__(
        self,
        database: SqliteDatabase,
        leader: Callable[[], str | None],
        token: str,
        client: httpx.AsyncClient,
        retry_s: float = RETRY_S,
    ) -> None:
        self._retry_s = retry_s
        self._database = database
        self._leader = leader
        self._token = token
        self._challenge = NONE
        self._client = client

    async def run(self) -> None:
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
                await asyncio.sleep(self._retry_s)

    async def _follow(self, url: str) -> None:
        """Keep what the leader at ``url`` sends after the newest row that is here, until the stream ends."""
        target = f"/v1/stream?after={self._database.last}"
        timeout = httpx.Timeout(SILENCE_S, connect=RETRY_S)
        for _ in range(2):
            asked = SignedRequest(self._token, self._challenge, "GET", target.encode())
            headers = {"Authorization": asked.authorization, "Accept": "text/event-stream"}
            async with self._client.stream("GET", url + target, headers=headers, timeout=timeout) as response:
                body = b"" if response.is_success else await _read(response)
                challenge = asked.challenge(response.headers.get(HEADER), response.status_code, body)
                if challenge is None:
                    raise httpx.ProtocolError(f"what listens at {url} does not know the job's token")
                self._challenge = challenge
                if response.status_code == STALE:
                    continue
                response.raise_for_status()
                await self._keep(asked, response)
                return

    async def _keep(self, asked: SignedRequest, response: httpx.Response) -> None:
        """Keep the rows of a stream, each once the mark behind it is there. Raises httpx.DecodingError."""
        number, pending, part = 0, b"", b""
        async for piece in response.aiter_raw():
            *whole, pending = (pending + piece).split(b"\n\n")
            for block in whole:
                if not block.startswith(MARK):
                    part += block + b"\n\n"
                    continue
                if not asked.marked(number, part, block):
                    raise httpx.DecodingError("a part of the stream is not proved")
                await asyncio.to_thread(self._database.append, list(_entries(part.split(b"\n\n"))))
                number, part = number + 1, b""
            if len(pending) + len(part) > MAX_PENDING:
                raise httpx.DecodingError(f"a row of more than {MAX_PENDING} bytes")


async def _read(response: httpx.Response) -> bytes:
    """Return the body of an answer that is no stream. Raises httpx.DecodingError for a long one."""
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_PENDING:
            raise httpx.DecodingError(f"an answer of more than {MAX_PENDING} bytes")
    return body


def _entries(blocks: list[bytes]) -> Iterator[JournalEntry]:
    """Yield the rows in blocks of server-sent events. Raises httpx.DecodingError for anything else."""
    for block in blocks:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line[1:])
        if b"data" not in fields:
            continue
        try:
            row = json.loads(fields[b"data"])
            kind = fields[b"event"].decode()
            shown = {k: v for k, v in row.items() if k not in ("seq", *WORDED)}
            entry = JournalEntry(int(fields[b"id"]), kind, shown)  # type: ignore[arg-type]
            float(entry.row["t"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise httpx.DecodingError(f"not a row: {error}") from error
        if kind in ("event", "commit", "logged"):
            yield entry
