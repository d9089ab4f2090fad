"""The reporter before real sockets: a lighthouse that answers, is slow, refuses, dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ft_hsdp import protocol
from ft_hsdp.control import telemetry as reporting
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.telemetry import Reporter, Rows
from ft_hsdp.core.traces import RankTrace
from ft_hsdp.protocol import RankBeat, Telemetry
from lighthouse.http.rate_limits import MAX_BODY
from tests.support.lighthouse.signed import line_of
from tests.support.waiting import async_until

TOKEN = "ab" * 32
BEAT = RankBeat(0, 7, "here", 3)


class Lighthouse:
    """Takes telemetry over HTTP; ``answer`` gives the status for a message, None never answers."""

    def __init__(self) -> None:
        self.taken: list[Telemetry] = []
        self.seen: list[tuple[float, Telemetry]] = []
        self.heads: list[str] = []
        self.answer: Callable[[Telemetry], int | None] = lambda _: 204
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[Any]:
        return [row["event"] for t in self.taken for row in t.events]

    @property
    def steps(self) -> list[Any]:
        return [row["step"] for t in self.taken for row in t.commits]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(int(h.split(":")[1]) for h in head.split("\r\n") if "content-length" in h.lower())
                message = protocol.decode(await reader.readexactly(length), Telemetry)
                self.heads.append(head)
                self.seen.append((time.monotonic(), message))
                status = self.answer(message)
                if status is None:
                    await asyncio.Event().wait()
                if status == 204:
                    self.taken.append(message)
                proof = line_of(head, status or 0, b"", TOKEN)
                writer.write(f"HTTP/1.1 {status} x\r\n{proof}content-length: 0\r\n\r\n".encode())
        self._open.discard(writer)
        writer.close()


class Scene:
    def __init__(self, beat: RankBeat | None = BEAT) -> None:
        self.lighthouse = Lighthouse()
        self._beat = beat

    async def __aenter__(self) -> Scene:
        await self.lighthouse.start()
        self.client = LighthouseClient((self.lighthouse.url,), TOKEN)
        beat = self._beat
        self.reporter = Reporter("0-x-0", self.client.tell, None if beat is None else lambda: beat, lambda: 0.0)
        self.reporter.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.reporter.close()
        await self.client.close()
        await self.lighthouse.die()

    async def until(self, ready: Callable[[], Any], what: str, seconds: float = 30) -> None:
        await async_until(ready, what, seconds, lambda: f"taken: {self.lighthouse.taken}")

    def say(self, *names: object) -> None:
        for name in names:
            self.reporter.event({"event": name})


@pytest.fixture
def fast(monkeypatch):
    """Short waits, so that many rounds fit into a test."""
    for name, seconds in {"PERIOD_S": 0.05, "TELL_S": 1.0, "BACKOFF_S": 0.02, "BACKOFF_MAX_S": 0.05}.items():
        monkeypatch.setattr(reporting, name, seconds)
    monkeypatch.setattr(reporting, "GATHER_S", 0.01)


@pytest.fixture
async def s() -> AsyncIterator[Scene]:
    async with Scene() as scene:
        yield scene


@mock.patch.object(reporting, "PERIOD_S", 3600.0)
async def test_an_event_of_any_thread_does_not_wait_for_the_next_sign_of_life() -> None:
    async with Scene() as s:
        await s.until(lambda: s.lighthouse.taken, "the first sign of life")
        for n in range(3):
            thread = threading.Thread(target=s.say, args=(n,))
            thread.start()
            await s.until(lambda n=n: n in s.lighthouse.events, "the event arrives")
            thread.join()


async def test_commits_and_beats_go_together_about_once_a_second(s: Scene) -> None:
    await s.until(lambda: s.lighthouse.taken, "the first sign of life")
    for step in range(5):
        s.reporter.commit({"step": step})
    await s.until(lambda: s.lighthouse.steps == [0, 1, 2, 3, 4], "all commits")
    assert len(s.lighthouse.seen) <= 3, "a commit wakes nobody: they go with the next sign of life"
    assert s.lighthouse.taken[-1].ranks == (BEAT,)
    assert s.lighthouse.taken[-1].source == "0-x-0"
    assert TOKEN not in "".join(s.lighthouse.heads)


async def test_a_lighthouse_that_was_killed_misses_nothing(fast, s: Scene) -> None:
    await s.until(lambda: s.lighthouse.taken, "the first sign of life")
    await s.lighthouse.die()
    s.say("one", "two")
    s.reporter.commit({"step": 1})
    await asyncio.sleep(0.3)
    s.say("three")
    await s.lighthouse.start()
    await s.until(lambda: s.lighthouse.steps, "the rows arrive")
    assert s.lighthouse.events == ["one", "two", "three"]
    assert s.lighthouse.taken[-1].dropped == 0


@pytest.mark.parametrize("status", [None, 401, 500, 503])
async def test_a_lighthouse_that_does_not_take_it_gets_it_later(fast, status: int | None, s: Scene) -> None:
    s.lighthouse.answer = lambda _: status
    s.say("one", "two")
    s.reporter.commit({"step": 1})
    s.reporter.log({"step": 1, "values": {"a": 1.0}})
    await s.until(lambda: len(s.lighthouse.seen) >= 4, "it is tried again")
    s.lighthouse.answer = lambda _: 204
    await s.until(lambda: s.lighthouse.steps == [1], "the rows arrive")
    assert s.lighthouse.events == ["one", "two"]
    s.reporter.log({"step": 2, "values": {"a": 2.0}})
    await s.until(lambda: [row["step"] for t in s.lighthouse.taken for row in t.logged] == [1, 2], "values, once")


@mock.patch.object(reporting, "BACKOFF_S", 3600.0)
async def test_an_event_causes_no_trial_while_it_is_away() -> None:
    async with Scene() as s:
        s.lighthouse.answer = lambda _: 503
        await s.until(lambda: s.lighthouse.seen, "it fails")
        for n in range(20):
            s.say(n)
            await asyncio.sleep(0.01)
        assert len(s.lighthouse.seen) == 1


@pytest.mark.parametrize("status", [413, 422])
async def test_one_row_that_is_refused_costs_itself_only(fast, status: int, s: Scene) -> None:
    def refuses(message: Telemetry) -> int:
        return status if any(row.get("event") == 13 for row in message.events) else 204

    s.lighthouse.answer = refuses
    s.say(*range(40))
    s.reporter.commit({"step": 1})
    await s.until(lambda: s.lighthouse.steps and len(s.lighthouse.events) == 39, "the others arrive")
    assert s.lighthouse.events == [n for n in range(40) if n != 13]
    await s.until(lambda: s.lighthouse.taken[-1].dropped == 1, "it is counted")


async def test_a_backlog_goes_in_messages_that_a_lighthouse_takes(fast, s: Scene) -> None:
    s.lighthouse.answer = lambda _: 503
    for n in range(300):
        s.reporter.event({"event": n, "reason": "x" * 1000})
    s.lighthouse.answer = lambda _: 204
    await s.until(lambda: len(s.lighthouse.events) == 300, "all arrive")
    assert s.lighthouse.events == list(range(300))
    assert max(len(protocol.encode(m)) for _, m in s.lighthouse.seen) < 128 * 1024


def test_what_finds_no_place_is_the_oldest_and_is_counted() -> None:
    rows = Rows(place=1000)
    for n in range(1000):
        rows.put({"event": n})
    kept = [json.loads(text)["event"] for text in rows.take(1000, 10**6)]
    assert kept == list(range(1000 - len(kept), 1000))
    assert rows.dropped == 1000 - len(kept)
    assert 900 < sum(len(json.dumps({"event": n}, separators=(",", ":"))) for n in kept) <= 1000


def test_rows_that_come_back_do_not_push_newer_ones_out() -> None:
    rows = Rows(place=60)
    for n in range(4):
        rows.put({"event": n})
    taken = rows.take(2, 10**6)
    rows.put({"event": 4})
    rows.put({"event": 5})
    rows.give_back(taken)
    assert [json.loads(t)["event"] for t in rows.take(9, 10**6)] == [1, 2, 3, 4, 5]
    assert rows.dropped == 1


def test_a_row_is_what_it_was_when_it_was_told_and_never_too_large() -> None:
    rows = Rows()
    row = {"event": "a", "state": object}
    rows.put(row)
    row["event"] = "b"
    rows.put({"event": "x" * 100_000})
    (text,) = rows.take(9, 10**6)
    assert json.loads(text)["event"] == "a"
    assert rows.dropped == 1


@mock.patch.multiple(reporting, BACKOFF_S=3600.0, CLOSE_S=30.0)
async def test_the_end_sends_what_waits_even_in_the_midst_of_failures() -> None:
    async with Scene() as s:
        s.lighthouse.answer = lambda _: 503
        s.say("one")
        await s.until(lambda: s.lighthouse.seen, "it fails")
        s.lighthouse.answer = lambda _: 204
        s.say("Finished")
        await s.reporter.close()
        assert s.lighthouse.events == ["one", "Finished"]


@pytest.mark.parametrize("status", [None, 422, 503])
async def test_the_end_has_a_deadline(s: Scene, status: int | None) -> None:
    s.lighthouse.answer = lambda _: status
    s.say(*range(50))
    await asyncio.wait_for(s.reporter.close(), 30)
    s.say("later")  # nobody is hurt


async def test_other_ranks_are_spoken_for_as_long_as_they_speak(fast, monkeypatch, s: Scene) -> None:
    monkeypatch.setattr(reporting, "HEARD_S", 3.0)
    other = RankBeat(1, 8, "there", 5, t=7.0)
    s.reporter.relay(Telemetry("0-x-0", ({"event": "of rank 1"},), (), (other,), 4))
    await s.until(lambda: "of rank 1" in s.lighthouse.events, "its event arrives")
    mine, passed_on = s.lighthouse.taken[-1].ranks
    assert (mine, replace(passed_on, t=7.0)) == (BEAT, other)
    assert passed_on.t > 7.0, "it has waited here"
    assert s.lighthouse.taken[-1].dropped == 4
    await s.until(lambda: s.lighthouse.taken[-1].ranks == (BEAT,), "it is silent")


async def test_the_traces_of_many_ranks_take_turns(fast, s: Scene) -> None:
    trace = RankTrace((), "trains", ("x" * 160,) * 12)
    others = tuple(RankBeat(rank, 8, "there", 5, "", 1.0, trace) for rank in range(1, 61))

    def told(message: Telemetry) -> set[int]:
        return {beat.rank for beat in message.ranks if beat.trace is not None}

    def all_told() -> bool:
        s.reporter.relay(Telemetry("0-x-0", (), (), others))
        return len(set().union(*map(told, s.lighthouse.taken))) == len(others)

    await s.until(all_told, "each has told")
    newest = s.lighthouse.taken[-1]
    assert [beat.rank for beat in newest.ranks] == list(range(61)), "all live"
    assert 20 < len(told(newest)) < 60
    assert len(protocol.encode(newest)) + reporting.MAX_BYTES < MAX_BODY


async def test_a_supervisor_says_nothing_when_nothing_happens(fast) -> None:
    async with Scene(beat=None) as s:
        await asyncio.sleep(0.3)
        assert not s.lighthouse.seen
        s.say("one")
        await s.until(lambda: s.lighthouse.events == ["one"], "the event arrives")


async def test_whatever_goes_wrong_the_rank_lives(fast, caplog) -> None:
    said = []
    enough = asyncio.Event()

    async def tell(telemetry: Telemetry) -> None:
        said.append(telemetry)
        if len(said) < 3:
            raise ZeroDivisionError("a mistake")
        enough.set()

    reporter = Reporter("0-x-0", tell, lambda: BEAT)
    reporter.start()
    reporter.event({"event": "one"})
    async with asyncio.timeout(30):
        await enough.wait()
    await reporter.close()
    assert said[2].events == ({"event": "one"},)
    assert "ZeroDivisionError" in caplog.text
