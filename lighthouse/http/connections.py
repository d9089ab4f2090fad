"""What every connection passes before there is a request: how many there are, how slow and how large they may be.

uvicorn with httptools bounds neither the head of a request nor the time that it takes, and at its limit of
connections it refuses every new one. Here a connection is a *stranger* until a request on it has shown a token.
When there are too many strangers the oldest one is closed, so that idle connections cannot keep out a replica.

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
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ft_hsdp.address import BACKLOG
from lighthouse.http.rate_limits import source

KEEP_ALIVE_S = 75
CONNECTIONS = 2048
SPARE_FILES = 128  # descriptors for everything else
STRANGERS = 512
STRANGERS_EACH = 256  # from one address: the replicas of one machine may all start at once
RECEIVE_TICKS = 10  # longest time for the head of a request, and for its body; longest idleness of a stranger
SEND_TICKS = 10  # longest time in which a client takes nothing of an answer that waits for it
HANDSHAKE_S = 5
SHUTDOWN_S = 2  # longest wait for the other side's end of a TLS connection
HEAD_BYTES = 16 * 1024
HEADERS = 64
REQUEST_BYTES = 1024 * 1024  # head, body and what chunks cost; the routes allow less
TICK_S = 1.0  # everything is timed in these: no timer per connection


class _Tracked(Protocol):
    address: str

    def tick(self) -> None: ...

    def drop(self) -> None: ...


class Connections:
    """All connections of a server, and which of them are strangers, oldest first.

    Args:
        most: How many may be open; fewer if the process may not open that many files.
        tick_s: Between two looks at all of them.
    """

    def __init__(self, most: int = CONNECTIONS, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(most, max(16, files - SPARE_FILES)) if files != resource.RLIM_INFINITY else most
        self._all: set[_Tracked] = set()
        self._strangers: dict[_Tracked, None] = {}
        self._of: dict[str, dict[_Tracked, None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._all)

    @property
    def strangers(self) -> int:
        """How many have not shown a token yet."""
        return len(self._strangers)

    def enter(self, connection: _Tracked) -> None:
        """Take a new connection; if there is no room, close the oldest stranger, else the new one."""
        mine = self._of.get(connection.address, {})
        if len(mine) >= STRANGERS_EACH:
            self._expel(next(iter(mine)))
        elif self._strangers and (len(self._strangers) >= STRANGERS or len(self._all) >= self._most):
            self._expel(next(iter(self._strangers)))
        if len(self._all) >= self._most:
            return connection.drop()
        self._all.add(connection)
        self._strangers[connection] = None
        self._of.setdefault(connection.address, {})[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return None

    def known(self, connection: _Tracked) -> None:
        if self._strangers.pop(connection, connection) is None:
            mine = self._of[connection.address]
            del mine[connection]
            if not mine:
                del self._of[connection.address]

    def leave(self, connection: _Tracked) -> None:
        self.known(connection)
        self._all.discard(connection)

    def _expel(self, connection: _Tracked) -> None:
        self.leave(connection)
        connection.drop()

    def _tick(self) -> None:
        for connection in tuple(self._all):
            connection.tick()
        again = bool(self._all)
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick) if again else None


class GuardedConnection(HttpToolsProtocol):
    """One connection. A wrong head is answered with 400 or 431; a connection that is too slow is cut off."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.address = ""
        self.stranger = True
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
        if self.cycle is not None and not self.cycle.response_complete:
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
        if self.cycle is not None and not self.cycle.response_complete:
            return self.drop()  # an answer is under way: another one would be taken for its end
        status, detail = self._wrong
        body = json.dumps({"detail": detail}).encode()
        reason = "Bad Request" if status == 400 else "Request Header Fields Too Large"
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
        return None

    # Calls of the gate and of `Connections`.

    def known(self) -> None:
        if self.stranger:
            self.stranger = False
            self._connections.known(self)

    def tick(self) -> None:
        """Note that `TICK_S` have passed; drop the connection if it is too slow or a stranger that idles."""
        if self.flow.write_paused or self.transport.is_closing():
            self._stuck += 1
        else:
            self._stuck = 0
        idle = self.cycle is None or self.cycle.response_complete
        if self._due or (idle and self.stranger):
            self._age += 1
        if self._age > RECEIVE_TICKS or self._stuck > SEND_TICKS:
            self.drop()

    def drop(self) -> None:
        self.transport.abort()


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
