"""A lighthouse with its journal in this process, behind its gate, and clients of it."""

from typing import Any

import httpx

from ft_hsdp.control.lighthouse_client import TokenProof
from lighthouse.http.access import Keys, view_key
from lighthouse.http.app import create_app
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN, make_service
from tests.support.lighthouse.signed import gated

KEYS = Keys(TOKEN, ADMIN)
KEY = view_key(TOKEN)
VIEWER = {"Authorization": f"Bearer {KEY}"}


class Site:
    """Behind its gate time is never short.

    database: of the journal; False: it has none. about: the job; its service then tells the journal of its rows.
    chosen: for `make_service`.
    """

    def __init__(self, total: int = 2, database: Any = None, about: JobInfo | None = None, **chosen: Any) -> None:
        told = about or JobInfo("job", total, 1, chosen.get("steps", 10))
        self.journal: Any = None if database is False else JobJournal(database or MemoryDatabase(), told)
        if about is not None:
            chosen["note"] = lambda row: self.journal.note([row])
        self.service, self.rows = make_service(total, **chosen)
        self.app = create_app(self.service, KEYS, self.journal)
        self.gate = gated(self.app, KEYS)

    def client(self, token: str = "", address: str = "127.0.0.1", **more: Any) -> httpx.AsyncClient:
        """A client at an address that proves a token, or shows the viewer's key."""
        if token:
            more |= {"headers": VIEWER} if token == KEY else {"auth": TokenProof(token)}
        transport = httpx.ASGITransport(app=self.gate, client=(address, 4000))
        return httpx.AsyncClient(transport=transport, base_url="http://lighthouse", **more)

    async def call(self, method: str, path: str, token: str = "", **arguments: Any) -> httpx.Response:
        """One request."""
        async with self.client(token) as http:
            return await http.request(method, path, **arguments)
