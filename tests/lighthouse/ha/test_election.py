import asyncio
import contextlib
import errno
import itertools
import json
import signal
import sqlite3
import threading
from functools import partial
from unittest import mock

import httpx
import pytest

from ft_hsdp.config import dump, load, parse
from ft_hsdp.core.grant import Continue
from ft_hsdp.jsonl import Journal, read_object, replace_json
from lighthouse import runtime
from lighthouse.ha import instance
from lighthouse.ha.candidate import Candidate
from lighthouse.ha.election import Election, boot_time
from lighthouse.ha.instance import InstanceLock
from lighthouse.http.access import Keys
from tests.support.etcd_server import LossyEtcd
from tests.support.lighthouse.lighthouse_helpers import TOKEN, at
from tests.support.lighthouse.program import Program, furnish
from tests.support.waiting import async_until, until

pytestmark = pytest.mark.multiproc
NAMES = itertools.count()


class Scene:
    def __init__(self, server):
        self.server = server
        self.key = f"/election/{next(NAMES)}/leader"
        self.clients = []

    def candidate(self, url, lease_s=300, clock=boot_time):
        self.clients.append(LossyEtcd((self.server.url,), min(5.0, lease_s / 2)))
        return Election(self.clients[-1], self.key, url, lease_s, clock)

    def close(self):
        for client in self.clients:
            client.close()


@pytest.fixture
def scene(etcd):
    made = Scene(etcd)
    yield made
    made.close()


async def test_one_leads_and_who_resigns_is_followed_at_once(scene):
    one, other = scene.candidate("http://one"), scene.candidate("http://other")
    await one.win()
    assert one.holds
    assert one.leader == "http://one"
    waiting = asyncio.create_task(other.win())
    await asyncio.sleep(0.6)
    assert not waiting.done()
    assert (other.holds, other.leader) == (False, "http://one")
    one.resign()
    assert not one.holds
    await asyncio.wait_for(waiting, 30)
    assert other.holds
    assert other.revision > one.revision
    other.resign()


async def test_who_is_silent_stops_before_another_begins(scene):
    """The old leader counts its lease from before it asked for it, and not to its end."""
    silent, other = scene.candidate("http://silent", lease_s=2), scene.candidate("http://other", lease_s=2)
    await silent.win()
    winning = asyncio.create_task(other.win())
    while silent.holds:
        assert not winning.done(), "two led"
        await asyncio.sleep(0.01)
    await asyncio.wait_for(winning, 30)
    other.resign()


async def test_who_did_not_run_for_longer_than_its_lease_leads_no_more(scene):
    """Even if etcd still took the call: what was known before is worth nothing."""
    jump = [0.0]
    leader = scene.candidate("http://leader", lease_s=4, clock=lambda: boot_time() + jump[0])
    await leader.win()
    keeping = asyncio.create_task(leader.keep())
    jump[0] = 10.0
    assert not leader.holds
    assert "did not run" in await asyncio.wait_for(keeping, 30)
    leader.resign()


async def test_a_lease_that_etcd_has_ended_is_lost_at_once(scene):
    leader = scene.candidate("http://leader", lease_s=4)
    await leader.win()
    scene.clients[0].revoke(scene.clients[0].lease)
    assert "ended its lease" in await asyncio.wait_for(leader.keep(), 30)
    assert not leader.holds


async def test_a_key_of_a_campaign_that_got_no_answer_is_not_taken_for_a_new_one(scene):
    """It hangs on a lease that nobody keeps."""
    candidate = scene.candidate("http://me", lease_s=2)
    client = scene.clients[0]
    client.loses = True
    winning = asyncio.create_task(candidate.win())
    while not client.campaigns:  # noqa: ASYNC110 - it counts on a thread
        await asyncio.sleep(0.01)
    unkept = client.lease
    client.loses = False
    await asyncio.wait_for(winning, 30)
    assert client.lease != unkept, "leads by a key whose lease is not kept"
    assert candidate.holds
    candidate.resign()


async def test_a_run_directory_that_hangs_or_fails_costs_nobody_the_lead(tmp_path, etcd, caplog):
    run = furnish(tmp_path / "job", job={"name": f"job-{next(NAMES)}"}, lighthouse={"etcd": [etcd.url]})
    config, keys = load(run / "config.yaml"), Keys(TOKEN)
    begin = partial(runtime.begin, config, run, keys, url="http://me", events=dict)
    fails, problems = {"seat-0.json": 1, "lighthouse.json": 3}, []
    hangs, answers = threading.Event(), threading.Event()

    def faulty(path, value):
        if path.name == "lighthouse.json":
            hangs.set()
            if not answers.wait(10):
                problems.append("the event loop waited")
        fails[path.name] -= 1
        if fails[path.name] >= 0:
            raise OSError(errno.ESTALE, path.name)
        replace_json(path, value)

    with mock.patch.object(instance, "replace_json", faulty):
        candidate = Candidate(config, InstanceLock(run), "http://me", keys, begin, Journal(run / "events.jsonl"))
        candidate.begin(partial(problems.append, "it ended"))
        await async_until(hangs.is_set)
        answers.set()
        await async_until(lambda: all(left < 0 for left in fails.values()))
        candidate.close()
        candidate.end()
    assert not problems
    assert caplog.text.count(f"{errno.ESTALE}] lighthouse.json") == 1, "once, and not at each look"


# Several lighthouses of one job, as processes, on a real etcd: one leads, another takes its place.


LEASE_S = 6


class Fleet:
    """Lighthouses of one run; a context that leaves none behind."""

    def __init__(self, run, etcd, count=2):
        chosen = {"etcd": [etcd.url], "etcd_lease_s": LEASE_S}
        self.run = furnish(run, job={"name": f"job-{next(NAMES)}"}, lighthouse=chosen)
        self.seats = [Program(run, seat=seat) for seat in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for seat in self.seats:
            seat.__exit__()

    def role(self, seat):
        try:
            return self.seats[seat].http.get(f"{self.seats[seat].url}/healthz", timeout=1.0).json()["role"]
        except httpx.HTTPError:
            return "away"

    def leader(self, *among):
        """The seat that leads, once one does."""
        seats = among or range(len(self.seats))
        found = []
        self.until(lambda: found.extend(s for s in seats if self.role(s) == "leader") or found, "one leads")
        return found[0]

    def said(self, seat):
        """What lighthouse.json says, once it names a seat."""
        file, url = self.run / "lighthouse.json", self.seats[seat].url
        return until(lambda: (said := read_object(file)).get("url") == url and said, "it says who leads")

    def until(self, condition, what, within_s=30.0):
        until(condition, what, within_s, self.seats[0].tail)

    def journal(self, seat, event):
        name = f"journal-{seat}.sqlite" if seat else "journal.sqlite"
        with contextlib.closing(sqlite3.connect(self.run / "lighthouse" / name)) as db:
            return db.execute("SELECT count(*) FROM rows WHERE event = ?", (event,)).fetchone()[0]


def events(run, name):
    rows = [json.loads(line) for line in (run / "lighthouse" / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def test_a_killed_leader_is_followed_by_another_in_the_same_epoch(tmp_path, etcd):
    with Fleet(tmp_path / "job", etcd) as fleet:
        first = fleet.leader()
        other = 1 - first
        grant = fleet.seats[first].first_epoch()
        assert fleet.said(first)["pid"] == fleet.seats[first].process.pid
        fleet.until(
            lambda: fleet.seats[other].post(0, at(1, 1), epoch=1).json().get("leader"), "it knows who leads"
        )
        refused = fleet.seats[other].post(0, at(1, 1), epoch=1)
        assert (refused.status_code, refused.json()["leader"]) == (503, fleet.seats[first].url)
        with httpx.Client(trust_env=False) as stranger:
            assert stranger.get(f"{fleet.seats[other].url}/v1/status").status_code == 401
            page = stranger.get(f"{fleet.seats[other].url}/")
            assert (page.status_code, page.headers["location"]) == (307, f"{fleet.seats[first].url}/")
        fleet.until(lambda: fleet.journal(other, "EpochGranted") == 1, "the standby has the leader's journal")
        fleet.seats[first].process.kill()
        assert fleet.leader(other) == other
        assert fleet.seats[other].answer(0, at(1, 1), epoch=1, max_term=grant.term) == Continue(1, 2)
        status = fleet.seats[other].get("/v1/status")
        assert (status["epoch"], status["term"] > grant.term) == (1, True)
        assert fleet.said(other)
        told = fleet.seats[other].get("/v1/events")["events"]
        assert [e["facts"]["epoch"] for e in told if e["event"] == "EpochGranted"] == [1], "history is lost"
        assert len([e for e in told if e["event"] == "LighthouseElected"]) == 2
        assert [e["seq"] for e in told] == sorted({e["seq"] for e in told})
        port = fleet.seats[first].url.rpartition(":")[2]
        fleet.seats[first].__exit__()
        fleet.seats[first] = Program(fleet.run, "--port", port, seat=first)
        fleet.until(lambda: fleet.role(first) == "standby", "the killed one stands by on its port", 20.0)
        fleet.until(
            lambda: fleet.seats[first].post(0).json().get("leader") == fleet.seats[other].url, "it knows who leads"
        )


def test_a_leader_that_was_stopped_beyond_its_lease_grants_nothing_when_it_goes_on(tmp_path, etcd):
    with Fleet(tmp_path / "job", etcd) as fleet:
        zombie = fleet.leader()
        heir = 1 - zombie
        grant = fleet.seats[zombie].first_epoch()
        fleet.seats[zombie].process.send_signal(signal.SIGSTOP)
        answers = []

        def ask_the_zombie():
            try:  # one that the old membership would settle, and one for a new ring
                answers.append(fleet.seats[zombie].post(0, at(1, 1), epoch=1))
                answers.append(fleet.seats[zombie].post(0, at(1, 1), epoch=1, after=1))
            except httpx.HTTPError as error:
                answers.append(error)

        thread = threading.Thread(target=ask_the_zombie)
        thread.start()
        assert fleet.leader(heir) == heir
        assert fleet.seats[heir].answer(1, at(1, 1), epoch=1, max_term=grant.term) == Continue(1, 2)
        fleet.seats[zombie].process.send_signal(signal.SIGCONT)
        thread.join(15)
        assert answers
        assert not any(isinstance(a, httpx.Response) and a.status_code == 200 for a in answers), answers
        fleet.until(lambda: fleet.role(zombie) == "standby", "the zombie stands by, as the same process", 20.0)
        assert fleet.seats[zombie].process.poll() is None
        fleet.until(
            lambda: fleet.seats[zombie].post(0).json().get("leader") == fleet.seats[heir].url, "it knows who leads"
        )
        terms = [row["term"] for row in events(fleet.run, "LighthouseElected")]
        assert terms == sorted(set(terms))
        assert len(events(fleet.run, "EpochGranted")) == 1


def test_without_etcd_it_stands_by_and_says_so(tmp_path, etcd):
    with Fleet(tmp_path / "job", etcd, count=0) as fleet:
        chosen = {"etcd": ["http://127.0.0.1:1"], "etcd_lease_s": LEASE_S}
        (fleet.run / "config.yaml").write_text(dump(parse({"replicas": 2, "lighthouse": chosen})))
        fleet.seats.append(Program(fleet.run, seat=0))
        fleet.until(lambda: fleet.role(0) == "standby", "it stands by")
        refused = fleet.seats[0].post(0)
        assert (refused.status_code, refused.json()["leader"]) == (503, None)
        fleet.seats[0].process.send_signal(signal.SIGTERM)
        assert fleet.seats[0].process.wait(30) == 143
