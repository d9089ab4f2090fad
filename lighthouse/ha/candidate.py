"""Candidate: one of several lighthouses, from standing by to leading, and to the loss of the lead.

A lighthouse that loses the lead is to start over as a new program: nothing that it remembers can be told any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from ft_hsdp import protocol, tls
from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_RETRYABLE, FtHsdpError
from ft_hsdp.jsonl import Journal
from lighthouse.ha.election import POLL_S, Election, EtcdStore
from lighthouse.ha.etcd import Etcd
from lighthouse.ha.instance import InstanceLock
from lighthouse.ha.replication import JournalMirror
from lighthouse.ha.standby import Standby, SwitchableApp
from lighthouse.http.auth import Keys, view_key
from lighthouse.journal.database import Database, SqliteDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.quorum.state import LighthouseState
from lighthouse.runtime import LeaderRuntime
from lighthouse.service import Service
from lighthouse.store import Store

GAP = 10_000  # numbers of rows that a new leader leaves out: the old one may have given some that are lost

Begin = Callable[[Store, Database, int], LeaderRuntime]
"""Makes the lighthouse on a store and a journal, of which it leaves out so many numbers. Raises FtHsdpError."""

_log = logging.getLogger(__name__)


class Candidate:
    """Stands by at `url`, then leads: `begin` makes what is served then. Raises ConfigError."""

    def __init__(
        self, config: Config, seat: InstanceLock, url: str, keys: Keys, begin: Begin, journal: Journal
    ) -> None:
        options = config.lighthouse
        run = seat.run_id(protocol.mac(keys.worker, "run", config.job.name)[:16])
        self._prefix = f"{options.etcd_prefix.rstrip('/')}/{config.job.name}/{run}"
        self._etcd = Etcd.with_secrets(options.etcd, options.etcd_lease_s / 2)
        self._election = Election(self._etcd, f"{self._prefix}/leader", url, options.etcd_lease_s)
        self._archive = SqliteDatabase(seat.archive, options.keep_rows)
        self._key = view_key(keys.worker)
        self._trusted = tls.client(config.network)
        self._seat = seat
        self._url = url
        self._begin = begin
        self._journal = journal
        self._service: Service | None = None
        self._chronicle: JobJournal | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed: BaseException | None = None
        self.app = SwitchableApp(Standby(lambda: self._election.leader))
        self.deposed = ""  # why it does not lead any more

    def begin(self, end: Callable[[], None]) -> None:
        """The port is open: say where, and stand by. `end` is called once it is deposed, or failed."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._conclude(task.exception())
                end()

        self._seat.named(self._url)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(ended)

    def close(self) -> None:
        """Answer what is open, and take no more."""
        if self._service is not None:
            self._service.close()
        if self._chronicle is not None:
            self._chronicle.close()
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """Let another one lead at once. Raises what made this one fail."""
        self._election.resign()
        self._etcd.close()
        self._archive.close()
        if self._failed is not None:
            raise self._failed

    async def _run(self) -> None:
        trusted = True if self._trusted is None else self._trusted
        async with httpx.AsyncClient(verify=trusted, trust_env=False, follow_redirects=False) as client:
            mirror = JournalMirror(self._archive, lambda: self._election.leader, self._key, client)
            mirroring = asyncio.create_task(mirror.run())
            try:
                await self._election.win()
            finally:
                mirroring.cancel()
                await asyncio.gather(mirroring, return_exceptions=True)
        store = EtcdStore(self._etcd, self._prefix, self._election)
        self._service, self._chronicle, app = self._begin(store, self._archive, GAP)
        self._elected(self._service.state, self._chronicle)
        self._chronicle.begin()
        self.app.lead(app)
        keeping = asyncio.create_task(self._election.keep())
        try:
            while not keeping.done() and not store.deposed:
                self._seat.leads(self._url)
                await asyncio.wait({keeping}, timeout=POLL_S)
            self.deposed = store.deposed or keeping.result()
        finally:
            keeping.cancel()
        self._note("LighthouseDeposed", f"it does not lead any more: {self.deposed}", {})

    def _elected(self, state: LighthouseState, chronicle: JobJournal) -> None:
        reason = f"it leads: fence {self._election.revision}, term {state.term}"
        row = self._note("LighthouseElected", reason, {"term": state.term, "epoch": state.epoch})
        chronicle.note([row])

    def _note(self, event: str, reason: str, facts: dict[str, object]) -> dict[str, Any]:
        row = {"t": time.time(), "event": event, "source": "lighthouse", "reason": reason, "url": self._url}
        row |= facts
        self._journal(row)
        _log.info("%s: %s", self._url, reason)
        return row

    def _conclude(self, error: BaseException | None) -> None:
        if isinstance(error, FtHsdpError) and error.exit_code == EXIT_RETRYABLE:
            self.deposed = str(error)  # a fresh start may help
        else:
            self._failed = error
