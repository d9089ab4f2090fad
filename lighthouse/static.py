"""Static: the page's files, from a table that is made once: no path from the network reaches the file system."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import HTTPException, Request, Response

FOLDER = Path(__file__).parent / "dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again each time; the answer is 304 as long as nothing has changed
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    etag: str


class Static:
    """The files of ``folder`` whose type is known, by their paths in it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        found = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in TYPES)
        self._files = {p.relative_to(folder).as_posix(): _read(p) for p in found}

    def answer(self, request: Request, path: str) -> Response:
        """The file at ``path``, or 304 to a browser that has it. Raises HTTPException 404."""
        file = self._files.get(path)
        if file is None:
            raise HTTPException(404, "no such page")
        headers = SECURITY | {"ETag": file.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.kind, headers=headers)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, TYPES[path.suffix], f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
