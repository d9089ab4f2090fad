"""Many clients of one lighthouse in one thread, that all ask at once, without a client's cost in the figure.

Requests are made before the clock starts, and an answer counts when its last byte is there. So both protocols are
spoken here with as little as that needs: HTTP/1.1 to our lighthouse, and gRPC to torchft's, which is Protocol
Buffers in HTTP/2 frames (RFC 9113). Headers of HTTP/2 are sent as literals that no table remembers (RFC 7541,
6.2.2), so that the bytes of a request never change.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ft_hsdp.errors import Retryable

CONNECT_S = 5.0
ROUND_S = 10.0  # longest time of one round
READ = 1 << 18

NUMBER, BYTES = 0, 2  # wire types of Protocol Buffers

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
WINDOW = 2**31 - 1
FIRST_WINDOW = 65535

_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"


class Wire(Protocol):
    """The protocol of one connection."""

    def greeting(self) -> bytes:
        """Return what is sent first."""

    def request(self, message: bytes) -> bytes:
        """Return the bytes of a request."""

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came; return the answer once it is whole, and what must be sent now.

        Raises:
            Retryable: It is no answer.
        """


class Http1:
    """Keep-alive requests to ``path`` with the bearer ``token``."""

    def __init__(self, host: str, path: str, token: str) -> None:
        lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json")
        secret = f"Authorization: Bearer {token}"
        self._head = "\r\n".join([*lines, secret, "Content-Length: "]).encode()
        self._received = bytearray()

    def greeting(self) -> bytes:
        """Return nothing: the request comes first."""
        return b""

    def request(self, message: bytes) -> bytes:
        """Return the bytes of a request."""
        return self._head + str(len(message)).encode() + _END + message

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came; return the answer's body once it is whole. Raises Retryable for a status but 200."""
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


def varint(value: int) -> bytes:
    """Encode a number of Protocol Buffers: 7 bits a byte, least first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encoded(field: int, value: int | str | bytes) -> bytes:
    """Encode a field of Protocol Buffers: a number >= 0, a text or a message."""
    if isinstance(value, int):
        return varint(field << 3 | NUMBER) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Return a header field as plain text; name and value have less than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Grpc:
    """Unary calls of ``method`` ("/package.Service/Method")."""

    def __init__(self, host: str, method: str) -> None:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": host,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self._headers = b"".join(_literal(name, value) for name, value in fields.items())
        self._stream = -1
        self._received = bytearray()
        self._body = bytearray()

    def greeting(self) -> bytes:
        """Return the preface, and room for all answers to come."""
        windows = frame(SETTINGS, 0, 0, struct.pack("!HI", 4, WINDOW))
        return PREFACE + windows + frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", WINDOW - FIRST_WINDOW))

    def request(self, message: bytes) -> bytes:
        """Return the bytes of the next call."""
        self._stream += 2
        body = b"\x00" + struct.pack("!I", len(message)) + message
        opening = frame(HEADERS, END_HEADERS, self._stream, self._headers)
        return opening + frame(DATA, END_STREAM, self._stream, body)

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Take what came; return the message once its stream has ended, and what must be sent now.

        Raises:
            Retryable: The call failed.
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


class Clients:
    """So many connections to ``address``, each with a protocol of its own."""

    def __init__(self, address: tuple[str, int], count: int, wire: Callable[[], Wire]) -> None:
        self._epoll = select.epoll()
        self._socks: list[socket.socket] = []
        self._wires = [wire() for _ in range(count)]
        self._numbers: dict[int, int] = {}  # of clients by descriptor
        for number, each in enumerate(self._wires):
            sock = socket.create_connection(address, CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(each.greeting())
            self._socks.append(sock)
            self._numbers[sock.fileno()] = number
            self._epoll.register(sock, select.EPOLLIN)

    def round(self, messages: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """Have each client send its message.

        Returns:
            Seconds from the first byte of the first request to the last byte of the last answer, and the answers.

        Raises:
            Retryable: An answer does not come or is none.
        """
        requests = [wire.request(message) for wire, message in zip(self._wires, messages, strict=True)]
        answers: dict[int, bytes] = {}
        begin = time.perf_counter()
        for sock, data in zip(self._socks, requests, strict=True):
            sock.sendall(data)
        while len(answers) < len(requests):
            ready = self._epoll.poll(max(0.0, begin + ROUND_S - time.perf_counter()))
            if not ready:
                late = len(requests) - len(answers)
                raise Retryable(f"{late} of {len(requests)} answers did not come within {ROUND_S:g} s")
            for descriptor, _ in ready:
                number = self._numbers[descriptor]
                data = self._socks[number].recv(READ)
                if not data:
                    raise Retryable("the lighthouse closed a connection")
                answer, reply = self._wires[number].feed(data)
                if reply:
                    self._socks[number].sendall(reply)
                if answer is not None:
                    answers[number] = answer
        return time.perf_counter() - begin, [answers[number] for number in range(len(requests))]

    def close(self) -> None:
        """Close the connections of all clients."""
        for sock in self._socks:
            sock.close()
        self._epoll.close()
