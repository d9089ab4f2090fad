"""Who may ask the lighthouse, and how much: tokens and roles, rates and sizes, and the gate that holds them.

Three roles. A *worker* is a replica or a supervisor of the job. An *admin* may evict, drain, and order a
checkpoint. A *viewer* may read what the lighthouse shows; its key is derived from the worker's token and grants
nothing else, so it may stand in a link. Workers and admins may read, too; no other role includes another.

`RequestGate` judges the token, the only time on a request's way, and a stranger learns nothing about the routes.
The route says which role it wants (`Bearer`).

Requests of known incarnations for a step have no rate of their own: a replica asks as often as it commits, each of
its connections has one request open, and steps are what the lighthouse is for. New incarnations have one.

A request's size is bounded three times, each for a reason. `connections` bounds the bytes of the whole request,
because what a route never reads is received all the same. The gate bounds the body by its route, so that no route
can be without a bound. `quorum_route.read` bounds the body where a route reads it itself: such routes are also
served without a gate (the page of a run that is over), and the gate leaves POST /v1/quorum to it, because that
route is on the path of every step.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fastapi import Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ft_hsdp import protocol, secret
from ft_hsdp.errors import ConfigError

ADMIN_VARIABLE = "FT_HSDP_ADMIN_TOKEN"
PROVED = 16  # headers that are recognized without comparing digests
LOOK_S = 1.0  # between two looks at the files of the tokens

Role = Literal["viewer", "worker", "admin"]
Tokens = tuple[str, ...]

_log = logging.getLogger(__name__)


def view_key(token: str) -> str:
    """Return the key that lets its holder look at a job and do nothing: 32 hex digits; "" without a token."""
    return protocol.mac(token, "view")[:32] if token else ""


def page_link(url: str, token: str) -> str:
    """Return the page's URL with the key behind #, which a browser does not send to the server."""
    return f"{url}/#key={view_key(token)}"


class Keys:
    """The job's secrets: the worker's tokens and the admin's.

    Without a worker's token every caller is a worker; without an admin's none is an admin.

    Args:
        worker: "" (none), one line or two: the current token, and one that is accepted beside it.
        admin: The same for the admin.
    """

    def __init__(self, worker: str = "", admin: str = "") -> None:
        self._look: Callable[[], tuple[Tokens, Tokens] | None] | None = None
        self._due = 0.0
        self._set(tuple(worker.split()), tuple(admin.split()))

    @classmethod
    def read(cls, worker: Path, admin: Path) -> Self:
        """Return the keys from two files, or else from the environment; a changed file counts within a second.

        A change that cannot be used changes nothing and is logged.

        Raises:
            ConfigError: what is there at the start cannot be used.
        """
        files = _Files(worker, admin)
        keys = cls()
        keys._set(*files.read())
        keys._look = files.changed
        return keys

    @property
    def worker(self) -> str:
        """The worker's current token, or ""."""
        return self._worker

    @property
    def admin(self) -> str:
        """The admin's current token, or ""."""
        return self._admin

    def role(self, header: bytes | None) -> Role | None:
        """Return the role that an Authorization header stands for; None for a stranger.

        Args:
            header: The value of the header; None: there is none.
        """
        if self._look is not None and time.monotonic() >= self._due:
            self._refresh()
        proved = self._proved.get(header)
        if proved is not None:
            return proved
        scheme, _, credential = (header or b"").partition(b" ")
        claimed = hashlib.sha256(credential.strip()).digest()
        role: Role | None = "worker" if self._open else None
        for digest, known in self._digests:  # all of them, so that the time does not tell which one fits
            if hmac.compare_digest(digest, claimed):
                role = known
        if not self._open and scheme.lower() != b"bearer":
            return None
        if role is not None and len(self._proved) < PROVED:
            self._proved[header] = role
        return role

    def _set(self, worker: Tokens, admin: Tokens) -> None:
        """Replace the tokens, and forget which headers were right."""
        self._worker, self._admin = (worker or ("",))[0], (admin or ("",))[0]
        self._open = not worker
        self._proved: dict[bytes | None, Role] = {}  # whole headers that were right; found by a keyed hash of them
        held: list[tuple[str, Role]] = [(view_key(token), "viewer") for token in worker]
        held += [(token, "worker") for token in worker]
        held += [(token, "admin") for token in admin]
        self._digests = [(hashlib.sha256(token.encode()).digest(), role) for token, role in held]

    def _refresh(self) -> None:
        """Look at the files, at most once in `LOOK_S`."""
        assert self._look is not None
        self._due = time.monotonic() + LOOK_S
        try:
            found = self._look()
        except ConfigError as error:
            _log.error("the tokens stay as they are: %s", error)
            return
        if found is not None and (found[0] or self._open):  # a job with a token never becomes open to all
            self._set(*found)
            _log.info("the tokens were read again")


class _Files:
    """The two files of tokens, and how they looked when they were last read."""

    def __init__(self, worker: Path, admin: Path) -> None:
        self._files = (worker, admin)
        self._seen: object = None

    def read(self) -> tuple[Tokens, Tokens]:
        """Return the tokens in the files. Raises ConfigError."""
        self._seen = self._marks()
        worker, admin = self._files
        return secret.read(worker, secret.TOKEN_VARIABLE), secret.read(admin, ADMIN_VARIABLE)

    def changed(self) -> tuple[Tokens, Tokens] | None:
        """Return the tokens if a file has changed, else None. Raises ConfigError, once for each change."""
        return self.read() if self._marks() != self._seen else None

    def _marks(self) -> list[object]:
        marks: list[object] = []
        for file in self._files:
            try:
                found = os.stat(file)
                marks.append((found.st_mtime_ns, found.st_size, found.st_ino))
            except OSError:
                marks.append(None)
        return marks


class Bearer(SecurityBase):
    """A FastAPI dependency: requires ``Authorization: Bearer`` with a token of ``role``; reads headers alone."""

    def __init__(self, keys: Keys, role: Role = "worker") -> None:
        self.model = HTTPBearer(description=f"a token of the role {role}")
        self.scheme_name = role
        self.role = role
        self._keys = keys

    async def __call__(self, request: Request) -> None:
        """Check the request's role. Raises HTTPException 401 for a missing or wrong token, else 403."""
        self.admit(request.scope["headers"], request.scope.get("role"))

    def admit(self, headers: Iterable[tuple[bytes, bytes]], known: Role | None = None) -> None:
        """Check the headers of an ASGI scope, as `__call__` does.

        Args:
            headers: Of the request.
            known: The role that `RequestGate` has found; None: no gate is in front, so the token is
                judged here.

        Raises:
            HTTPException: 401 for a missing or wrong token, 403 for a token of another role.
        """
        # Defence in depth: a route that is served without the gate, as on the page of a run that is over.
        if known is None:
            known = self._keys.role(next((value for name, value in headers if name == b"authorization"), None))
        if known is None:
            raise unknown_token()
        if not may(known, self.role):
            raise HTTPException(403, f"this token is a {known}'s; the route is for a {self.role}")


def may(known: Role, wanted: Role) -> bool:
    """Return whether a holder of the role ``known`` may do what is for ``wanted``."""
    return known == wanted or wanted == "viewer"


# Rates and sizes, by kind of request. Pure: the time is an argument.

KIB = 1024
MAX_BODY = 256 * KIB  # of what replicas and supervisors send
ADDRESSES = 4096  # that are remembered; the one that was quiet longest is forgotten first
STREAMS = 64  # open at once, and a quarter of that from one address

Kind = Literal["ask", "report", "read", "admin", "open", "stranger", "join"]


class TooMany(HTTPException):
    """429: more than is allowed; after ``retry_s`` seconds there is room again."""

    def __init__(self, what: str, retry_s: float) -> None:
        seconds = math.ceil(retry_s)
        super().__init__(429, f"too many {what}; try again in {seconds} s", {"Retry-After": str(seconds)})


class Buckets:
    """A token bucket per key.

    Of each key only the time at which its bucket is full again is kept.

    Args:
        rate: Tokens a second.
        burst: Tokens at once.
        size: How many keys are remembered at most; the one that was quiet longest is forgotten first.
    """

    def __init__(self, rate: float, burst: int, size: int = ADDRESSES) -> None:
        self._period = 1.0 / rate
        self._span = burst / rate
        self._size = size
        self._full_at: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, key: Hashable, now: float) -> float:
        """Take one token from the bucket of ``key``.

        Returns:
            0.0, or the seconds until there is a token; then none is taken.
        """
        full_at = self._full_at.pop(key, now)
        after = (full_at if full_at > now else now) + self._period
        wait = after - now - self._span
        if wait > 1e-9:
            self._full_at[key] = full_at
            return wait
        self._full_at[key] = after
        if len(self._full_at) > self._size:
            del self._full_at[next(iter(self._full_at))]
        return 0.0


class OpenSlots:
    """How many of something are open, in all and per key."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._open: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    def enter(self, key: Hashable) -> bool:
        """Open one more if there is room; return whether there was. Then `leave` must follow."""
        if len(self) >= self._total or self._open[key] >= self._each:
            return False
        self._open[key] += 1
        return True

    def leave(self, key: Hashable) -> None:
        """Close one that `enter` has opened."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


@dataclass(frozen=True, slots=True)
class Rule:
    """The limits of a route."""

    kind: Kind
    max_body: int = 64 * KIB  # bytes
    stream: bool = False  # its answer may have no end


_ROUTES = {
    "/v1/quorum": Rule("ask", MAX_BODY),
    "/v1/processes": Rule("report", MAX_BODY),
    "/v1/telemetry": Rule("report", MAX_BODY),
    "/v1/holders": Rule("report"),
    "/v1/stream": Rule("read", stream=True),
    "/healthz": Rule("open"),
    "/": Rule("open"),
}
_ADMIN, _OPEN, _READ = Rule("admin"), Rule("open"), Rule("read")


def rule(path: str) -> Rule:
    """Return the limits of the route at ``path``; only the kind "open" needs no token."""
    found = _ROUTES.get(path)
    if found is not None:
        return found
    if path.startswith("/v1/admin/"):
        return _ADMIN
    return _OPEN if path.startswith("/assets/") else _READ


class Rates:
    """The buckets of every kind that has a rate, per address; all strangers together share one more."""

    def __init__(self) -> None:
        self._of: dict[Kind, Buckets] = {
            "report": Buckets(1000, 2000),  # 64 supervisors and 64 reporters on one machine, and to spare
            "read": Buckets(100, 400),
            "open": Buckets(100, 400),
            "admin": Buckets(2, 20),
            "stranger": Buckets(1, 20),
            "join": Buckets(20, 256),
        }
        self._strangers = Buckets(50, 500, 1)
        self._joins = Buckets(2, 20)  # of one replica

    def take(self, kind: Kind, address: str, now: float) -> float:
        """Return the seconds until a request of this kind from this address may come; 0.0: it may come now."""
        buckets = self._of.get(kind)
        if buckets is None:
            return 0.0
        wait = buckets.take(address, now)
        return wait or (self._strangers.take(None, now) if kind == "stranger" else 0.0)

    def join(self, replica: int, address: str, now: float) -> None:
        """Count a new incarnation of ``replica`` that asks for the first time. Raises TooMany."""
        wait = self._joins.take(replica, now)
        if wait:
            raise TooMany(f"new incarnations of replica {replica}", wait)
        wait = self.take("join", address, now)
        if wait:
            raise TooMany(f"new incarnations from {address}", wait)


@functools.lru_cache(ADDRESSES)
def source(host: str) -> str:
    """Return what counts as one address: an IPv4 address, also mapped into IPv6, or the /64 of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class RequestGate:
    """An ASGI middleware: passes a request to ``app``, or answers 401, 413, or 429 with Retry-After.

    Args:
        app: The application behind the gate.
        keys: The job's secrets.
        rates: How much each address may ask.
        clock: Monotonic seconds.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, rates: Rates, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates
        self._clock = clock
        self._streams = OpenSlots(STREAMS, STREAMS // 4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http":
            raise ValueError("the lighthouse speaks HTTP only")
        authorization = length = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = value
        limits = rule(scope["path"])
        client = scope.get("client")
        address = source(client[0]) if client else ""
        if limits.kind != "open":
            # The only time that the token is judged: the route finds the role in the scope.
            role = scope["role"] = self._keys.role(authorization)
            if role is None:
                wait = self._rates.take("stranger", address, self._clock())
                error = TooMany("requests without a token that is known", wait) if wait else unknown_token()
                await refuse(send, error)
                return
            # A connection that has shown a token is not closed to make room for others.
            connection = scope.get("extensions", {}).get("connection")
            if connection is not None:
                connection["known"]()
        if limits.kind != "ask" and (wait := self._rates.take(limits.kind, address, self._clock())):
            await refuse(send, TooMany(f"requests of this kind from {address}", wait))
        elif length is not None and (not length.isdigit() or len(length) > 12 or int(length) > limits.max_body):
            await refuse(send, too_large(limits.max_body))
        elif limits.kind == "ask":  # the route on the path of every step counts its body itself
            await self._app(scope, receive, send)
        elif limits.stream:
            await self._stream(address, scope, receive, send)
        else:
            await self._app(scope, _counted(receive, limits.max_body), send)

    async def _stream(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose answer has no end, if there is room for one more."""
        if not self._streams.enter(address):
            return await refuse(send, TooMany("open streams", 5.0))
        try:
            await self._app(scope, receive, send)
        finally:
            self._streams.leave(address)


def _counted(receive: Receive, largest: int) -> Receive:
    """Return a ``receive`` that raises HTTPException 413 once more than ``largest`` bytes of a body have come."""
    got = 0

    async def counted() -> Message:
        nonlocal got
        message = await receive()
        body = message.get("body")
        if body:
            got += len(body)
            if got > largest:
                raise too_large(largest)
        return message

    return counted


def too_large(largest: int) -> HTTPException:
    """Return the 413 for a body of more than ``largest`` bytes."""
    return HTTPException(413, f"body: more than {largest} bytes")


def unknown_token() -> HTTPException:
    """Return the 401 for a missing or wrong token."""
    what = "Authorization: Bearer TOKEN is missing or wrong"
    return HTTPException(401, what, headers={"WWW-Authenticate": "Bearer"})


async def refuse(send: Send, error: HTTPException) -> None:
    """Answer with ``error`` as {"detail": one line}; `connections` bounds what still comes of the body."""
    body = json.dumps({"detail": " ".join(error.detail.split())}).encode()
    always = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    extra = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": [*always, *extra]})
    await send({"type": "http.response.body", "body": body})
