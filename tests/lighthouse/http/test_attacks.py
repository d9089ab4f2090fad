"""Attacks on a lighthouse in a process of its own, over real sockets. A replica trains on all the while."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from ft_hsdp import protocol
from tests.support.lighthouse.guarded import AUTHORIZED, Healthy, guarded, read
from tests.support.lighthouse.lighthouse_helpers import ask
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

TICK_S = 0.1  # the server's deadlines are ten of them


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with guarded(tmp_path_factory.mktemp("attacked"), tick_s=TICK_S) as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(server):
    """A replica that is never turned away, nor kept waiting, whatever the test does; nothing stays open."""
    process = psutil.Process(server.process.pid)
    files, memory = process.num_fds(), process.memory_info().rss
    with Healthy(server) as replica:
        yield replica
        replica.more()
    assert replica.problem is None
    until(lambda: process.num_fds() <= files + 4, "connections stay open")
    assert process.memory_info().rss - memory < 64 * 2**20


def head(method="GET", path="/healthz", *headers):
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n".encode() + b"".join(headers)


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"


def status(answer):
    return int(answer[0].split(b" ", 2)[1]) if answer[0] else None


def test_strangers_get_401_then_429_and_never_in(server, healthy):
    codes, began = [], time.monotonic()

    def flood():
        with server.client(headers={"Authorization": "Bearer wrong"}) as http:
            while codes.count(429) < 100:
                assert time.monotonic() < began + 30
                answer = http.post("/v1/quorum", content=b"{}")
                codes.append(answer.status_code)
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    healthy.more(10)
    for thread in threads:
        thread.join()
    assert set(codes) == {401, 429}
    assert codes.count(401) <= 21 + time.monotonic() - began, "20 at once, and one a second"


def test_a_thousand_connections_that_say_nothing_keep_nobody_out(server, healthy):
    opened = [server.connect() for _ in range(1000)]
    try:
        healthy.more()
        assert server.say(head() + b"connection: close\r\n\r\n")[0].startswith(b"HTTP/1.1 200")
        time.sleep(12 * TICK_S)
        for sock in opened:
            sock.settimeout(30.0)
            assert read(sock)[1] == "closed"
    finally:
        for sock in opened:
            sock.close()


def test_a_byte_at_a_time_is_cut_off(server):
    slow = {
        "a head": (b"GET /healthz HTTP/1.1\r\nx: ", b"a"),
        "a body": (head("POST", "/v1/quorum", AUTHORIZED, b"content-length: 1000\r\n\r\n"), b"a"),
        "a chunk": (head("POST", "/v1/quorum", AUTHORIZED, CHUNKED, b"FFFF\r\n"), b"a"),
        "the body of a stranger": (head("POST", "/v1/quorum", b"content-length: 1000\r\n\r\n"), b"a"),
        "empty lines": (b"", b"\r\n"),
    }
    began = time.monotonic()
    opened = {name: server.connect() for name in slow}
    for name, sock in opened.items():
        sock.sendall(server.signed(slow[name][0]))
    ended = {}
    while len(ended) < len(slow) and time.monotonic() < began + 5:
        for name in slow.keys() - ended.keys():
            try:
                opened[name].sendall(slow[name][1])
            except (BrokenPipeError, ConnectionResetError):
                ended[name] = time.monotonic() - began
                opened[name].close()
        time.sleep(TICK_S / 2)
    assert ended.keys() == slow.keys()
    assert min(ended.values()) > 0.8


def endless(server, start, piece, most):
    """Send `piece` until the server hangs up; how many bytes it took, at most `most`."""
    sent = 0
    with server.connect(3.0) as sock:
        try:
            sock.sendall(server.signed(start))
            while sent < most:
                sock.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            return sent
        return most


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /healthz HTTP/1.1\r\nx: ", b"y" * 65536),
        (b"GET /healthz HTTP/1.1\r\n", b"x: y\r\n" * 10000),
        (b"GET /", b"x" * 65536),
        (head("POST", "/v1/quorum", AUTHORIZED, CHUNKED), CHUNK),
        (head("POST", "/v1/quorum", CHUNKED), CHUNK),
        (head("POST", "/v1/quorum", AUTHORIZED, CHUNKED, b"1;x="), b"y" * 65536),
        (head("POST", "/v1/quorum", AUTHORIZED, CHUNKED, b"0\r\nx: "), b"y" * 65536),
        (head("POST", "/v1/quorum", AUTHORIZED, b"content-length: 99999999999\r\n\r\n"), b" " * 65536),
    ],
    ids=["header", "headers", "path", "body", "body-of-a-stranger", "extension", "trailer", "announced"],
)
def test_what_has_no_end_is_cut_off(server, start, piece):
    assert endless(server, start, piece, 64 * 2**20) < 16 * 2**20  # most of it is in the kernel's buffers


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (head() + b"x: " + b"y" * 17000 + b"\r\n\r\n", 431),
        (head() + b"x: " + b"y" * 17000, 431),
        (head() + b"x: y\r\n" * 65 + b"\r\n", 431),
        (head("POST", "/v1/processes", AUTHORIZED, CHUNKED, b"2\r\n{}\r\n0\r\nx: y\r\n\r\n"), None),
        (b"GET /" + b"x" * 17000 + b" HTTP/1.1\r\n\r\n", 431),
        (head("POST", "/v1/quorum", b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"), 400),
        (head("POST", "/v1/quorum", b"content-length: 5\r\ncontent-length: 6\r\n\r\n"), 400),
        (head("POST", "/v1/quorum", b"content-length: -1\r\n\r\n"), 400),
        (head("POST", "/v1/quorum", b"content-length: 99999999999999999999999\r\n\r\n"), 400),
        (b"GET http://169.254.169.254/ HTTP/1.1\r\nconnection: close\r\n\r\n", 200),
        (head("GET", "/../../etc/passwd", b"connection: close\r\n\r\n"), 401),
        (head("GET", "/assets/..%2f..%2fauth.py", b"connection: close\r\n\r\n"), 404),
        (head("GET", "/healthz\x00/v1/status", b"\r\n"), 400),
        (head("GET", "/v1/status", b"upgrade: websocket\r\nconnection: upgrade, close\r\n\r\n"), 401),
        (head("PRI * HTTP/2.0", "", b"\r\n"), 400),
        (head("TRACE", "/v1/status", b"connection: close\r\n\r\n"), 401),
    ],
)
def test_bad_heads_get_one_answer(server, data, code):
    answer = server.say(server.signed(data))
    assert answer[1] == "closed"
    assert status(answer) in ((401, 429) if code == 401 else (code,))
    assert answer[0].count(b"HTTP/1.1 ") == (code is not None)
    assert b"Traceback" not in answer[0]


def test_ten_thousand_requests_in_one_breath_are_not_queued(server):
    answer = server.say(server.signed(head("GET", "/v1/status", AUTHORIZED, b"\r\n")) * 10_000)
    assert answer[1] == "closed"
    assert answer[0].count(b"HTTP/1.1 200") <= 1


def test_a_flood_of_incarnations_is_429_and_the_others_train_on(server, healthy):
    codes = []
    for life in range(60):
        try:
            code, content = server.post("/v1/quorum", protocol.encode(ask(1, life=life)), timeout=0.05)
        except TimeoutError:
            codes.append(None)  # it waits, as it would for a replica
            continue
        codes.append(code)
        if code == 429:
            assert b"incarnations of replica 1" in content
    assert 0 < codes.count(429) <= 40  # 20 come in at once, and more with time
    healthy.more()
