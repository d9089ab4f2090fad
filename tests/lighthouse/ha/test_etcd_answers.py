"""Answers that etcd does not give: of a proxy, cut short, of other types. Each is one clear error and no crash."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from lighthouse.ha.election import Deposed, Election, EtcdStore
from lighthouse.ha.etcd import Etcd, EtcdEntry, EtcdUnreachable
from lighthouse.quorum.state import Policy
from tests.support.answering import Answering, serving

HEADER = {"cluster_id": "1", "member_id": "2", "revision": "7", "raft_term": "2"}
POLICY = Policy(slots=2, steps=10)


def wire(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def kv(key: str, value: str = "x", **more: Any) -> dict[str, Any]:
    return {"key": wire(key), "value": wire(value), "create_revision": "5", "version": "1", **more}


class Fake(ThreadingHTTPServer):
    """Says the same to every call, or what `say` makes of a path and a body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[str] = []
        self.say: Callable[[str, dict[str, Any]], bytes] = lambda path, body: b""
        self.cut = False  # whether it hangs up in the middle of its answers
        self.url = f"http://127.0.0.1:{self.server_port}"

    def says(self, answer: object) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.say = lambda path, body: data


class Handler(Answering):
    server: Fake

    def do_POST(self) -> None:
        self.server.calls.append(self.path)
        data = self.server.say(self.path, json.loads(self.body()))
        self.answer(200, data, {"Content-Length": str(len(data) + 10)} if self.server.cut else {})
        self.close_connection = self.server.cut


@pytest.fixture(scope="module")
def server() -> Iterator[Fake]:
    made = Fake()
    with serving(made):
        yield made


@pytest.fixture
def fake(server: Fake) -> Fake:
    server.calls.clear()
    server.cut = False
    return server


@pytest.fixture
def client(fake: Fake) -> Iterator[Etcd]:
    made = Etcd((fake.url,), 5.0)
    yield made
    made.close()


async def elected(fake: Fake, client: Etcd, lease_s: int = 30) -> Election:
    """A candidate that leads, by what a sound etcd answers."""

    def say(path: str, body: dict[str, Any]) -> bytes:
        if "lease" in path:
            found: dict[str, Any] = {"ID": "3", "TTL": str(lease_s)}
        elif "txn" in path:
            put = body["success"][0]["request_put"]
            entry = {**kv(""), "key": put["key"], "value": put["value"]}
            found = {"succeeded": True, "responses": [{}, {"response_range": {"count": "1", "kvs": [entry]}}]}
        else:
            found = {"count": "0"}
        return json.dumps({"header": HEADER, **found}).encode()

    fake.say = say
    election = Election(client, "/job/leader", "http://me", lease_s)
    await election.win()
    fake.calls.clear()
    return election


CALLS: dict[str, Callable[[Etcd], object]] = {
    "grant": lambda client: client.grant(30),
    "keep_alive": lambda client: client.keep_alive(3),
    "revoke": lambda client: client.revoke(3),
    "get": lambda client: client.get("/k"),
    "below": lambda client: client.below("/k/"),
    "create": lambda client: client.create("/k", "v", 3),
    "put_if": lambda client: client.put_if("/k", 5, {}, {}),
}
ODD: dict[str, object] = {
    "nothing": b"",
    "no JSON": b"<html>502 Bad Gateway</html>",
    "no text": b"\xff\xfe",
    "cut short": b'{"header": {"revision": "7"}, "kvs": [{"key": "L2s=", "crea',
    "deep": b"[" * 100_000,
    "a list": [],
    "a number": 7,
    "empty": {},
    "another program's": {"status": "ok"},
    "a header without a revision": {"header": {}},
    "a header that is none": {"header": "none"},
    "no keys but their number": {"header": HEADER, "count": "2", "responses": [], "result": {"header": {}}},
    "a key without a revision": {
        "header": HEADER,
        "count": "1",
        "kvs": [{"key": wire("/k")}],
        "responses": [{"response_range": {"count": "1", "kvs": [{"key": wire("/k")}]}}],
        "result": [],
        "ID": "x",
    },
}
# Nothing but the header of the answer to "revoke" is looked at.
CASES = [(call, odd) for call in CALLS for odd in ODD if call != "revoke" or "key" not in odd]


@pytest.mark.parametrize(("call", "odd"), CASES)
def test_an_odd_answer_is_one_clear_error_that_may_be_tried_again(fake, client, call, odd) -> None:
    fake.says(ODD[odd])
    with pytest.raises(EtcdUnreachable) as caught:
        CALLS[call](client)
    assert str(caught.value).startswith(f"etcd: {fake.url}")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "kvs",
    [[kv("/k/1")], [kv("/k/1", create_revision="?"), kv("/k/2")], [{**kv("/k/1"), "value": "%"}, kv("/k/2")]],
)
def test_keys_that_are_missing_or_damaged_are_noticed(fake: Fake, client: Etcd, kvs: list[object]) -> None:
    fake.says({"header": HEADER, "kvs": kvs, "count": "2"})
    with pytest.raises(EtcdUnreachable):
        client.below("/k/")


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-Infinity", "soon", [], {}])
def test_a_lease_of_no_number_of_seconds_is_none(fake: Fake, client: Etcd, seconds: object) -> None:
    fake.says({"header": HEADER, "ID": "3", "TTL": seconds, "result": {"header": HEADER, "TTL": seconds}})
    for call in ("grant", "keep_alive"):
        with pytest.raises(EtcdUnreachable):
            CALLS[call](client)


def test_a_connection_that_ends_in_the_middle_of_an_answer_counts_as_none(fake: Fake, client: Etcd) -> None:
    fake.says({"header": HEADER})
    fake.cut = True
    with pytest.raises(EtcdUnreachable):
        client.get("/k")


def test_another_endpoint_is_asked_where_one_says_something_odd(fake: Fake) -> None:
    fake.says({"header": HEADER, "kvs": [kv("/k")], "count": "1"})
    odd = Fake()
    odd.says({"status": "ok"})
    with serving(odd), closing(Etcd((odd.url, fake.url), 5.0)) as client:
        for _ in range(2):
            assert client.get("/k") == EtcdEntry("x", 5, 1)
            assert len(odd.calls) == 1, "it does not stay with the one that is understood"


def test_a_token_that_does_not_come_is_one_clear_error(fake: Fake) -> None:
    client = Etcd((fake.url,), 5.0, "root", "secret")
    fake.says({"header": HEADER})
    with pytest.raises(EtcdUnreachable) as caught:
        client.get("/k")
    assert "secret" not in str(caught.value)
    client.close()


@pytest.mark.parametrize("odd", ["another program's", "cut short", "a list"])
async def test_a_leader_that_understands_no_answer_steps_down_when_its_lease_may_have_run_out(
    fake: Fake, client: Etcd, odd: str
) -> None:
    election = await elected(fake, client, lease_s=1)
    fake.says(ODD[odd])
    assert "may have run out" in await election.keep()
    assert len(fake.calls) >= 2, "it was tried once only"
    assert not election.holds


async def test_a_candidate_that_understands_no_answer_goes_on_looking(fake: Fake, client: Etcd) -> None:
    election = Election(client, "/job/leader", "http://me", 30)
    fake.says({"responses": []})
    winning = asyncio.create_task(election.win())
    async with asyncio.timeout(10):
        while len(fake.calls) < 2:  # noqa: ASYNC110 - it counts on a thread
            await asyncio.sleep(0.01)
        fake.says({"header": HEADER, "kvs": [kv("/job/leader", '{"url": "http://other"}')], "count": "1"})
        while election.leader != "http://other":  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    assert not election.holds
    winning.cancel()
    await asyncio.gather(winning, return_exceptions=True)


async def test_a_store_that_is_not_understood_is_not_taken_for_an_empty_one(fake: Fake, client: Etcd) -> None:
    store = EtcdStore(client, "/job", await elected(fake, client))
    fake.says({})
    with pytest.raises(Deposed):
        store.load(POLICY)
