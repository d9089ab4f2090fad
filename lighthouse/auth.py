"""Who may talk to the lighthouse: whoever knows the job's token, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import HTTPException, Request


class Bearer:
    """A FastAPI dependency that lets a request in only with ``Authorization: Bearer TOKEN``.

    It reads headers alone, so a stranger's body is never parsed. With an empty token everybody may come in;
    the lighthouse then listens on loopback only.
    """

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest() if token else None

    def knows(self, header: str | None) -> bool:
        """Whether the value of an Authorization header (None: there is none) holds the token."""
        if self._digest is None:
            return True
        scheme, _, credential = (header or "").partition(" ")
        claimed = hashlib.sha256(credential.strip().encode(errors="surrogateescape")).digest()
        return hmac.compare_digest(self._digest, claimed) and scheme.lower() == "bearer"

    async def __call__(self, request: Request) -> None:
        """Raises HTTPException 401 for a missing or wrong token."""
        if not self.knows(request.headers.get("authorization")):
            raise HTTPException(
                401, "Authorization: Bearer TOKEN is missing or wrong", headers={"WWW-Authenticate": "Bearer"}
            )
