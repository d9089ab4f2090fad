"""One of several lighthouses, from standing by to leading, and to the loss of the lead.

A lighthouse that loses the lead must start over as a new program: nothing that it remembers can be told any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any

import httpx
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ft_hsdp import protocol, tls
from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_RETRYABLE, FtHsdpError
from ft_hsdp.jsonl import Journal
from lighthouse.ha.election import POLL_S, Election, EtcdStore
from lighthouse.ha.etcd import Etcd, prefix
from lighthouse.ha.instance import InstanceLock
from lighthouse.ha.replication import JournalMirror
from lighthouse.http.access import Keys
from lighthouse.journal.database import SqliteDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.quorum.state import LighthouseState
from lighthouse.runtime import LeaderRuntime
from lighthouse.service import Service
from lighthouse.store import Store

GAP = 10_000  # numbers of rows that a new leader leaves out: the old one may have given some that are lost

Begin = Callable[[Store, SqliteDatabase, int], LeaderRuntime]
"""Makes the lighthouse on a store and a journal, of which it leaves out so many numbers. Raises FtHsdpError."""

_log = logging.getLogger(__name__)


class Candidate:
    """A lighthouse that stands by at ``url``, then leads.

    Args:
        begin: Builds what is served while it leads.
        events: Takes each event of this lighthouse, as a row of its events.jsonl.

    Raises:
        ConfigError: etcd's endpoints or the certificates cannot be used.
        DatabaseFailed: the disk takes no writes.
    """

    def __init__(
        self, config: Config, instance: InstanceLock, url: str, keys: Keys, begin: Begin, events: Journal
    ) -> None:
        options = config.lighthouse
        run = instance.run_id(protocol.mac(keys.worker, "run", config.job.name)[:16])
        self._prefix = f"{prefix(config.job.name)}/{run}"
        self._etcd = Etcd.with_secrets(options.etcd, options.etcd_lease_s / 2)
        self._election = Election(self._etcd, f"{self._prefix}/leader", url, options.etcd_lease_s)
        self._database = SqliteDatabase(instance.database_path, note=partial(events.event, source="lighthouse"))
        self._token = keys.worker
        self._trusted = tls.client(config.network)
        self._instance = instance
        self._url = url
        self._begin = begin
        self._events = events
        self._service: Service | None = None
        self._journal: JobJournal | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self.app = SwitchableApp(lambda: self._election.leader)
        self.deposed = ""  # why it does not lead any more

    def begin(self, end: Callable[[], None]) -> None:
        """Write where it listens, and stand by, now that the port is open. Does not wait.

        Args:
            end: Called once when this lighthouse is deposed or has failed.
        """

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._conclude(task.exception())
                end()

        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(ended)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._journal is not None:
            self._journal.close()
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """Give up the lead, so that another lighthouse can lead at once.

        Raises the error that made this one fail, if it failed.
        """
        self._election.resign()
        self._etcd.close()
        self._database.close()
        if self._failed is not None:
            raise self._failed

    async def _run(self) -> None:
        trusted = True if self._trusted is None else self._trusted
        async with httpx.AsyncClient(verify=trusted, trust_env=False, follow_redirects=False) as client:
            mirror = JournalMirror(self._database, lambda: self._election.leader, self._token, client)
            mirroring = asyncio.create_task(mirror.run())
            naming = asyncio.create_task(self._keep_written(self._instance.named))
            try:
                await self._election.win()
            finally:
                mirroring.cancel()
                naming.cancel()
                await asyncio.gather(mirroring, naming, return_exceptions=True)
        store = EtcdStore(self._etcd, self._prefix, self._election)
        self._service, self._journal, app = self._begin(store, self._database, GAP)
        self._elected(self._service.state, self._journal)
        self._journal.begin()
        self.app.lead(app)
        telling = asyncio.create_task(self._keep_written(self._instance.leads))
        keeping = asyncio.create_task(self._election.keep())
        try:
            while not keeping.done() and not store.deposed:
                await asyncio.wait({keeping}, timeout=POLL_S)
            self.deposed = store.deposed or keeping.result()
        finally:
            keeping.cancel()
            telling.cancel()
        self._note("LighthouseDeposed", f"it does not lead any more: {self.deposed}", {})

    async def _keep_written(self, write: Callable[[str], None]) -> None:
        """Write to the run directory again and again, on a thread: if that fails or hangs, nothing else does."""
        failed = False
        while True:
            try:
                await asyncio.to_thread(write, self._url)
                failed = False
            except OSError as error:
                if not failed:
                    _log.error("where %s listens is not written: %s", self._url, error)
                failed = True
            await asyncio.sleep(POLL_S)

    def _elected(self, state: LighthouseState, journal: JobJournal) -> None:
        reason = f"it leads: fence {self._election.revision}, term {state.term}"
        row = self._note("LighthouseElected", reason, {"term": state.term, "epoch": state.epoch})
        journal.note([row])

    def _note(self, event: str, reason: str, facts: dict[str, object]) -> dict[str, Any]:
        """Write an event to events.jsonl and to the log; return its row."""
        row = {"t": time.time(), "event": event, "source": "lighthouse", "reason": reason, "url": self._url}
        row |= facts
        self._events(row)
        _log.info("%s: %s", self._url, reason)
        return row

    def _conclude(self, error: BaseException | None) -> None:
        """Note why `_run` ended: deposed, so that a fresh start may help, or failed."""
        if isinstance(error, FtHsdpError) and error.exit_code == EXIT_RETRYABLE:
            self.deposed = str(error)  # a fresh start may help
        else:
            self._failed = error


class SwitchableApp:
    """The application of a lighthouse: it names the leader until `lead` is called."""

    def __init__(self, leader: Callable[[], str | None]) -> None:
        self._leader = leader  # returns its URL, or None while there is none
        self._app: ASGIApp | None = None  # while it leads

    def lead(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/healthz":
            role, date = "standby" if self._app is None else "leader", {"date": formatdate(usegmt=True)}
            await JSONResponse({"role": role}, headers=date)(scope, receive, send)
        else:
            await (self._app or self._standby(scope["path"]))(scope, receive, send)

    def _standby(self, path: str) -> Response:
        leader = self._leader()
        if path == "/" and leader is not None:
            return RedirectResponse(f"{leader}/", 307)  # a key behind # goes along
        detail = f"this lighthouse stands by; {'another one leads' if leader else 'none leads now'}"
        return JSONResponse({"detail": detail, "leader": leader}, 503)
