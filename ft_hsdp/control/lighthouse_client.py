"""LighthouseClient: asks for a step over HTTP and waits for the answer."""

from __future__ import annotations

from typing import Any

import httpx

from ft_hsdp import protocol
from ft_hsdp.core.assignment import Answer, Continue, Final, Finish, Grant, Refused
from ft_hsdp.errors import LighthouseUnreachable, ProtocolViolation
from ft_hsdp.protocol import Ask, Processes, Wait

POLL_S = 30.0
CONNECT_S = 2.0


class LighthouseClient:
    """One replica's line to the lighthouse at ``url``; the job's token goes into every request."""

    def __init__(self, url: str, token: str) -> None:
        self._token = token
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(POLL_S, connect=CONNECT_S),
            trust_env=False,
            follow_redirects=False,
        )

    async def ask(self, ask: Ask) -> Answer:
        """Ask for a step and wait until the lighthouse has decided.

        Raises:
            LighthouseUnreachable: it does not answer, or not as a lighthouse does.
        """
        while True:
            answer = await self._post("/v1/quorum", ask, (Grant, Continue, Final, Finish, Refused, Wait))
            if isinstance(answer, Grant):
                try:
                    protocol.verify(self._token, answer)
                except ProtocolViolation as error:
                    raise LighthouseUnreachable(str(error)) from error
            if not isinstance(answer, Wait):
                assert isinstance(answer, Answer)
                return answer

    async def report(self, processes: Processes) -> None:
        """Tell the lighthouse which incarnations have exited (a rank does this for its own predecessors)."""
        await self._post("/v1/processes", processes, (protocol.Overview,))

    async def _post(self, path: str, message: object, expected: tuple[type, ...]) -> Any:
        try:
            response = await self._http.post(path, content=protocol.encode(message))
            if response.status_code != 200:
                text = response.text.strip().splitlines()
                raise LighthouseUnreachable(
                    f"lighthouse answered {response.status_code}: {(text or [''])[0][:200]}"
                )
            return protocol.decode(response.content, *expected)
        except (httpx.HTTPError, ProtocolViolation) as error:
            raise LighthouseUnreachable(f"lighthouse: {type(error).__name__} {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
