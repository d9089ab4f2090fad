"""Several lighthouses: the one that leads is found, kept to, and left when it is gone, hangs, or leads no more."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from ft_hsdp.control import lighthouse_client
from ft_hsdp.control.lighthouse_client import Lighthouses, http_client, parse_urls, urls_of_run
from ft_hsdp.errors import ConfigError, LighthouseUnreachable

A, B, C = URLS = ("http://a:1", "http://b:1", "http://c:1")


class Sea:
    """Lighthouses at A, B and C: "leads", "stands by", "down", "hangs" (takes requests, and never answers)."""

    def __init__(self, **how: str) -> None:
        self.how = how
        self.hint: str | None = None
        self.asked: list[str] = []

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


def run(sea: Sea, body: Callable[[Lighthouses], Coroutine[Any, Any, None]], urls: tuple[str, ...] = URLS) -> None:
    async def main() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(sea.answer))
        follow = Lighthouses(urls, client)
        try:
            async with asyncio.timeout(10):
                await body(follow)
        finally:
            await follow.close()

    asyncio.run(main())


def test_the_leader_is_found_by_a_hint_and_kept_to() -> None:
    sea = Sea(a="stands by", b="stands by", c="leads")
    sea.hint = f"{C}/"

    async def body(follow: Lighthouses) -> None:
        for _ in range(3):
            assert (await follow.post("/v1/x", b"")).text == "from c"
        assert sea.asked == ["a", "c", "c", "c"]
        assert follow.url == C

    run(sea, body)


def test_without_a_hint_it_asks_one_after_the_other() -> None:
    sea = Sea(a="stands by", b="down", c="leads")

    async def body(follow: Lighthouses) -> None:
        assert (await follow.post("/v1/x", b"")).text == "from c"

    run(sea, body)


@pytest.mark.parametrize("there", [None, "", "[]", f'{{"url": "{A}"}}', f'{{"url": "{C}", "urls": ["{C}"]}}'])
def test_one_that_moved_is_found_where_the_run_says(tmp_path: Path, there: str | None) -> None:
    file = tmp_path / "lighthouse.json"
    if there is not None:
        file.write_text(there)

    async def body(_: Lighthouses) -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(sea.answer)) as client:
            follow = Lighthouses((A,), client, file)
            with pytest.raises(LighthouseUnreachable):
                await follow.post("/v1/x", b"")
            if C in (there or ""):
                assert (await follow.post("/v1/x", b"")).text == "from c"
            else:
                assert follow.urls == (A,)

    sea = Sea(a="down", c="leads")
    run(sea, body)


def test_a_hint_at_a_stranger_is_not_followed() -> None:
    """Whoever stands by may be anybody; the token goes only where the job's own list says."""
    sea = Sea(a="stands by", b="leads", c="down", evil="leads")
    sea.hint = "http://evil:1"

    async def body(follow: Lighthouses) -> None:
        assert (await follow.post("/v1/x", b"")).text == "from b"
        assert "evil" not in sea.asked

    run(sea, body)


def test_a_hint_at_a_leader_that_is_down_does_not_go_round_for_ever() -> None:
    sea = Sea(a="down", b="stands by", c="stands by")
    sea.hint = A

    async def body(follow: Lighthouses) -> None:
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

    run(sea, body)


def test_all_down_is_unreachable_in_one_line() -> None:
    async def body(follow: Lighthouses) -> None:
        with pytest.raises(LighthouseUnreachable, match="ConnectError refused") as caught:
            await follow.post("/v1/x", b"")
        assert len(str(caught.value).splitlines()) == 1

    run(Sea(a="down", b="down", c="down"), body)


def test_nobody_leads_is_an_answer_of_503() -> None:
    async def body(follow: Lighthouses) -> None:
        assert (await follow.post("/v1/x", b"")).status_code == 503

    run(Sea(a="stands by", b="stands by", c="stands by"), body)


@pytest.mark.parametrize("end", ["frozen", "stands by"])
def test_an_open_poll_is_left_when_its_lighthouse_freezes_or_leads_no_more(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is slow but well is waited for."""
    monkeypatch.setattr(lighthouse_client, "PROBE_S", 0.1)
    sea = Sea(a="slow", b="leads", c="down")

    async def body(follow: Lighthouses) -> None:
        asking = asyncio.create_task(follow.post("/v1/x", b""))
        await asyncio.sleep(0.5)
        assert not asking.done(), "a long poll was given up"
        sea.how["a"] = end
        assert (await asking).text == "from b"

    run(sea, body)


def test_a_poll_can_be_cancelled() -> None:
    async def body(follow: Lighthouses) -> None:
        asking = asyncio.create_task(follow.post("/v1/x", b""))
        await asyncio.sleep(0.05)
        asking.cancel()
        began = time.monotonic()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert time.monotonic() - began < 1

    run(Sea(a="slow", b="slow", c="slow"), body)


def test_the_only_one_is_asked_once_whatever_it_answers() -> None:
    sea = Sea(a="stands by")

    async def body(follow: Lighthouses) -> None:
        assert (await follow.post("/v1/x", b"")).status_code == 503
        assert sea.asked == ["a"]
        sea.how["a"] = "down"
        with pytest.raises(LighthouseUnreachable):
            await follow.post("/v1/x", b"")

    run(sea, body, (A,))


def test_lists_of_lighthouses() -> None:
    assert parse_urls("http://a:1/, https://b:2") == ("http://a:1", "https://b:2")
    for text in ("", ",", "a:1", "http://", "http://a:1,b:2", "ftp://a:1"):
        with pytest.raises(ConfigError, match="--lighthouse"):
            parse_urls(text)
    assert urls_of_run({"pid": 1, "url": A}) == (A,)
    assert urls_of_run({"pid": 1, "url": B, "urls": [A, B, C]}) == (B, A, C)
    for document in (None, [], {}, {"urls": None}, {"url": 3, "urls": [None]}):
        assert urls_of_run(document) == ()


def test_the_client_goes_nowhere_else() -> None:
    async def body() -> None:
        async with http_client("secret", 5.0) as client:
            assert client.headers["authorization"] == "Bearer secret"
            assert not client.follow_redirects
            assert not client.trust_env
            assert client.timeout.connect == lighthouse_client.CONNECT_S

    asyncio.run(body())


def test_json_that_is_no_object_is_no_hint() -> None:
    for content in (b"", b"[]", b"3", b"<html>", json.dumps({"leader": 3}).encode()):
        assert lighthouse_client._leader(httpx.Response(503, content=content)) is None
