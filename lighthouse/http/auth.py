"""Who may talk to the lighthouse: a holder of a token, compared in constant time. Three roles.

A *worker* is a replica or a supervisor of the job. An *admin* may evict, drain, and order a checkpoint. A *viewer*
may read what the lighthouse shows; its key is derived from the worker's token and grants nothing else, so it may
stand in a link. Workers and admins may read, too; no other role includes another.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Self

from fastapi import HTTPException, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from ft_hsdp import protocol, secret
from ft_hsdp.errors import ConfigError

TOKEN_VARIABLE = "FT_HSDP_TOKEN"  # noqa: S105 - the name of a variable
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
        return secret.read(worker, TOKEN_VARIABLE), secret.read(admin, ADMIN_VARIABLE)

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
            known: The role that `middleware.RequestGate` has found; None: no gate is in front, so the token is
                judged here.

        Raises:
            HTTPException: 401 for a missing or wrong token, 403 for a token of another role.
        """
        # Defence in depth: a route that is served without the gate, as on the page of a run that is over.
        if known is None:
            known = self._keys.role(next((value for name, value in headers if name == b"authorization"), None))
        if known is None:
            raise HTTPException(401, STRANGER, headers={"WWW-Authenticate": "Bearer"})
        if not may(known, self.role):
            raise HTTPException(403, f"this token is a {known}'s; the route is for a {self.role}")


STRANGER = "Authorization: Bearer TOKEN is missing or wrong"


def may(known: Role, wanted: Role) -> bool:
    """Return whether a holder of the role ``known`` may do what is for ``wanted``."""
    return known == wanted or wanted == "viewer"
