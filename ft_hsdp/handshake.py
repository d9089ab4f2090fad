"""How the two ends of a connection prove to each other that they know the job's token.

All listeners of a job begin every connection with it: those of rings, hubs, the ranks' stores, state servers, and
the agents' local sockets. Three frames of fixed size pass before the first message:

    listener -> caller    MAGIC, 32 random bytes
    caller -> listener    MAGIC, the purpose (1 byte), 32 random bytes, HMAC("caller")
    listener -> caller    HMAC("listener")

Both MACs are HMAC-SHA256 over both nonces, under a key that is derived from the token and the purpose. A recording
is therefore useless on another connection or for another purpose, and the token never crosses the network. A
connection that does not go on like that is closed without an answer.

`CallerGate` is the listener's side. It bounds strangers (connections that have not proved the token) in number,
bytes and time. `dial`, `call` and `call_blocking` are the caller's. The *session* is a secret of both ends of one
connection: a MAC under that key binds other things to the connection, such as a certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ft_hsdp import address, record_layer
from ft_hsdp.errors import LocalResourceError, ProtocolViolation, exhausted


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

MAX_STRANGERS = 64
MAX_STRANGERS_PER_ADDRESS = 32
HELLO_S = 5.0
PAUSE_S = 0.05  # pause of the listener when no descriptor is left for one more connection
ACCEPT_TRIES = 20  # failures to accept in a row, after which the owner is told
BACKLOG = 128
TRIES = 5  # of `dial`: a busy listener closes its oldest strangers, and this caller may be one
AGAIN_S = 0.02
TOLD_EVERY_S = 60.0

_log = logging.getLogger(__name__)


_hello_s = HELLO_S


def use(hello_s: float) -> None:
    """Set how many seconds this process's listeners wait for a caller's proof, and again for its first message."""
    global _hello_s
    _hello_s = hello_s


def hello_s() -> float:
    """Return what `use` was told last, in seconds."""
    return _hello_s


class HungUp(ConnectionResetError):
    """The listener closed a new connection before it proved anything: it had no room, or is closing."""


@functools.lru_cache(maxsize=64)
def _key(token: str, purpose: Purpose) -> bytes:
    return hmac.digest(token.encode(), f"ft_hsdp connection 1 {purpose.name}".encode(), "sha256")


def _mac(key: bytes, role: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + challenge + nonce, "sha256")


class Caller:
    """The caller's side of one handshake, without a socket.

    Args:
        token: the job's token.
        purpose: of the connection.
    """

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
    """A caller that knows the token."""

    purpose: Purpose  # of the connection
    proof: bytes  # the listener's, to be sent to it
    session: bytes  # the connection's secret


def admit(token: str, purposes: Sequence[Purpose], challenge: bytes, answer: bytes) -> Admitted | None:
    """Return what a caller's frame proves.

    Args:
        token: the job's token.
        purposes: that are accepted here.
        challenge: the nonce that the listener sent.
        answer: the caller's frame.

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

    async def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await loop.sock_recv(sock, count - len(data))
            if not part:
                raise HungUp("it closed the connection before the handshake")
            data += part
        return data

    try:
        await loop.sock_sendall(sock, caller.answer(await exactly(CHALLENGE_BYTES)))
        return caller.session(await exactly(PROOF_BYTES))
    except (ConnectionResetError, BrokenPipeError) as error:
        raise HungUp(str(error)) from error


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
        purpose: of the connection.
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

    A listener that closes it before it has proved anything may be crowded by strangers: it is called again, up to
    `TRIES` times.

    Args:
        where: "host:port", or a local socket's name behind a zero byte.
        token: the job's token.
        purpose: of the connection.

    Returns:
        A socket, encrypted if it is to be.

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


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has not proved the token yet."""

    sock: socket.socket
    origin: str
    challenge: bytes
    until: float
    got: bytearray = field(default_factory=bytearray)


class CallerGate:
    """Lets callers in at listening sockets, on the running loop.

    A stranger has `hello_s` seconds and `ANSWER_BYTES` bytes. Of more than `MAX_STRANGERS`, or of more than
    `MAX_STRANGERS_PER_ADDRESS` of one address, the oldest makes room. No stranger costs a thread or a task.

    Args:
        token: the job's token.
        purposes: that are accepted.
        admitted: called with what was proved and the connection, non-blocking, which it owns from then on. It must
            neither block nor raise.
        failed: called when this process could accept no caller `ACCEPT_TRIES` times in a row, because it lacks a
            resource. The gate goes on trying.
    """

    def __init__(
        self,
        token: str,
        purposes: Sequence[Purpose],
        admitted: Callable[[Admitted, socket.socket], None],
        failed: Callable[[LocalResourceError], None] = lambda error: None,
    ) -> None:
        self._token = token
        self._purposes = purposes
        self._admitted = admitted
        self._failed = failed
        self._listeners: list[socket.socket] = []
        self._strangers: dict[_Stranger, None] = {}  # oldest first
        self._origins: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._unknown = 0
        self._told = -TOLD_EVERY_S

    @property
    def strangers(self) -> int:
        """How many connections have not proved the token yet."""
        return len(self._strangers)

    def watch(self, listener: socket.socket) -> None:
        """Let callers in at `listener`, which is bound and belongs to the gate from now on."""
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop listening, and close the connections of strangers."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for stranger in list(self._strangers):
            self._drop(stranger)
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self, listener: socket.socket) -> None:
        """Accept one caller per turn of the loop, so that other work on the loop has its turn between two."""
        try:
            sock, name = listener.accept()
        except OSError as error:
            if (lacking := exhausted(error)) is not None:
                self._lacks(lacking, listener)
            return  # or a caller that is gone already
        self._failures = 0
        stranger = _Stranger(sock, _origin(sock, name), os.urandom(NONCE), time.monotonic() + _hello_s)
        self._make_room(stranger.origin)
        self._strangers[stranger] = None
        self._origins[stranger.origin] += 1
        sock.setblocking(False)
        try:
            sock.send(MAGIC + stranger.challenge)
        except OSError:
            self._drop(stranger)
            return
        self._read(stranger)  # a caller that sends before it has read the challenge is seen at once
        if stranger not in self._strangers:
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._read, stranger)
        if self._timer is None:
            self._timer = loop.call_later(_hello_s, self._expire)

    def _make_room(self, origin: str) -> None:
        """Close the oldest stranger of an address that has its share, and the oldest of all if too many."""
        if self._origins[origin] >= MAX_STRANGERS_PER_ADDRESS:
            self._drop(next(s for s in self._strangers if s.origin == origin))
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _lacks(self, lacking: LocalResourceError, listener: socket.socket) -> None:
        """Close the oldest stranger to get its descriptor back; without strangers, pause the listener."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(PAUSE_S, self._resume, listener)
        self._failures += 1
        if self._failures == ACCEPT_TRIES:
            self._failures = 0
            self._failed(lacking)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _read(self, stranger: _Stranger) -> None:
        try:
            part = stranger.sock.recv(ANSWER_BYTES - len(stranger.got))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part = b""
        stranger.got += part
        answer = bytes(stranger.got)
        if not part or answer[: len(MAGIC)] != MAGIC[: len(answer)]:
            self._drop(stranger)
        elif len(answer) == ANSWER_BYTES:
            self._decide(stranger, admit(self._token, self._purposes, stranger.challenge, answer))

    def _decide(self, stranger: _Stranger, proved: Admitted | None) -> None:
        if proved is None:
            self._drop(stranger)
            return
        try:
            whole = stranger.sock.send(proved.proof) == len(proved.proof)
        except OSError:
            whole = False
        if not whole:
            self._drop(stranger)
            return
        self._forget(stranger)
        self._admitted(proved, stranger.sock)

    def _expire(self) -> None:
        """Close strangers whose time is over. All have the same time, so the oldest come first."""
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers))).until <= now:
            self._drop(oldest)
        self._timer = None
        if self._strangers:
            left = next(iter(self._strangers)).until - now
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    def _forget(self, stranger: _Stranger) -> None:
        asyncio.get_running_loop().remove_reader(stranger.sock)
        del self._strangers[stranger]
        self._origins[stranger.origin] -= 1
        if not self._origins[stranger.origin]:
            del self._origins[stranger.origin]

    def _drop(self, stranger: _Stranger) -> None:
        """Close a stranger's connection, and log some of them: a line for each could fill the disk."""
        self._forget(stranger)
        self._unknown += 1
        now = time.monotonic()
        if now - self._told >= TOLD_EVERY_S:
            _log.warning("hung up on %d connections that did not prove the job's token", self._unknown)
            self._unknown, self._told = 0, now
        stranger.sock.close()


def _origin(sock: socket.socket, name: object) -> str:
    """Return the origin on which a caller counts: an IPv4 address, the /64 of an IPv6 one, or the local user."""
    if isinstance(name, tuple):
        host = str(name[0]).partition("%")[0]
        if sock.family == socket.AF_INET6 and not host.startswith("::ffff:"):
            return socket.inet_pton(socket.AF_INET6, host)[:8].hex()
        return host.removeprefix("::ffff:")
    with contextlib.suppress(OSError):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"uid {int.from_bytes(credentials[4:8], 'little')}"
    return "local"
