"""HTTP/1.1 as a client that only measures needs it: requests made beforehand, answers cut out of a stream."""

from __future__ import annotations

from ft_hsdp.errors import Retryable

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
