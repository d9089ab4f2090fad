"""The routes that feed and show the journal: telemetry, overview, log, stream; and the files of the page.

The page of a run that is over has these routes, too, without a `Service`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ft_hsdp import protocol
from ft_hsdp.analysis.diagnosis import describe
from ft_hsdp.protocol import MAX_COUNT, Telemetry, tag_of
from lighthouse.http.access import Bearer, Keys
from lighthouse.http.quorum_route import read
from lighthouse.http.rate_limits import TooMany
from lighthouse.journal.database import MAX_READ, DatabaseFailed, EventQuery
from lighthouse.journal.journal import JobJournal, worded
from lighthouse.quorum.state import LighthouseState as Decisions
from lighthouse.service import Service

PING_S = 10.0  # longest silence of a stream
RETRY_MS = 1000  # a browser opens a stream again after this
FOLDER = Path(__file__).parents[1] / "dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again each time; the answer is 304 as long as nothing has changed
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    etag: str


class Static:
    """The page's files, by their paths in ``folder``; read once, only those of a known type.

    Not starlette's StaticFiles: it looks a request's path up in the file system, takes the media type from the
    machine's tables, and the ETag from the file's time. Here no path from the network reaches the file system,
    the browser gets the same type everywhere, and after an update without changes it keeps its copy.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        found = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in TYPES)
        self._files = {p.relative_to(folder).as_posix(): _read(p) for p in found}

    def answer(self, request: Request, path: str) -> Response:
        """Return the file at ``path``, or 304 to a browser that has it. Raises HTTPException 404."""
        file = self._files.get(path)
        if file is None:
            raise HTTPException(404, "no such page")
        headers = SECURITY | {"ETag": file.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.kind, headers=headers)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, TYPES[path.suffix], f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')


Time = Annotated[float | None, Query(ge=0, le=MAX_COUNT, allow_inf_nan=False, description="Unix seconds")]
Number = Annotated[int | None, Query(ge=0, le=MAX_COUNT, description="number of a row")]


def views(journal: JobJournal, service: Service | None, keys: Keys) -> APIRouter:
    """Return the routes.

    Errors are {"detail": one line}: 401, 403, 413, 422, 429, and 503 if the journal cannot be read.

    GET  /, /assets/...   the page: files that hold no data, for everyone
    POST /v1/telemetry    `protocol.encode(Telemetry)` from a worker; 204
    GET  /v1/overview     the job, now or ``at`` a time
    GET  /v1/diagnosis    who keeps the job waiting, and who waits for whom
    GET  /v1/events       a page of the log
    GET  /v1/stream       server-sent events: every row as it comes, and none twice after a break

    Args:
        journal: Takes the rows and shows them.
        service: Decides; None: the job has ended.
    """
    routes = APIRouter()
    files = Static()
    # Not the loop's own threads: the election renews its lease on those, and slow searches would hold them all.
    searches, descriptions = ThreadPoolExecutor(1, "searches"), ThreadPoolExecutor(1, "descriptions")
    worker, viewer = [Depends(Bearer(keys, "worker"))], [Depends(Bearer(keys, "viewer"))]

    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        """The page itself, index.html."""
        return files.answer(request, "index.html")

    @routes.get("/assets/{path:path}", include_in_schema=False)
    async def asset(request: Request, path: str) -> Response:
        """Another file of the page."""
        return files.answer(request, path)

    told = takes(Telemetry)

    @routes.post(
        "/v1/telemetry", dependencies=worker, status_code=204, response_class=Response, openapi_extra=told
    )
    async def telemetry(request: Request) -> None:
        """A replica or a supervisor reports what is only shown."""
        journal.take(protocol.decode(await read(request.receive), Telemetry))
        await journal.kept()

    @routes.get("/v1/overview", dependencies=viewer)
    async def overview(
        at: Time = None,
        start: Time = None,
        end: Time = None,
        points: Annotated[int, Query(ge=1, le=5000, description="of a curve, at most")] = 600,
    ) -> JSONResponse:
        """The job as the page shows it."""
        try:
            await journal.ready(at)
            shown = journal.overview(at=at, start=start, end=end, points=points)
        except DatabaseFailed as error:
            raise _unreadable(error) from None
        if service is not None and at is None:
            _decided(shown, service.state)
            shown["hosts"] = service.hosts()
        return JSONResponse(shown)

    @routes.get("/v1/diagnosis", dependencies=viewer)
    async def diagnosis(
        traces: Annotated[
            bool, Query(description="all that the ranks have told, instead of what follows")
        ] = False,
    ) -> JSONResponse:
        """Who keeps the job waiting."""
        work = partial(asdict if traces else describe, journal.diagnosis())
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(descriptions, work))

    @routes.get("/v1/events", dependencies=viewer)
    async def events(
        after: Number = None,
        before: Number = None,
        limit: Annotated[int, Query(ge=1, le=MAX_READ)] = 200,
        replica: Annotated[int | None, Query(ge=0, le=MAX_COUNT)] = None,
        event: Annotated[str | None, Query(max_length=64)] = None,
        text: Annotated[str | None, Query(max_length=200, description="stands somewhere in the row")] = None,
    ) -> JSONResponse:
        """A page of the log: the first rows after a number, else the newest ones before a number or of all."""
        try:
            asked: EventQuery = {"after": after, "before": before, "limit": limit}
            asked |= {"replica": replica, "event": event, "text": text}
            search = partial(journal.events, **asked)
            found = await asyncio.get_running_loop().run_in_executor(searches, search)
        except DatabaseFailed as error:
            raise _unreadable(error) from None
        return JSONResponse(found)

    @routes.get("/v1/stream", dependencies=viewer, response_class=StreamingResponse, responses=_STREAM)
    async def stream(request: Request, after: Number = None) -> StreamingResponse:
        """Every row above the Last-Event-ID, or above ``after``, or from now on."""
        told = request.headers.get("last-event-id", "")
        if told.isascii() and told.isdigit() and len(told) <= 16:
            after = int(told)
        if journal.subscribers.full:
            raise HTTPException(429, "too many followers; try again in 5 s", headers={"Retry-After": "5"})
        rows = _messages(journal.subscribers.follow(after))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(rows, media_type="text/event-stream", headers=headers)

    return routes


def takes(message: type) -> dict[str, Any]:
    """Return what the description of a route says that reads a ``message`` of the protocol itself."""
    tag = {"type": "string", "const": tag_of(message)}
    tagged = {
        "type": "object",
        "required": ["type", "body"],
        "properties": {"type": tag, "body": {"type": "object"}},
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": tagged}}}}


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "rows: `id`, `event: event` or `event: commit`, `data`; `said` is an event in a sentence",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}

Rows = AsyncIterator[tuple[int, str, dict[str, Any]]]


async def _messages(rows: Rows) -> AsyncIterator[str]:
    """Yield server-sent events of ``rows``; a comment when there is none for `PING_S`."""
    task = asyncio.ensure_future(anext(rows, None))
    try:
        yield f"retry: {RETRY_MS}\n\n"
        while True:
            await asyncio.wait({task}, timeout=PING_S)
            if not task.done():
                yield ": \n\n"
                continue
            try:
                row = task.result()
            except (DatabaseFailed, TooMany):
                return  # the client opens the stream again, and goes on where it was
            if row is None:
                return
            seq, kind, body = row
            told = worded(body) if kind == "event" else {}
            data = json.dumps({"seq": seq, **body, **told}, separators=(",", ":"), allow_nan=False)
            yield f"id: {seq}\nevent: {kind}\ndata: {data}\n\n"
            task = asyncio.ensure_future(anext(rows, None))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rows.aclose()  # type: ignore[attr-defined]


def _decided(shown: dict[str, Any], state: Decisions) -> None:
    """Put what the lighthouse decides by into an overview: it is true even where rows of the journal are lost."""
    shown["lighthouse"] |= {"term": state.term, "epoch": state.epoch}
    shown["job"]["total"] = state.target
    for row in shown["replicas"]:
        row["drained"] = row["replica"] in state.drained


def _unreadable(error: DatabaseFailed) -> HTTPException:
    return HTTPException(503, " ".join(str(error).split()))
