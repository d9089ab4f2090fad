"""A lighthouse with a made-up past: `python -m tests.support.lighthouse.page_server DATABASE PORT`.

Its application is the real one; replica 3 has a supervisor that reports.
"""

import asyncio
import socket
import sys
from pathlib import Path

import uvicorn

from ft_hsdp.config import Config
from ft_hsdp.core.restart import RestartPolicy
from ft_hsdp.protocol import ProcessReport
from lighthouse.http.access import Keys
from lighthouse.http.app import create_app
from lighthouse.journal.database import SqliteDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo
from lighthouse.placement.state import PlacementPolicy
from lighthouse.quorum.state import Policy
from lighthouse.runtime import about
from lighthouse.service import Service
from tests.support.lighthouse.lighthouse_helpers import MemoryStore
from tests.support.lighthouse.signed import gated

TOKEN = "5e" * 32
ADMIN = "ad" * 32
REPLICAS = 20
STEPS = 120_000


class _Server(uvicorn.Server):
    """Begins what needs the event loop."""

    def __init__(self, database: Path, port: int) -> None:
        job = JobInfo("pretrain", REPLICAS, 2, STEPS, config=about(Config()).config)
        self._journal = JobJournal(SqliteDatabase(database), job)
        store = MemoryStore()
        placing = PlacementPolicy(1, 2, RestartPolicy(3, 0.0))
        state = store.load(Policy(slots=REPLICAS, steps=STEPS, evict_s=600.0, placing=placing))
        self._service = Service(state, store, TOKEN, lambda row: self._journal.note([row]), name="pretrain")
        app = gated(create_app(self._service, Keys(TOKEN, ADMIN), self._journal))
        super().__init__(uvicorn.Config(app, port=port, lifespan="off", log_level="warning"))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._journal.begin()
        self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        while True:
            self._service.processes(ProcessReport({3: "3-run-0"}))
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    _Server(Path(sys.argv[1]), int(sys.argv[2])).run()
