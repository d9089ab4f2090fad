"""Line: one connection to a donor's state server; as little HTTP/1.1 as is needed, into memory that is given.

Its socket blocks without timeouts, so that the kernel fills large pieces in one call (MSG_WAITALL); whoever will
not wait any longer calls `hang_up` from another thread.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from dataclasses import dataclass

from ft_hsdp import address, handshake, record_layer
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption, ProtocolViolation
from ft_hsdp.handshake import Purpose

MAX_HEAD = 16 << 10
CONNECT_TIMEOUT = struct.pack("@ll", 5, 0)  # struct timeval
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*")
_DECIMAL = re.compile(r"\d{1,18}")


class DonorBusy(ConnectionError):
    """The donor hung up on a new connection without a word: it has no place for one more reader, or is ending."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers (lower case) of an answer, and the bytes that follow."""

    status: int
    headers: dict[str, str]
    length: int


class DonorConnection:
    """A connection to ``address`` ("host:port"), made when it is first needed."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._early = b""  # what came together with a head
        self._answered = False
        self._over = False

    def ask(self, path: str, span: tuple[int, int] | None = None) -> Answer:
        """GET ``path``, all of it or the bytes [begin, end) of ``span``. Everything before must have been read.

        Raises:
            Unanswered: it hung up before its first word.
            OSError: not connected, or not any more.
            DataCorruption: the answer is no HTTP.
        """
        sock = self._sock or self._connect()
        lines = [f"GET {path} HTTP/1.1", f"Host: {self._address}"]
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
        """The ``length`` bytes that follow.

        Raises:
            DataCorruption: they are more than ``most``, or fewer came.
        """
        if length > most:
            raise DataCorruption(f"answered with {length} bytes; allowed: {most}")
        data = bytearray(length)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the bytes that follow.

        Raises:
            ConnectionError: fewer came.
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
        """End it for good, from any thread: what waits in it raises OSError, and so does all that comes later."""
        with self._lock:
            self._over = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next question makes a new one. By the thread that uses it."""
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
            if self._over:  # while it was not yet a connection that could be shut down
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


def _begins_well(data: bytes) -> bool:
    return data[:9] == b"HTTP/1.1 "[: len(data)]


def path(state: StateId, rank: int, what: str) -> str:
    """Where a server has ``what`` ("manifest" or "data") of a rank's shard of a state."""
    return f"/v1/state/{state.commit_epoch}/{state.step}/{state.lineage}/{rank}/{what}"
