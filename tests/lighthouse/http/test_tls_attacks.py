"""TLS on real sockets: who has no certificate of the authority gets no answer, and keeps nobody waiting."""

from __future__ import annotations

import contextlib
import ssl
import time
from datetime import timedelta

import httpx
import psutil
import pytest

from ft_hsdp import tls
from ft_hsdp.config import parse
from tests.support.certificates import Authority
from tests.support.lighthouse.guarded import guarded, read
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc
DAY = timedelta(days=1)
HANDSHAKE_S = 1


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(server, its keys, authority, another one) of a lighthouse whose clients show certificates."""
    folder = tmp_path_factory.mktemp("tls")
    authority, other = Authority(folder), Authority(folder, "other")
    keys = dict(zip(("tls_certificate", "tls_key"), authority.sign("server", "127.0.0.1"), strict=True))
    keys |= dict(zip(("client_certificate", "client_key"), authority.sign("client", client=True), strict=True))
    keys["tls_ca"] = authority.path
    with guarded(folder, network=keys, tick_s=0.1, handshake_s=HANDSHAKE_S) as server:
        yield server, keys, authority, other


def context(keys):
    return tls.client(parse({"network": keys}).network)


def trusting(path, pair=None):
    made = ssl.create_default_context(cafile=path)
    if pair is not None:
        made.load_cert_chain(*pair)
    return made


def test_a_client_of_the_authority_is_served_for_its_token(job):
    server, keys, _, _ = job
    assert server.url.startswith("https://")
    with server.client(verify=context(keys)) as http:
        assert [http.get("/v1/status").status_code for _ in range(3)] == [200] * 3
    with server.client(verify=context(keys), headers={}) as http:
        assert http.get("/v1/status").status_code == 401


def test_a_client_believes_no_other_lighthouse(job):
    server, keys, _, other = job
    with (
        server.client(verify=trusting(other.path)) as http,
        pytest.raises(httpx.ConnectError, match="VERIFY_FAILED"),
    ):
        http.get("/healthz")
    port = server.address[1]
    there = f"https://localhost:{port}"
    http = server.client(base_url=there, verify=context(keys))
    with http, pytest.raises(httpx.ConnectError, match="not valid for 'localhost'"):
        http.get("/healthz")


def pairs(authority, other):
    return {
        "none": None,
        "another authority's": other.sign("stranger", client=True),
        "expired": authority.sign("expired", client=True, valid=(-3 * DAY, -DAY)),
        "not valid yet": authority.sign("early", client=True, valid=(DAY, 3 * DAY)),
        "a lighthouse's": authority.sign("another", "127.0.0.1"),
    }


def test_who_shows_no_certificate_that_counts_gets_no_answer(job):
    server, _, authority, other = job
    for name, pair in pairs(authority, other).items():
        with server.client(verify=trusting(authority.path, pair)) as http, pytest.raises(httpx.TransportError):
            print(name, http.get("/healthz").text)


def test_http_and_noise_get_no_answer(job):
    server, *_ = job
    for data in (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500, bytes(1000)):
        answer, ended = server.say(data)
        assert ended == "closed"
        assert b"HTTP" not in answer


def test_handshakes_that_do_not_end_keep_nobody_out(job):
    server, keys, *_ = job
    process = psutil.Process(server.process.pid)
    files = process.num_fds()
    began = time.monotonic()
    with contextlib.ExitStack() as stack, server.client(verify=context(keys)) as http:
        opened = [stack.enter_context(server.connect()) for _ in range(600)]
        for sock in opened[::2]:
            with contextlib.suppress(OSError):
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert http.get("/v1/status").status_code == 200
        for sock in opened:
            assert read(sock)[1] == "closed"
    assert time.monotonic() - began < 10 * HANDSHAKE_S
    until(lambda: process.num_fds() <= files + 2, "connections stay open")


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(job):
    """The last bytes of the handshake and the request in one segment, as a client of TLS 1.3 may send them."""
    server, keys, *_ = job
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    inner = context(keys).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with server.connect() as sock:
        while True:
            try:
                inner.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(outgoing.read())
                incoming.write(sock.recv(65536))
        inner.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        sock.sendall(outgoing.read())
        answer = b""
        while b"\r\n\r\n" not in answer:
            try:
                answer += inner.read(65536)
            except ssl.SSLWantReadError:
                incoming.write(sock.recv(65536))
    assert answer.startswith(b"HTTP/1.1 200")
