"""The gate and the door, piece by piece: sizes while they stream, places for streams, answers nobody reads."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request

from lighthouse.http import connections
from lighthouse.http.access import Keys, Rates, RequestGate
from lighthouse.http.openapi import describe
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN, run_async

KEYS = Keys(TOKEN, ADMIN)


async def reads(scope, receive, send):
    """An application that reads the whole body and answers 200."""
    await Request(scope, receive).body()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Caller:
    """Calls an application; `more` is how many pieces of 16 KiB its endless body has had."""

    def __init__(self, app, address="192.0.2.1", token=TOKEN):
        self._app, self._address, self._token = app, address, token
        self.more, self.sent = 0, []

    async def __call__(self, path, *headers):
        told = (b"authorization", f"Bearer {self._token}".encode())
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
def test_a_body_without_end_is_413_at_its_routes_limit(path, pieces):
    app = FastAPI()
    app.mount("/", reads)
    describe(app, KEYS)
    caller = Caller(RequestGate(app, KEYS, Rates(), lambda: 0.0), token=ADMIN if "admin" in path else TOKEN)
    assert run_async(caller(path))[0] == 413
    assert caller.more == pieces + 1


@pytest.mark.parametrize("length", [b"65537", b"99999999999999999999", b"-1", b"1e3", b"\xb2"])
def test_a_length_that_is_too_large_or_none_is_413_before_anything_is_read(length):
    caller = Caller(RequestGate(reads, KEYS, Rates(), lambda: 0.0))
    assert run_async(caller("/v1/status", (b"content-length", length)))[0] == 413
    assert caller.more == 0


def test_an_address_has_sixteen_streams_and_the_others_have_theirs():
    async def main():
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

    run_async(main())


class Guest:
    """A connection."""

    def __init__(self, address):
        self.address, self.dropped = address, False

    def tick(self):
        pass

    def drop(self):
        self.dropped = True


def test_the_oldest_stranger_makes_room_and_who_is_known_stays():
    async def main():
        guests = connections.Connections(1000)
        known = [Guest("192.0.2.1") for _ in range(400)]
        for guest in known:
            guests.enter(guest)
            guests.known(guest)
        flood = [Guest("192.0.2.1") for _ in range(300)]
        other = Guest("192.0.2.2")
        guests.enter(other)
        for guest in flood:
            guests.enter(guest)
        assert [g.dropped for g in flood] == [True] * 44 + [False] * 256
        assert not other.dropped
        many = [Guest(f"10.0.{n // 256}.{n % 256}") for n in range(10_000)]
        for guest in many:
            guests.enter(guest)
        assert guests.strangers == connections.STRANGERS
        assert len(guests) == 400 + connections.STRANGERS
        assert other.dropped
        assert not any(g.dropped for g in known + many[-connections.STRANGERS :])
        for guest in [*known, *many[-connections.STRANGERS :]]:
            guests.leave(guest)
            guests.leave(guest)
        assert (len(guests), guests.strangers, guests._of) == (0, 0, {})

    run_async(main())


def test_when_all_are_known_the_new_one_goes():
    async def main():
        guests = connections.Connections(20)
        for n in range(20):
            guest = Guest(f"192.0.2.{n}")
            guests.enter(guest)
            guests.known(guest)
        late = Guest("192.0.2.99")
        guests.enter(late)
        assert late.dropped
        assert len(guests) == 20

    run_async(main())


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(connections, "TICK_S", 0.05)

    async def main():
        done = asyncio.get_running_loop().create_future()

        async def talks(scope, receive, send):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(100):
                    await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
            finally:
                done.set_result(None)

        guests = connections.Connections()
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
        assert guests.strangers == 0
        assert not guests._of
        writer.close()
        server.should_exit = True
        await serving

    run_async(main())
