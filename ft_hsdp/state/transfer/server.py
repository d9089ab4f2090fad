"""Server: offers complete snapshots over HTTP/1.1, on threads that share nothing with training (FT-HSDP §4.4).

    GET /v1/state/EPOCH/STEP/LINEAGE/RANK/manifest   wire.encode of the manifest
    GET /v1/state/EPOCH/STEP/LINEAGE/RANK/data       the packed bytes, or one range of them (bytes=A-B, bytes=A-)

on connections whose both ends have proved the job's token (`handshake`): strangers get no word of HTTP, no thread
and no place. 404: not here (yet). 416: another kind of range, or one that is not inside. ETag is the manifest's
digest. Who gets no place is hung up on and asks again. A reader that is slow, silent or malicious loses its place
and costs a training step nothing: bytes go from the segment to the socket by sendfile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import re
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from ft_hsdp import address, handshake, record_layer
from ft_hsdp.core.state_id import StateId
from ft_hsdp.handshake import CallerGate, Purpose
from ft_hsdp.state.transfer.source import ServedSnapshot, SnapshotSource

PATH = re.compile(r"/v1/state/(\d{1,18})/(\d{1,18})/([0-9a-f]{32})/(\d{1,9})/(manifest|data)")
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
MAX_READERS = 32
MAX_READERS_PER_PEER = 16  # one address may be a whole host of ranks, but never takes all places
IDLE_S = 10.0  # for a whole request to come
WINDOW_S = 10.0  # in which a reader takes at least
WINDOW_BYTES = 10 << 20
TICK_S = 0.25  # of the watchman
SLICE = 1 << 20  # bytes of one sendfile: how closely a reader's progress is known
CLOSE_S = 5.0

_log = logging.getLogger(__name__)


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

    server: _Readers  # type: ignore[assignment]  # what a handler needs of one
    protocol_version = "HTTP/1.1"
    server_version = "ft_hsdp"
    sys_version = ""

    def setup(self) -> None:
        """Blocking sockets, without timeouts: the watchman hangs up where it takes too long."""
        super().setup()
        address.tune(self.connection)
        self.reader = self.server.places[self.connection]

    def do_GET(self) -> None:
        """Answer with a manifest or with packed bytes."""
        self.reader.now(taking=True)
        match = PATH.fullmatch(self.path)
        if match is None:
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

    def _data(self, served: ServedSnapshot) -> None:
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
        if begin < end and isinstance(self.connection, record_layer.Sealed):
            return self._encrypted(served, begin, end)
        while begin < end:
            sent = os.sendfile(self.connection.fileno(), served.fd, begin, min(SLICE, end - begin))
            if sent == 0:
                raise ConnectionError("the segment ended")
            begin += sent
            self.reader.taken += sent
        return None

    def _encrypted(self, served: ServedSnapshot, begin: int, end: int) -> None:
        """Encrypt from the segment's pages. They are not copied, and the kernel maps all of the range at once."""
        base = begin - begin % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        pages = mmap.mmap(served.fd, end - base, flags=flags, prot=mmap.PROT_READ, offset=base)
        with pages, memoryview(pages) as segment:
            for at in range(begin - base, end - base, SLICE):
                with segment[at : min(at + SLICE, end - base)] as piece:
                    self.connection.sendall(piece)
                    self.reader.taken += len(piece)

    def _head(self, status: int, length: int, **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing: fetches are events of the replica that fetches."""


class _Readers:
    """Those who have proved the token: a place and a thread for each."""

    def __init__(self, shelf: SnapshotSource) -> None:
        self.shelf = shelf
        self.places: dict[socket.socket, _Reader] = {}
        self._peers: Counter[str] = Counter()
        self._change = threading.Condition()

    def take(self, sock: socket.socket, session: bytes) -> None:
        """Give a reader a place and a thread, unless there is none left."""
        try:
            peer = str(sock.getpeername()[0])
        except OSError:  # gone already
            sock.close()
            return
        sock = record_layer.sealable(sock, session, listening=True)
        with self._change:
            full = len(self.places) >= MAX_READERS or self._peers[peer] >= MAX_READERS_PER_PEER
            if not full:
                self.places[sock] = _Reader(sock)
                self._peers[peer] += 1
        if full:
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(sock, peer), name="state-reader", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left for it
            _log.warning("cannot serve one more reader: %s", error)
            self._give_back(sock, peer)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setblocking(True)
            record_layer.agree([sock])
            _Handler(sock, peer, self)  # type: ignore[arg-type]
        except OSError:  # it went away or was hung up on: its own affair
            pass
        finally:
            self._give_back(sock, peer)

    def _give_back(self, sock: socket.socket, peer: str) -> None:
        sock.close()
        with self._change:
            del self.places[sock]
            self._peers -= Counter([peer])
            self._change.notify_all()

    def watch(self) -> None:
        """Hang up on those who are too slow."""
        with self._change:
            now = time.monotonic()
            for reader in self.places.values():
                if reader.too_slow(now):
                    reader.hang_up()

    def leave(self) -> None:
        """Hang up on all, and wait until they have given back what they borrowed."""
        with self._change:
            for reader in self.places.values():
                reader.hang_up()
            self._change.wait_for(lambda: not self.places, CLOSE_S)


class StateServer:
    """Serves a shelf at ``host`` and ``port`` (0: a free one) until closed; ``address`` is "host:port"."""

    def __init__(self, host: str, port: int, shelf: SnapshotSource, token: str) -> None:
        listener = address.bound(host, port)
        listener.listen(handshake.BACKLOG)
        self.address = address.join(host, listener.getsockname()[1])
        self._readers = _Readers(shelf)
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        serving = self._serve(listener, token)
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(serving,), name="state-server", daemon=True
        )
        self._thread.start()

    async def _serve(self, listener: socket.socket, token: str) -> None:
        """Let readers in, and watch them."""
        gate = CallerGate(token, (Purpose.STATE,), lambda proved, sock: self._readers.take(sock, proved.session))
        gate.watch(listener)
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._closed.wait()
            self._readers.watch()
        gate.close()

    def close(self) -> None:
        """Stop serving; nothing is borrowed afterwards."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        self._loop.close()
        self._readers.leave()
