"""Server: a healthy rank offers its snapshots over HTTP, on threads that share nothing with training.

GET /v1/state/EPOCH/STEP/LINEAGE/manifest and .../data, with the job's bearer token. A state that is not here (yet)
is 404. Reads take no lock, so a slow reader cannot hold up a step.
"""

from __future__ import annotations

import hmac
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ft_hsdp.core.lineage import StateId
from ft_hsdp.state import wire
from ft_hsdp.state.snapshot import Snapshots

PATH = re.compile(r"/v1/state/(\d{1,19})/(\d{1,19})/([0-9a-f]{32})/(manifest|data)")
IDLE_S = 30.0
MAX_READERS = 16


class _Handler(BaseHTTPRequestHandler):
    """One reader."""

    server: _Http
    protocol_version = "HTTP/1.1"
    server_version = "ft_hsdp"
    sys_version = ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer with a manifest or with a packed shard."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return self._answer(401, b"")
        match = PATH.fullmatch(self.path)
        if match is None:
            return self._answer(404, b"")
        state = StateId(int(match[1]), int(match[2]), match[3])
        snapshot = self.server.snapshots.get(state)
        if snapshot is None:
            return self._answer(404, b"")
        return self._answer(200, wire.encode(snapshot.manifest) if match[4] == "manifest" else snapshot.data)

    def _answer(self, status: int, body: bytes | memoryview) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing: fetches are events of the replica that fetches."""


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_READERS

    def __init__(self, host: str, snapshots: Snapshots, token: str) -> None:
        super().__init__((host, 0), _Handler)
        self.snapshots = snapshots
        self.token = token
        self._readers = threading.BoundedSemaphore(MAX_READERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a reader's thread, unless there are too many."""
        if not self._readers.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one reader."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._readers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader went away: its own affair."""


class StateServer:
    """Serves ``snapshots`` on a free port of ``host`` until closed."""

    def __init__(self, host: str, snapshots: Snapshots, token: str) -> None:
        self._http = _Http(host, snapshots, token)
        self.address = f"{host}:{self._http.server_address[1]}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.2}, name="state-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
