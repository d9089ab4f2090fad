from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from benchmarks import local, readers
from benchmarks.local import LocalOptions
from benchmarks.readers import READERS, BadReaders
from ft_hsdp.bench.command import MIB
from ft_hsdp.handshake import Purpose
from tests.support.known import admit


def test_bad_readers_do_what_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a server that lets in who knows the token, and then never stops sending."""
    monkeypatch.setattr(readers, "BEAT_S", 0.02)
    asked: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = server.accept()
                socks.append(sock)
                with suppress(ConnectionError):  # it may be gone already
                    if not admit(sock, "secret", Purpose.STATE):
                        sock.close()
                        continue
                    asked.append(sock.recv(4096))
                    sock.setblocking(False)
                    with suppress(BlockingIOError):
                        sock.send(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20))

    socks: list[socket.socket] = []
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with BadReaders([f"127.0.0.1:{server.getsockname()[1]}"], "secret", lambda: "/v1/state") as crowd:
        deadline = time.monotonic() + 10
        while crowd.seen["beats"] < 5 or crowd.seen.total() < crowd.seen["beats"] + sum(READERS.values()):
            assert time.monotonic() < deadline, crowd.seen
            time.sleep(0.01)
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for sock in socks:
        sock.close()
    assert crowd.seen.keys() == {"beats", "slow 200", "garbage gone", "stranger gone"}
    assert crowd.seen["slow 200"] == READERS["slow"]
    assert asked == [b"GET /v1/state HTTP/1.1\r\nHost: x\r\n\r\n"] * READERS["slow"]


@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_state_comes_back_from_the_agent_and_from_a_file() -> None:
    with open(os.devnull, "w") as nowhere:
        result = local.run(LocalOptions((MIB + 4,), rounds=1), nowhere)
    (row,) = result["local"]
    assert row["bytes"] == MIB + 4
    assert {name: found["count"] for name, found in row["times"].items()} == {
        "stage": 1,
        "save": 1,
        "agent": 1,
        "file": 1,
    }
