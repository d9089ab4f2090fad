from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from state_helpers import STATE, TOKEN, sealed

from ft_hsdp.state import server, wire
from ft_hsdp.state.server import MAX_READERS, StateServer
from ft_hsdp.state.snapshot import Snapshots

PATH = f"/v1/state/{STATE.commit_epoch}/{STATE.step}/{STATE.lineage}"
BEARER = f"Bearer {TOKEN}"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    held = Snapshots()
    held.put(sealed(size=1 << 20)[0])
    served = StateServer("127.0.0.1", held, TOKEN)
    yield served.address
    served.close()


def ask(address: str, path: str, authorization: str | None = BEARER, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=5)
    headers = {} if authorization is None else {"Authorization": authorization}
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


def test_manifest_and_data(address: str) -> None:
    snapshot, _ = sealed(size=1 << 20)
    assert ask(address, f"{PATH}/manifest") == (200, wire.encode(snapshot.manifest))
    status, data = ask(address, f"{PATH}/data")
    assert status == 200
    assert data == bytes(snapshot.data)


@pytest.mark.parametrize(
    "given", [None, "", TOKEN, f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0", "Bearer \xe9", "Basic x"]
)
def test_without_the_token_there_is_nothing(address: str, given: str | None) -> None:
    for path in (f"{PATH}/manifest", f"{PATH}/data", "/", "/v1/state/9/9/" + "0" * 32 + "/data"):
        assert ask(address, path, given) == (401, b"")


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/state/3/8/{STATE.lineage}/data",
        f"/v1/state/4/7/{STATE.lineage}/data",
        f"/v1/state/3/7/{'f' * 32}/manifest",
        PATH,
        f"{PATH}/",
        f"{PATH}/data/../manifest",
        f"{PATH}/data?x=1",
        f"{PATH}/token",
        "/v1/state/../../etc/passwd",
        f"/v1/state/3/7/{STATE.lineage.upper()}/data",
        f"/v1/state/-3/7/{STATE.lineage}/data",
        f"/v1/state/{'9' * 5000}/7/{STATE.lineage}/data",
        f"/v1/state/%33/7/{STATE.lineage}/data",
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


def test_too_many_readers_are_hung_up_on_and_it_recovers(address: str) -> None:
    host, port = address.split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(MAX_READERS)]
    for sock in idle:  # each has its thread before the next one comes
        sock.sendall(f"GET {PATH}/manifest HTTP/1.1\r\nAuthorization: {BEARER}\r\n\r\n".encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(address, f"{PATH}/manifest")
    idle.pop().close()
    deadline = time.monotonic() + 5
    while True:
        try:
            assert ask(address, f"{PATH}/manifest")[0] == 200
            break
        except (ConnectionError, http.client.RemoteDisconnected):
            assert time.monotonic() < deadline, "a place did not become free"
            time.sleep(0.02)
    for sock in idle:
        sock.close()


def test_a_silent_reader_loses_its_place(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 0.1)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.settimeout(3)
        sock.sendall(b"GET /v1")
        assert sock.recv(1) == b""


def test_noise_does_not_end_it(address: str) -> None:
    host, port = address.split(":")
    for noise in (b"\0" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000):
        with socket.create_connection((host, int(port))) as sock:
            sock.settimeout(3)
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            try:
                while sock.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert ask(address, f"{PATH}/manifest")[0] == 200


def test_after_close_nobody_answers() -> None:
    served = StateServer("127.0.0.1", Snapshots(), TOKEN)
    assert ask(served.address, f"{PATH}/data") == (404, b"")
    served.close()
    with pytest.raises(ConnectionRefusedError):
        ask(served.address, f"{PATH}/data")
