"""Encrypts connections between the processes of a job, behind the handshake that proves the token.

Both ends send a fresh X25519 key, with a MAC under the connection's secret, and derive two keys from their
shared secret. So a recording stays unreadable if the token becomes known later. Bytes travel in records: a
length, and AES-128-GCM of at most `RECORD` bytes under a counter, which covers the length. A record that was
changed, repeated, left out or moved ends the connection. After `REKEY` records a key is replaced by one derived
from it.

A data connection becomes a `Sealed`. A control connection is spliced: its user has one end of a local pair of
sockets, and two tasks carry the bytes between the other end and the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Data = bytes | bytearray | memoryview
Mode = Literal["auto", "on", "off"]
RECORD = 256 * 1024
REKEY = 2**20
TAG = 16
HEAD = 4
KEY = 16
PUBLIC = 32
MAC = 32
SILENCE_MS = 120_000  # a spliced connection ends if the other host reads nothing for this time
_mode: Mode = "auto"


def use(mode: Mode) -> None:
    """Set what this process encrypts.

    Connections between hosts (auto), all network connections (on), or none (off).
    """
    global _mode
    _mode = mode


def wanted(sock: socket.socket) -> bool:
    """Return whether a connection must be encrypted. Both ends decide the same: both see the two addresses."""
    if _mode == "off" or sock.family == socket.AF_UNIX:
        return False
    return _mode == "on" or not within_host(sock)


def within_host(sock: socket.socket) -> bool:
    if isinstance(sock, Spliced):
        return sock.within_host
    if sock.family == socket.AF_UNIX:
        return True
    try:
        mine, theirs = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # it has ended already
        return False
    return mine == theirs or all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in (mine, theirs))


class Direction:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._count = 0

    def _nonce(self) -> bytes:
        if self._count == REKEY:
            self._key = _derive(self._key, b"", b"ft_hsdp next key", KEY)
            self._cipher = AESGCM(self._key)
            self._count = 0
        self._count += 1
        return self._count.to_bytes(12, "big")

    def seal_into(self, data: memoryview, record: memoryview) -> int:
        """Write the record of `data`, at most `RECORD` bytes, to `record`, and return its size."""
        size = HEAD + len(data) + TAG
        record[:HEAD] = head = len(data).to_bytes(HEAD, "big")
        self._cipher.encrypt_into(self._nonce(), data, head, record[HEAD:size])
        return size

    def seal(self, data: Data) -> bytes:
        view, records = memoryview(data).cast("B"), []
        for begin in range(0, len(view), RECORD):
            head = len(view[begin : begin + RECORD]).to_bytes(HEAD, "big")
            records.append(head + self._cipher.encrypt(self._nonce(), bytes(view[begin : begin + RECORD]), head))
        return b"".join(records)

    def open_into(self, head: bytes, body: memoryview, data: memoryview) -> None:
        """Write the content of a record to `data`.

        Raises:
            ConnectionAbortedError: it was changed, or is not the next one.
        """
        try:
            self._cipher.decrypt_into(self._nonce(), body, head, data)
        except InvalidTag:
            raise ConnectionAbortedError("what came was changed on its way") from None


def length(head: bytes) -> int:
    """Return how many bytes a record contains.

    Raises:
        ConnectionAbortedError: no record has so many.
    """
    size = int.from_bytes(head, "big")
    if not 0 < size <= RECORD:
        raise ConnectionAbortedError(f"a record of {size} bytes")
    return size


class KeyExchange:
    """The exchange of keys at one end.

    Args:
        session: the connection's secret, from the handshake.
        listening: whether this is the listener's end.
        context: what else both ends must agree on; different contexts end the connection.
    """

    def __init__(self, session: bytes, listening: bool, context: bytes = b"") -> None:
        self._session = session
        self._listening = listening
        self._context = context
        self._private = X25519PrivateKey.generate()
        self._public = self._private.public_key().public_bytes_raw()
        self.offer = self._public + self._mac(listening, self._public)

    def _mac(self, listening: bool, public: bytes) -> bytes:
        role = b"listener" if listening else b"caller"
        return hmac.digest(self._session, b"ft_hsdp key of the " + role + public + self._context, "sha256")

    def accept(self, offer: bytes) -> tuple[Direction, Direction]:
        """Return the direction in which this end sends, and the one in which it receives.

        Raises:
            ConnectionAbortedError: the offer is not the other end's.
        """
        public, mac = offer[:PUBLIC], offer[PUBLIC:]
        if not hmac.compare_digest(mac, self._mac(not self._listening, public)):
            raise ConnectionAbortedError("the other end does not encrypt (network.tls), or its key was changed")
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise ConnectionAbortedError("a key that is none") from None
        publics = (public, self._public) if self._listening else (self._public, public)
        keys = _derive(shared, self._session, b"ft_hsdp sealed 1" + b"".join(publics) + self._context, 2 * KEY)
        caller, listener = Direction(keys[:KEY]), Direction(keys[KEY:])
        return (listener, caller) if self._listening else (caller, listener)


def _derive(key: bytes, salt: bytes, info: bytes, nbytes: int) -> bytes:
    return HKDF(hashes.SHA256(), nbytes, salt, info).derive(key)


class Sealed(socket.socket):
    """A connection that is plain until `agree` and encrypted from then on.

    One thread may send while another receives.

    Waits are in the kernel, with the deadlines of the socket (SO_RCVTIMEO, SO_SNDTIMEO). After an error the
    connection can only be closed.
    """

    def __init__(self, sock: socket.socket, session: bytes, listening: bool) -> None:
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.settimeout(timeout)
        self._session = session
        self._listening = listening
        self._out: Direction | None = None
        self._in: Direction | None = None

    def agree(self, context: bytes = b"") -> None:
        """Exchange keys. Blocks.

        Args:
            context: what both ends must agree on.

        Raises:
            OSError: the other end is gone, too late, or does not do the same.
        """
        agreement = KeyExchange(self._session, self._listening, context)
        super().sendall(agreement.offer)
        offer = bytearray(PUBLIC + MAC)
        self._raw(memoryview(offer))
        self._record = memoryview(bytearray(HEAD + RECORD + TAG))
        self._body = memoryview(bytearray(HEAD + RECORD + TAG))
        self._got = 0
        self._left = memoryview(b"")
        self._out, self._in = agreement.accept(bytes(offer))

    def _raw(self, view: memoryview) -> None:
        while view:
            n = super().recv_into(view, 0, socket.MSG_WAITALL)
            if not n:
                raise ConnectionResetError("closed its connection")
            view = view[n:]

    # Sending.

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        if self._out is None:
            return super().sendall(data, flags)
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), RECORD):
            size = self._out.seal_into(view[begin : begin + RECORD], self._record)
            super().sendall(self._record[:size], flags)
        return None

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send all bytes: a part of a record is useless to the other end."""
        if self._out is None:
            return super().send(data, flags)
        self.sendall(data, flags & ~socket.MSG_DONTWAIT)
        return memoryview(data).nbytes

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, /, *more: Any) -> int:
        """Send all buffers, each completely."""
        if self._out is None:
            return super().sendmsg(buffers, ancdata, flags, *more)
        return sum(self.send(buffer, flags) for buffer in buffers)

    # Receiving.

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        if self._in is None:
            return super().recv(bufsize, flags)
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data, 0, flags)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
        """Receive into a buffer, as a socket does; MSG_WAITALL and MSG_DONTWAIT are kept."""
        if self._in is None:
            return super().recv_into(buffer, nbytes, flags)
        view = memoryview(buffer).cast("B")
        view = view[:nbytes] if nbytes else view
        filled = self._take(view)
        while filled < len(view) and (not filled or flags & socket.MSG_WAITALL):
            try:
                if not self._fetch(flags & socket.MSG_DONTWAIT):
                    break
            except BlockingIOError:
                if not filled:
                    raise
                break  # as a socket does: what has come before the deadline is returned
            head = bytes(self._body[:HEAD])
            size = length(head)
            whole = size <= len(view) - filled
            data = view[filled : filled + size] if whole else memoryview(bytearray(size))
            self._in.open_into(head, self._body[HEAD : self._got], data)
            self._got = 0
            if whole:
                filled += size
            else:
                self._left = data
                filled += self._take(view[filled:])
        return filled

    def _take(self, view: memoryview) -> int:
        n = min(len(self._left), len(view))
        view[:n] = self._left[:n]
        self._left = self._left[n:]
        return n

    def _fetch(self, flags: int) -> bool:
        """Read the next record into `_body`; an incomplete one stays there for the next call.

        Return False at the end.
        """
        while True:
            need = HEAD if self._got < HEAD else HEAD + length(bytes(self._body[:HEAD])) + TAG
            if self._got == need:
                return True
            n = super().recv_into(self._body[self._got : need], 0, flags or socket.MSG_WAITALL)
            if not n:
                if self._got:
                    raise ConnectionResetError("closed its connection in the middle of a record")
                return False
            self._got += n


def sealable(sock: socket.socket, session: bytes, *, listening: bool) -> socket.socket:
    """Return the connection to use in place of `sock`: a `Sealed` if it must be encrypted."""
    return Sealed(sock, session, listening) if wanted(sock) else sock


def agree(socks: Sequence[socket.socket], context: bytes = b"") -> None:
    """Encrypt the connections that must be encrypted. Blocks.

    Args:
        socks: from `sealable`, in the order of the other end's.
        context: what both ends must agree on.

    Raises:
        OSError: the other end of one is gone, too late, or does not do the same.
    """
    for number, sock in enumerate(socks):
        if isinstance(sock, Sealed):
            sock.agree(context + b"/%d" % number)


class Spliced(socket.socket):
    """This process's end of the pair behind an encrypted control connection."""

    within_host = False


async def spliced(sock: socket.socket, session: bytes, *, listening: bool) -> socket.socket:
    """Return the connection, or, if it is to be encrypted, a local one whose bytes pass through it.

    Until cancelled.

    Raises:
        OSError: the other end is gone, or does not do the same.
    """
    if not wanted(sock):
        return sock
    loop, agreement = asyncio.get_running_loop(), KeyExchange(session, listening)
    await loop.sock_sendall(sock, agreement.offer)
    out, into = agreement.accept(await exactly(sock, PUBLIC + MAC))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    near, far = socket.socketpair()
    user = Spliced(near.family, near.type, near.proto, near.detach())
    user.within_host = within_host(sock)
    for each in (user, far):
        each.setblocking(False)
    task = loop.create_task(_splice(sock, far, out, into))
    _splices.add(task)
    task.add_done_callback(_splices.discard)
    return user


_splices: set[asyncio.Task[None]] = set()


async def _splice(sock: socket.socket, far: socket.socket, out: Direction, into: Direction) -> None:
    """Carry bytes in both directions until both have ended."""
    try:
        await asyncio.gather(_outward(sock, far, out), _inward(sock, far, into))
    finally:
        sock.close()
        far.close()


async def _outward(sock: socket.socket, far: socket.socket, out: Direction) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(far, RECORD):
            await loop.sock_sendall(sock, out.seal(data))
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


async def _inward(sock: socket.socket, far: socket.socket, into: Direction) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while True:
            head = await exactly(sock, HEAD)
            body = await exactly(sock, length(head) + TAG)
            data = bytearray(length(head))
            into.open_into(head, memoryview(body), memoryview(data))
            await loop.sock_sendall(far, data)
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_WR)


async def exactly(sock: socket.socket, count: int) -> bytes:
    """Return the next ``count`` bytes of a non-blocking socket. Raises ConnectionResetError at its end."""
    loop, data = asyncio.get_running_loop(), bytearray(count)
    view = memoryview(data)
    while view:
        got = await loop.sock_recv_into(sock, view)
        if not got:
            raise ConnectionResetError("closed its connection")
        view = view[got:]
    return bytes(data)
