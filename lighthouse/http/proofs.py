"""The lighthouse's side of `ft_hsdp.http_proof`: who has signed a request, and the MAC of its answer.

`SignedCalls` judges the head of a request before anything of its body is read. `Proof.receive` checks the body as
it arrives, and `Proof.send` signs the answer, whatever it is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from ft_hsdp.http_proof import HEADER, SCHEME, ProofKeys, keys_of

CHALLENGE_S = 60.0  # for which requests with a challenge are accepted at least; twice that at most
REMEMBERED = 1 << 17  # requests of one challenge: then the next one comes early

_SCHEME = SCHEME.encode()


@dataclass(slots=True)
class Proof:
    role: str  # of the token
    fresh: bool  # whether it is accepted: its challenge is valid, and it comes for the first time
    _keys: ProofKeys
    _asked: bytes  # its MAC
    _body: bytes  # the SHA-256 of its body
    _calls: SignedCalls

    def receive(self, receive: Receive) -> Receive:
        """Return a ``receive`` that raises HTTPException 400 at the end of a body that was not signed."""
        parts: hashlib._Hash | None = None  # of a body that comes in parts

        async def checked() -> Message:
            nonlocal parts
            message = await receive()
            if message["type"] != "http.request":
                return message
            body, more = message.get("body", b""), message.get("more_body", False)
            if parts is not None:
                parts.update(body)
            elif more:
                parts = hashlib.sha256(body)
            if not more and (parts or hashlib.sha256(body)).hexdigest().encode() != self._body:
                raise HTTPException(400, "body: not the one that was signed")
            return message

        return checked

    def send(self, send: Send) -> Send:
        """Return a ``send`` that signs the answer: its head is held back until its body is known."""
        head: Message | None = None
        number = -1  # of the last part of a stream

        async def signed(message: Message) -> None:
            nonlocal head, number
            if message["type"] == "http.response.start":
                head = message
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            if head is not None:
                challenge = self._calls.current
                mac = self._keys.answer(self._asked, challenge, head["status"], b"" if more else body)
                head["headers"] = [*head["headers"], (HEADER.encode(), b"%s %s" % (challenge, mac))]
                begun, head = head, None
                await send(begun)
            if more and body:
                number += 1
                message["body"] = body + self._keys.mark(self._asked, number, body)
            await send(message)

        return signed


class SignedCalls:
    """The tokens whose holders may sign requests; the current challenge and the one before, with their nonces."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, tuple[ProofKeys, str]] = {}
        self._due = 0.0
        self._seen: dict[bytes, set[bytes]] = {}  # nonces of the requests that came with each challenge
        self.current = b""
        self._replace()

    def hold(self, tokens: Iterable[tuple[str, str]]) -> None:
        """Accept these tokens, each with its role, and no other ones."""
        known = [(keys_of(token), role) for token, role in tokens]
        self._known = {keys.key_id.encode(): (keys, role) for keys, role in known}

    def judge(self, authorization: bytes, scope: Scope) -> Proof | None:
        parts = authorization.split(b" ")
        if parts[0] != _SCHEME or len(parts) != 6:
            return None
        _, key_id, challenge, nonce, body, mac = parts
        found = self._known.get(key_id)
        if found is None:
            return None
        keys, role = found
        query = scope["query_string"]
        target = b"%s?%s" % (scope["raw_path"], query) if query else scope["raw_path"]
        said = authorization[len(_SCHEME) + len(key_id) + 2 : -len(mac) - 1]
        if not hmac.compare_digest(keys.request(scope["method"], target, said), mac):
            return None
        return Proof(role, self.take(challenge, nonce), keys, mac, body, self)

    def take(self, challenge: bytes, nonce: bytes) -> bool:
        """Return whether a request that its caller signed is accepted: the challenge is valid, the nonce new."""
        if self._clock() >= self._due or len(self._seen[self.current]) >= REMEMBERED:
            self._replace()
        seen = self._seen.get(challenge)
        if seen is None or nonce in seen:
            return False
        seen.add(nonce)
        return True

    def _replace(self) -> None:
        before = {self.current: self._seen[self.current]} if self.current else {}
        self.current = os.urandom(16).hex().encode()
        self._seen = {**before, self.current: set()}
        self._due = self._clock() + CHALLENGE_S
