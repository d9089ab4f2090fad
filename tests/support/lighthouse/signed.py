import itertools
import time
from collections.abc import Callable, Generator
from typing import Any

import httpx

from ft_hsdp.control.lighthouse_client import TokenProof
from ft_hsdp.http_proof import HEADER, NONE, SCHEME, SignedRequest, keys_of
from ft_hsdp.secret import worker_token
from lighthouse.http.access import Keys, RequestGate
from lighthouse.http.proofs import CHALLENGE_S
from lighthouse.http.rate_limits import Rates
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN

Handler = Callable[[httpx.Request], httpx.Response]
CHALLENGE = "0" * 32  # of a made-up lighthouse


def gated(app: Any, keys: Keys | None = None) -> RequestGate:
    """An application behind its gate, where time is never short."""
    return RequestGate(app, keys or Keys(TOKEN, ADMIN), Rates(), itertools.count(0, 10).__next__)


def proving(handler: Handler, token: str) -> Handler:
    return lambda request: proved(handler(request), request.headers["Authorization"], token)


def proved(response: httpx.Response, authorization: str, token: str) -> httpx.Response:
    """An answer with the proof of a lighthouse that knows ``token``."""
    response.headers[HEADER] = proof(authorization, response.status_code, response.content, token)
    return response


def proof(authorization: str, status: int, body: bytes, token: str) -> str:
    """The value of the header that proves an answer to a request of a holder of ``token``, or of a worker."""
    scheme, key_id, *_, asked = authorization.split()
    keys = {keys.key_id: keys for keys in (keys_of(token), keys_of(worker_token(token)))}[key_id]
    assert scheme == SCHEME
    return f"{CHALLENGE} {keys.answer(asked.encode(), CHALLENGE.encode(), status, body).decode()}"


def line_of(head: str, status: int, body: bytes, token: str) -> str:
    """The header line that proves an answer; ``head``: of the request, in raw text."""
    found = next(line for line in head.split("\r\n") if line.lower().startswith("authorization:"))
    return f"{HEADER}: {proof(found.partition(':')[2].strip(), status, body, token)}\r\n"


class BlockingProof(TokenProof):
    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request until its challenge is accepted."""
        request.read()
        for signed in self._signed(request):
            response = yield request
            response.read()
            if self._accepted(request, signed, response):
                return


class Signer:
    """Signs requests to the lighthouse at ``url`` that are sent in raw bytes, or by another client."""

    def __init__(self, url: str, token: str = TOKEN) -> None:
        self._url, self._token, self._until = url, token, 0.0

    def headers(self, method: str, target: str, body: bytes = b"") -> dict[str, str]:
        if time.monotonic() > self._until:
            self._challenge, self._until = self._current(), time.monotonic() + CHALLENGE_S / 2
        signed = SignedRequest(self._token, self._challenge, method, target.encode(), body)
        return {"Authorization": signed.authorization, "Content-Type": "application/json"}

    def _current(self) -> str:
        first = SignedRequest(self._token, NONE, "GET", b"/healthz")
        headers = {"Authorization": first.authorization}
        answer = httpx.get(f"{self._url}/healthz", headers=headers, timeout=10.0, trust_env=False)
        challenge = first.challenge(answer.headers.get(HEADER), answer.status_code, answer.content)
        assert challenge is not None, answer.text
        return challenge
