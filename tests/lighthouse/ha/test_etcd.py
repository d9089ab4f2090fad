"""The client of etcd's JSON gateway, on a real etcd: what is asked for happens once, no call waits for ever."""

import itertools
import socket
import time
from unittest import mock

import httpx
import pytest

from lighthouse.ha.etcd import Etcd, EtcdEntry, EtcdRefused, EtcdUnreachable
from tests.support.etcd_server import EtcdServer
from tests.support.refused import refused

pytestmark = pytest.mark.multiproc
NAMES = itertools.count()


@pytest.fixture
def client(etcd):
    made = Etcd((etcd.url,), 5.0)
    yield made
    made.close()


@pytest.fixture
def key():
    return f"/client/{next(NAMES)}"


def test_a_key_is_made_once_and_its_lease_ends_it(client, key):
    lease, holds_s = client.grant(30)
    assert holds_s == 30.0
    made = client.create(key, "mine", lease)
    assert made.value == "mine"
    assert client.create(key, "theirs", lease) == made
    assert client.get(key) == made
    assert client.keep_alive(lease) == 30.0
    client.revoke(lease)
    assert client.get(key) is None
    assert client.keep_alive(lease) == 0.0
    with pytest.raises(EtcdRefused, match="lease not found"):
        client.revoke(lease)


def test_a_write_is_let_in_by_the_revision_of_a_key_alone(client, key):
    lease, _ = client.grant(30)
    first = client.create(f"{key}/leader", "a", lease)
    assert (
        client.put_if(f"{key}/leader", first.create_revision, {f"{key}/x/1": "1", f"{key}/x/2": "ü"}, {}) is None
    )
    client.revoke(lease)
    lease, _ = client.grant(30)
    second = client.create(f"{key}/leader", "a", lease)
    assert second.create_revision > first.create_revision
    late = {f"{key}/x/1": "late", f"{key}/x/3": "late"}
    found = client.put_if(f"{key}/leader", first.create_revision, late, {})
    assert found == {f"{key}/leader": second, f"{key}/x/1": client.get(f"{key}/x/1")}
    assert {k: e.value for k, e in client.below(f"{key}/x/").items()} == {f"{key}/x/1": "1", f"{key}/x/2": "ü"}
    client.revoke(lease)


def test_another_endpoint_is_asked_where_one_is_gone_or_hangs(etcd, key):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never says a word
        hangs = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = Etcd(("http://127.0.0.1:1", hangs, etcd.url), 4.0)
        with mock.patch("lighthouse.ha.etcd.LEAST_S", 0.0):  # the last one answers in its own part of the time
            assert client.get(key) is None
        silent.accept()[0].close()
        assert client.get(key) is None
        silent.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # it stays with the one that answers
            silent.accept()
        client.close()


def test_nobody_answers_in_time(key):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = Etcd((*[hangs] * 8, "http://127.0.0.1:1"), 0.4)
        started = time.monotonic()
        with pytest.raises(EtcdUnreachable) as caught:
            client.get(key)
        assert time.monotonic() - started < 30.0, "httpx itself waits 5 s for each"
        assert len(str(caught.value).splitlines()) == 1
        client.close()


def test_a_cluster_with_users_wants_the_password_of_the_environment(key, monkeypatch):
    with EtcdServer() as server:
        root = Etcd((server.url,), 5.0)
        for path, body in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            httpx.post(f"{server.url}/v3/auth/{path}", json=body, trust_env=False).raise_for_status()
        with pytest.raises(EtcdRefused):
            root.get(key)
        root.close()
        monkeypatch.setenv("FT_HSDP_ETCD_USER", "root")
        monkeypatch.setenv("FT_HSDP_ETCD_PASSWORD", "secret")
        client = Etcd.with_secrets((server.url,), 5.0)
        assert client.put_if(key, 0, {key: "x"}, {}) is None
        client._token = "run.out"
        assert isinstance(client.get(key), EtcdEntry)
        client.close()
        monkeypatch.setenv("FT_HSDP_ETCD_PASSWORD", "wrong")
        client = Etcd.with_secrets((server.url,), 5.0)
        with pytest.raises(EtcdRefused, match="invalid user ID or password") as caught:
            client.get(key)
        assert "wrong" not in str(caught.value)
        client.close()


def test_an_endpoint_that_is_no_url_is_one_clear_line():
    refused(lambda: Etcd.with_secrets(("etcd:2379",), 1.0), r"lighthouse\.etcd: got 'etcd:2379'")
