"""`replay --page`: the lighthouse's page for a finished run, with a slider for the time.

The run's logs become a journal in memory, which the lighthouse's own routes serve.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ft_hsdp.config import load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import done_by, events_of, logged_of
from lighthouse.http.access import Keys, page_link
from lighthouse.http.journal_routes import views
from lighthouse.journal import row_checks
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo, JournalEntry
from lighthouse.runtime import about

BATCH = 5000  # rows that are appended to the journal at once


def serve_run(run: RunDir, host: str, port: int, opened: Callable[[str], None]) -> None:
    """Serve the page of a run until Ctrl-C; blocks. The run is read once, as it is now.

    Args:
        host: A loopback address.
        port: 0 for any that is free.
        opened: Called with the page's link, key included, once the server listens.

    Raises:
        ConfigError: Nothing is recorded, or the address is not free.
    """
    rows, job_info = recorded(run)
    database = MemoryDatabase()
    for first in range(0, len(rows), BATCH):
        database.append(rows[first : first + BATCH])
    journal = JobJournal(database, job_info)
    keys = Keys(secrets.token_hex(32))
    app = FastAPI(title=run.name, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(views(journal, None, keys))
    with _listen(host, port) as sock:
        name = f"[{host}]" if sock.family == socket.AF_INET6 else host
        opened(page_link(f"http://{name}:{sock.getsockname()[1]}", keys.job))
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        try:
            with contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[sock])
        finally:
            journal.close()
            database.close()


def recorded(run: RunDir) -> tuple[list[JournalEntry], JobInfo]:
    """Return a run's events and commits by time, as rows of a journal, and what is known of its job.

    Raises:
        ConfigError: There are none.
    """
    job_info = about(load(run.config), live=False)
    rows: list[tuple[float, str, Row]] = [
        (row["t"], "event", row_checks.plain({"source": "replica", "reason": "", **row})) for row in events_of(run)
    ]
    rows += [(row["t"], "commit", row_checks.commit(row, job_info, row["t"])) for row in done_by(run)]
    rows += [(row["t"], "logged", row_checks.logged(row, job_info, row["t"])) for row in logged_of(run)]
    if not rows:
        raise ConfigError("RUN", run.name, "a run that has recorded something")
    rows.sort(key=lambda row: row[0])
    numbered = enumerate(rows, 1)
    return [JournalEntry(seq, kind, row) for seq, (_, kind, row) in numbered], job_info  # type: ignore[arg-type]


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError if the address is not free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError("HOST:PORT", f"{host}:{port}", f"an address to listen at ({error.strerror})") from None
