from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from state_helpers import STATE, TOKEN, sealed

from ft_hsdp.state import fetch, wire
from ft_hsdp.state.fetch import Cancelled, Donor, Expected, NotFetched
from ft_hsdp.state.server import StateServer
from ft_hsdp.state.snapshot import Snapshot, Snapshots

SNAPSHOT, LAYOUT = sealed(size=5000)
EXPECTED = Expected(STATE, 0, 2, LAYOUT.fingerprint, LAYOUT.nbytes)
Answer = Callable[[BaseHTTPRequestHandler, bytes, bytes], None]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK_BYTES", 4096)


def snapshot() -> Snapshot:
    return sealed(size=5000)[0]


@contextmanager
def good(*held: Snapshot) -> Iterator[tuple[str, Snapshots]]:
    snapshots = Snapshots()
    for each in held:
        snapshots.put(each)
    server = StateServer("127.0.0.1", snapshots, TOKEN)
    try:
        yield server.address, snapshots
    finally:
        server.close()


@contextmanager
def evil(answer: Answer) -> Iterator[str]:
    """A donor that answers as it likes: ``answer(handler, manifest, data)``."""
    honest = snapshot()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self, wire.encode(honest.manifest), bytes(honest.data))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def say(h: BaseHTTPRequestHandler, body: bytes, length: int | None = None, status: int = 200) -> None:
    h.send_response_only(status)
    h.send_header("Content-Length", str(len(body) if length is None else length))
    h.end_headers()
    h.wfile.write(body)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def serving(manifest: Callable[[bytes], bytes] = bytes, data: Callable[[bytes], bytes] = bytes) -> Answer:
    def answer(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        say(h, manifest(m) if h.path.endswith("manifest") else data(d))

    return answer


def _short(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    """Dies midway."""
    if h.path.endswith("manifest"):
        return say(h, m)
    say(h, d[: len(d) // 2], len(d))
    h.close_connection = True
    h.connection.shutdown(socket.SHUT_RDWR)
    return None


def _status(status: int) -> Answer:
    def answer(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        say(h, b"", status=status)

    return answer


def _dropped_meanwhile(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    say(h, m) if h.path.endswith("manifest") else say(h, b"", status=404)


def _no_http(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    h.wfile.write(b"220 ready\r\n")
    h.close_connection = True


def _endless_header(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    h.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n")
    h.close_connection = True


def _redirect(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    h.send_response_only(302)
    h.send_header("Location", "http://127.0.0.1:1/")
    h.send_header("Content-Length", "0")
    h.end_headers()


_other = wire.encode(sealed(replace(STATE, step=8), size=5000)[0].manifest)
_rank = wire.encode(sealed(rank=1, size=5000)[0].manifest)

EVIL: dict[str, Answer] = {
    "a flipped bit in the first chunk": serving(data=lambda d: flipped(d, 5)),
    "a flipped bit in the last chunk": serving(data=lambda d: flipped(d, len(d) * 8 - 1)),
    "a flipped bit in the manifest": serving(manifest=lambda m: m.replace(b'"cursors":[4,5]', b'"cursors":[4,4]')),
    "bytes of another state": serving(data=lambda d: bytes(sealed(seed=1, size=5000)[0].data)),
    "the manifest of another state": serving(manifest=lambda m: _other),
    "the manifest of another rank": serving(manifest=lambda m: _rank),
    "junk as a manifest": serving(manifest=lambda m: b"\0\xff" * 50),
    "less than announced": _short,
    "one byte too few": serving(data=lambda d: d[:-1]),
    "one byte too many": serving(data=lambda d: d + b"\0"),
    "500": _status(500),
    "401": _status(401),
    "404 for the data only": _dropped_meanwhile,
    "no HTTP": _no_http,
    "an endless header": _endless_header,
    "a redirect": _redirect,
}


def run(donors: list[str], deadline_s: float = 5.0, cancel: threading.Event | None = None):
    rejected: list[tuple[int, str]] = []
    given = [Donor(i, a) for i, a in enumerate(donors)]
    try:
        got = fetch.fetch(
            given,
            EXPECTED,
            TOKEN,
            deadline_s,
            cancel or threading.Event(),
            lambda donor, why: rejected.append((donor.replica, why)),
        )
    except NotFetched as error:
        return error, rejected
    return got, rejected


def test_what_a_donor_has_is_fetched_bit_by_bit() -> None:
    honest = snapshot()
    with good(honest) as (address, _):
        got, rejected = run([address])
    assert (got.snapshot.manifest, bytes(got.snapshot.data)) == (honest.manifest, bytes(honest.data))
    assert len(honest.manifest.checksums) > 3
    assert (got.donor.replica, rejected) == (0, [])
    assert 0 < got.seconds < 5


@pytest.mark.parametrize("kind", EVIL)
def test_a_wrong_donor_is_passed_over_and_reported(kind: str) -> None:
    honest = snapshot()
    with evil(EVIL[kind]) as bad, good(honest) as (address, _):
        got, rejected = run([bad, address])
        assert bytes(got.snapshot.data) == bytes(honest.data)
        assert got.donor.replica == 1
        assert [r for r, _ in rejected] == [0]
        assert rejected[0][1]


def test_when_all_fail_each_is_named() -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(evil(answer)) for answer in EVIL.values()]
        with socket.create_server(("127.0.0.1", 0)) as taken:
            addresses.append(f"127.0.0.1:{taken.getsockname()[1]}")
        began = time.monotonic()
        error, rejected = run(addresses)
    assert isinstance(error, NotFetched)
    assert [r for r, _ in rejected] == list(range(len(addresses))), "each is asked once"
    for replica in range(len(addresses)):
        assert f"replica {replica}: " in str(error)
    assert time.monotonic() - began < 4, "it waited although nobody was left to ask"


def test_a_donor_that_does_not_have_it_yet_is_asked_again() -> None:
    honest = snapshot()
    with good() as (address, held):
        threading.Timer(0.2, held.put, (honest,)).start()
        got, rejected = run([address])
        assert bytes(got.snapshot.data) == bytes(honest.data)
        assert 0.15 < got.seconds < 3
        assert not rejected


def test_the_deadline() -> None:
    with good() as (address, _):
        began = time.monotonic()
        error, rejected = run([address], deadline_s=0.3)
        assert isinstance(error, NotFetched)
        assert "within 0.3 s" in str(error)
        assert 0.3 <= time.monotonic() - began < 1
        assert not rejected


def test_a_donor_that_drips_does_not_hold_up_the_deadline() -> None:
    def drip(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        if h.path.endswith("manifest"):
            return say(h, m)
        say(h, b"", len(d))
        for i in range(len(d)):
            h.wfile.write(d[i : i + 1])
            time.sleep(0.02)
        return None

    with evil(drip) as address:
        began = time.monotonic()
        error, rejected = run([address], deadline_s=0.4)
        assert isinstance(error, NotFetched)
        assert time.monotonic() - began < 1.5
        assert [r for r, _ in rejected] == [0]


def test_a_donor_that_is_silent_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SOCKET_TIMEOUT_S", 0.2)
    honest = snapshot()
    with socket.create_server(("127.0.0.1", 0)) as silent, good(honest) as (address, _):
        got, rejected = run([f"127.0.0.1:{silent.getsockname()[1]}", address])
        assert got.donor.replica == 1
        assert [r for r, _ in rejected] == [0]


def test_cancel_while_waiting_and_while_receiving() -> None:
    def stall(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        if h.path.endswith("manifest"):
            return say(h, m)
        say(h, d[:1], len(d))
        for _ in range(100):
            h.wfile.write(d[1:2])
            time.sleep(0.02)
        return None

    with good() as (empty, _), evil(stall) as slow:
        for address in (empty, slow):
            cancel = threading.Event()
            threading.Timer(0.2, cancel.set).start()
            began = time.monotonic()
            with pytest.raises(Cancelled):
                run([address], cancel=cancel)
            assert time.monotonic() - began < 1.5


def test_the_token_is_needed() -> None:
    with good(snapshot()) as (address, _), pytest.raises(NotFetched, match="replica 0: answered 401"):
        fetch.fetch([Donor(0, address)], EXPECTED, "cd" * 32, 2, threading.Event(), lambda *_: None)


def test_nobody_to_ask() -> None:
    error, _ = run([], deadline_s=0.1)
    assert isinstance(error, NotFetched)
