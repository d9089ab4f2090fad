"""A standby's copy of the journal, made over real sockets from the routes that a leader serves."""

import asyncio
import contextlib

import httpx
import pytest
from fastapi import FastAPI

from lighthouse.ha import replication as mirrors
from lighthouse.ha.replication import JournalMirror
from lighthouse.http.access import Keys
from lighthouse.http.journal_routes import views
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo, JournalEntry
from tests.support.lighthouse.lighthouse_helpers import TOKEN, served
from tests.support.lighthouse.signed import gated
from tests.support.waiting import async_until


class Leader:
    def __init__(self, first):
        self.database = MemoryDatabase()
        if first > 1:
            self.database.append([JournalEntry(first - 1, "event", row(first - 1))])
        self.journal = JobJournal(self.database, JobInfo("job", 2, 1, 10))
        self.app = FastAPI()
        self.app.include_router(views(self.journal, None, Keys(TOKEN)))


@contextlib.asynccontextmanager
async def leading(first=1):
    leader = Leader(first)
    async with served(gated(leader.app)) as leader.url:
        yield leader
        leader.journal.close()
    leader.database.close()


def row(number):
    return {"t": 1000.0 + number, "event": "Noted", "source": "lighthouse", "reason": f"row {number} — ü"}


def kept(database):
    return database.read(0, 1000)


@contextlib.asynccontextmanager
async def mirrored(database, leader, token=None):
    async with httpx.AsyncClient(trust_env=False) as client:
        made = JournalMirror(database, leader, TOKEN if token is None else token, client, retry_s=0.05)
        running = asyncio.create_task(made.run())
        try:
            yield
        finally:
            assert not running.done(), running
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_each_row_is_kept_under_its_number_also_those_of_before():
    async with leading() as leader:
        leader.journal.note([row(1), row(2)])
        copy = MemoryDatabase()
        async with mirrored(copy, lambda: leader.url):
            await async_until(lambda: copy.last == leader.database.last)
            leader.journal.note([row(n) for n in range(3, 60)])
            await async_until(lambda: copy.last == leader.database.last)
        assert kept(copy) == kept(leader.database)
        assert len(kept(copy)) >= 59
        copy.close()


async def test_it_goes_on_where_it_was_and_turns_to_a_new_leader():
    copy = MemoryDatabase()
    who = [None]
    async with leading() as old, leading(first=500) as new, mirrored(copy, lambda: who[0]):
        who[0] = old.url
        old.journal.note([row(1)])
        await async_until(lambda: copy.last >= 1)
        before = kept(copy)
        who[0] = new.url
        new.journal.note([row(500)])
        await async_until(lambda: copy.last >= 500)
        assert kept(copy)[: len(before)] == before
        assert kept(copy)[len(before) :] == [e for e in kept(new.database) if e.seq > before[-1].seq]
        old.journal.note([row(99)])
        await asyncio.sleep(0.1)
        assert all(e.row["reason"] != row(99)["reason"] for e in kept(copy)), "it still follows the old one"
    copy.close()


@pytest.mark.parametrize("key", ["", "no key"])
async def test_a_leader_that_refuses_or_is_gone_is_asked_again(key):
    copy = MemoryDatabase()
    async with leading() as leader:
        urls = iter(["http://127.0.0.1:1", leader.url])
        who = [next(urls)]
        async with mirrored(copy, lambda: who[0], key):
            await asyncio.sleep(0.2)
            who[0] = next(urls)
            leader.journal.note([row(1)])
            await asyncio.sleep(0.2)
            assert not kept(copy)
    copy.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"id: x\nevent: event\ndata: {}\n\n",
        b"id: 1\nevent: event\ndata: []\n\n",
        b'id: 1\nevent: event\ndata: {"seq": 1}\n\n',
        b"data: {}\n\n",
    ],
)
def test_what_is_no_row_is_not_kept(sent):
    with pytest.raises(httpx.DecodingError, match="not a row"):
        list(mirrors._entries(sent.split(b"\n\n")))


def test_comments_and_other_events_are_passed_over():
    sent = b": ping\n\nretry: 1000\n\n"
    sent += b'id: 4\nevent: event\ndata: {"t": 1, "event": "X", "seq": 4, "reason": "a: b", "said": "s"}\n\n'
    other = b'id: 5\nevent: hint\ndata: {"t": 1}\n\n'
    assert list(mirrors._entries((sent + other).split(b"\n\n"))) == [
        JournalEntry(4, "event", {"t": 1, "event": "X", "reason": "a: b"})
    ]
