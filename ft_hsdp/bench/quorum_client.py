"""The little of Protocol Buffers that a member of torchft's quorum says and hears.

HTTP/1.1 as a client that only measures needs it: requests made beforehand, answers cut out of a stream.

gRPC as a client that only measures needs it: unary calls over HTTP/2 frames (RFC 9113) made beforehand.

Headers are sent as literals that no table remembers (RFC 7541, 6.2.2), so that a request's bytes never change.

Herd: many clients of one server, in one process and one thread, that all ask at once.

Both sides of a comparison get the same herd: requests are made before the clock starts, and an answer counts
when its last byte is there.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ft_hsdp.errors import Retryable

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """A number, 7 bits a byte, least first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """A field that holds a number >= 0."""
    return varint(field << 3 | VARINT) + varint(value)


def encoded_text(field: int, value: str | bytes) -> bytes:
    """A field that holds text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def counted(message: bytes, outer: int, inner: int) -> int:
    """How many fields `inner` are in the field `outer` of `message`."""
    return sum(1 for body in _fields(message, outer) for _ in _fields(body, inner))


def _fields(message: bytes, wanted: int) -> list[bytes]:
    """The contents of all fields `wanted` that hold bytes."""
    found, at = [], 0
    while at < len(message):
        key, at = _read(message, at)
        kind = key & 7
        if kind == VARINT:
            _, at = _read(message, at)
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if size is None:
            size, at = _read(message, at)
        if key >> 3 == wanted:
            found.append(message[at : at + size])
        at += size
    return found


def _read(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"


class Http1:
    """One connection's side of keep-alive requests to `path` with the bearer `token`."""

    def __init__(self, host: str, path: str, token: str) -> None:
        lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json")
        secret = f"Authorization: Bearer {token}"
        self._head = "\r\n".join([*lines, secret, "Content-Length: "]).encode()
        self._received = bytearray()

    def greeting(self) -> bytes:
        """Nothing is said first."""
        return b""

    def request(self, message: bytes) -> bytes:
        """The bytes that ask."""
        return self._head + str(len(message)).encode() + _END + message

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came: the answer's body once it is whole, and what must be sent now.

        Raises Retryable for an answer that is none.
        """
        self._received += data
        end = self._received.find(_END)
        if end < 0:
            return None, b""
        head = bytes(self._received[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise Retryable(f"the lighthouse answered {bytes(self._received[:200])!r}")
        where = head.index(_LENGTH) + len(_LENGTH)
        length = int(head[where:].split(b"\r\n", 1)[0])
        whole = end + len(_END) + length
        if len(self._received) < whole:
            return None, b""
        body = bytes(self._received[end + len(_END) : whole])
        del self._received[:whole]
        return body, b""


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
WINDOW = 2**31 - 1
FIRST_WINDOW = 65535


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one HTTP/2 frame."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field as plain text; name and value have less than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Grpc:
    """One connection's side of unary calls of `method` ("/package.Service/Method")."""

    def __init__(self, host: str, method: str) -> None:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": host,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self._headers = b"".join(literal(name, value) for name, value in fields.items())
        self._stream = -1
        self._received = bytearray()
        self._body = bytearray()

    def greeting(self) -> bytes:
        """The preface, and room for all answers to come."""
        windows = frame(SETTINGS, 0, 0, struct.pack("!HI", 4, WINDOW))
        return PREFACE + windows + frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", WINDOW - FIRST_WINDOW))

    def request(self, message: bytes) -> bytes:
        """The bytes of the next call."""
        self._stream += 2
        body = b"\x00" + struct.pack("!I", len(message)) + message
        opening = frame(HEADERS, END_HEADERS, self._stream, self._headers)
        return opening + frame(DATA, END_STREAM, self._stream, body)

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came: the answer's message once its stream has ended, and what must be sent now.

        Raises Retryable for a call that failed.
        """
        self._received += data
        reply = bytearray()
        answer = None
        while len(self._received) >= 9:
            length = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + length:
                break
            kind, flags, stream = struct.unpack("!BBI", self._received[3:9])
            payload = bytes(self._received[9 : 9 + length])
            del self._received[: 9 + length]
            if kind == DATA:
                self._body += payload
                reply += frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", length)) if length else b""
            elif kind in (SETTINGS, PING) and not flags & ACK:
                reply += frame(kind, ACK, 0, payload if kind == PING else b"")
            elif kind in (RST_STREAM, GOAWAY):
                raise Retryable(f"the call failed: HTTP/2 frame {kind}, {payload[:100]!r}")
            if kind in (DATA, HEADERS) and flags & END_STREAM and stream == self._stream:
                if len(self._body) < 5:
                    raise Retryable(f"the call failed: {payload[:200]!r}")
                answer = bytes(self._body[5:])
                self._body.clear()
        return answer, bytes(reply)


CONNECT_S = 5.0
ROUND_S = 10.0  # longest time of one round
READ = 1 << 18


class Wire(Protocol):
    """The protocol of one connection."""

    def greeting(self) -> bytes:
        """What is said first."""

    def request(self, message: bytes) -> bytes:
        """The bytes that ask."""

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came: the answer once it is whole, and what must be sent now."""


class ClientHerd:
    """`count` connections to `address`, each with a wire of its own."""

    def __init__(self, address: tuple[str, int], count: int, wire: Callable[[], Wire]) -> None:
        self._epoll = select.epoll()
        self._socks: list[socket.socket] = []
        self._wires = [wire() for _ in range(count)]
        self._who: dict[int, int] = {}
        for number, each in enumerate(self._wires):
            sock = socket.create_connection(address, CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(each.greeting())
            self._socks.append(sock)
            self._who[sock.fileno()] = number
            self._epoll.register(sock, select.EPOLLIN)

    def round(self, messages: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Seconds from the first byte of the first request to the last byte of the last answer, and the answers.

        Raises Retryable where an answer does not come or is none.
        """
        requests = [wire.request(message) for wire, message in zip(self._wires, messages, strict=True)]
        answers: list[bytes | None] = [None] * len(requests)
        open_ = len(requests)
        begin = time.perf_counter()
        for sock, data in zip(self._socks, requests, strict=True):
            sock.sendall(data)
        while open_:
            ready = self._epoll.poll(max(0.0, begin + ROUND_S - time.perf_counter()))
            if not ready:
                raise Retryable(f"{open_} of {len(requests)} answers did not come within {ROUND_S:g} s")
            for descriptor, _ in ready:
                number = self._who[descriptor]
                data = self._socks[number].recv(READ)
                if not data:
                    raise Retryable("the lighthouse closed a connection")
                answer, reply = self._wires[number].feed(data)
                if reply:
                    self._socks[number].sendall(reply)
                if answer is not None:
                    answers[number] = answer
                    open_ -= 1
        return time.perf_counter() - begin, [answer for answer in answers if answer is not None]

    def close(self) -> None:
        """Close all connections of the client."""
        for sock in self._socks:
            sock.close()
        self._epoll.close()
