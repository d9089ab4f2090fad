"""Who may ask the lighthouse: tokens and roles, and the gate that holds them and the limits of `rate_limits`.

Four roles. A *host* is the agent of a host, or a launcher: it has the job's token. A *worker* is a rank; its
token follows from the job's (`secret.worker_token`). An *admin* may evict, drain, and order a checkpoint. They
sign their requests (`proofs`): their tokens are never sent. A *viewer* may read what the lighthouse shows; its key
is derived from the job's token and grants nothing else, so it may stand in a link, and is sent as it is. All may
read, and a host may do what a worker may; no other role includes another.

`RequestGate` judges the request, the only time on its way, and a stranger learns nothing about the routes. The
route says which role it wants (`Bearer`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Self

from fastapi import Request
from fastapi.openapi.models import HTTPBase
from fastapi.security.base import SecurityBase
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ft_hsdp import protocol, secret
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.http_proof import SCHEME, STALE
from ft_hsdp.jsonl import WAIT_S, DiskThread
from lighthouse.http.connections import NO_PLACE
from lighthouse.http.proofs import Proof, SignedCalls
from lighthouse.http.rate_limits import STREAMS, OpenSlots, Rates, TooMany, rule, source

ADMIN_VARIABLE = "FT_HSDP_ADMIN_TOKEN"
PROVED = 16  # headers that are recognized without comparing digests
LOOK_S = 1.0  # between two looks at the files of the tokens

Role = Literal["viewer", "worker", "host", "admin"]
Tokens = tuple[str, ...]

_log = logging.getLogger(__name__)


def view_key(token: str) -> str:
    """Return the key that lets its holder look at a job and do nothing: 32 hex digits; "" without a token."""
    return protocol.mac(token, "view")[:32] if token else ""


def page_link(url: str, token: str) -> str:
    """Return the page's URL with the key behind #, which a browser does not send to the server."""
    return f"{url}/#key={view_key(token)}"


class Keys:
    """The job's secrets: its tokens and the admin's.

    Without a job's token every caller is a host; without an admin's none is an admin.

    `job`, `worker` and `admin` are the current tokens, or "".

    Args:
        job: "" (none), one line or two: the current token, and one that is accepted beside it.
        admin: The same for the admin.
        clock: Monotonic seconds.
    """

    def __init__(self, job: str = "", admin: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look: Callable[[], None] | None = None  # on a thread: the disk may hang
        self._disk = DiskThread(WAIT_S)
        self._found: tuple[Tokens, Tokens] | None = None  # by the thread
        self._due = 0.0
        self._signed = SignedCalls()
        self._set(tuple(job.split()), tuple(admin.split()))

    @classmethod
    def read(cls, job: Path, admin: Path, clock: Callable[[], float] = time.monotonic) -> Self:
        """Return the keys from two files, or else from the environment; a changed file counts within a second.

        A change that cannot be used changes nothing and is logged. An admin's token that cannot be used at the
        start counts as none.

        Raises:
            Retryable: there is no job's token, or it cannot be used. Without one all doors would be open.
        """
        files = _Files(job, admin)
        keys = cls(clock=clock)
        keys._set(*files.first())

        def look() -> None:
            try:
                keys._found = files.changed() or keys._found
            except ConfigError as error:
                _log.error("the tokens stay as they are: %s", error)

        keys._look = look
        return keys

    def proof(self, header: bytes, scope: Scope) -> Proof | None:
        """Return what the Authorization header of a signed request proves; None: nothing, or it is not signed."""
        self._refresh()
        return self._signed.judge(header, scope)

    def role(self, header: bytes | None) -> Role | None:
        """Return the role that an Authorization header with a key stands for; None for a stranger.

        Args:
            header: The value of the header; None: there is none.
        """
        self._refresh()
        proved = self._proved.get(header)
        if proved is not None:
            return proved
        scheme, _, credential = (header or b"").partition(b" ")
        claimed = hashlib.sha256(credential.strip()).digest()
        role: Role | None = "host" if self._open else None
        for digest, known in self._digests:  # all of them, so that the time does not tell which one fits
            if hmac.compare_digest(digest, claimed):
                role = known
        if not self._open and scheme.lower() != b"bearer":
            return None
        if role is not None and len(self._proved) < PROVED:
            self._proved[header] = role
        return role

    def _set(self, job: Tokens, admin: Tokens) -> None:
        self.job, self.admin = (job or ("",))[0], (admin or ("",))[0]
        self.worker = secret.worker_token(self.job)
        self._open = not job
        self._proved: dict[bytes | None, Role] = {}  # whole headers that were right; found by a keyed hash of them
        self._digests: list[tuple[bytes, Role]] = [
            (hashlib.sha256(view_key(token).encode()).digest(), "viewer") for token in job
        ]
        workers = [(secret.worker_token(token), "worker") for token in job]
        hosts = [(token, "host") for token in (("",) if self._open else job)]
        self._signed.hold([*workers, *hosts, *((token, "admin") for token in admin)])

    def _refresh(self) -> None:
        """Look at the files, at most once in `LOOK_S`; on a disk that hangs the tokens stay as they are."""
        if self._look is None or self._clock() < self._due:
            return
        self._due = self._clock() + LOOK_S
        try:
            self._disk.run(self._look)
        except TimeoutError:
            return
        found, self._found = self._found, None
        if found is not None and found[0]:  # a job with a token never becomes open to all
            self._set(*found)
            _log.info("the tokens were read again")


class _Files:
    """The two files of tokens, and how they looked when they were last read."""

    def __init__(self, job: Path, admin: Path) -> None:
        self._files = (job, admin)
        self._seen: object = None

    def first(self) -> tuple[Tokens, Tokens]:
        """Return the tokens at the start; the admin's may be none. Raises Retryable."""
        self._seen = self._marks()
        file, admin = self._files
        why = f"{file} is missing and {secret.TOKEN_VARIABLE} is not set"
        try:
            job = secret.read(file, secret.TOKEN_VARIABLE)
        except ConfigError as error:
            job, why = (), str(error)
        if not job:
            raise Retryable(
                f"no lighthouse without the job's token: {why}; put the token back, then start it again"
            )
        try:
            return job, secret.read(admin, ADMIN_VARIABLE)
        except ConfigError as error:
            _log.error("nobody is an admin: %s", error)
            return job, ()

    def changed(self) -> tuple[Tokens, Tokens] | None:
        """Return the tokens if a file has changed, else None. Raises ConfigError, once for each change."""
        before, self._seen = self._seen, self._marks()
        if self._seen == before:
            return None
        job, admin = self._files
        return secret.read(job, secret.TOKEN_VARIABLE), secret.read(admin, ADMIN_VARIABLE)

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
    """A FastAPI dependency: requires what `RequestGate` has found to be of ``role``, or a viewer's key."""

    def __init__(self, keys: Keys, role: Role = "worker") -> None:
        what = (
            "the viewer's key; or signed, as for the other roles" if role == "viewer" else f"signed, as the {role}"
        )
        self.model = HTTPBase(scheme="bearer" if role == "viewer" else SCHEME, description=what)
        self.scheme_name = role
        self.role = role
        self._keys = keys

    async def __call__(self, request: Request) -> None:
        self.admit(request.scope["headers"], request.scope.get("role"))

    def admit(self, headers: Iterable[tuple[bytes, bytes]], known: Role | None = None) -> None:
        """Check the headers of an ASGI scope, as `__call__` does.

        Args:
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
    return known == wanted or wanted == "viewer" or (known, wanted) == ("host", "worker")


class RequestGate:
    """An ASGI middleware: passes a request to ``app``, or answers 401, 413, or 429 with Retry-After.

    Args:
        rates: How much each address may ask.
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
        # The only time that a request is judged: the route finds the role in the scope.
        proof = None if authorization is None else self._keys.proof(authorization, scope)
        if proof is not None:
            receive, send = proof.receive(receive), proof.send(send)
            if not proof.fresh and limits.kind != "open":
                await refuse(send, HTTPException(STALE, "the challenge is not valid, or this request came before"))
                return
        if limits.kind != "open":
            role = scope["role"] = self._keys.role(authorization) if proof is None else proof.role
            if role is None:
                wait = self._rates.take("stranger", address, self._clock())
                error = TooMany("requests without a token that is known", wait) if wait else unknown_token()
                await refuse(send, error)
                return
            # A replica's connection is not closed to make room for others; viewers have their share of places.
            connection = scope.get("extensions", {}).get("connection")
            if connection is not None and not connection["known"](role):
                await refuse(send, HTTPException(503, NO_PLACE, {"Connection": "close"}))
                return
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
    return HTTPException(413, f"body: more than {largest} bytes")


def unknown_token() -> HTTPException:
    what = f"Authorization: {SCHEME} with a token of this job, or Bearer with a viewer's key, is missing or wrong"
    return HTTPException(401, what, headers={"WWW-Authenticate": f"{SCHEME}, Bearer"})


async def refuse(send: Send, error: HTTPException) -> None:
    """Answer with ``error`` as {"detail": one line}; `connections` bounds what still comes of the body."""
    body = json.dumps({"detail": " ".join(error.detail.split())}).encode()
    always = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    extra = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": [*always, *extra]})
    await send({"type": "http.response.body", "body": body})
