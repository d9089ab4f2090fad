"""gRPC as a client that only measures needs it: unary calls over HTTP/2 frames (RFC 9113) made beforehand.

Headers are sent as literals that no table remembers (RFC 7541, 6.2.2), so that a request's bytes never change.
"""

from __future__ import annotations

import struct

from ft_hsdp.errors import Retryable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
WINDOW = 2**31 - 1
FIRST_WINDOW = 65535


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
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
