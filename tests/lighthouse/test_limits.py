"""Rates, places and the memory for them: bounded whoever comes, and wide enough for who belongs here."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from uvicorn.server import ServerState

from lighthouse.http import connections
from lighthouse.http.access import ADDRESSES, KIB, Buckets, OpenSlots, Rates, TooMany, rule, source
from tests.support.lighthouse.lighthouse_helpers import run_async


def test_a_bucket_lets_a_burst_through_and_then_its_rate():
    buckets = Buckets(rate=2, burst=5)
    assert [buckets.take("a", 0.0) for _ in range(5)] == [0.0] * 5
    assert buckets.take("a", 0.0) == pytest.approx(0.5)
    assert buckets.take("a", 0.4) == pytest.approx(0.1)
    assert buckets.take("a", 0.5) == 0.0
    assert buckets.take("b", 0.5) == 0.0
    assert [buckets.take("a", 100.0) for _ in range(6)][:5] == [0.0] * 5


@given(
    st.lists(st.floats(0, 3), max_size=200),
    st.floats(0.1, 100),
    st.integers(1, 50),
)
def test_no_order_of_calls_gets_more_than_burst_and_rate(gaps, rate, burst):
    buckets = Buckets(rate, burst)
    now, taken = 1000.0, []
    for gap in gaps:
        now += gap
        wait = buckets.take("a", now)
        assert wait >= 0
        if wait:
            assert buckets.take("a", now + wait + 1e-6) == 0.0
            now += wait + 1e-6
        taken.append(now)
    for i, first in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate * (taken[j] - first) + 1e-3


def test_ten_thousand_addresses_cost_no_more_than_four_thousand():
    rates = Rates()
    for n in range(10_000):
        address = f"10.{n // 65536}.{n // 256 % 256}.{n % 256}"
        for kind in ("report", "read", "open", "admin", "join", "stranger"):
            rates.take(kind, address, n * 1e-4)
    assert max(map(len, rates._of.values())) <= ADDRESSES
    assert len(rates._joins) == 0


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


def test_slots_are_per_key_and_in_all():
    slots = OpenSlots(3, 2)
    assert [slots.enter("a") for _ in range(3)] == [True, True, False]
    assert [slots.enter("b") for _ in range(2)] == [True, False]
    slots.leave("a")
    assert slots.enter("b")
    assert len(slots) == 3
    for key in ("a", "b", "b"):
        slots.leave(key)
    assert len(slots) == 0
    assert not slots._open


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/quorum", "ask", 256 * KIB),
        ("/v1/telemetry", "report", 256 * KIB),
        ("/v1/processes", "report", 256 * KIB),
        ("/v1/admin/replicas/0/evict", "admin", 64 * KIB),
        ("/v1/status", "read", 64 * KIB),
        ("/metrics", "read", 64 * KIB),
        ("/openapi.json", "read", 64 * KIB),
        ("/no/such/route", "read", 64 * KIB),
        ("/v1/quorum/", "read", 64 * KIB),
        ("//healthz", "read", 64 * KIB),
        ("/", "open", 64 * KIB),
        ("/assets/app.js", "open", 64 * KIB),
        ("/assets", "read", 64 * KIB),
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


def test_a_connection_that_was_reset_is_let_go_at_once():
    """Its keep-alive timer would hold it, and all of its last request, for another 75 seconds."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def main():
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
            await asyncio.wait_for(gone.wait(), 5)
            assert guest.timeout_keep_alive_task is None

    run_async(main())
