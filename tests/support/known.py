"""The handshake for tests that talk to a listener, or stand in for one, by hand."""

import asyncio
import http.client
import os
import socket
from contextlib import closing

from ft_hsdp import address, handshake
from ft_hsdp.handshake import Purpose


class KnownConnection(http.client.HTTPConnection):
    """HTTP behind the handshake of a state server."""

    def __init__(self, where: str, token: str, timeout: float = 30.0) -> None:
        host, port = address.split(where)
        super().__init__(host, port, timeout=timeout)
        self._token = token

    def connect(self) -> None:
        super().connect()
        handshake.call_blocking(self.sock, self._token, Purpose.STATE)


def get(
    where: str, path: str, token: str, span: str | None = None, method: str = "GET"
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers that a state server answers to one request."""
    with closing(KnownConnection(where, token)) as connection:
        connection.request(method, path, headers={} if span is None else {"Range": span})
        response = connection.getresponse()
        return response.status, response.read(), dict(response.headers)


def known(where: str, token: str, purpose: Purpose, timeout: float = 30.0) -> socket.socket:
    """A blocking connection whose both ends know the token."""
    sock = socket.create_connection(address.split(where), timeout=timeout)
    try:
        handshake.call_blocking(sock, token, purpose)
    except BaseException:
        sock.close()
        raise
    return sock


async def streams(where: str, token: str, purpose: Purpose) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The same for asyncio."""
    return await asyncio.open_connection(sock=await handshake.dial(where, token, purpose))


def admit(sock: socket.socket, token: str, purpose: Purpose) -> bool:
    """Be the listener's end on a blocking socket; whether the caller knows the token."""
    challenge = os.urandom(handshake.NONCE)
    sock.sendall(handshake.MAGIC + challenge)
    proved = handshake.admit(token, (purpose,), challenge, sock.recv(handshake.ANSWER_BYTES))  # sent as one
    if proved is not None:
        sock.sendall(proved.proof)
    return proved is not None


async def admit_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, purpose: Purpose
) -> None:
    """The same for asyncio, for a caller that knows the token."""
    challenge = os.urandom(handshake.NONCE)
    writer.write(handshake.MAGIC + challenge)
    proved = handshake.admit(token, (purpose,), challenge, await reader.readexactly(handshake.ANSWER_BYTES))
    assert proved is not None
    writer.write(proved.proof)
