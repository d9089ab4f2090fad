"""Sends and receives the small control messages between members; sets the options of their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from ft_hsdp import address, protocol

FAREWELL_S = 0.5  # how long `hang_up` waits for the peer to close
LOOPBACK_BUFFER = 256 * 1024  # bytes


async def send(sock: socket.socket, message: object) -> None:
    """Send one message; wait until the kernel has taken all of it."""
    await asyncio.get_running_loop().sock_sendall(sock, protocol.frame(message))


def say(sock: socket.socket, message: object) -> None:
    """Send one small message now or not at all: the peer may be gone, and the caller does not wait for it."""
    with contextlib.suppress(OSError):
        sock.send(protocol.frame(message), socket.MSG_DONTWAIT)


async def receive(sock: socket.socket, *expected: type, heard: Callable[[], None] = lambda: None) -> object | None:
    """Receive one message.

    Args:
        sock: a non-blocking socket.
        *expected: the message types that are allowed here.
        heard: called whenever a part of the message arrives.

    Returns:
        The message; None at the end of the stream.

    Raises:
        ProtocolViolation: the message is too large or not of an expected type.
        OSError: the connection broke.
    """
    head = await _exactly(sock, protocol.LENGTH.size, heard)
    if head is None:
        return None
    body = await _exactly(sock, protocol.frame_length(head), heard)
    return None if body is None else protocol.decode(body, *expected)


async def _exactly(sock: socket.socket, count: int, heard: Callable[[], None]) -> bytes | None:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            return None
        heard()
        data += part
    return bytes(data)


async def hang_up(sock: socket.socket) -> None:
    """Close a connection once the peer has closed its end, or after `FAREWELL_S`.

    An immediate close could reset the connection and lose the last message.
    """
    try:
        with contextlib.suppress(OSError, TimeoutError):
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(FAREWELL_S):
                while await asyncio.get_running_loop().sock_recv(sock, 4096):
                    pass
    finally:
        sock.close()


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Set the options of a connection: no delay, and an error if sent bytes stay unacknowledged for `timeout_s`.

    On loopback also choose what suits memory instead of a network: no pacing, and buffers small enough that each
    byte stays in the cache between its two copies. Unix sockets stay as they are.
    """
    if sock.family == socket.AF_UNIX:
        return
    address.tune(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
    if address.local(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


def blocking(sock: socket.socket, timeout_s: float) -> socket.socket:
    """Make `sock` blocking, with `timeout_s` as the kernel's deadline for each receive and send; return it.

    Python's own timeout would make the socket non-blocking, and MSG_WAITALL would have no effect.
    """
    sock.setblocking(True)
    deadline = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
    return sock
