"""What every connection passes before there is a request: how many there are, how slow and how large they may be.

uvicorn with httptools bounds neither the head of a request nor the time that it takes, and at its limit of
connections it refuses every new one. Here a connection is a *stranger* until a request on it has shown a token.
Strangers and viewers have a share of the places each, so that neither can keep out a replica: the oldest stranger
or the idlest viewer makes room for the next one.

This module subclasses internals of uvicorn and of asyncio's TLS; tests/lighthouse/http/test_attacks.py holds what
it relies on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ft_hsdp.address import BACKLOG
from lighthouse.http.rate_limits import source

KEEP_ALIVE_S = 75
CONNECTIONS = 2048
SPARE_FILES = 128  # descriptors for everything else
SHARE = 0.25  # of all places: for strangers, half of them for one address, and for viewers
SAY_TICKS = 60  # between two lines about connections that found no place
RECEIVE_TICKS = 10  # longest time for the head of a request, and for its body; longest idleness of a stranger
SEND_TICKS = 10  # longest time in which a client takes nothing of an answer that waits for it
HANDSHAKE_S = 5
SHUTDOWN_S = 2  # longest wait for the other side's end of a TLS connection
HEAD_BYTES = 16 * 1024
HEADERS = 64
NO_PLACE = "no connection is free; try again later"
REQUEST_BYTES = 1024 * 1024  # head, body and what chunks cost; the routes allow less
TICK_S = 1.0  # everything is timed in these: no timer per connection


_log = logging.getLogger(__name__)


class _Tracked(Protocol):
    address: str

    @property
    def busy(self) -> bool: ...

    def tick(self) -> None: ...

    def drop(self) -> None: ...

    def refuse(self) -> None: ...


class Connections:
    """All connections of a server: the strangers among them, oldest first, and the viewers, idlest first.

    Args:
        most: How many may be open; fewer if the process may not open that many files.
        tick_s: Between two looks at all of them.
    """

    def __init__(self, most: int = CONNECTIONS, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(most, max(16, files - SPARE_FILES)) if files != resource.RLIM_INFINITY else most
        self._share = int(SHARE * self._most)
        self._all: set[_Tracked] = set()
        self._strangers: dict[_Tracked, None] = {}
        self._viewers: dict[_Tracked, None] = {}
        self._of: dict[str, dict[_Tracked, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed: Counter[str] = Counter()  # for want of a place, by role, since the last line about it
        self._quiet = 0  # ticks until the next one

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, connection: _Tracked) -> None:
        """Take a new connection, as a stranger; refuse it if none makes room."""
        mine = self._of.get(connection.address, {})
        if len(mine) >= self._share // 2:
            self._expel(next(iter(mine)), "stranger")
        elif self._strangers and (len(self._strangers) >= self._share or len(self._all) >= self._most):
            self._expel(next(iter(self._strangers)), "stranger")
        if len(self._all) >= self._most and not self._idlest_goes():
            self._closed["stranger"] += 1
            return connection.refuse()
        self._all.add(connection)
        self._strangers[connection] = None
        self._of.setdefault(connection.address, {})[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return None

    def known(self, connection: _Tracked, role: str) -> bool:
        """Note with each request which role a connection has shown; return whether there is a place for it."""
        self._no_stranger(connection)
        was = self._viewers.pop(connection, connection)
        if role == "viewer":
            if was is connection and len(self._viewers) >= self._share and not self._idlest_goes():
                self._closed["viewer"] += 1
                return False
            self._viewers[connection] = None
        return True

    def leave(self, connection: _Tracked) -> None:
        self._no_stranger(connection)
        self._viewers.pop(connection, None)
        self._all.discard(connection)

    def _no_stranger(self, connection: _Tracked) -> None:
        if self._strangers.pop(connection, connection) is None:
            mine = self._of[connection.address]
            del mine[connection]
            if not mine:
                del self._of[connection.address]

    def _idlest_goes(self) -> bool:
        """Close the viewer that has asked for nothing for the longest time; one that is being answered stays."""
        idlest = next((viewer for viewer in self._viewers if not viewer.busy), None)
        if idlest is not None:
            self._expel(idlest, "viewer")
        return idlest is not None

    def _expel(self, connection: _Tracked, role: str) -> None:
        self._closed[role] += 1
        self.leave(connection)
        connection.drop()

    def _tick(self) -> None:
        for connection in tuple(self._all):
            connection.tick()
        self._quiet = max(0, self._quiet - 1)
        if self._closed and not self._quiet:
            counts = ", ".join(f"{count} of {role}s" for role, count in sorted(self._closed.items()))
            _log.warning("%d of %d places are taken; closed to keep some free: %s", len(self), self._most, counts)
            self._closed.clear()
            self._quiet = SAY_TICKS
        again = bool(self._all)
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick) if again else None


class GuardedConnection(HttpToolsProtocol):
    """One connection. A wrong head is answered with 400 or 431; a connection that is too slow is cut off."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.address = ""
        self._role: str | None = None  # that it has shown; None: of a stranger
        self._connections = connections
        self._got = 0  # bytes of the request that is coming in
        self._due = True  # more of a request is to come
        self._in_head = True
        self._age = 0  # ticks that the present part of it has taken
        self._stuck = 0  # ticks in which nothing of an answer could be sent
        self._wrong = (400, "this is not an HTTP request")

    # Callbacks of uvicorn's protocol.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = source(self.client[0]) if self.client else ""
        self._connections.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn forgets to: its timer keeps this alive

    def data_received(self, data: bytes) -> None:
        self._got += len(data)
        super().data_received(data)
        if self._got > HEAD_BYTES and self._due and not self.transport.is_closing():
            if self._in_head:
                self._wrong = (431, f"the head of the request has more than {HEAD_BYTES} bytes")
                self.send_400_response("")
            elif self._got > REQUEST_BYTES:
                self.drop()

    def on_message_begin(self) -> None:
        """Start a request with its first byte, and let the gate say that its token is known."""
        if self.busy:
            raise ValueError("a request before the answer to the last one")
        super().on_message_begin()
        self.scope["extensions"] = {"connection": {"known": self.known}}
        self._due = self._in_head = True
        self._age = 0

    def on_headers_complete(self) -> None:
        """Refuse a head with too many or too large headers."""
        headers = self.headers
        if len(headers) > HEADERS:
            self._wrong = (431, f"more than {HEADERS} headers")
            raise ValueError("too many headers")
        if self._got > HEAD_BYTES and sum(len(n) + len(v) for n, v in headers) + len(self.url) > HEAD_BYTES:
            self._wrong = (431, f"the head of the request has more than {HEAD_BYTES} bytes")
            raise ValueError("large head")
        self._in_head = False
        self._age = 0
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            raise ValueError("a trailer")
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._due = False
        self._got = self._age = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say in one line what is wrong with the head of a request, and close."""
        if self.busy:
            return self.drop()  # an answer is under way: another one would be taken for its end
        status, detail = self._wrong
        body = json.dumps({"detail": detail}).encode()
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
        head = f"{line}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
        return None

    # Calls of the gate and of `Connections`.

    def known(self, role: str) -> bool:
        """Note that a request has shown a role; return whether there is a place for it."""
        if self._role in (None, "viewer"):
            self._role = role
            return self._connections.known(self, role)
        return True

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def tick(self) -> None:
        """Note that `TICK_S` have passed; drop the connection if it is too slow or a stranger that idles."""
        if self.flow.write_paused or self.transport.is_closing():
            self._stuck += 1
        else:
            self._stuck = 0
        if self._due or (self._role is None and not self.busy):
            self._age += 1
        if self._age > RECEIVE_TICKS or self._stuck > SEND_TICKS:
            self.drop()

    def drop(self) -> None:
        self.transport.abort()

    def refuse(self) -> None:
        self._wrong = (503, NO_PLACE)
        self.send_400_response("")


class GuardedTlsConnection(GuardedConnection):
    """A connection behind TLS; it exists once the handshake is over."""

    def __init__(self, connections: Connections, handshake: Handshake, **uvicorn: Any) -> None:
        super().__init__(connections, **uvicorn)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connections.leave(self._handshake)
        super().connection_made(transport)


class Handshake(SSLProtocol):
    """TLS around a connection: during the handshake it is a stranger like any other.

    uvicorn would let the loop do this, where unfinished handshakes are not counted.
    """

    busy = False

    def __init__(self, connections: Connections, context: ssl.SSLContext, **uvicorn: Any) -> None:
        self.address = ""
        self._connections = connections
        super().__init__(
            asyncio.get_running_loop(),
            GuardedTlsConnection(connections, self, **uvicorn),
            context,
            None,  # type: ignore[arg-type]  # no future waits for the end of the handshake
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.address = source(str(peer[0])) if peer else ""
        self._wire = _Wire(transport)
        super().connection_made(self._wire)  # type: ignore[arg-type]
        self._connections.enter(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.leave(self)
        super().connection_lost(exc)

    def tick(self) -> None:
        """Do nothing; the handshake has a deadline of its own."""

    def drop(self) -> None:
        self._wire.abort()

    refuse = drop


class _Wire:
    """A transport of uvloop with the one more method that asyncio's TLS needs."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _force_close(self, exc: BaseException | None) -> None:
        self._transport.abort()


def protocol(connections: Connections, context: ssl.SSLContext | None) -> Callable[..., asyncio.BaseProtocol]:
    """Return what ``uvicorn.Config(http=...)`` takes: a factory of the protocol of each new connection."""

    def make(**uvicorn: Any) -> asyncio.BaseProtocol:
        if context is None:
            return GuardedConnection(connections, **uvicorn)
        return Handshake(connections, context, **uvicorn)

    return make


def options(connections: Connections, context: ssl.SSLContext | None) -> dict[str, Any]:
    """Return the options that uvicorn runs with.

    Args:
        connections: Tracks the server's connections.
        context: Speak TLS; None: plain HTTP.
    """
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what strangers send is no news
    return {
        "loop": "uvloop",
        "http": protocol(connections, context),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "backlog": BACKLOG,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": 1,
    }
