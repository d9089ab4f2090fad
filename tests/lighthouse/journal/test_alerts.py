"""Alerts reach people in order, and whoever does not take them holds nobody up."""

import json
import logging
import os
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp import protocol
from ft_hsdp.config import AlertConfig
from lighthouse.journal import alerts as module
from lighthouse.journal.alerts import AlertSink, NotDelivered, Target, post, run_program
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo, Overview
from tests.support.lighthouse.lighthouse_helpers import NOW, commit_row
from tests.support.lighthouse.webhook import SECRET, Webhook, webhook
from tests.support.waiting import async_until, until


@contextmanager
def target(deliver: Callable[[bytes], None]) -> Iterator[Target]:
    them = Target("them", deliver, 0.01)
    yield them
    them.end()
    them.join(30)


def posting(server: Webhook, answer_s: float = 10.0) -> Callable[[bytes], None]:
    return partial(post, server.url, ssl.create_default_context(), answer_s=answer_s)


def put(to: Target, *numbers: int) -> None:
    for number in numbers:
        to.put(json.dumps({"n": number}).encode())


def halted(replica: int | None = None, over: bool = False) -> dict[str, Any]:
    if replica is None:
        return {"t": NOW, "event": "JobHalted", "source": "lighthouse", "reason": "<!here>"}
    return {"t": NOW, "event": "CulpritFound", "replica": replica, "rank": 0, "reason": "why", "over": over}


@pytest.mark.parametrize("code", [500, 503, 408, 429, 307])
def test_what_is_not_taken_comes_again_and_in_order(code: int) -> None:
    with webhook(code, code) as server, target(posting(server)) as them:
        put(them, 1, 2, 3)
        until(lambda: len(server.got) == 5)
    assert [each["n"] for each in server.got] == [1, 1, 1, 2, 3]
    assert server.paths == [f"/services/{SECRET}"] * 5  # no redirect is followed


@pytest.mark.parametrize("code", [400, 404, 410])
def test_what_is_refused_is_given_up_with_one_line_and_the_next_one_comes(code: int, caplog: Any) -> None:
    with webhook(code) as server, target(posting(server)) as them:
        put(them, 1, 2)
        until(lambda: len(server.got) == 2)
    assert [each["n"] for each in server.got] == [1, 2]
    (line,) = [each.message for each in caplog.records]
    assert "refuses" in line
    assert str(code) in line


def test_one_that_hangs_is_tried_again_and_one_that_is_not_there_is_one_line_a_minute(caplog: Any) -> None:
    with webhook(0) as server, target(posting(server, 0.05)) as them:
        put(them, 1)
        until(lambda: len(server.got) == 2)
    tries: list[bytes] = []

    def away(message: bytes) -> None:
        tries.append(message)
        posting(server)(message)

    with target(away) as them:
        put(them, *range(300))
        until(lambda: len(tries) > 3)
    lines = [each.message for each in caplog.records]
    assert len(lines) == 3, lines  # of the one that hangs, of the one that is away, and of what is lost at the end
    assert f"{module.KEPT} messages" in lines[-1]


def test_the_newest_messages_are_kept() -> None:
    begun, go, got = threading.Event(), threading.Event(), list[int]()

    def slow(message: bytes) -> None:
        begun.set()
        go.wait()
        got.append(json.loads(message)["n"])

    with target(slow) as them:
        put(them, 0)
        assert begun.wait(30)
        put(them, *range(1, 501))
        go.set()
    assert got == [0, *range(301, 501)]


def test_a_program_gets_each_message_and_none_of_the_secrets(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FT_HSDP_TOKEN", SECRET)
    tries, got = tmp_path / "tries", tmp_path / "got"
    code = (
        "import os, sys; text = sys.stdin.read(); assert 'FT_HSDP_TOKEN' not in os.environ\n"
        f"open({str(tries)!r}, 'a').write('x')\n"
        f"sys.exit(3) if os.path.getsize({str(tries)!r}) < 3 else open({str(got)!r}, 'a').write(text + '\\n')"
    )
    with target(partial(run_program, [sys.executable, "-c", code])) as them:
        put(them, 1, 2)
        until(lambda: tries.exists() and tries.stat().st_size == 4)
    assert [json.loads(line)["n"] for line in got.read_text().splitlines()] == [1, 2]


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NotDelivered):
        run_program(["/bin/sh", "-c", f"exec 9>{fifo}; sleep 1000 & sleep 1000"], b"{}", 0.5)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # whoever held the other end is gone
    os.close(reader)


def test_people_are_told_what_their_rules_say(caplog: Any) -> None:
    with webhook() as one, webhook() as other:
        caplog.set_level(logging.DEBUG, "lighthouse")
        both = (AlertConfig(url=one.url), AlertConfig(url=other.url, rules=("culprit",)))
        sink = AlertSink(both, "job", "http://h:1")
        sink.take("event", 1, halted())
        sink.take("event", 2, halted(3))
        sink.take("event", 3, halted(3, over=True))
        until(lambda: (len(one.got), len(other.got)) == (3, 2))
        sink.close()
    keys, (first, *rest) = list(one.got[0]), one.got
    assert (keys[0], first.pop("text")[-9:]) == ("text", "- (!here)")
    whole = {"job": "job", "rule": "halted", "subject": "job", "state": "raised", "t": NOW, "page": "http://h:1"}
    assert first == whole
    assert rest == other.got
    assert [(each["rule"], each["state"]) for each in other.got] == [
        ("culprit", "raised"),
        ("culprit", "resolved"),
    ]
    assert SECRET not in caplog.text


async def test_a_journal_waits_for_nobody() -> None:
    """A journal that waited for each answer would never come to its end: this webhook gives none."""
    with webhook(*([0] * 500)) as server:
        sink = AlertSink([AlertConfig(url=server.url)], "job", "")
        journal = JobJournal(MemoryDatabase(), JobInfo("job", 400, 2, 100), watcher=sink)
        journal.begin()
        for replica in range(400):
            journal.note([halted(replica)])
        await async_until(lambda: len(server.got) == 1)
        assert len(journal.events(limit=1000)["events"]) == 400
        journal.close()


async def test_the_overview_is_looked_at_each_second() -> None:
    looks: list[tuple[int, bool]] = []

    class Looking(AlertSink):
        def look(self, overview: Overview, paused: bool) -> None:
            looks.append((overview.goodput.commits, paused))
            super().look(overview, paused)

    journal = JobJournal(MemoryDatabase(), JobInfo("job", 3, 2, 100), watcher=Looking((), "job", ""))
    journal.begin()
    beat = protocol.RankBeat(0, 7, "h", 1, pause="evaluates")
    journal.take(protocol.Telemetry("0-a-0", commits=(dict(commit_row(1, who=(0, 1))),), ranks=(beat,)))
    await async_until(lambda: looks)
    journal.close()
    assert looks == [(1, True)]
