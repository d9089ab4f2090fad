"""How a request to the lighthouse and its answer prove that both ends know a token, which is never sent.

    caller -> lighthouse    Authorization: FT-HMAC KEY-ID CHALLENGE NONCE BODY MAC
    lighthouse -> caller    FT-HMAC: CHALLENGE MAC

KEY-ID names the token, BODY is the SHA-256 of the body. The request's MAC also covers the method and the target.
The answer's MAC covers the MAC of its request, the status and the body, so it answers this one request. All MACs
are HMAC-SHA256 under keys that are derived from the token, one for requests and one for answers.

A request is accepted once. CHALLENGE is a random text that one lighthouse process made, and that it replaces from
time to time. The lighthouse remembers each NONCE for as long as it accepts the challenge. So no clock of another
host counts, and a recording is of no use, neither here, nor after a restart, nor at another lighthouse. A caller
without a valid challenge gets 401 with the current one, and asks again; each answer brings the current one.

An answer without end, a stream, carries an empty body's MAC in its head and `mark`s in between.

The lighthouse's side is `lighthouse.http.proofs`; the callers' is `control.lighthouse_client`.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from collections.abc import Callable

SCHEME = "FT-HMAC"
HEADER = "ft-hmac"  # of an answer
NONE = "-"  # the challenge of a caller that has none yet
STALE = 401  # status of an answer to a request that was not accepted, with a challenge that is
MARK = b": ft-hmac "  # a comment in server-sent events

_BLOCK = 64  # of SHA-256
_INNER, _OUTER = bytes(x ^ 0x36 for x in range(256)), bytes(x ^ 0x5C for x in range(256))


def _hmac(key: bytes) -> Callable[[bytes], bytes]:
    """Return HMAC-SHA256 under ``key`` (32 bytes) as 64 hex digits; half the time of `hmac.digest`."""
    padded = key.ljust(_BLOCK, b"\0")
    inner, outer = hashlib.sha256(padded.translate(_INNER)), hashlib.sha256(padded.translate(_OUTER))

    def mac(data: bytes) -> bytes:
        first, second = inner.copy(), outer.copy()
        first.update(data)
        second.update(first.digest())
        return second.hexdigest().encode()

    return mac


class ProofKeys:
    """What follows from a token: how it is named, and the MACs of requests and of answers."""

    def __init__(self, token: str) -> None:
        def derived(purpose: str) -> bytes:
            return hmac.digest(token.encode(), f"ft_hsdp http 1 {purpose}".encode(), "sha256")

        self.key_id = derived("key id")[:8].hex()
        self._request = _hmac(derived("request"))
        self._answer = _hmac(derived("answer"))

    def request(self, method: str, target: bytes, rest: bytes) -> bytes:
        """Return the MAC of a request, 64 hex digits.

        Args:
            target: Path and query as they are sent.
            rest: "CHALLENGE NONCE BODY".
        """
        return self._request(b"%s %s %s" % (method.encode(), target, rest))

    def answer(self, asked: bytes, challenge: bytes, status: int, body: bytes) -> bytes:
        """Return the MAC of an answer.

        Args:
            asked: The MAC of its request.
            challenge: That comes with it.
            body: The whole body; b"" for a stream.
        """
        return self._answer(b"answer %s %s %d %s" % (asked, challenge, status, body))

    def mark(self, asked: bytes, number: int, events: bytes) -> bytes:
        """Return the line that follows a part of a stream: `MARK`, its MAC and an empty line.

        Args:
            asked: The MAC of the request.
            number: Of the part, from 0.
        """
        return MARK + self._answer(b"stream %s %d %s" % (asked, number, events)) + b"\n\n"


keys_of = functools.lru_cache(maxsize=64)(ProofKeys)


class SignedRequest:
    """A request that its caller signs, and that checks its answer.

    Args:
        token: The worker's or the admin's.
        challenge: Of the lighthouse, or `NONE`.
        target: Path and query as they are sent.
    """

    def __init__(self, token: str, challenge: str, method: str, target: bytes, body: bytes = b"") -> None:
        self._keys = keys_of(token)
        rest = f"{challenge} {os.urandom(16).hex()} {hashlib.sha256(body).hexdigest()}"
        self._mac = self._keys.request(method, target, rest.encode())
        self.authorization = f"{SCHEME} {self._keys.key_id} {rest} {self._mac.decode()}"

    def challenge(self, header: str | None, status: int, body: bytes) -> str | None:
        """Return the challenge that an answer brings if the answer is proved; else None.

        Args:
            header: The value of `HEADER` in the answer; None: there is none.
            body: The whole body; b"" for a stream.
        """
        challenge, _, claimed = (header or "").partition(" ")
        if not (challenge and claimed.isascii() and challenge.isascii()):
            return None
        expected = self._keys.answer(self._mac, challenge.encode(), status, body)
        return challenge if hmac.compare_digest(expected, claimed.encode()) else None

    def marked(self, number: int, events: bytes, line: bytes) -> bool:
        """Return whether ``line`` (no empty line behind it) marks this part of the stream that answers this."""
        return hmac.compare_digest(self._keys.mark(self._mac, number, events).rstrip(b"\n"), line)
