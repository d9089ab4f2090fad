"""A lighthouse as a process behind its gate (`python -m ... JSON`); prints its URL, then serves.

JSON: total (replicas), tick_s and handshake_s (of the door), network (that section of the configuration).
"""

import asyncio
import json
import logging
import socket
import sys

import uvicorn
import uvloop

from ft_hsdp import tls
from ft_hsdp.config import parse
from lighthouse.http import connections
from lighthouse.http.access import Keys, RequestGate
from lighthouse.http.app import create_app
from lighthouse.http.rate_limits import Rates
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo
from lighthouse.quorum.state import Policy
from lighthouse.service import Service
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN, MemoryStore


async def main() -> None:
    told = json.loads(sys.argv[1])
    context = tls.server(parse({"network": told.get("network", {})}).network)
    connections.HANDSHAKE_S = told.get("handshake_s", connections.HANDSHAKE_S)
    store = MemoryStore()
    state = store.load(Policy(slots=told.get("total", 2), steps=10**6))
    service = Service(state, store, TOKEN, lambda _: None, long_poll_s=1.0)
    keys = Keys(TOKEN, ADMIN)
    journal = JobJournal(MemoryDatabase(), JobInfo("job", 2, 1, 10**6))
    journal.begin()
    app = RequestGate(create_app(service, keys, journal), keys, Rates())
    guests = connections.Connections(tick_s=told.get("tick_s", connections.TICK_S))
    server = uvicorn.Server(uvicorn.Config(app, **connections.options(guests, context)))
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(f"{'http' if context is None else 'https'}://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await serving


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    uvloop.run(main())
