import http.client
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ft_hsdp import handshake
from ft_hsdp.address import split
from ft_hsdp.handshake import Purpose
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import http as state_http
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import StateServer
from tests.support.known import KnownConnection, known
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


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Counting, str]]:
    source = Counting()
    served = StateServer("127.0.0.1", 0, source, TOKEN)
    yield source, served.address
    served.close()


@pytest.fixture
def source(running: tuple[Counting, str]) -> Iterator[Counting]:
    source, _ = running
    source.put(SNAPSHOT.manifest, SNAPSHOT.room)
    yield source
    until(lambda: source.lent == 0, "something was not given back")


@pytest.fixture
def address(running: tuple[Counting, str], source: Counting) -> str:
    return running[1]


def ask(
    address: str, path: str, token: str = TOKEN, method: str = "GET", span: str | None = None
) -> tuple[int, bytes]:
    status, body, _ = answer(address, path, token, method, span)
    return status, body


def answer(
    address: str, path: str, token: str = TOKEN, method: str = "GET", span: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    connection = KnownConnection(address, token)
    try:
        connection.request(method, path, headers={} if span is None else {"Range": span})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    return response.status, body, dict(response.headers)


def test_manifest_and_data(address: str) -> None:
    status, body, headers = answer(address, f"{PATH}/manifest")
    assert (status, body, headers["ETag"]) == (200, ENCODED, ETAG)
    status, body, headers = answer(address, f"{PATH}/data")
    assert (status, headers["ETag"], headers["Accept-Ranges"]) == (200, ETAG, "bytes")
    assert body == DATA


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
    status, body, headers = answer(address, f"{PATH}/data", span=span)
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
    status, body, headers = answer(address, f"{PATH}/data", span=span)
    assert (status, body, headers["Content-Range"]) == (416, b"", f"bytes */{len(DATA)}")


def test_one_connection_for_many_answers(address: str) -> None:
    connection = KnownConnection(address, TOKEN)
    socks = set()
    for path, status in (("manifest", 200), ("no", 404), ("data", 200), ("data", 200)):
        connection.request("GET", f"{PATH}/{path}")
        response = connection.getresponse()
        response.read()
        assert response.status == status
        assert connection.sock is not None
        socks.add(connection.sock.getsockname())
    connection.close()
    assert len(socks) == 1


def test_what_is_read_stays_although_it_is_dropped(address: str, source: Counting) -> None:
    with known(address, TOKEN, Purpose.STATE) as sock:
        sock.sendall(f"GET {PATH}/data HTTP/1.1\r\n\r\n".encode())
        until(lambda: source.lent == 1, "nothing was borrowed")
        source.drop(STATE, 0)
        assert ask(address, f"{PATH}/data")[0] == 404
        got = bytearray()
        while len(got) < len(DATA):
            got += sock.recv(1 << 20)
    assert bytes(got).endswith(DATA)


@pytest.mark.parametrize("given", ["", TOKEN[:-1], f"{TOKEN}0", "\xe9"])
def test_without_the_token_there_is_nothing(address: str, given: str) -> None:
    for path in (f"{PATH}/manifest", f"{PATH}/data", "/", "/v1/state/9/9/" + "0" * 32 + "/0/data"):
        with pytest.raises(handshake.HungUp):
            ask(address, path, given)


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
    assert ask(address, path) == (404, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH"])
def test_reading_is_all_that_can_be_done(address: str, method: str) -> None:
    status, body = ask(address, f"{PATH}/data", method=method)
    assert status == 501
    assert len(body) < 2000


def taken_place(address: str) -> socket.socket:
    """A connection that has its thread."""
    sock = known(address, TOKEN, Purpose.STATE)
    sock.sendall(f"GET {PATH}/no HTTP/1.1\r\n\r\n".encode())
    assert sock.recv(12) == b"HTTP/1.1 404"
    return sock


@pytest.fixture
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the server, by name, as the test's parameter says."""
    for name, value in request.param.items():
        monkeypatch.setattr(state_http, name, value)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("limits", [{"MAX_READERS": 4}, {"MAX_READERS_PER_PEER": 4}], ids=str, indirect=True)
def test_too_many_readers_are_hung_up_on_and_it_recovers(address: str) -> None:
    places = [taken_place(address) for _ in range(4)]
    with known(address, TOKEN, Purpose.STATE) as late:
        assert late.recv(4096) == b""
    places.pop().close()

    def served() -> bool:
        try:
            return ask(address, f"{PATH}/manifest")[0] == 200
        except (ConnectionError, http.client.HTTPException):
            return False

    until(served, "a place did not become free")
    for sock in places:
        sock.close()


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("limits", [{"IDLE_S": 0.1}], ids=str, indirect=True)
def test_a_silent_reader_and_one_that_drips_lose_their_places(address: str) -> None:
    with known(address, TOKEN, Purpose.STATE) as silent, known(address, TOKEN, Purpose.STATE) as slow:
        slow.settimeout(0.02)
        silent.sendall(b"GET /v1")
        assert silent.recv(1) == b""
        deadline = time.monotonic() + 5
        while True:  # a byte now and then does not help
            assert time.monotonic() < deadline
            try:
                slow.sendall(b"G")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("limits", [{"WINDOW_S": 0.25, "WINDOW_BYTES": 1 << 20}], ids=str, indirect=True)
def test_a_reader_that_takes_too_little_is_dropped_and_one_that_takes_is_not(address, source) -> None:
    state = replace(STATE, step=9)
    size = 64 << 20
    big = SnapshotBuffer(size)
    source.put(replace(SNAPSHOT.manifest, state=state, nbytes=size, tensors=(), checksums=("0" * 16,) * 16), big)
    path = PATH.replace("/7/", "/9/") + "/data"
    host, port = address.split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect((host, int(port)))
        handshake.call_blocking(sock, TOKEN, Purpose.STATE)
        sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        until(lambda: source.lent == 1, "nothing was borrowed")
        until(lambda: source.lent == 0, "a reader that takes nothing keeps its place")
    connection = KnownConnection(address, TOKEN)
    connection.request("GET", path)
    response = connection.getresponse()
    got, began = 0, time.monotonic()
    while part := response.read(1 << 20):
        got += len(part)
        if time.monotonic() - began < 1.0:  # four windows
            time.sleep(0.02)
    connection.close()
    assert got == size


def test_strangers_take_no_place_from_a_reader(address: str) -> None:
    """Connections from two addresses held all places for ever, whether they asked for something or not."""
    crowd = []
    for number in range(3 * state_http.MAX_READERS):
        sock = socket.socket()
        sock.bind((f"127.0.0.{2 + number % 2}", 0))
        sock.connect(split(address))
        if number % 3 == 0:
            sock.sendall(f"GET {PATH}/manifest HTTP/1.1\r\n\r\n".encode())
        crowd.append(sock)
    assert ask(address, f"{PATH}/manifest")[0] == 200
    for sock in crowd:
        sock.close()


def test_a_thread_that_cannot_start_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with monkeypatch.context() as lacking:
        no_thread(lacking)
        for _ in range(2 * state_http.MAX_READERS_PER_PEER):
            with known(address, TOKEN, Purpose.STATE) as sock:
                assert sock.recv(1) == b""
    assert ask(address, f"{PATH}/manifest")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_serves_over_both_families(host: str) -> None:
    source = InMemorySnapshots()
    source.put(SNAPSHOT.manifest, SNAPSHOT.room)
    served = StateServer(host, 0, source, TOKEN)
    assert ask(served.address, f"{PATH}/manifest") == (200, ENCODED)
    served.close()


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
        ask(served.address, f"{PATH}/data")
