import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from unittest import mock

import pytest

from ft_hsdp import handshake
from ft_hsdp.address import split
from ft_hsdp.handshake import Purpose
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import http as state_http
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.donor_connection import DonorConnection
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.parts import ServedParts
from tests.support.known import KnownConnection, get, known
from tests.support.state.state_helpers import STATE, TOKEN, no_thread, sealed
from tests.support.waiting import until

PATH = f"/v1/state/{STATE.commit_epoch}/{STATE.step}/{STATE.lineage}/0"
SNAPSHOT, _ = sealed(size=1 << 20)
DATA = bytes(SNAPSHOT.data)
ENCODED = shard_manifest.encode(SNAPSHOT.manifest)
ETAG = f'"{shard_manifest.digest(ENCODED)}"'


class Counting(InMemorySnapshots):
    lent = 0

    def borrow(self, *args, **more):
        served = super().borrow(*args, **more)
        with self._lock:
            self.lent += served is not None
        return served

    def give_back(self, served):
        with self._lock:
            self.lent -= 1


@pytest.fixture
def source() -> Counting:
    source = Counting()
    source.put(SNAPSHOT.manifest, SNAPSHOT.room)
    return source


@pytest.fixture
def address(source: Counting) -> Iterator[str]:
    with closing(StateServer("127.0.0.1", 0, source, TOKEN)) as served:
        yield served.address
        until(lambda: source.lent == 0, "something was not given back")


@pytest.mark.parametrize(
    ("span", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-99", 5, 100),
        (f"bytes=70000-{70000 + (2 << 20)}", 70000, 70001 + (2 << 20)),
        (f"bytes={len(DATA) - 1}-", len(DATA) - 1, len(DATA)),
        ("bytes=0-", 0, len(DATA)),
        (f"bytes=7-{10**17}", 7, len(DATA)),
    ],
)
def test_a_range(address: str, span: str, begin: int, end: int) -> None:
    status, body, headers = get(address, f"{PATH}/data", TOKEN, span)
    assert (status, headers["Content-Range"]) == (206, f"bytes {begin}-{end - 1}/{len(DATA)}")
    assert headers["ETag"] == ETAG
    assert body == DATA[begin:end]


@pytest.mark.parametrize(
    "span",
    [
        *(f"bytes={len(DATA)}-", f"bytes={'9' * 30}-", "bytes=5-4", "bytes=-5", "bytes=0-1,3-4"),
        *("bytes=", "rows=0-1", "0-1", "bytes=a-b"),
    ],
)
def test_a_range_that_cannot_be_given(address: str, span: str) -> None:
    status, body, headers = get(address, f"{PATH}/data", TOKEN, span)
    assert (status, body, headers["Content-Range"]) == (416, b"", f"bytes */{len(DATA)}")


def test_one_connection_for_many_answers(address: str) -> None:
    socks = set()
    with closing(KnownConnection(address, TOKEN)) as connection:
        for path, status in (("manifest", 200), ("no", 404), ("data", 200), ("data", 200)):
            connection.request("GET", f"{PATH}/{path}")
            response = connection.getresponse()
            response.read()
            assert response.status == status
            assert connection.sock is not None
            socks.add(connection.sock.getsockname())
    assert len(socks) == 1


def test_what_is_read_stays_although_it_is_dropped(address: str, source: Counting) -> None:
    with known(address, TOKEN, Purpose.STATE) as sock:
        sock.sendall(f"GET {PATH}/data HTTP/1.1\r\n\r\n".encode())
        until(lambda: source.lent == 1, "nothing was borrowed")
        source.drop(STATE, 0)
        assert get(address, f"{PATH}/data", TOKEN)[0] == 404
        got = bytearray()
        while len(got) < len(DATA):
            got += sock.recv(1 << 20)
    assert bytes(got).endswith(DATA)


@pytest.mark.parametrize("given", ["", TOKEN[:-1], f"{TOKEN}0", "\xe9"])
def test_without_the_token_there_is_nothing(address: str, given: str) -> None:
    for path in (f"{PATH}/manifest", f"{PATH}/data", "/", "/v1/state/9/9/" + "0" * 32 + "/0/data"):
        with pytest.raises(handshake.HungUp):
            get(address, path, given)


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/state/3/8/{STATE.lineage}/0/data",
        f"/v1/state/4/7/{STATE.lineage}/0/data",
        f"/v1/state/3/7/{'f' * 32}/0/manifest",
        f"/v1/state/3/7/{STATE.lineage}/1/manifest",
        f"/v1/state/3/7/{STATE.lineage}/data",
        PATH,
        f"{PATH}/",
        f"{PATH}/data/../manifest",
        f"{PATH}/data?x=1",
        f"{PATH}/token",
        "/v1/state/../../etc/passwd",
        f"/v1/state/3/7/{STATE.lineage.upper()}/0/data",
        f"/v1/state/-3/7/{STATE.lineage}/0/data",
        f"/v1/state/{'9' * 5000}/7/{STATE.lineage}/0/data",
        f"/v1/state/%33/7/{STATE.lineage}/0/data",
        "/",
    ],
)
def test_what_is_not_there_is_404(address: str, path: str) -> None:
    assert get(address, path, TOKEN)[:2] == (404, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH"])
def test_reading_is_all_that_can_be_done(address: str, method: str) -> None:
    status, body, _ = get(address, f"{PATH}/data", TOKEN, method=method)
    assert status == 501
    assert len(body) < 2000


def taken_place(stack: ExitStack, address: str) -> socket.socket:
    """A connection that has its thread."""
    sock = stack.enter_context(known(address, TOKEN, Purpose.STATE))
    sock.sendall(f"GET {PATH}/no HTTP/1.1\r\n\r\n".encode())
    assert sock.recv(12) == b"HTTP/1.1 404"
    return sock


def hung_up(sock: socket.socket, data: bytes) -> bool:
    sock.settimeout(0.02)
    try:
        sock.sendall(data)
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


class Clock:
    """The time of the server, which the test has go faster."""

    ahead_s, asked = 0.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.multiple(state_http, time=clock, TICK_S=0.01, WINDOW_BYTES=1 << 20):
        yield clock


@pytest.fixture
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the server, by name, as the test's parameter says."""
    for name, value in request.param.items():
        monkeypatch.setattr(state_http, name, value)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("limits", [{"MAX_READERS": 4}, {"MAX_READERS_PER_PEER": 4}], ids=str, indirect=True)
def test_too_many_readers_are_hung_up_on_and_it_recovers(address: str) -> None:
    def served() -> bool:
        try:
            return get(address, f"{PATH}/manifest", TOKEN)[0] == 200
        except (ConnectionError, http.client.HTTPException):
            return False

    with ExitStack() as stack:
        places = [taken_place(stack, address) for _ in range(4)]
        with known(address, TOKEN, Purpose.STATE) as late:
            assert late.recv(4096) == b""
        places.pop().close()
        until(served, "a place did not become free")


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("limits", [{"IDLE_S": 0.1}], ids=str, indirect=True)
def test_a_silent_reader_and_one_that_drips_lose_their_places(address: str) -> None:
    with known(address, TOKEN, Purpose.STATE) as silent, known(address, TOKEN, Purpose.STATE) as slow:
        silent.sendall(b"GET /v1")
        until(lambda: hung_up(silent, b""), "a silent reader keeps its place")
        until(lambda: hung_up(slow, b"G"), "a byte now and then helps")


def test_a_reader_that_takes_too_little_is_dropped_and_one_that_takes_is_not(address, source, clock) -> None:
    state, size = replace(STATE, step=9), 64 << 20
    big = SnapshotBuffer(size)
    source.put(replace(SNAPSHOT.manifest, state=state, nbytes=size, tensors=(), checksums=("0" * 16,) * 16), big)
    path = PATH.replace("/7/", "/9/") + "/data"

    def dropped() -> bool:
        clock.ahead_s += state_http.WINDOW_S
        return source.lent == 0

    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect(split(address))
        handshake.call_blocking(sock, TOKEN, Purpose.STATE)
        sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
        until(dropped, "a reader that takes nothing keeps its place")
    clock.ahead_s = 0.0
    with closing(KnownConnection(address, TOKEN)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        for _ in range(3):  # windows
            assert len(response.read(size // 4)) == size // 4
            clock.ahead_s += state_http.WINDOW_S + 1
            asked = clock.asked
            until(lambda asked=asked: clock.asked > asked + 2, "the server has looked at its readers")
        assert len(response.read()) == size // 4


@pytest.mark.parametrize(
    ("owner", "name", "query"), [(InMemorySnapshots, "borrow", ""), (ServedParts, "part", "?for=0.2")]
)
def test_a_reader_waits_for_checksums_as_long_as_they_take(address, clock, owner, name, query) -> None:
    """Those of the data it compares itself: it gets them at once."""
    begun, go_on, real = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*args, verify: bool = True, **more):
        if verify:
            begun.set()
            assert go_on.wait(5)
        return real(*args, **more)

    with closing(KnownConnection(address, TOKEN)) as connection, mock.patch.object(owner, name, slow):
        connection.request("GET", f"{PATH}/manifest{query}")
        assert begun.wait(5)
        assert get(address, f"{PATH}/data", TOKEN)[:2] == (200, DATA)
        clock.ahead_s += state_http.WINDOW_S + 1
        asked = clock.asked
        until(lambda: clock.asked > asked + 2, "the server has looked at its readers")
        go_on.set()
        assert connection.getresponse().status == 200


def test_a_donor_that_hung_up_on_an_idle_reader_is_called_again(address: str, clock: Clock) -> None:
    def gone() -> bool:
        clock.ahead_s += state_http.IDLE_S
        return all(thread.name != "state-reader" for thread in threading.enumerate())

    with closing(DonorConnection(address, TOKEN)) as connection:
        for _ in range(2):
            answer = connection.ask(f"{PATH}/manifest")
            assert connection.read(answer.length, answer.length) == ENCODED
            until(gone, "an idle reader keeps its place")


def test_strangers_take_no_place_from_a_reader(address: str) -> None:
    """Connections from two addresses held all places for ever, whether they asked for something or not."""
    with ExitStack() as crowd:
        for number in range(3 * state_http.MAX_READERS):
            sock = crowd.enter_context(socket.socket())
            sock.bind((f"127.0.0.{2 + number % 2}", 0))
            sock.connect(split(address))
            if number % 3 == 0:
                sock.sendall(f"GET {PATH}/manifest HTTP/1.1\r\n\r\n".encode())
        assert get(address, f"{PATH}/manifest", TOKEN)[0] == 200


def test_a_thread_that_cannot_start_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with monkeypatch.context() as lacking:
        no_thread(lacking)
        for _ in range(2 * state_http.MAX_READERS_PER_PEER):
            with known(address, TOKEN, Purpose.STATE) as sock:
                assert sock.recv(1) == b""
    assert get(address, f"{PATH}/manifest", TOKEN)[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_serves_over_both_families(host: str) -> None:
    source = InMemorySnapshots()
    source.put(SNAPSHOT.manifest, SNAPSHOT.room)
    with closing(StateServer(host, 0, source, TOKEN)) as served:
        assert get(served.address, f"{PATH}/manifest", TOKEN)[:2] == (200, ENCODED)


def test_after_close_nobody_answers_and_nothing_is_borrowed(source: Counting) -> None:
    served = StateServer("127.0.0.1", 0, source, TOKEN)
    host, port = served.address.split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        handshake.call_blocking(sock, TOKEN, Purpose.STATE)
        sock.sendall(f"GET {PATH}/data HTTP/1.1\r\n\r\n".encode())
        until(lambda: source.lent == 1, "nothing was borrowed")
        served.close()
        assert source.lent == 0
    with pytest.raises(ConnectionRefusedError):
        get(served.address, f"{PATH}/data", TOKEN)
