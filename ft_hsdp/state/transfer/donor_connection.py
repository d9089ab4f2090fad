"""The reader's end of the HTTP/1.1 over which one replica fetches snapshots of another (FT-HSDP §4.4).

`DonorConnection` has only as much HTTP as `http.StateServer` needs. Bodies are received into memory that the
caller provides. The socket blocks without timeouts, so that the kernel fills large pieces in one call
(MSG_WAITALL). A thread that will not wait any longer calls `DonorConnection.hang_up`. `ask_held` asks many
agents at once what they keep.
"""

from __future__ import annotations

import contextlib
import queue
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ft_hsdp import address, handshake, record_layer
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption, ProtocolViolation
from ft_hsdp.handshake import Purpose
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import Held

HELD = "/v1/held"
CLASS, COPY = "Ft-Class", "copy"  # header of a request, and its value when what is read becomes a copy elsewhere
MAX_HEAD = 16 << 10  # bytes of status line and headers
CONNECT_TIMEOUT = struct.pack("@ll", 5, 0)  # struct timeval: 5 s
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*")
_DECIMAL = re.compile(r"\d{1,18}")


def path(state: StateId, rank: int, ranks: int | None = None, part: tuple[int, int] | None = None) -> str:
    """Return the path at which a state server has a rank's shard of a state, with {} for "manifest" or "data".

    Args:
        state: The state.
        rank: The rank whose shard it is.
        ranks: Ranks of that replica; None: any number.
        part: (rank, ranks) of whom only a part of it is wanted for; None: all of it.
    """
    shard = str(rank) if ranks is None else f"{rank}.{ranks}"
    query = "" if part is None else f"?for={part[0]}.{part[1]}"
    return f"/v1/state/{state.commit_epoch}/{state.step}/{state.lineage}/{shard}/{{}}{query}"


class DonorBusy(ConnectionError):
    """The donor hung up before it answered: it has no place for another reader, or it is shutting down."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer."""

    status: int
    headers: dict[str, str]  # by name in lower case
    length: int  # bytes of the body, which follow on the connection


class DonorConnection:
    """A connection to the state server of one donor. It is made by the first `ask`.

    One thread uses it; only `hang_up` may be called from another one.

    Args:
        address: "host:port" of the state server.
        token: The job's token, which both ends prove.
        copy: What is read becomes a copy on this host, and may wait.
    """

    def __init__(self, address: str, token: str, copy: bool = False) -> None:
        self._address = address
        self._token = token
        self._copy = copy
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._early = b""  # bytes of the body that came together with the head
        self._answered = False  # this connection has been answered once
        self._over = False  # `hang_up` was called

    def ask(self, path: str, span: tuple[int, int] | None = None) -> Answer:
        """Send ``GET path`` for the bytes ``span`` (None: all), and return the head of the answer. Blocks.

        The body before must have been read. A donor that has hung up since then is called again: it does so on
        readers that ask for nothing.

        Raises:
            DonorBusy: The donor hung up before its first answer on this connection.
            ConnectionError: It hung up later.
            OSError: There is no connection, or it broke.
            DataCorruption: The answer is not HTTP, or the other end does not know the token.
        """
        if self._sock is not None and _hung_up(self._sock):
            self.close()
        sock = self._sock or self._connect()
        lines = [f"GET {path} HTTP/1.1", f"Host: {self._address}"]
        if self._copy:
            lines.append(f"{CLASS}: {COPY}")
        if span is not None:
            lines.append(f"Range: bytes={span[0]}-{span[1] - 1}")
        try:
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            answer = self._head(sock)
        except ConnectionError as error:
            if self._answered:
                raise
            self.close()
            raise DonorBusy(str(error)) from None
        self._answered = True
        return answer

    def read(self, length: int, most: int) -> bytes:
        """Return the ``length`` bytes that follow. Blocks.

        Raises:
            DataCorruption: ``length`` is above ``most``.
            OSError: The connection broke before all came.
        """
        if length > most:
            raise DataCorruption(f"answered with {length} bytes; allowed: {most}")
        data = bytearray(length)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the bytes that follow. Blocks.

        Raises:
            ConnectionError: The donor hung up before ``view`` was full.
            OSError: The connection broke before that.
        """
        assert self._sock is not None
        got = min(len(self._early), len(view))
        view[:got] = self._early[:got]
        self._early = self._early[got:]
        while got < len(view):
            n = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if n == 0:
                raise ConnectionError("hung up in the middle")
            got += n

    def hang_up(self) -> None:
        """End the connection, from any thread. Calls that wait, and all later ones, raise OSError."""
        with self._lock:
            self._over = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The next `ask` makes a new one, unless `hang_up` was called."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None
            self._early = b""

    def _connect(self) -> socket.socket:
        host, port = address.split(self._address)
        with self._lock:
            if self._over:
                raise ConnectionError("hung up")
            sock = self._sock = socket.socket(address.family(host), socket.SOCK_STREAM)
        self._answered = False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, CONNECT_TIMEOUT)
        sock.connect((host, port))
        with self._lock:
            if self._over:  # before there was a connection that `hang_up` could shut down
                raise ConnectionError("hung up")
        address.tune(sock)
        try:
            session = handshake.call_blocking(sock, self._token, Purpose.STATE)
        except handshake.HungUp as error:
            self.close()
            raise DonorBusy(str(error)) from None
        except ProtocolViolation as error:
            raise DataCorruption(str(error)) from None
        with self._lock:
            if self._over:
                raise ConnectionError("hung up")
            sock = self._sock = record_layer.sealable(sock, session, listening=False)
        record_layer.agree([sock])
        return sock

    def _head(self, sock: socket.socket) -> Answer:
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD or not _begins_well(data):
                raise DataCorruption("answered with something that is no HTTP")
            part = sock.recv(MAX_HEAD)
            if not part:
                raise ConnectionError("hung up before an answer")
            data += part
        first, *rest = data[:end].split(b"\r\n")
        self._early = data[end + 4 :]
        status = _STATUS.fullmatch(first)
        pairs = (line.decode("latin-1").partition(":") for line in rest)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = headers.get("content-length", "")
        if status is None or not _DECIMAL.fullmatch(length):
            raise DataCorruption("answered with something that is no HTTP")
        return Answer(int(status[1]), headers, int(length))


def _hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _begins_well(data: bytes) -> bool:
    return data[:9] == b"HTTP/1.1 "[: len(data)]


MAX_ASKED = 4096  # agents that are asked at most
MAX_THREADS = 256  # agents that are asked at once; one that answers nothing keeps its thread until it is hung up
GRACE_S = 0.1  # for further answers when there are enough
RETRY_S = 0.02  # before an agent that has no place for a reader is asked again


def ask_held(
    addresses: Iterable[str],
    token: str,
    deadline_s: float,
    enough: Callable[[str, Held], bool] = lambda *_: False,
) -> dict[str, Held]:
    """Ask state agents which complete shards they keep. Blocks for ``deadline_s`` at most, and for one ``enough``.

    Args:
        addresses: "host:port" of each, the most important first; `MAX_ASKED` of them at most are asked.
        token: The job's token, which they check.
        deadline_s: Seconds for all of them; `MAX_THREADS` are asked at once.
        enough: Takes each answer, the address and what is kept there, and tells whether all answers so far are all
            that is needed. Then the others have `GRACE_S` more: a host that is gone may answer nothing at all.

    Returns:
        The shards, by address, of those that have answered in time. Who is gone, late or wrong is not in it. It is
        empty if this process cannot start a thread.
    """
    until = time.monotonic() + deadline_s
    wanted = [*dict.fromkeys(addresses)][:MAX_ASKED]
    answers: queue.SimpleQueue[tuple[str, Held | None]] = queue.SimpleQueue()
    connections = {address: DonorConnection(address, token) for address in wanted}
    left = deque(connections.items())
    started = 0
    for _ in wanted[:MAX_THREADS]:
        try:
            threading.Thread(target=_ask_all, args=(left, until, answers), name="held", daemon=True).start()
        except RuntimeError:  # this process has no thread left; those that were started ask all
            break
        started += 1
    found: dict[str, Held] = {}
    for _ in wanted if started else ():
        left_s = until - time.monotonic()
        if left_s <= 0.0:
            break
        try:
            address, held = answers.get(timeout=left_s)
        except queue.Empty:
            break
        if held is not None:
            found[address] = held
            if enough(address, held):
                until = min(until, time.monotonic() + GRACE_S)
    left.clear()
    for connection in connections.values():
        connection.hang_up()  # a thread that still connects ends by itself
    return found


def _ask_all(
    left: deque[tuple[str, DonorConnection]], until: float, answers: queue.SimpleQueue[tuple[str, Held | None]]
) -> None:
    """Ask one agent after the other, until none is left that no thread asks."""
    while True:
        try:
            address, connection = left.popleft()
        except IndexError:
            return
        answers.put((address, _ask(connection, until)))


def _ask(connection: DonorConnection, until: float) -> Held | None:
    try:
        while time.monotonic() < until:
            try:
                answer = connection.ask(HELD)
            except DonorBusy:
                time.sleep(RETRY_S)
                continue
            if answer.status != 200:
                break
            return shard_manifest.decode_held(connection.read(answer.length, shard_manifest.MAX_HELD_BYTES))
    except (OSError, ValueError, DataCorruption):
        return None
    finally:
        connection.close()
    return None
