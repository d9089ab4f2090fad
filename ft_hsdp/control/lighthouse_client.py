"""Which lighthouse of a job is asked, over HTTP, and how a replica waits for its answer.

A job has one lighthouse, or several of which one leads. Those that do not lead answer 503 and name the leader.
Every process that talks to a lighthouse has a `LighthouseClient`.
No token is ever sent, and an answer counts only if it proves that its sender knows the token: `TokenProof`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from ft_hsdp import address, bounded, fault_injection, http_proof, protocol
from ft_hsdp.core.grant import Answer, CatchUp, Continue, Finish, Grant, Holders, Refused
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, ProtocolViolation, one_line
from ft_hsdp.jsonl import read_object
from ft_hsdp.protocol import ProcessReport, QuorumRequest, SupervisorReply, Telemetry, Wait
from ft_hsdp.tls import Trusted

CONNECT_S = 2.0  # longest wait for a connection
PROBE_S = 1.0  # between two looks at a lighthouse that has not answered yet, and the longest one
HOLDERS_S = 2.0  # for an answer that no decision waits for, and
HOLDERS_AGAIN_S = 0.2  # between two attempts to get it
ASK_S = 20.0  # for which a lighthouse keeps a request open, unless the configuration says otherwise
REPLY_S = 2.0  # for the answer to a report, on top of the time for which the lighthouse keeps it open
MARGIN_S = 10.0  # for the way of an answer, on top of the time for which the lighthouse keeps a request open
TAKEN = 204  # status of telemetry that was taken
REFUSED = (413, 422)  # statuses of a message that must not be sent again
UNAVAILABLE = 503  # status of a lighthouse that does not lead
MAX_ANSWER = 16 << 20  # bytes
SIGNED = 3  # times that a request is sent until the lighthouse accepts its challenge
SAY_S = 60.0  # between two lines about the same address

_HOLDERS = bounded.checker(Holders)


def own_address(host: str, lighthouse: str, key: str = "network.host") -> str:
    """Return the IP address at which this machine listens, and that it advertises.

    Args:
        host: the name of an interface or of a host (its first address counts), an address, or 0.0.0.0 or :: for
            the address from which this machine reaches the lighthouse.
        key: that has it.

    Raises:
        ConfigError: there is none; the line names `key`.
    """
    if any(host == name for _, name in socket.if_nameindex()):
        import psutil  # few name an interface

        for family in (socket.AF_INET, socket.AF_INET6):
            for found in psutil.net_if_addrs().get(host, ()):
                if found.family == family and "%" not in found.address:  # that of a link alone is no use
                    return str(found.address)
        raise ConfigError(key, host, "an interface that has an address")
    try:
        listening = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if not address.unspecified(listening):
            return listening
        there = urlsplit(lighthouse)
        return address.source(there.hostname, there.port or 80)
    except OSError as error:
        raise ConfigError(
            key, host, f"an address or an interface of this machine ({error.strerror or error})"
        ) from None


_log = logging.getLogger(__name__)


class Unproved(httpx.ProtocolError):
    """What listens there does not know the token: its answer counts as none."""


class TokenProof(httpx.Auth):
    """Signs every request of an httpx client with a token, and lets only proved answers through.

    Args:
        token: the worker's or the admin's.
    """

    _said: dict[str, float] = {}  # noqa: RUF012 - by address, when this process told of it last

    def __init__(self, token: str) -> None:
        self._token = token
        self._challenges: dict[str, str] = {}  # by address
        self._doubted: set[str] = set()  # addresses where the last answer was not proved

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Send a request until its challenge is accepted. Raises Unproved."""
        await request.aread()
        if request.url.netloc.decode() in self._doubted:
            # An open connection would stay with who has answered, also when the lighthouse listens there again.
            request.headers["Connection"] = "close"
        for signed in self._signed(request):
            response = yield request
            response.stream = _Bounded(response)
            await response.aread()
            if self._accepted(request, signed, response):
                return
        raise self._unproved(request)

    def _signed(self, request: httpx.Request) -> Iterator[http_proof.SignedRequest]:
        where = request.url.netloc.decode()
        for _ in range(SIGNED):
            challenge, target = self._challenges.get(where, http_proof.NONE), request.url.raw_path
            signed = http_proof.SignedRequest(self._token, challenge, request.method, target, request.content)
            request.headers["Authorization"] = signed.authorization
            yield signed

    def _accepted(
        self, request: httpx.Request, signed: http_proof.SignedRequest, response: httpx.Response
    ) -> bool:
        """Return whether a proved answer is one to this request, and no new challenge. Raises Unproved."""
        header = response.headers.get(http_proof.HEADER)
        challenge = signed.challenge(header, response.status_code, response.content)
        if challenge is None:
            raise self._unproved(request)
        self._challenges[request.url.netloc.decode()] = challenge
        self._doubted.discard(request.url.netloc.decode())
        return response.status_code != http_proof.STALE

    def _unproved(self, request: httpx.Request) -> Unproved:
        """Return the error, and say once in `SAY_S` seconds what is wrong."""
        self._doubted.add(request.url.netloc.decode())
        where = f"{request.url.scheme}://{request.url.netloc.decode()}"
        error = Unproved(f"what listens at {where} does not know the job's token")
        now = time.monotonic()
        if now - self._said.get(where, -SAY_S) >= SAY_S:
            self._said[where] = now
            _log.warning("%s: its answers do not count", error)
        return error


class _Bounded(httpx.AsyncByteStream):
    """The body of an answer; httpx.DecodingError if it has more than `MAX_ANSWER` bytes, or is packed."""

    def __init__(self, response: httpx.Response) -> None:
        self._stream: Any = response.stream
        self._left = MAX_ANSWER if "content-encoding" not in response.headers else -1

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise httpx.DecodingError(f"an answer of more than {MAX_ANSWER} bytes, or a packed one")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def http_client(token: str, timeout_s: float, tls: Trusted | None = None) -> httpx.AsyncClient:
    """Return the HTTP client with which every process talks to the lighthouse.

    It follows neither proxies nor redirects, and each answer that it returns is proved.

    Args:
        tls: from `ft_hsdp.tls.client`; None trusts what this machine trusts.
    """
    return httpx.AsyncClient(
        auth=TokenProof(token),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # an answer that is not proved may bring some
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
        verify=True if tls is None else tls,
        trust_env=False,
        follow_redirects=False,
    )


def get_proved(url: str, token: str, timeout_s: float, trusted: Trusted) -> httpx.Response:
    """Return a lighthouse's proved answer to a GET, whatever its status. Blocks; not inside of an event loop.

    Args:
        timeout_s: longest wait for the whole answer, in seconds: what listens there may send it byte by byte.
        trusted: whose certificates are accepted.

    Raises:
        httpx.HTTPError: there is no answer, or it is not proved.
        httpx.InvalidURL: `url` is none.
    """

    async def get() -> httpx.Response:
        async with http_client(token, timeout_s, trusted) as client, asyncio.timeout(timeout_s):
            return await client.get(url)

    try:
        return asyncio.run(get())
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer within {timeout_s:g} s") from None


def parse_urls(text: str, option: str = "--lighthouse") -> tuple[str, ...]:
    """Return the URLs in `URL[,URL]`, without a slash at the end.

    Args:
        text: the value of an option.
        option: its name, for the error.

    Raises:
        ConfigError: a part is no http or https URL, or there is none.
    """
    urls = tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
    found = [address.parse_url(url) for url in urls]
    if not urls or any(parts is None or parts.scheme not in ("http", "https") for parts in found):
        raise ConfigError(option, text, "http://HOST:PORT, and more of them after commas")
    return urls


def urls_of_run(document: object) -> tuple[str, ...]:
    """Return the URLs in the document of a run's lighthouse.json, the leader's first; () for another document."""
    if not isinstance(document, Mapping):
        return ()
    others = document.get("urls")
    urls: Iterable[Any] = [document.get("url"), *(others if isinstance(others, list) else ())]
    return tuple(dict.fromkeys(url for url in urls if isinstance(url, str)))


class NotTaken(LighthouseUnreachable):
    """The lighthouse is there and refuses this message: it is too large, or not valid."""


class LighthouseClient:
    """The requests of a process to the lighthouses of its job. The last one that answered is asked first.

    The name of a leader is followed only to one of `urls`.

    Args:
        tls: from `ft_hsdp.tls.client`.
        file: a run's lighthouse.json. It is read again when none answers: a scheduler may have started the
            lighthouse on another machine.
        reply_s: longest wait for an answer, in seconds.
        http: sends the requests, and is closed with this client; None: one from `http_client`.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        tls: ssl.SSLContext | None = None,
        file: Path | None = None,
        reply_s: float = ASK_S + MARGIN_S,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self.urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._token = token
        self._client = http or http_client(token, reply_s, tls)
        self._file = file
        self._at = 0

    @property
    def url(self) -> str:
        return self.urls[self._at]

    async def post(self, path: str, content: bytes) -> httpx.Response:
        """Return the answer of the lighthouse that leads, whatever its status; of the last one if none leads.

        Raises:
            LighthouseUnreachable: none of them answers.
        """
        return await self._send("POST", path, content)

    async def get(self, path: str) -> httpx.Response:
        """Return the answer to a GET of the lighthouse that leads; as `post`."""
        return await self._send("GET", path, b"")

    async def _send(self, method: str, path: str, content: bytes) -> httpx.Response:
        problem = ""
        cause: Exception | None = None
        await self._pass()
        for last in (*(False,) * len(self.urls), True):
            url = self.url
            try:
                async with asyncio.timeout(self._client.timeout.read):  # of all parts of an answer together
                    asking = self._client.request(method, f"{url}{path}", content=content)
                    response = await self._watched(asking, url)
                await self._pass()
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
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
        """Wait, or fail, if a fault injection cuts this process off from the lighthouse."""
        try:
            await fault_injection.passes(fault_injection.LIGHTHOUSE, CONNECT_S)
        except OSError as error:
            raise LighthouseUnreachable(f"lighthouse {self.url}: {error}") from error

    async def greet(self) -> None:
        """Connect, if the lighthouse is there, so that the first request does not wait for that."""
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            await self._client.get(f"{self.url}/healthz", timeout=PROBE_S)

    async def close(self) -> None:
        await self._client.aclose()

    def _look_again(self) -> None:
        """Take the addresses that lighthouse.json has now, if they are others."""
        urls = urls_of_run(read_object(self._file)) if self._file is not None else ()
        if urls and set(urls) != set(self.urls):
            self.urls, self._at = urls, 0

    def _leave(self, url: str, leader: str | None = None) -> bool:
        """Ask another lighthouse than `url` from now on: the `leader` if it is known, else the next.

        Return False if there is none.
        """
        if len(self.urls) == 1:
            return False
        if leader in self.urls and leader != url:
            self._at = self.urls.index(leader)
        elif self.url == url:
            self._at = (self._at + 1) % len(self.urls)
        return True

    async def _watched(self, request: Awaitable[httpx.Response], url: str) -> httpx.Response:
        """Return the answer to `request`. Give it up when its lighthouse stops answering, or leading.

        An answer may take long, so the lighthouse is probed meanwhile, if there is another one to ask.
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
        """Raise httpx.HTTPError if the lighthouse at `url` is silent or does not lead."""
        response = await self._client.get(f"{url}/healthz", timeout=PROBE_S)
        if response.status_code != httpx.codes.OK or _fact(response, "role") == "standby":
            raise httpx.ReadError("it does not lead any more")

    async def ask(self, ask: QuorumRequest) -> Answer | Wait:
        """Ask for a step, and wait until the lighthouse has decided, or says that it has not.

        Returns:
            The answer; a grant's MAC is checked.

        Raises:
            LighthouseUnreachable: it does not answer, or not as a lighthouse does.
        """
        expected = Grant, Continue, CatchUp, Finish, Refused, Wait
        answer: Answer | Wait = await self._post("/v1/quorum", ask, expected)
        if isinstance(answer, Grant):
            try:
                protocol.verify(self._token, answer)
            except ProtocolViolation as error:
                raise LighthouseUnreachable(str(error)) from error
        return answer

    async def holders(self, replica: int) -> Holders:
        """Ask where copies of the newest state may be, for ``replica``, which recovers.

        Raises:
            LighthouseUnreachable: it does not answer, or not as a lighthouse does.
        """
        response = await self.get(f"/v1/holders?replica={replica}")
        _check(response)
        try:
            found: Holders = _HOLDERS.validate_json(response.content)
        except ValidationError as error:
            raise LighthouseUnreachable(f"lighthouse: {bounded.complaint(error)}") from None
        return found

    async def find_holders(self, replica: int, wait_s: float) -> Holders | None:
        """Ask as `holders`, once and again for ``wait_s`` seconds; return None if there is no answer.

        Each attempt has `HOLDERS_S`.
        """
        until = time.monotonic() + wait_s
        while True:
            try:
                async with asyncio.timeout(HOLDERS_S):
                    return await self.holders(replica)
            except (LighthouseUnreachable, TimeoutError):
                if time.monotonic() >= until:
                    return None
            await asyncio.sleep(HOLDERS_AGAIN_S)

    async def report(self, processes: ProcessReport) -> SupervisorReply:
        """Tell the lighthouse which ranks live, and which have ended.

        Raises:
            LighthouseUnreachable: it does not answer, or not as a lighthouse does.
        """
        reply: SupervisorReply = await self._post("/v1/processes", processes, (SupervisorReply,))
        return reply

    async def tell(self, telemetry: Telemetry) -> None:
        """Send telemetry.

        Raises:
            LighthouseUnreachable: it was not taken, and may be sent again.
            NotTaken: it never will be taken as it is.
        """
        response = await self.post("/v1/telemetry", protocol.encode(telemetry))
        _check(response, TAKEN)

    async def _post(self, path: str, message: object, expected: tuple[type, ...]) -> Any:
        response = await self.post(path, protocol.encode(message))
        _check(response)
        try:
            return protocol.decode(response.content, *expected)
        except ProtocolViolation as error:
            raise LighthouseUnreachable(f"lighthouse: {error}") from error


def _check(response: httpx.Response, status: int = httpx.codes.OK) -> None:
    """Raise LighthouseUnreachable if an answer has another status; NotTaken if that refuses the message."""
    if response.status_code != status:
        refused = NotTaken if response.status_code in REFUSED else LighthouseUnreachable
        raise refused(f"lighthouse answered {response.status_code}: {one_line(response.text)[:200]}")


def _leader(response: httpx.Response) -> str | None:
    """Return the URL of the leader that a lighthouse names which does not lead."""
    hint = _fact(response, "leader")
    return hint.rstrip("/") if isinstance(hint, str) else None


def _fact(response: httpx.Response, key: str) -> Any:
    try:
        document = response.json()
    except ValueError:
        return None
    return document.get(key) if isinstance(document, dict) else None
