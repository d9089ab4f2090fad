"""How much may be asked of the lighthouse: the rate and the size of a request, by its route and its address.

Pure: the time is an argument. `access.RequestGate` holds requests to these limits.

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
import ipaddress
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from starlette.exceptions import HTTPException

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
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


@dataclass(frozen=True, slots=True)
class Rule:
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
