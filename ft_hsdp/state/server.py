"""Server: offers complete snapshots over HTTP/1.1, on threads that share nothing with training (FT-HSDP §4.4).

    GET /v1/state/EPOCH/STEP/LINEAGE/RANK/manifest   wire.encode of the manifest
    GET /v1/state/EPOCH/STEP/LINEAGE/RANK/data       the packed bytes, or one range of them (bytes=A-B, bytes=A-)

with the job's bearer token. 401: wrong token. 404: not here (yet). 416: another kind of range, or one that is not
inside. ETag is the manifest's digest. 503: all places are taken, ask again. A reader that is slow, silent or
malicious loses its place and costs a training step nothing: bytes go from the segment to the socket by sendfile.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ft_hsdp.core.lineage import StateId
from ft_hsdp.state.shelf import Served, Shelf

PATH = re.compile(r"/v1/state/(\d{1,18})/(\d{1,18})/([0-9a-f]{32})/(\d{1,9})/(manifest|data)")
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
MAX_READERS = 32
MAX_READERS_PER_PEER = 16  # one address may be a whole host of ranks, but never takes all places
IDLE_S = 10.0  # for a whole request to come
WINDOW_S = 10.0  # in which a reader takes at least
WINDOW_BYTES = 10 << 20
TICK_S = 0.25  # of the watchman
CLOSE_TICK_S = 0.1
SLICE = 1 << 20  # bytes of one sendfile: how closely a reader's progress is known
CLOSE_S = 5.0
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(eq=False, slots=True)
class _Reader:
    """One connection: since when it asks or takes, and what it has taken since."""

    sock: socket.socket
    taking: bool = False
    since: float = field(default_factory=time.monotonic)
    taken: int = 0

    def now(self, *, taking: bool) -> None:
        """It begins to ask or to take."""
        self.taking, self.since, self.taken = taking, time.monotonic(), 0

    def too_slow(self, now: float) -> bool:
        """Whether it has to make room."""
        if not self.taking:
            return now - self.since > IDLE_S
        if now - self.since <= WINDOW_S:
            return False
        slow = self.taken < WINDOW_BYTES
        self.now(taking=True)
        return slow

    def hang_up(self) -> None:
        """Its thread wakes up with an error or an end of file, whatever it waits for."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """The thread of one reader."""

    server: _Http
    protocol_version = "HTTP/1.1"
    server_version = "ft_hsdp"
    sys_version = ""

    def setup(self) -> None:
        """Blocking sockets, without timeouts: the watchman hangs up where it takes too long."""
        super().setup()
        tune(self.connection)
        self.reader = self.server.readers[self.connection]

    def do_GET(self) -> None:
        """Answer with a manifest or with packed bytes."""
        self.reader.now(taking=True)
        given = self.headers.get("Authorization", "")
        match = PATH.fullmatch(self.path)
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._head(401, 0)
        elif match is None:
            self._head(404, 0)
        else:
            self._serve(StateId(int(match[1]), int(match[2]), match[3]), int(match[4]), match[5] == "data")
        self.reader.now(taking=False)

    def _serve(self, state: StateId, rank: int, data: bool) -> None:
        served = self.server.shelf.borrow(state, rank)
        if served is None:
            return self._head(404, 0)
        try:
            if data:
                return self._data(served)
            self._head(200, len(served.manifest), ETag=f'"{served.digest}"')
            self.wfile.write(served.manifest)
            return None
        finally:
            self.server.shelf.give_back(served)

    def _data(self, served: Served) -> None:
        wanted, total = self.headers.get("Range"), served.nbytes
        begin, end = 0, total
        if wanted is not None:
            match = RANGE.fullmatch(wanted)
            begin = int(match[1]) if match else total
            end = min(int(match[2]) + 1, total) if match and match[2] else total
            if begin >= end:
                return self._head(416, 0, Content_Range=f"bytes */{total}")
        about = {"ETag": f'"{served.digest}"', "Accept_Ranges": "bytes"}
        if wanted is not None:
            about["Content_Range"] = f"bytes {begin}-{end - 1}/{total}"
        self._head(200 if wanted is None else 206, end - begin, **about)
        while begin < end:
            sent = os.sendfile(self.connection.fileno(), served.fd, begin, min(SLICE, end - begin))
            if sent == 0:
                raise ConnectionError("the segment ended")
            begin += sent
            self.reader.taken += sent
        return None

    def _head(self, status: int, length: int, **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing: fetches are events of the replica that fetches."""


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, shelf: Shelf, token: str) -> None:
        super().__init__((host, port), _Handler)
        self.shelf = shelf
        self.token = token
        self.readers: dict[socket.socket, _Reader] = {}
        self._peers: Counter[str] = Counter()
        self._change = threading.Condition()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a reader's thread, unless all places are taken."""
        with self._change:
            full = len(self.readers) >= MAX_READERS or self._peers[client_address[0]] >= MAX_READERS_PER_PEER
            if not full:
                self.readers[request] = _Reader(request)
                self._peers[client_address[0]] += 1
        if full:
            with contextlib.suppress(OSError):
                request.send(_BUSY, socket.MSG_DONTWAIT)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one reader."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._change:
                del self.readers[request]
                self._peers -= Counter([client_address[0]])
                self._change.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader went away or was hung up on: its own affair."""

    def watch(self) -> None:
        """Hang up on those who are too slow."""
        with self._change:
            now = time.monotonic()
            for reader in self.readers.values():
                if reader.too_slow(now):
                    reader.hang_up()

    def leave(self) -> None:
        """Hang up on all, and wait until they have given back what they borrowed."""
        with self._change:
            for reader in self.readers.values():
                reader.hang_up()
            self._change.wait_for(lambda: not self.readers, CLOSE_S)


class StateServer:
    """Serves a shelf at ``host`` and ``port`` (0: a free one) until closed; ``address`` is "host:port"."""

    def __init__(self, host: str, port: int, shelf: Shelf, token: str) -> None:
        self._http = _Http(host, port, shelf, token)
        self.address = f"{host}:{self._http.server_address[1]}"
        self._closed = threading.Event()
        serve = self._http.serve_forever
        self._threads = [
            threading.Thread(target=serve, args=(CLOSE_TICK_S,), name="state-server", daemon=True),
            threading.Thread(target=self._watch, name="state-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(TICK_S):
            self._http.watch()

    def close(self) -> None:
        """Stop serving; nothing is borrowed afterwards."""
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._http.leave()
        for thread in self._threads:
            thread.join()


def tune(sock: socket.socket) -> None:
    """No delay, and on loopback no pacing: the congestion control of a network halves the speed there."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getpeername()[0].startswith("127."):
        with contextlib.suppress(OSError):  # the kernel's default serves too
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
