"""Home: the address at which the other machines of a job reach this one.

Lighthouses: where they listen, and which of them is asked. One class for all who talk to them.

A job has one lighthouse, or several of which one leads. Those that do not answer 503 and say who does.

LighthouseClient: asks for a step over HTTP and waits for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from ft_hsdp import fault_injection, protocol
from ft_hsdp.core.grant import Answer, CatchUp, Continue, Finish, Grant, Refused
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, ProtocolViolation
from ft_hsdp.protocol import ProcessReport, QuorumRequest, Telemetry, Wait


def own_address(host: str, lighthouse: str) -> str:
    """The IP address to listen at and to advertise for ``host``: a name's first one, an address as it is.

    For 0.0.0.0 and :: it is the one from which this machine reaches ``lighthouse`` (a URL).

    Raises:
        ConfigError: there is none; the line names network.host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        address = str(found[4][0])
        if not ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            return address
        there = urlsplit(lighthouse)
        family, _, _, _, target = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)  # sends nothing: the kernel chooses the way
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            "network.host", host, f"an address of this machine ({error.strerror or error})"
        ) from None


TAKEN = 204
REFUSED = (413, 422)
CONNECT_S = 2.0
PROBE_S = 1.0  # between two looks at a lighthouse that has not answered yet, and the longest one
UNAVAILABLE = 503


def http_client(token: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """What every process talks to the lighthouse with; ``timeout_s`` is the longest wait for one answer.

    ``tls``: from `ft_hsdp.tls.client`; None trusts what this machine trusts.
    Neither proxies nor redirects are followed: the job's token goes into every request.
    """
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        verify=True if tls is None else tls,
        trust_env=False,
        follow_redirects=False,
    )


def parse_urls(text: str, option: str = "--lighthouse") -> tuple[str, ...]:
    """``URL[,URL]``, the value of ``option``, as URLs without a slash at the end. Raises ConfigError."""
    urls = tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
    if not urls or any(urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc for url in urls):
        raise ConfigError(option, text, "http://HOST:PORT, and more of them after commas")
    return urls


def urls_of_run(document: object) -> tuple[str, ...]:
    """The URLs in a run's lighthouse.json, the leader's first; none in anything else."""
    if not isinstance(document, Mapping):
        return ()
    urls: Iterable[Any] = [document.get("url"), *(document.get("urls") or ())]
    return tuple(dict.fromkeys(url for url in urls if isinstance(url, str)))


class Lighthouses:
    """The lighthouses at ``urls``, of which the last one that answered is asked first.

    A hint at the leader is followed only to one of ``urls``: nobody else is shown the token. ``file``: a run's
    lighthouse.json, which is read again when none answers: a scheduler may have started it on another machine.
    """

    def __init__(self, urls: tuple[str, ...], client: httpx.AsyncClient, file: Path | None = None) -> None:
        self.urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._client = client
        self._file = file
        self._at = 0

    @property
    def url(self) -> str:
        """The one that is asked next."""
        return self.urls[self._at]

    async def post(self, path: str, content: bytes) -> httpx.Response:
        """The answer of the one that leads, whatever its status; of the last one if none leads.

        Raises:
            LighthouseUnreachable: none of them answers.
        """
        problem = ""
        cause: Exception | None = None
        await self._pass()
        for last in (*(False,) * len(self.urls), True):
            url = self.url
            try:
                response = await self._watched(self._client.post(f"{url}{path}", content=content), url)
                await self._pass()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem, cause = f"lighthouse {url}: {type(error).__name__} {error}", error
                self._leave(url)
            else:
                if last or response.status_code != UNAVAILABLE or not self._leave(url, _leader(response)):
                    return response
                problem = f"lighthouse {url}: it does not lead"
            if len(self.urls) == 1:
                break
        self._look_again()
        raise LighthouseUnreachable(problem) from cause

    async def _pass(self) -> None:
        """Nothing, but where nothing passes to the lighthouse on purpose."""
        try:
            await fault_injection.passes(fault_injection.LIGHTHOUSE, CONNECT_S)
        except OSError as error:
            raise LighthouseUnreachable(f"lighthouse {self.url}: {error}") from error

    async def greet(self) -> None:
        """Connect, if the lighthouse is there: who asks first does not have to wait for that."""
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            await self._client.get(f"{self.url}/healthz", timeout=PROBE_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _look_again(self) -> None:
        """Take the addresses that the run has now, if they are others."""
        with contextlib.suppress(OSError, ValueError):
            urls = urls_of_run(json.loads(self._file.read_text())) if self._file is not None else ()
            if urls and set(urls) != set(self.urls):
                self.urls, self._at = urls, 0

    def _leave(self, url: str, leader: str | None = None) -> bool:
        """Ask another one than ``url`` from now on, if there is one: the ``leader``, else the next."""
        if len(self.urls) == 1:
            return False
        if leader in self.urls and leader != url:
            self._at = self.urls.index(leader)
        elif self.url == url:
            self._at = (self._at + 1) % len(self.urls)
        return True

    async def _watched(self, request: Awaitable[httpx.Response], url: str) -> httpx.Response:
        """The answer to ``request``, which is given up when its lighthouse stops answering, or leading.

        An answer may take long; whether there is another one to ask is then worth a look.
        """
        if len(self.urls) == 1:
            return await request
        asked = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({asked}, timeout=PROBE_S))[0]:
                await self._probe(url)
            return await asked
        finally:
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                await asked

    async def _probe(self, url: str) -> None:
        """Raises httpx.HTTPError if the lighthouse at ``url`` is silent, or does not lead."""
        response = await self._client.get(f"{url}/healthz", timeout=PROBE_S)
        if response.status_code != httpx.codes.OK or _fact(response, "role") == "standby":
            raise httpx.ReadError("it does not lead any more")


def _leader(response: httpx.Response) -> str | None:
    """Who leads, according to one that does not."""
    hint = _fact(response, "leader")
    return hint.rstrip("/") if isinstance(hint, str) else None


def _fact(response: httpx.Response, key: str) -> Any:
    try:
        document = response.json()
    except ValueError:
        return None
    return document.get(key) if isinstance(document, dict) else None


ASK_S = 20.0
MARGIN_S = 10.0  # for which an answer may be on its way, beside the time that the lighthouse keeps an ask


class NotTaken(LighthouseUnreachable):
    """The lighthouse is there, and refuses this message: it is too large, or not valid."""


async def deliver(lighthouses: Lighthouses, telemetry: Telemetry) -> None:
    """Have the lighthouse that leads take a message.

    Raises:
        LighthouseUnreachable: it did not; NotTaken: it never will.
    """
    response = await lighthouses.post("/v1/telemetry", protocol.encode(telemetry))
    if response.status_code in REFUSED:
        raise NotTaken(f"lighthouse answered {response.status_code}: {response.text[:200]}")
    if response.status_code != TAKEN:
        raise LighthouseUnreachable(f"lighthouse answered {response.status_code}: {response.text[:200]}")


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

    async def ask(self, ask: QuorumRequest) -> Answer:
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

    async def report(self, processes: ProcessReport) -> None:
        """Tell the lighthouse which incarnations have exited (a rank does this for its own predecessors)."""
        await self._post("/v1/processes", processes, (protocol.SupervisorReply,))

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
