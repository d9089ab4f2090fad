"""The tokens: who proves one comes in with its role; a viewer's key may be shown as it is; two may be in use."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import pickle
import random
import re
import socket
import struct
import threading
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.server import ServerState

from ft_hsdp.errors import Retryable
from ft_hsdp.http_proof import NONE, SignedRequest
from ft_hsdp.secret import TOKEN_VARIABLE, worker_token
from lighthouse.http import connections
from lighthouse.http.access import ADMIN_VARIABLE, LOOK_S, Keys, RequestGate, may, view_key
from lighthouse.http.rate_limits import ADDRESSES, KIB, Buckets, Rates, TooMany, rule, source
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN
from tests.support.waiting import until

NEXT = "7a" * 32
KEYS = Keys(TOKEN, ADMIN)


KEY = view_key(TOKEN)
HEAD = {"type": "http", "method": "GET", "path": "/v1/x", "raw_path": b"/v1/x", "query_string": b""}


def role(keys, token):
    """Of who signs with a token; of who shows a key."""
    signed = SignedRequest(token, NONE, "GET", b"/v1/x").authorization.encode()
    proof = keys.proof(signed, HEAD)
    return keys.role(f"Bearer {token}".encode()) if proof is None else proof.role


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} "])
def test_the_key_of_a_viewer_lets_in(header):
    assert KEYS.role(header.encode()) == "viewer"


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}0"),
        *(f"Bearer {KEY} {KEY}", f"Bearer {KEY.upper()}", "Bearer \xdc\xe9", "Bearer\x00"),
        *(f"Bearer {TOKEN}", f"Bearer {ADMIN}"),  # what is sent as it is proves nothing
    ],
)
def test_anything_else_does_not(header):
    assert KEYS.role(header.encode("latin-1")) is None
    assert KEYS.role(None) is None


def test_each_token_has_one_role():
    known = (TOKEN, worker_token(TOKEN), ADMIN, view_key(TOKEN), view_key(ADMIN))
    assert [role(KEYS, token) for token in known] == ["host", "worker", "admin", "viewer", None]
    pairs = itertools.product(("worker", "host", "admin"), ("viewer", "worker", "host", "admin"))
    others = {("worker", "worker"), ("host", "worker"), ("host", "host"), ("admin", "admin")}
    assert {pair for pair in pairs if may(*pair) and pair[1] != "viewer"} == others
    assert all(may(role, "viewer") and not may("viewer", role) for role in ("worker", "host", "admin"))


def test_digests_are_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    keys = Keys(TOKEN, ADMIN)
    for credential in ("x", "y" * 1000, TOKEN):
        role(keys, credential)
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32), (32, 32), (64, 64)]
    assert not {TOKEN.encode(), ADMIN.encode()} & {side for pair in compared for side in pair}


def test_without_a_token_everybody_is_a_host_and_nobody_an_admin():
    assert Keys("").role(None) == "host"
    assert Keys("", ADMIN).role(None) == "host"
    assert role(Keys("", ADMIN), ADMIN) == "admin"
    assert role(Keys(TOKEN), ADMIN) is None
    assert role(Keys(TOKEN), "") is None


def test_two_lines_are_two_tokens_and_the_first_is_the_current_one():
    keys = Keys(f"{NEXT}\n{TOKEN}\n", f"{ADMIN}\n{NEXT[:-1]}1")
    assert (keys.job, keys.worker) == (NEXT, worker_token(NEXT))
    assert keys.admin == ADMIN
    assert [role(keys, t) for t in (NEXT, TOKEN, ADMIN, NEXT[:-1] + "1")] == ["host", "host", "admin", "admin"]
    assert [role(keys, view_key(t)) for t in (NEXT, TOKEN)] == ["viewer", "viewer"]


class Keyring:
    """Keys from two files, and the clock by which they are looked at again."""

    def __init__(self, folder):
        self.now = 0.0
        self.keys = Keys.read(folder / "token", folder / "admin_token", lambda: self.now)

    def look(self):
        self.now += LOOK_S


@pytest.fixture
def files(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "admin_token").write_text(ADMIN)
    return tmp_path


def test_files_are_read_again_when_they_change(files):
    ring = Keyring(files)
    keys = ring.keys
    assert role(keys, TOKEN) == "host"
    (files / "admin_token").write_text(f"{NEXT}\n{ADMIN}\n")
    ring.now += LOOK_S / 2
    assert role(keys, NEXT) is None  # not before it has looked
    ring.look()
    assert (role(keys, NEXT), role(keys, ADMIN)) == ("admin", "admin")
    (files / "part").write_text(f"{NEXT}\n")
    os.replace(files / "part", files / "admin_token")
    ring.look()
    assert (role(keys, NEXT), role(keys, ADMIN)) == ("admin", None)


@pytest.mark.parametrize("content", [b"", b"a b c", b"\xff\xfe" * 10, b"short", b"x" * 300])
def test_a_change_that_cannot_be_used_changes_nothing(files, content, caplog):
    ring = Keyring(files)
    (files / "token").write_bytes(content)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            ring.look()
            assert role(ring.keys, TOKEN) == "host"
    assert len(caplog.records) == 1  # said once, not every second
    assert "token: got" in caplog.text
    assert content.decode("latin-1") not in caplog.text or not content


class Hanging(type(Path())):
    """A file on a disk that answers while an event is set."""

    answers = threading.Event()

    def __fspath__(self):
        self.answers.wait(10)
        return super().__fspath__()


def test_a_disk_that_hangs_holds_no_request_up_and_a_change_counts_once_it_answers(files):
    Hanging.answers.set()
    ring = Keyring(Hanging(files))
    Hanging.answers.clear()
    (files / "admin_token").write_text(NEXT)
    for _ in range(3):
        ring.look()
        assert (role(ring.keys, ADMIN), role(ring.keys, NEXT)) == ("admin", None)
    Hanging.answers.set()

    def counts():
        ring.look()
        return role(ring.keys, NEXT) == "admin"

    until(counts)
    assert role(ring.keys, ADMIN) is None


def test_a_job_with_a_token_does_not_become_open(files, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    ring = Keyring(files)
    (files / "token").unlink()
    ring.look()
    assert ring.keys.role(None) is None
    assert role(ring.keys, TOKEN) == "host"


def test_what_was_proved_is_forgotten_with_its_token_and_bounded(files):
    ring = Keyring(files)
    keys = ring.keys
    for n in range(100):
        assert keys.role(b"Bearer" + b" " * (n + 1) + KEY.encode()) == "viewer"
        assert keys.role(b"Bearer %d" % n) is None
    assert len(keys._proved) == 16
    (files / "token").write_text(NEXT)
    ring.look()
    assert (role(keys, KEY), role(keys, TOKEN)) == (None, None)
    assert role(keys, NEXT) == "host"


def test_without_files_the_environment_counts(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(ADMIN_VARIABLE, ADMIN)
    keys = Keys.read(tmp_path / "token", tmp_path / "admin_token")
    assert (role(keys, TOKEN), role(keys, ADMIN), keys.role(None)) == ("host", "admin", None)


@pytest.mark.parametrize("content", [b"", b"\n", b"a b c", b"\xff" * 64, b"short"])
def test_a_file_that_cannot_be_used_is_one_line_that_does_not_show_it(files, content):
    (files / "token").write_bytes(content)
    with pytest.raises(Retryable) as caught:
        Keys.read(files / "token", files / "admin_token")
    assert "token: got " in str(caught.value)
    assert "short" not in str(caught.value).replace(str(files), "")


@pytest.mark.parametrize("spoil", ["missing", "empty", "folder", "blank variable"])
def test_a_missing_secret_closes_a_door(files, spoil, monkeypatch):
    """Without the worker's token nothing is served; without the admin's nobody is an admin."""
    for name in ("token", "admin_token"):
        (files / name).rename(files / "kept")
        if spoil == "blank variable":
            monkeypatch.setenv({"token": "FT_HSDP_TOKEN"}.get(name, ADMIN_VARIABLE), " ")
        elif spoil == "folder":
            (files / name).mkdir()
        elif spoil == "empty":
            (files / name).touch()
        if name == "token":
            with pytest.raises(Retryable, match="no lighthouse without the job's token"):
                Keys.read(files / "token", files / "admin_token")
            if spoil == "folder":
                (files / name).rmdir()
            (files / "kept").replace(files / name)
    keys = Keys.read(files / "token", files / "admin_token")
    assert (role(keys, TOKEN), role(keys, ADMIN), role(keys, ""), keys.role(None)) == ("host", None, None, None)


# The gate and the door, piece by piece: sizes while they stream, places for streams, answers nobody reads.


async def reads(scope, receive, send):
    """An application that reads the whole body and answers 200."""
    await Request(scope, receive).body()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Caller:
    """Calls an application; `more` is how many pieces of 16 KiB its endless body has had."""

    def __init__(self, app, address="192.0.2.1"):
        self._app, self._address = app, address
        self.more, self.sent = 0, []

    async def __call__(self, path, *headers):
        told = (b"authorization", f"Bearer {KEY}".encode())
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [told, *headers]}
        await self._app({**scope, "client": (self._address, 1)}, self._receive, self._send)
        return self.sent[0]["status"], dict(self.sent[0]["headers"])

    async def _receive(self):
        self.more += 1
        assert self.more < 100, "it reads on and on"
        return {"type": "http.request", "body": bytes(16384), "more_body": True}

    async def _send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize(
    ("path", "pieces"), [("/v1/processes", 16), ("/v1/telemetry", 16), ("/v1/admin/checkpoint", 4)]
)
async def test_a_body_without_end_is_413_at_its_routes_limit(path, pieces):
    app = FastAPI()
    app.mount("/", reads)
    caller = Caller(RequestGate(app, KEYS, Rates(), lambda: 0.0))
    assert (await caller(path))[0] == 413
    assert caller.more == pieces + 1


@pytest.mark.parametrize("length", [b"65537", b"99999999999999999999", b"-1", b"1e3", b"\xb2"])
async def test_a_length_that_is_too_large_or_none_is_413_before_anything_is_read(length):
    caller = Caller(RequestGate(reads, KEYS, Rates(), lambda: 0.0))
    assert (await caller("/v1/status", (b"content-length", length)))[0] == 413
    assert caller.more == 0


async def test_an_address_has_sixteen_streams_and_the_others_have_theirs():
    ended = asyncio.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await ended.wait()

    gate = RequestGate(endless, KEYS, Rates(), lambda: 0.0)
    callers = [Caller(gate) for _ in range(20)] + [Caller(gate, f"192.0.2.{n}") for n in range(2, 60)]
    running = [asyncio.create_task(caller("/v1/stream")) for caller in callers]
    for _ in range(5):
        await asyncio.sleep(0)
    codes = [caller.sent[0]["status"] for caller in callers]
    assert codes[:20] == [200] * 16 + [429] * 4
    assert codes[20:].count(200) == 64 - 16
    ended.set()
    await asyncio.gather(*running)
    last = Caller(gate)
    assert (await last("/v1/stream"))[0] == 200


class Guest:
    """A connection, and how it was closed."""

    def __init__(self, address="192.0.2.1", busy=False):
        self.address, self.busy, self.closed = address, busy, None

    def tick(self):
        pass

    def drop(self):
        self.closed = "dropped"

    def refuse(self):
        self.closed = "refused"


def arrive(guests, count, role=None, **told):
    """Connections that come in, show a role, and stay if there is a place for them."""
    came = [Guest(**told) for _ in range(count)]
    for guest in came:
        guests.enter(guest)
        if guest.closed is None and role is not None and not guests.known(guest, role):
            guests.leave(guest)
            guest.closed = "refused"
    return came


def ends(came):
    return [guest.closed for guest in came]


async def test_the_oldest_stranger_makes_room_and_who_is_known_stays():
    guests = connections.Connections(800)
    known = arrive(guests, 400, "worker")
    (other,) = arrive(guests, 1, address="192.0.2.2")
    flood = arrive(guests, 300)
    assert ends(flood) == ["dropped"] * 200 + [None] * 100
    assert other.closed is None
    many = [arrive(guests, 1, address=f"10.0.{n // 256}.{n % 256}")[0] for n in range(10_000)]
    assert len(guests) == 600
    assert other.closed == "dropped"
    assert set(ends(known + many[-200:])) == {None}
    for guest in [*known, *many[-200:]]:
        guests.leave(guest)
        guests.leave(guest)
    assert len(guests) == 0


async def test_viewers_have_a_quarter_of_the_places_and_the_idlest_makes_room():
    guests = connections.Connections(40)
    busy = arrive(guests, 2, "viewer", busy=True)
    idle = arrive(guests, 8, "viewer")
    assert guests.known(idle[0], "viewer")  # asks again
    later = arrive(guests, 3, "viewer")
    assert ends(busy + idle) == [None] * 3 + ["dropped"] * 3 + [None] * 4
    for guest in [*idle, *later]:
        guest.busy = True
    assert ends(arrive(guests, 2, "viewer")) == ["refused"] * 2
    assert guests.known(idle[0], "worker")  # no viewer any more
    assert ends(arrive(guests, 1, "viewer")) == [None]
    workers = arrive(guests, 29, "worker")
    assert set(ends(busy + workers)) == {None}


async def test_a_new_one_takes_the_place_of_an_idle_viewer_or_is_refused():
    guests = connections.Connections(20)
    workers, viewers = arrive(guests, 18, "worker"), arrive(guests, 2, "viewer")
    assert ends(arrive(guests, 2, "worker")) == [None] * 2
    assert ends(viewers) == ["dropped"] * 2
    assert ends(arrive(guests, 1)) == ["refused"]
    assert (len(guests), set(ends(workers))) == (20, {None})


async def test_a_line_each_minute_tells_of_connections_that_found_no_place(caplog):
    guests = connections.Connections(40, tick_s=0.001)
    arrive(guests, 26, "worker")
    arrive(guests, 12, "viewer", busy=True)
    arrive(guests, 3)
    async with asyncio.timeout(10):
        while len(caplog.records) < 2:
            arrive(guests, 1)
            await asyncio.sleep(0.001)
    assert "2 of viewers" in caplog.messages[0]
    (strangers,) = re.findall(r"(\d+) of strangers", caplog.messages[1])
    assert int(strangers) > 20  # of all the time since the first line


async def test_a_client_that_reads_nothing_is_cut_off():
    done = asyncio.get_running_loop().create_future()

    async def talks(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(100):
                await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        finally:
            done.set_result(None)

    guests = connections.Connections(tick_s=0.05)
    server = uvicorn.Server(uvicorn.Config(talks, **{**connections.options(guests, None), "loop": "asyncio"}))
    sock = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    _, writer = await asyncio.open_connection(*sock.getsockname())
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(10):
        while not len(guests):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        while len(guests):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        await done
    writer.close()
    server.should_exit = True
    await serving


# Rates, places and the memory for them: bounded whoever comes, and wide enough for who belongs here.


@given(st.lists(st.floats(0, 3), max_size=200), st.floats(0.1, 100), st.integers(1, 50))
def test_no_order_of_calls_gets_more_than_burst_and_rate(gaps, rate, burst):
    buckets = Buckets(rate, burst)
    now, taken = 1000.0, []
    for gap in gaps:
        now += gap
        wait = buckets.take("a", now)
        assert wait == 0.0 if len(taken) < burst else wait >= 0
        if wait:
            assert buckets.take("a", now + wait + 1e-6) == 0.0
            now += wait + 1e-6
        taken.append(now)
    for i, first in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate * (taken[j] - first) + 1e-3


def test_ten_thousand_addresses_cost_no_more_than_four_thousand():
    rates, sizes = Rates(), []
    for n in range(10_000):
        address = f"10.{n // 65536}.{n // 256 % 256}.{n % 256}"
        for kind in ("report", "read", "open", "admin", "join", "stranger"):
            rates.take(kind, address, n * 1e-4)
        if n in (ADDRESSES + 256, 9_999):
            sizes.append(len(pickle.dumps(rates)))
    assert sizes[1] < 1.1 * sizes[0]


def test_strangers_share_a_bucket_so_that_many_addresses_gain_nothing():
    rates = Rates()
    let_in = sum(rates.take("stranger", f"10.0.{n // 256}.{n % 256}", 1.0) == 0.0 for n in range(10_000))
    assert let_in == 500
    assert rates.take("report", "10.0.0.1", 1.0) == 0.0


def test_an_address_that_fails_is_slowed_down_alone():
    rates = Rates()
    assert [rates.take("stranger", "192.0.2.1", 0.0) == 0.0 for _ in range(21)] == [True] * 20 + [False]
    assert rates.take("stranger", "192.0.2.2", 0.0) == 0.0
    assert rates.take("stranger", "192.0.2.1", 1.0) == 0.0


def test_a_flood_of_incarnations_is_bounded_and_says_when_to_come_back():
    rates = Rates()
    for _ in range(20):
        rates.join(0, "192.0.2.1", 0.0)
    with pytest.raises(TooMany, match="too many new incarnations of replica 0; try again in 1 s") as caught:
        rates.join(0, "192.0.2.1", 0.0)
    assert isinstance(caught.value, HTTPException)
    assert caught.value.status_code == 429
    assert caught.value.headers == {"Retry-After": "1"}
    rates.join(1, "192.0.2.1", 0.0)  # the others come in as before
    rates.join(0, "192.0.2.1", 0.5)


def test_all_replicas_of_a_machine_may_start_at_once_and_crash_often():
    rates = Rates()
    for life in range(4):
        for replica in range(64):
            rates.join(replica, "127.0.0.1", life * 1.0)


def test_one_address_cannot_be_all_replicas_over_and_over():
    rates = Rates()
    for n in range(256):
        rates.join(n % 64, "192.0.2.1", 0.0)
    with pytest.raises(TooMany, match=r"incarnations from 192\.0\.2\.1"):
        rates.join(0, "192.0.2.1", 0.0)


def test_what_belongs_here_is_never_slowed_down():
    """64 supervisors and 64 reporters on one machine for a minute, with all their changes at once."""
    rates, chance = Rates(), random.Random(1)
    calls = sorted(60 * chance.random() for _ in range(64 * 60 * (4 + 5)))
    burst = [30.0] * 1000
    assert not any(rates.take("report", "127.0.0.1", at) for at in sorted(calls + burst))
    assert not any(rates.take("ask", "127.0.0.1", 0.0) for _ in range(10**5))


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/quorum", "ask", 256 * KIB),
        ("/v1/telemetry", "report", 256 * KIB),
        ("/v1/processes", "report", 256 * KIB),
        ("/v1/admin/replicas/0/evict", "admin", 64 * KIB),
        ("/v1/status", "read", 64 * KIB),
        ("/metrics", "read", 64 * KIB),
        ("/no/such/route", "read", 64 * KIB),
        ("/v1/quorum/", "read", 64 * KIB),
        ("//healthz", "read", 64 * KIB),
        ("/", "open", 64 * KIB),
        ("/assets/app.js", "open", 64 * KIB),
        ("/healthz", "open", 64 * KIB),
    ],
)
def test_what_is_not_named_wants_a_token(path, kind, body):
    assert (rule(path).kind, rule(path).max_body) == (kind, body)


@pytest.mark.parametrize(
    ("host", "same"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("x" * 1000, "x" * 64),
    ],
)
def test_an_address_is_what_one_host_cannot_change(host, same):
    assert source(host) == same


async def test_a_connection_that_was_reset_is_let_go_at_once():
    """Its keep-alive timer would hold it, and all of its last request, for another 75 seconds."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    gone = asyncio.Event()

    class Guest(connections.GuardedConnection):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            gone.set()

    guest = Guest(connections.Connections(), config=config, server_state=ServerState(), app_state={})
    async with await asyncio.get_running_loop().create_server(lambda: guest, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert guest.timeout_keep_alive_task is not None
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 30)
        assert guest.timeout_keep_alive_task is None
