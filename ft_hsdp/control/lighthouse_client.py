"""LighthouseClient: asks for a step over HTTP and waits for the answer."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.control.lighthouses import Lighthouses, http_client
from ft_hsdp.control.reporter import deliver
from ft_hsdp.core.assignment import Answer, CatchUp, Continue, Finish, Grant, Refused
from ft_hsdp.errors import LighthouseUnreachable, ProtocolViolation
from ft_hsdp.protocol import Ask, Processes, Telemetry, Wait

ASK_S = 20.0
MARGIN_S = 10.0  # for which an answer may be on its way, beside the time that the lighthouse keeps an ask


class LighthouseClient:
    """One replica's line to the lighthouses at ``urls``; the job's token goes into every request.

    ``file``: see `Lighthouses`; ``ask_s``: how long they keep an ask.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        tls: ssl.SSLContext | None = None,
        file: Path | None = None,
        ask_s: float = ASK_S,
    ) -> None:
        self._token = token
        self._lighthouses = Lighthouses(urls, http_client(token, ask_s + MARGIN_S, tls), file)

    async def greet(self) -> None:
        """Connect, if the lighthouse is there."""
        await self._lighthouses.greet()

    async def ask(self, ask: Ask) -> Answer:
        """Ask for a step and wait until the lighthouse has decided.

        Raises:
            LighthouseUnreachable: it does not answer, or not as a lighthouse does.
        """
        while True:
            answer = await self._post("/v1/quorum", ask, (Grant, Continue, CatchUp, Finish, Refused, Wait))
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

    async def tell(self, telemetry: Telemetry) -> None:
        """Tell the lighthouse what is only to be seen.

        Raises:
            LighthouseUnreachable: it did not take it; NotTaken: it never will.
        """
        await deliver(self._lighthouses, telemetry)

    async def _post(self, path: str, message: object, expected: tuple[type, ...]) -> Any:
        response = await self._lighthouses.post(path, protocol.encode(message))
        if response.status_code != 200:
            text = response.text.strip().splitlines()
            raise LighthouseUnreachable(f"lighthouse answered {response.status_code}: {(text or [''])[0][:200]}")
        try:
            return protocol.decode(response.content, *expected)
        except ProtocolViolation as error:
            raise LighthouseUnreachable(f"lighthouse: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._lighthouses.close()
