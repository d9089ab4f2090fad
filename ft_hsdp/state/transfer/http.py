"""The donor's end of the HTTP/1.1 over which one replica fetches snapshots of another (FT-HSDP §4.4).

    GET /v1/state/EPOCH/STEP/LINEAGE/RANK.RANKS/manifest   the encoded manifest (`shard_manifest.encode`)
    GET /v1/state/EPOCH/STEP/LINEAGE/RANK.RANKS/data       the packed bytes, or a range (bytes=A-B, bytes=A-)
    GET /v1/held                                           JSON list of the complete shards here (`encode_held`)
    GET /v1/blocks/STORE/SLICE/manifest                    the encoded manifest of a slice of a store of blocks
    GET /v1/blocks/STORE/SLICE/data                        its bytes, or a range

With "?for=RANK2.RANKS2" the answer is about a part of that shard: what it has for a rank of another width
(`parts`), as a stream with a manifest of its own. Without ".RANKS" the shard may be of any width.

A reader of a copy for another host sends the header "Ft-Class: copy"; its data leaves when the `Pacer` lets it.

404: the snapshot is not here (yet). 400: no such part can be made; the body says why. 416: another kind of
range, or one that is not inside. The ETag is the digest of the manifest. Both ends of a connection prove the job's
token first (`handshake`).

`StateServer` works on threads of its own. A stranger gets no HTTP, no thread and no place. The number of readers
is limited; one that finds no place is disconnected and asks again. A reader that is slow, silent or malicious
loses its place. None of them delays a training step: the bytes go from the shared memory to the socket by
sendfile. The reader's end is `donor_connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import re
import socket
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from ft_hsdp import address, caller_gate, record_layer
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.handshake import Purpose
from ft_hsdp.memory.shape import Extent
from ft_hsdp.state.pacing import CopyStream, Pacer, lower_priority
from ft_hsdp.state.shared_memory import ServedSnapshot, SnapshotSource
from ft_hsdp.state.transfer import parts, shard_manifest
from ft_hsdp.state.transfer.donor_connection import CLASS, COPY, HELD
from ft_hsdp.state.transfer.parts import ServedParts

PATH = re.compile(r"/v1/state/(\d{1,18})/(\d{1,18})/([0-9a-f]{32})/(\d{1,9})(?:\.(\d{1,9}))?/(manifest|data)")
FOR = re.compile(r"for=(\d{1,9})\.(\d{1,9})")
BLOCKS = re.compile(r"/v1/blocks/([0-9a-f]{32})/(\d{1,9})/(manifest|data)")
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
MAX_READERS = 32
MAX_READERS_PER_PEER = 16  # one address may be a whole host of ranks, but must not occupy all places
IDLE_S = 10.0  # in which a whole request has to come
WINDOW_S = 10.0  # in which a reader has to take at least
WINDOW_BYTES = 10 << 20  # bytes
TICK_S = 0.25  # between two looks at the readers' progress
SLICE = 1 << 20  # bytes of one sendfile: the precision of a reader's progress
GATHER = 32 << 10  # bytes: shorter runs of a part are read and sent together
CLOSE_S = 5.0  # to wait for the readers' threads at the end

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Reader:
    """The progress of one connection."""

    sock: socket.socket
    responding: bool = False  # an answer is being sent; False: a request is awaited
    held: bool = False  # the server itself lets it wait
    since: float = field(default_factory=time.monotonic)  # when that began, or the current window did
    taken: int = 0  # bytes of bodies that were sent since then

    def now(self, *, responding: bool) -> None:
        """Record that the server begins to send an answer, or to wait for a request."""
        self.responding, self.since, self.taken = responding, time.monotonic(), 0

    def too_slow(self, now: float) -> bool:
        """Return whether to disconnect the reader. Begins a new window if it was fast enough in the last one."""
        if self.held:
            self.since = now
            return False
        if not self.responding:
            return now - self.since > IDLE_S
        if now - self.since <= WINDOW_S:
            return False
        slow = self.taken < WINDOW_BYTES
        self.now(responding=True)
        return slow

    def hang_up(self) -> None:
        """Shut the connection down: its thread wakes up with an error or at the end of the stream."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one reader, on a thread of its own."""

    server: _Readers  # type: ignore[assignment]  # what a handler needs of one
    protocol_version = "HTTP/1.1"
    server_version = "ft_hsdp"
    sys_version = ""

    def setup(self) -> None:
        """Use blocking sockets without timeouts; `_Readers.watch` disconnects a reader that takes too long."""
        super().setup()
        address.tune(self.connection)
        self.reader = self.server.readers[self.connection]
        self._unsent = 0  # bytes that may wait in the socket; 0: any number

    @property
    def _becomes_copy(self) -> bool:
        """Whether what is read becomes a copy of another host's shard, which may wait."""
        return self.headers.get(CLASS) == COPY

    def do_GET(self) -> None:
        """Answer with a manifest, with packed bytes, or with the list of what is here."""
        self.reader.held = True  # until `_head`: what is asked for may be compared, or sealed, for minutes
        if self._becomes_copy:
            lower_priority()  # this thread answers this connection alone
        name, mark, query = self.path.partition("?")
        match, target = PATH.fullmatch(name), FOR.fullmatch(query)
        of_blocks = BLOCKS.fullmatch(self.path)
        if self.path == HELD:
            rows = shard_manifest.encode_held(self.server.source.held())
            self._head(200, len(rows), Content_Type="application/json")
            self.wfile.write(rows)
        elif of_blocks is not None:
            self._serve(of_blocks[1], int(of_blocks[2]), None, of_blocks[3] == "data", None)
        elif match is None or (mark and not query.startswith("for=")):
            self._head(404, 0)
        elif mark and not (target and int(target[1]) < int(target[2]) <= parts.MAX_WIDTH):
            self._refuse(f"no part {query[:40]}; allowed: for=RANK.RANKS, of {parts.MAX_WIDTH} ranks at most")
        else:
            state, ranks = StateId(int(match[1]), int(match[2]), match[3]), int(match[5]) if match[5] else None
            part = (int(target[1]), int(target[2])) if target else None
            self._serve(state, int(match[4]), ranks, match[6] == "data", part)
        self.reader.now(responding=False)

    def _serve(
        self, content: StateId | str, rank: int, ranks: int | None, data: bool, target: tuple[int, int] | None
    ) -> None:
        # Every reader compares the data. Who makes a copy of a shard, or reads a slice, needs no more than that.
        verify = not data and not self._becomes_copy and isinstance(content, StateId)
        while (served := self.server.source.borrow(content, rank, ranks, verify=verify)) is not None:
            if self._serve_part(served, content, rank, data, target):
                return
        self._head(404, 0)

    def _serve_part(
        self, served: ServedSnapshot, content: StateId | str, rank: int, data: bool, target: tuple[int, int] | None
    ) -> bool:
        """Answer with what is borrowed, and give it back; False: it was damaged, and is dropped."""
        try:
            part = served if target is None else self.server.parts.part(served, *target)
            if data:
                self._data(part, rank)
            else:
                self._head(200, len(part.manifest), ETag=f'"{part.digest}"')
                self.wfile.write(part.manifest)
        except parts.Uncuttable as error:
            self._refuse(str(error))
        except DataCorruption as error:
            self.server.source.drop_damaged(served, content, error)
            return False
        finally:
            self.server.source.give_back(served)
        return True

    def _data(self, part: ServedSnapshot, rank: int) -> None:
        wanted, total = self.headers.get("Range"), part.nbytes
        begin, end = 0, total
        if wanted is not None:
            match = RANGE.fullmatch(wanted)
            begin = int(match[1]) if match else total
            end = min(int(match[2]) + 1, total) if match and match[2] else total
            if begin >= end:
                return self._head(416, 0, Content_Range=f"bytes */{total}")
        about = {"ETag": f'"{part.digest}"', "Accept_Ranges": "bytes"}
        if wanted is not None:
            about["Content_Range"] = f"bytes {begin}-{end - 1}/{total}"
        self._head(200 if wanted is None else 206, end - begin, **about)
        if not self._becomes_copy:
            return self._extents(part, begin, end, None)
        with self.server.pacer.stream(rank, self._queued) as paced:
            return self._extents(part, begin, end, paced)

    def _queued(self) -> int:
        """Return how many bytes of what was sent the reader's end has not acknowledged."""
        found = fcntl.ioctl(self.connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(found, sys.byteorder)

    def _extents(self, part: ServedSnapshot, begin: int, end: int, paced: CopyStream | None) -> None:
        """Send the bytes of a part from ``begin`` to ``end``."""
        send = self._encrypted if isinstance(self.connection, record_layer.Sealed) else self._plain
        short = bytearray()
        for first, nbytes in parts.runs(part.extents or (Extent(0, 0, part.nbytes),), begin, end):
            assert first is not None, "every byte of a part lies somewhere"
            if nbytes < GATHER:
                short += os.pread(part.fd, nbytes, first)
            if short and (nbytes >= GATHER or len(short) >= SLICE):
                self._send(memoryview(bytes(short)), paced)
                short.clear()
            if nbytes >= GATHER:
                send(part.fd, first, first + nbytes, paced)
        self._send(memoryview(short), paced)

    def _send(self, data: memoryview, paced: CopyStream | None) -> None:
        at = 0
        while at < len(data):
            with self._slice(paced, len(data) - at) as most, data[at : at + most] as piece:
                self.connection.sendall(piece)
            self.reader.taken += most
            at += most

    def _plain(self, fd: int, begin: int, end: int, paced: CopyStream | None) -> None:
        """Send a range directly from the pages of the segment.

        Raises:
            ConnectionError: The segment is shorter.
        """
        while begin < end:
            with self._slice(paced, end - begin) as most:
                sent = os.sendfile(self.connection.fileno(), fd, begin, most)
            if sent == 0:
                raise ConnectionError("the segment ended")
            begin += sent
            self.reader.taken += sent

    def _encrypted(self, fd: int, begin: int, end: int, paced: CopyStream | None) -> None:
        """Encrypt a range directly from the pages of the segment, which are mapped at once and not copied."""
        base = begin - begin % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        pages = mmap.mmap(fd, end - base, flags=flags, prot=mmap.PROT_READ, offset=base)
        with pages, memoryview(pages) as segment, segment[begin - base : end - base] as wanted:
            self._send(wanted, paced)

    @contextlib.contextmanager
    def _slice(self, paced: CopyStream | None, left: int) -> Iterator[int]:
        """Yield how much to send at once, of ``left`` bytes: of a copy, when and as much as the pacer says.

        A reader without a stream (``paced``) waits for nobody.
        """
        if paced is None:
            yield min(SLICE, left)
            return
        self.reader.held = True
        most = paced.admit(left)
        self.reader.held = False
        if paced.unsent != self._unsent:
            self._unsent = paced.unsent
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._unsent)
        yield most
        paced.sent(most)

    def _refuse(self, why: str) -> None:
        line = why.encode("ascii", "replace")
        self._head(400, len(line), Content_Type="text/plain")
        self.wfile.write(line)

    def _head(self, status: int, length: int, **headers: str) -> None:
        self.reader.now(responding=True)
        self.reader.held = False
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the replica that fetches reports its fetches as events."""


class _Readers:
    """The connections that have proved the token, with a place and a thread for each."""

    def __init__(self, source: SnapshotSource, pacer: Pacer) -> None:
        self.source = source
        self.pacer = pacer
        self.parts = ServedParts()
        self.readers: dict[socket.socket, _Reader] = {}
        self._peers: Counter[str] = Counter()
        self._change = threading.Condition()

    def accept(self, sock: socket.socket, session: bytes) -> None:
        """Give a connection a place and a thread, or close it if no place is left."""
        try:
            peer = str(sock.getpeername()[0])
        except OSError:  # gone already
            sock.close()
            return
        sock = record_layer.sealable(sock, session, listening=True)
        with self._change:
            full = len(self.readers) >= MAX_READERS or self._peers[peer] >= MAX_READERS_PER_PEER
            if not full:
                self.readers[sock] = _Reader(sock)
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
        except OSError:  # the reader went away or was disconnected
            pass
        finally:
            self._give_back(sock, peer)

    def _give_back(self, sock: socket.socket, peer: str) -> None:
        sock.close()
        with self._change:
            del self.readers[sock]
            self._peers -= Counter([peer])
            self._change.notify_all()

    def watch(self) -> None:
        """Disconnect the readers that are too slow."""
        with self._change:
            now = time.monotonic()
            for reader in self.readers.values():
                if reader.too_slow(now):
                    reader.hang_up()

    def leave(self) -> None:
        """Disconnect all readers, and wait for at most CLOSE_S until they have given back what they borrowed."""
        with self._change:
            for reader in self.readers.values():
                reader.hang_up()
            self._change.wait_for(lambda: not self.readers, CLOSE_S)


class StateServer:
    """Serves the snapshots of ``source`` until closed. It has a thread of its own, which runs an event loop.

    Args:
        host: The address to listen at.
        port: The port; 0 for any.
        source: Where the snapshots are. Called from the readers' threads.
        token: The job's token, which readers must prove.
        pacer: Says when readers of copies are served; None: at once.

    Attributes:
        address: "host:port" at which it listens.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(
        self, host: str, port: int, source: SnapshotSource, token: str, pacer: Pacer | None = None
    ) -> None:
        listener = address.bound(host, port)
        listener.listen(caller_gate.BACKLOG)
        self.address = address.join(host, listener.getsockname()[1])
        self._readers = _Readers(source, pacer or Pacer())
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        serving = self._serve(listener, token)
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(serving,), name="state-server", daemon=True
        )
        self._thread.start()

    async def _serve(self, listener: socket.socket, token: str) -> None:
        gate = CallerGate(token, (Purpose.STATE,), lambda proved, sock: self._readers.accept(sock, proved.session))
        gate.watch(listener)
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._closed.wait()
            self._readers.watch()
        gate.close()

    def close(self) -> None:
        """Stop serving. Blocks for CLOSE_S at most. Nothing is borrowed afterwards."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        self._loop.close()
        self._readers.leave()
