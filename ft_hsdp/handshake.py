"""How the two ends of a connection prove to each other that they know the job's token.

All listeners of a job begin every connection with it: those of rings, hubs, the ranks' stores, state servers, and
the agents' local sockets. Three frames of fixed size pass before the first message:

    listener -> caller    MAGIC, 32 random bytes
    caller -> listener    MAGIC, the purpose (1 byte), 32 random bytes, HMAC("caller")
    listener -> caller    HMAC("listener")

Both MACs are HMAC-SHA256 over both nonces, under a key that is derived from the token and the purpose. A recording
is therefore useless on another connection or for another purpose, and the token never crosses the network. A
connection that does not go on like that is closed without an answer.

`dial`, `call` and `call_blocking` are the caller's side; `caller_gate` is the listener's. The *session* is a
secret of both ends of one connection: a MAC under that key binds other things to it, such as a certificate.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ft_hsdp import address, record_layer
from ft_hsdp.errors import ProtocolViolation


class Purpose(IntEnum):
    """What a connection is for. A proof for one purpose is no proof for another."""

    RING = 1
    DATA = 2
    HUB = 3
    STATE = 4
    AGENT = 5
    STORE = 6


MAGIC = b"FTH1"
NONCE = 32
MAC = hashlib.sha256().digest_size
CHALLENGE_BYTES = len(MAGIC) + NONCE
ANSWER_BYTES = len(MAGIC) + 1 + NONCE + MAC
PROOF_BYTES = MAC

TRIES = 5  # of `dial`: a busy listener closes its oldest strangers, and this caller may be one
AGAIN_S = 0.02


class HungUp(ConnectionResetError):
    """The listener closed a new connection before it proved anything: it had no room, or is closing."""


@functools.lru_cache(maxsize=64)
def _key(token: str, purpose: Purpose) -> bytes:
    return hmac.digest(token.encode(), f"ft_hsdp connection 1 {purpose.name}".encode(), "sha256")


def _mac(key: bytes, role: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + challenge + nonce, "sha256")


class Caller:
    """The caller's side of one handshake, without a socket."""

    def __init__(self, token: str, purpose: Purpose) -> None:
        self._key = _key(token, purpose)
        self._purpose = purpose
        self._nonce = os.urandom(NONCE)
        self._challenge = b""

    def answer(self, challenge: bytes) -> bytes:
        """Return what to send after the listener's first frame.

        Raises:
            ProtocolViolation: it is not such a frame.
        """
        if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(MAGIC):
            raise ProtocolViolation("what listens there does not speak this job's protocol")
        self._challenge = challenge[len(MAGIC) :]
        mac = _mac(self._key, b"caller", self._challenge, self._nonce)
        return MAGIC + bytes([self._purpose]) + self._nonce + mac

    def session(self, proof: bytes) -> bytes:
        """Return the connection's secret, 32 bytes, if the listener's proof is right.

        Raises:
            ProtocolViolation: the listener does not know the token.
        """
        if not hmac.compare_digest(proof, _mac(self._key, b"listener", self._challenge, self._nonce)):
            raise ProtocolViolation("what listens there does not know the job's token")
        return _mac(self._key, b"session", self._challenge, self._nonce)


@dataclass(frozen=True, slots=True)
class Admitted:
    purpose: Purpose  # of the connection
    proof: bytes  # the listener's, to be sent to it
    session: bytes  # the connection's secret


def admit(token: str, purposes: Sequence[Purpose], challenge: bytes, answer: bytes) -> Admitted | None:
    """Return what a caller's frame proves.

    Args:
        purposes: that are accepted here.
        challenge: the nonce that the listener sent.

    Returns:
        None if it proves nothing.
    """
    if len(answer) != ANSWER_BYTES or not answer.startswith(MAGIC) or answer[len(MAGIC)] not in purposes:
        return None
    purpose = Purpose(answer[len(MAGIC)])
    nonce, mac = answer[-NONCE - MAC : -MAC], answer[-MAC:]
    key = _key(token, purpose)
    if not hmac.compare_digest(mac, _mac(key, b"caller", challenge, nonce)):
        return None
    return Admitted(purpose, _mac(key, b"listener", challenge, nonce), _mac(key, b"session", challenge, nonce))


async def call(sock: socket.socket, token: str, purpose: Purpose) -> bytes:
    """Do the caller's side on a connected, non-blocking socket, and return the connection's secret.

    Until cancelled.

    Raises:
        HungUp: the listener closed the connection first.
        ProtocolViolation: what listens there does not know the token.
    """
    loop, caller = asyncio.get_running_loop(), Caller(token, purpose)
    try:
        await loop.sock_sendall(sock, caller.answer(await record_layer.exactly(sock, CHALLENGE_BYTES)))
        return caller.session(await record_layer.exactly(sock, PROOF_BYTES))
    except (ConnectionResetError, BrokenPipeError) as error:
        raise HungUp("it closed the connection before the handshake") from error


def call_blocking(sock: socket.socket, token: str, purpose: Purpose) -> bytes:
    """Do the same as `call` on a blocking socket, with the timeout that it has.

    Raises:
        HungUp: the listener closed the connection first.
        ProtocolViolation: what listens there does not know the token.
        OSError: it took too long.
    """
    caller = Caller(token, purpose)

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))
            if not part:
                raise HungUp("it closed the connection before the handshake")
            data += part
        return data

    try:
        sock.sendall(caller.answer(exactly(CHALLENGE_BYTES)))
        return caller.session(exactly(PROOF_BYTES))
    except (ConnectionResetError, BrokenPipeError) as error:
        raise HungUp(str(error)) from error


async def secured(sock: socket.socket, session: bytes, purpose: Purpose, *, listening: bool) -> socket.socket:
    """Return what a connection becomes behind the handshake, before its first message. Both ends call it.

    A connection that is to be encrypted is so from here on; a data connection from when its two ends call
    `record_layer.agree`.

    Args:
        sock: non-blocking.
        session: the secret of both ends.
        listening: whether this is the listener's end.

    Returns:
        The socket to use in place of `sock`.

    Raises:
        OSError: the other end is gone, or does not do the same.
    """
    if purpose is Purpose.DATA:
        return record_layer.sealable(sock, session, listening=listening)
    return await record_layer.spliced(sock, session, listening=listening)


async def dial(where: str, token: str, purpose: Purpose) -> socket.socket:
    """Return a non-blocking connection on which both ends have proved the token; until cancelled.

    A listener that closes it before it has proved anything may be crowded by strangers: it is called again, up
    to `TRIES` times.

    Args:
        where: "host:port", or a local socket's name behind a zero byte.

    Raises:
        OSError: the listener cannot be reached, or closes every connection.
        ProtocolViolation: what listens there does not know the token, or `where` is no address.
    """
    loop = asyncio.get_running_loop()
    for number in range(1, TRIES + 1):
        sock, target = _socket(where)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, target)
            return await secured(sock, await call(sock, token, purpose), purpose, listening=False)
        except HungUp:
            sock.close()
            if number == TRIES:
                raise
            await asyncio.sleep(AGAIN_S * 2**number)
        except BaseException:
            sock.close()
            raise
    raise AssertionError


def _socket(where: str) -> tuple[socket.socket, Any]:
    """Return a new socket that can be connected to `where`, and what to connect it to."""
    if where.startswith("\0"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), where
    try:
        host, port = address.split(where)
    except ValueError as error:
        raise ProtocolViolation(str(error)) from None
    return socket.socket(address.family(host), socket.SOCK_STREAM), (host, port)
