"""The listener's side of connections: who may call, and how much a stranger can cost.

A *stranger* is a connection that has not proved the job's token yet (`handshake`). `CallerGate` bounds strangers
in number, bytes and time, without a thread or a task for any of them. All listeners of a job let callers in so:
those of rings, hubs, the stores of ranks, state servers, and the local sockets of agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ft_hsdp.errors import LocalResourceError, exhausted
from ft_hsdp.handshake import ANSWER_BYTES, MAGIC, NONCE, Admitted, Purpose, admit

MAX_STRANGERS = 64
MAX_STRANGERS_PER_ADDRESS = 32
HELLO_S = 5.0
PAUSE_S = 0.05  # pause of the listener when no descriptor is left for one more connection
ACCEPT_TRIES = 20  # failures to accept in a row, after which the owner is told
BACKLOG = 128
TOLD_EVERY_S = 60.0

_log = logging.getLogger(__name__)
_hello_s = HELLO_S


def use(hello_s: float) -> None:
    """Set how many seconds this process's listeners wait for a caller's proof, and again for its first message."""
    global _hello_s
    _hello_s = hello_s


def hello_s() -> float:
    return _hello_s


@dataclass(eq=False, slots=True)
class _Stranger:
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
        return len(self._strangers)

    def watch(self, listener: socket.socket) -> None:
        """Let callers in at `listener`, which is bound and belongs to the gate from now on."""
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def close(self) -> None:
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
            self._drop(stranger, silent=True)
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
            self._drop(stranger, silent=not answer)  # it only looked whether somebody listens
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

    def _drop(self, stranger: _Stranger, silent: bool = False) -> None:
        """Close a stranger's connection, and log some of them: a line for each could fill the disk."""
        self._forget(stranger)
        self._unknown += not silent
        now = time.monotonic()
        if not silent and now - self._told >= TOLD_EVERY_S:
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
