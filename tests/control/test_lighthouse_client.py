import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ft_hsdp import protocol
from ft_hsdp.control import lighthouse_client
from ft_hsdp.control.lighthouse_client import (
    LighthouseClient,
    TokenProof,
    Unproved,
    get_proved,
    own_address,
    parse_urls,
    urls_of_run,
)
from ft_hsdp.core.grant import Answer, CatchUp, Continue, Finish, Grant, Holders, Member, Refused, Report
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, LighthouseUnreachable
from ft_hsdp.protocol import ProcessReport, QuorumRequest, SupervisorReply, Wait
from tests.support.launch.squatter import SquatterServer
from tests.support.lighthouse.signed import line_of, proving
from tests.support.refused import refused

TOKEN = "ab" * 32
STATE = StateId(0, 0, "0" * 32)
ASK = QuorumRequest(Report(0, "0-x-0", STATE, 1), ("r",), ("s",), "hash", "layout")
GRANT = protocol.sign(TOKEN, Grant(1, 1, STATE, (Member(0, "0-x-0", "contribute"),), 1, "first"))


@asynccontextmanager
async def following(there: Any, urls: tuple[str, ...], auth: TokenProof | None) -> AsyncIterator[LighthouseClient]:
    """A client of what answers ``there``."""
    client = LighthouseClient(urls, TOKEN, http=httpx.AsyncClient(auth=auth, transport=httpx.MockTransport(there)))
    try:
        yield client
    finally:
        await client.close()


def client_of(handler: Callable[[httpx.Request], httpx.Response]) -> AbstractAsyncContextManager[LighthouseClient]:
    return following(proving(handler, TOKEN), ("http://lighthouse",), TokenProof(TOKEN))


def answer(message: object) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(200, content=protocol.encode(message))


@pytest.mark.parametrize(
    "message", [GRANT, Continue(3, 4), CatchUp(STATE, GRANT.members), Finish(), Refused("gone", 75), Wait("for 2")]
)
async def test_an_answer(message: Answer | Wait) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(message)(request)

    async with client_of(handler) as client:
        assert await client.ask(ASK) == message
    assert (seen[0].method, seen[0].url.path) == ("POST", "/v1/quorum")
    assert TOKEN not in str(seen[0].headers)
    assert protocol.decode(seen[0].content, QuorumRequest) == ASK


@pytest.mark.parametrize(
    "forged", [replace(GRANT, mac=""), replace(GRANT, epoch=2), protocol.sign("cd" * 32, GRANT)]
)
async def test_a_grant_of_somebody_else_is_no_grant(forged: Grant) -> None:
    async with client_of(answer(forged)) as client:
        with pytest.raises(LighthouseUnreachable, match="wrong MAC"):
            await client.ask(ASK)


def _fails(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    return handler


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (lambda _: httpx.Response(400, text="no\nreally"), "400: no"),
        (lambda _: httpx.Response(401), "does not know the job's token"),
        (lambda _: httpx.Response(503), "503"),
        (lambda _: httpx.Response(302, headers={"Location": "http://elsewhere"}), "302"),
        (lambda _: httpx.Response(200, text="<html>"), "not a valid message"),
        (lambda _: httpx.Response(200, content=b"x" * ((1 << 20) + 1)), "allowed"),
        (answer(SupervisorReply(0, False)), "not expected"),
        (lambda _: httpx.Response(200, content=json.dumps({"type": "Grant", "body": {}})), "not a valid message"),
        (_fails(httpx.ConnectError("refused")), "ConnectError refused"),
        (_fails(httpx.ReadTimeout("slow")), "ReadTimeout slow"),
    ],
)
async def test_everything_else_is_unreachable(handler, said) -> None:
    async with client_of(handler) as client:
        with pytest.raises(LighthouseUnreachable, match=said):
            await client.ask(ASK)


async def test_who_holds_copies() -> None:
    seen: list[httpx.Request] = []
    body = {"stands": False, "head": {"commit_epoch": 1, "step": 4, "lineage": "a" * 32}, "agents": {"1": ["h:1"]}}

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=body)

    async with client_of(handler) as client:
        assert await client.holders(3) == Holders(False, StateId(1, 4, "a" * 32), {1: ("h:1",)})
    assert (seen[0].method, str(seen[0].url)) == ("GET", "http://lighthouse/v1/holders?replica=3")
    assert TOKEN not in str(seen[0].headers)


@pytest.mark.parametrize(
    "handler",
    [
        lambda _: httpx.Response(404),
        lambda _: httpx.Response(200, json={"stands": "maybe"}),
        _fails(httpx.ConnectError("refused")),
    ],
)
async def test_an_answer_about_copies_that_cannot_be_used_is_none(handler) -> None:
    async with client_of(handler) as client:
        with pytest.raises(LighthouseUnreachable):
            await client.holders(0)
        assert await client.find_holders(0, 0.0) is None


async def test_holders_are_asked_for_again_until_the_lighthouse_is_back() -> None:
    count = 0

    def handler(_: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        return httpx.Response(503) if count < 3 else httpx.Response(200, json={"stands": True, "head": None})

    async with client_of(handler) as client:
        assert await client.find_holders(0, 60.0) == Holders(True, None)
    assert count == 3


async def test_no_proxy_and_no_redirect_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        content = protocol.encode(Continue(1, 2))
        proof = line_of(head, 200, content, TOKEN).encode()
        begin = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + proof
        writer.write(begin + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = LighthouseClient((f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",), TOKEN)
    assert await client.ask(ASK) == Continue(1, 2)
    await client.close()
    server.close()
    await asyncio.sleep(0.02)


async def test_no_answer_of_a_squatter_is_one_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with SquatterServer() as squatter:
        client = LighthouseClient((squatter.url,), TOKEN)
        try:
            for _ in range(3):
                with pytest.raises(LighthouseUnreachable, match="does not know the job's token"):
                    await client.ask(ASK)
                assert await client.find_holders(0, 0.0) is None
                with pytest.raises(LighthouseUnreachable):
                    await client.report(ProcessReport("1-x-0"))
        finally:
            await client.close()
    assert [squatter.url in record.getMessage() for record in caplog.records] == [True]
    assert TOKEN not in str(squatter.seen)
    closed = ["Connection: close" in headers for _, headers, _ in squatter.seen]
    assert all(closed[1:]), "a connection to it stays open when the lighthouse is back"


async def test_a_proxy_that_repeats_old_answers_is_not_believed() -> None:
    kept: list[httpx.Response] = []

    def handler(request: httpx.Request) -> httpx.Response:
        good = proving(answer(Continue(3, len(kept))), TOKEN)(request)
        kept.append(good)
        return good if len(kept) == 1 else httpx.Response(200, content=kept[0].content, headers=kept[0].headers)

    async with following(handler, ("http://lighthouse",), TokenProof(TOKEN)) as follow:
        assert (await follow.post("/v1/quorum", b"{}")).content == protocol.encode(Continue(3, 0))
        with pytest.raises(LighthouseUnreachable, match="does not know the job's token"):
            await follow.post("/v1/quorum", b"{}")


async def test_a_new_challenge_is_taken_and_a_lighthouse_without_one_is_given_up() -> None:
    stale = [True, True, False, True, True, True]

    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(401) if stale.pop(0) else httpx.Response(200, content=b"yes")

    there = httpx.MockTransport(proving(handler, TOKEN))
    async with httpx.AsyncClient(auth=TokenProof(TOKEN), transport=there) as http:
        assert (await http.get("http://lighthouse/v1/x")).content == b"yes"
        with pytest.raises(Unproved):
            await http.get("http://lighthouse/v1/x")
    assert stale == []


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "gzip"}])
async def test_an_answer_without_end_or_packed_costs_no_memory(headers, monkeypatch) -> None:
    monkeypatch.setattr(lighthouse_client, "MAX_ANSWER", 1000)
    body = gzip.compress(bytes(10_000)) if headers else bytes(10_000)
    there = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=httpx.ByteStream(body)))
    async with httpx.AsyncClient(auth=TokenProof(TOKEN), transport=there) as http:
        with pytest.raises(httpx.DecodingError, match="more than 1000 bytes, or a packed one"):
            await http.get("http://lighthouse/v1/x")


# Several lighthouses: the one that leads is found, kept to, and left when it is gone, hangs, or leads no more.


A, B, C = URLS = ("http://a:1", "http://b:1", "http://c:1")


class Sea:
    """Lighthouses at A, B and C: "leads", "stands by", "down", "hangs" (takes requests, and never answers)."""

    def __init__(self, **how: str) -> None:
        self.how = how
        self.hint: str | None = None
        self.asked: list[str] = []

    def followed(self, urls: tuple[str, ...] = URLS) -> AbstractAsyncContextManager[LighthouseClient]:
        return following(self.answer, urls, None)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        how = self.how[name]
        if how == "down":
            raise httpx.ConnectError("refused")
        if how == "hangs":
            await asyncio.sleep(3600)
        if request.url.path == "/healthz":
            if how == "frozen":
                await asyncio.sleep(1)
                raise httpx.ReadTimeout("no answer")
            return httpx.Response(200, json={"role": "leader" if how in ("leads", "slow") else "standby"})
        self.asked.append(name)
        if how in ("slow", "frozen"):
            await asyncio.sleep(0.01)
            if self.how[name] in ("slow", "frozen"):
                self.asked.pop()
            return await self.answer(request)
        if how == "leads":
            return httpx.Response(200, text=f"from {name}")
        return httpx.Response(503, json={"detail": "stands by", "leader": self.hint})


async def test_the_leader_is_found_by_a_hint_and_kept_to() -> None:
    sea = Sea(a="stands by", b="stands by", c="leads")
    sea.hint = f"{C}/"
    async with sea.followed() as follow:
        for _ in range(3):
            assert (await follow.post("/v1/x", b"")).text == "from c"
        assert sea.asked == ["a", "c", "c", "c"]
        assert follow.url == C


@pytest.mark.parametrize("there", [None, "", "[]", f'{{"url": "{A}"}}', f'{{"url": "{C}", "urls": ["{C}"]}}'])
async def test_one_that_moved_is_found_where_the_run_says(tmp_path: Path, there: str | None) -> None:
    file = tmp_path / "lighthouse.json"
    if there is not None:
        file.write_text(there)
    sea = Sea(a="down", c="leads")
    async with sea.followed() as _, httpx.AsyncClient(transport=httpx.MockTransport(sea.answer)) as client:
        follow = LighthouseClient((A,), TOKEN, file=file, http=client)
        with pytest.raises(LighthouseUnreachable):
            await follow.post("/v1/x", b"")
        if C in (there or ""):
            assert (await follow.post("/v1/x", b"")).text == "from c"
        else:
            assert follow.urls == (A,)


async def test_a_hint_at_a_stranger_is_not_followed() -> None:
    """Requests go only where the job's own list says."""
    sea = Sea(a="stands by", b="leads", c="down", evil="leads")
    sea.hint = "http://evil:1"
    async with sea.followed() as follow:
        assert (await follow.post("/v1/x", b"")).text == "from b"
        assert "evil" not in sea.asked


async def test_a_hint_at_a_leader_that_is_down_does_not_go_round_for_ever() -> None:
    sea = Sea(a="down", b="stands by", c="stands by")
    sea.hint = A
    async with sea.followed() as follow:
        try:
            response = await follow.post("/v1/x", b"")
        except LighthouseUnreachable:
            pass
        else:
            assert response.status_code == 503
        assert len(sea.asked) <= 4
        sea.how["c"] = "leads"
        sea.hint = C
        assert (await follow.post("/v1/x", b"")).text == "from c"


async def test_nobody_leads_is_an_answer_of_503() -> None:
    async with Sea(a="stands by", b="stands by", c="stands by").followed() as follow:
        assert (await follow.post("/v1/x", b"")).status_code == 503


@pytest.mark.parametrize("end", ["frozen", "stands by"])
async def test_an_open_poll_is_left_when_its_lighthouse_freezes_or_leads_no_more(end, monkeypatch) -> None:
    """One that is slow but well is waited for."""
    monkeypatch.setattr(lighthouse_client, "PROBE_S", 0.1)
    sea = Sea(a="slow", b="leads", c="down")
    async with sea.followed() as follow:
        asking = asyncio.create_task(follow.post("/v1/x", b""))
        await asyncio.sleep(0.5)
        assert not asking.done(), "a long poll was given up"
        sea.how["a"] = end
        assert (await asking).text == "from b"


async def test_a_poll_can_be_cancelled() -> None:
    async with Sea(a="hangs", b="hangs", c="hangs").followed() as follow:
        asking = asyncio.create_task(follow.post("/v1/x", b""))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait([asking], timeout=30)
        assert asking.cancelled()


async def test_the_only_one_is_asked_once_whatever_it_answers() -> None:
    sea = Sea(a="stands by")
    async with sea.followed((A,)) as follow:
        assert (await follow.post("/v1/x", b"")).status_code == 503
        assert sea.asked == ["a"]
        sea.how["a"] = "down"
        with pytest.raises(LighthouseUnreachable):
            await follow.post("/v1/x", b"")


def test_lists_of_lighthouses() -> None:
    assert parse_urls("http://a:1/, https://b:2") == ("http://a:1", "https://b:2")
    for text in (
        "",
        ",",
        "a:1",
        "http://",
        "http://a:1,b:2",
        "ftp://a:1",
        "http://a:x",
        "http://[::1",
        "http://a:99999",
    ):
        refused(lambda text=text: parse_urls(text), "--lighthouse")
    assert urls_of_run({"pid": 1, "url": A}) == (A,)
    assert urls_of_run({"pid": 1, "url": B, "urls": [A, B, C]}) == (B, A, C)
    for document in (None, [], {}, {"urls": None}, {"url": 3, "urls": [None]}):
        assert urls_of_run(document) == ()


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"<html>", b'{"leader": 3}'])
async def test_json_that_is_no_object_is_no_hint(content: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.host == "b" else 503, content=content)

    async with following(answer, (A, B), None) as follow:
        assert (await follow.post("/v1/x", b"")).status_code == 200
        assert follow.url == B


# Where a machine says that it is: always an address, never one at which nobody can be reached.


URL = "http://127.0.0.1:8765"


@pytest.mark.parametrize(
    ("host", "lighthouse", "address"),
    [
        ("127.0.0.1", URL, "127.0.0.1"),
        ("192.0.2.7", URL, "192.0.2.7"),
        ("::1", URL, "::1"),
        ("localhost", URL, "127.0.0.1"),
        ("0.0.0.0", URL, "127.0.0.1"),
        ("0.0.0.0", "https://localhost", "127.0.0.1"),
        ("::", URL, "127.0.0.1"),
        ("lo", URL, "127.0.0.1"),
    ],
)
def test_it_is_an_address_that_can_be_reached(host, lighthouse, address):
    assert own_address(host, lighthouse) in (address, "::1" if "localhost" in host + lighthouse else address)


@pytest.mark.parametrize(
    ("host", "lighthouse"), [("no-such-host.invalid", URL), ("0.0.0.0", "http://no-such.invalid:1")]
)
def test_a_name_without_an_address_is_one_line(host, lighthouse):
    with pytest.raises(
        ConfigError, match=r"^network\.host: got .*; allowed: an address or an interface of this machine \("
    ) as caught:
        own_address(host, lighthouse)
    assert "\n" not in str(caught.value)


def test_an_answer_that_comes_byte_by_byte_has_one_deadline() -> None:
    """What listens there need not know the token to hold a command up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as caller:
                caller.sendall(b"HTTP/1.1 200 OK\r\n")
                for _ in range(200):
                    caller.sendall(b"x: y\r\n")
                    time.sleep(0.05)

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(httpx.ReadTimeout, match="no whole answer"):
            get_proved(f"http://127.0.0.1:{server.getsockname()[1]}/healthz", TOKEN, 0.3, True)
        dripping.join()
