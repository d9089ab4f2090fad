"""TLS from the configuration: what does not fit is one line that names the key, before anybody relies on it."""

import ssl
from datetime import timedelta
from pathlib import Path

import pytest

from ft_hsdp import address, tls
from ft_hsdp.config import parse
from tests.support.certificates import Authority
from tests.support.refused import refused

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Paths of an authority's files, and of another one's."""
    folder = tmp_path_factory.mktemp("pem")
    authority, other = Authority(folder), Authority(folder, "other")
    pairs = {
        "server": authority.sign("server", "127.0.0.1", "localhost"),
        "client": authority.sign("client", client=True),
        "expired": authority.sign("expired", "127.0.0.1", valid=(-3 * DAY, -DAY)),
        "early": authority.sign("early", "127.0.0.1", valid=(DAY, 3 * DAY)),
        "stranger": other.sign("stranger", "127.0.0.1"),
        "stranger_client": other.sign("stranger_client", client=True),
        "elsewhere": authority.sign("elsewhere", "192.0.2.1"),
        "nameless": authority.sign("nameless"),
    }
    (folder / "garbage.pem").write_text("no certificate")
    (folder / "empty.pem").write_text("")
    (folder / "folder.pem").mkdir()
    (folder / "locked.key").write_bytes(_locked(folder / "server.key"))
    files = {name: pair[0] for name, pair in pairs.items()}
    files |= {f"{name}.key": pair[1] for name, pair in pairs.items()}
    files |= {
        name: str(folder / f"{name}.pem") for name in ("garbage", "empty", "folder", "nowhere", "ca", "other")
    }
    return {**files, "locked.key": str(folder / "locked.key")}


def _locked(path: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(path.read_bytes(), None)
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))


def network(here, **keys):
    return parse({"network": {key: here.get(value, value) for key, value in keys.items()}}).network


SERVER = {"tls_certificate": "server", "tls_key": "server.key"}
MUTUAL = {**SERVER, "tls_ca": "ca", "client_certificate": "client", "client_key": "client.key"}


@pytest.mark.parametrize("keys", [SERVER, MUTUAL], ids=["server", "mutual"])
def test_what_fits_is_taken(here, keys):
    server = tls.server(network(here, **keys))
    client = tls.client(network(here, **keys))
    assert server.verify_mode == (ssl.CERT_REQUIRED if "tls_ca" in keys else ssl.CERT_NONE)
    assert client.verify_mode == ssl.CERT_REQUIRED
    assert client.check_hostname
    assert min(server.minimum_version, client.minimum_version) >= ssl.TLSVersion.TLSv1_2
    said = tls.check(network(here, **keys))
    assert said.startswith("HTTPS as 127.0.0.1 until ")
    elsewhere = network(here, **{**keys, "tls_key": "nowhere"})  # it is with the lighthouse alone
    refused(lambda: tls.check(elsewhere), "No such file", "network.tls_key")
    assert tls.check(elsewhere, ["https://head:1"]).startswith("HTTPS; ")
    assert tls.check(elsewhere, ["http://head:1"]).startswith("HTTP, ")


def test_without_keys_it_is_http(here):
    assert tls.server(network(here)) is None
    assert tls.client(network(here)) is None
    assert tls.check(network(here)).startswith("HTTP, ")
    assert tls.check(network(here), ["https://head:1"]).startswith("HTTPS; ")


BAD_SERVER = [
    ({**SERVER, "tls_certificate": "nowhere"}, "tls_certificate", "No such file"),
    ({**SERVER, "tls_key": "nowhere"}, "tls_key", "No such file"),
    ({**SERVER, "tls_certificate": "folder"}, "tls_certificate", "Is a directory"),
    ({**SERVER, "tls_certificate": "garbage"}, "tls_certificate", "a certificate in it"),
    ({**SERVER, "tls_certificate": "empty"}, "tls_certificate", "a certificate in it"),
    ({**SERVER, "tls_key": "garbage"}, "tls_key", "a key in it"),
    ({**SERVER, "tls_key": "locked.key"}, "tls_key", "a key without a password"),
    ({**SERVER, "tls_key": "client.key"}, "tls_key", "the key of"),
    ({"tls_certificate": "expired", "tls_key": "expired.key"}, "tls_certificate", "certificate has expired"),
    ({"tls_certificate": "early", "tls_key": "early.key"}, "tls_certificate", "not yet valid"),
    ({**MUTUAL, "tls_certificate": "expired", "tls_key": "expired.key"}, "tls_certificate", "has expired"),
    ({**MUTUAL, "tls_certificate": "stranger", "tls_key": "stranger.key"}, "tls_certificate", "local issuer"),
    ({**MUTUAL, "tls_certificate": "client", "tls_key": "client.key"}, "tls_certificate", "purpose"),
    ({**MUTUAL, "tls_ca": "nowhere"}, "tls_ca", "No such file"),
    ({**MUTUAL, "tls_ca": "garbage"}, "tls_ca", "with certificates in it"),
    ({**MUTUAL, "tls_ca": "empty"}, "tls_ca", "with certificates in it"),
]
BAD_CLIENT = [
    ({**MUTUAL, "client_key": "server.key"}, "client_key", "the key of"),
    ({**MUTUAL, "client_certificate": "nowhere"}, "client_certificate", "No such file"),
    ({**MUTUAL, "client_certificate": "server", "client_key": "server.key"}, "client_certificate", "purpose"),
    (
        {**MUTUAL, "client_certificate": "stranger_client", "client_key": "stranger_client.key"},
        "client_certificate",
        "local issuer",
    ),
    ({**MUTUAL, "tls_ca": "other"}, "client_certificate", "local issuer"),
]


@pytest.mark.parametrize(("keys", "key", "why"), BAD_SERVER)
def test_what_does_not_fit_the_lighthouse_is_one_line(here, keys, key, why):
    refused(lambda: tls.server(network(here, **keys)), why, f"network.{key}")
    refused(lambda: tls.check(network(here, **keys)), why, f"network.{key}")


@pytest.mark.parametrize(("keys", "key", "why"), BAD_CLIENT)
def test_what_does_not_fit_a_client_is_one_line(here, keys, key, why):
    refused(lambda: tls.client(network(here, **keys)), why, f"network.{key}")
    refused(lambda: tls.check(network(here, **keys), ["https://head:1"]), why, f"network.{key}")


@pytest.mark.parametrize("name", ["elsewhere", "nameless"])
def test_a_preflight_finds_a_certificate_for_another_address(here, name):
    keys = {"tls_certificate": name, "tls_key": f"{name}.key"}
    assert tls.server(network(here, **keys)) is not None
    refused(lambda: tls.check(network(here, **keys)), "127.0.0.1", "network.tls_certificate")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"tls_certificate": "c"}, "tls_certificate"),
        ({"tls_key": "k"}, "tls_key"),
        ({**SERVER, "client_certificate": "c"}, "client_certificate"),
        ({**SERVER, "client_key": "c"}, "client_key"),
        ({**SERVER, "client_certificate": "c", "client_key": "k"}, "client_certificate"),
        ({"tls_ca": "ca"}, "tls_ca"),
        ({**SERVER, "tls_ca": "ca"}, "tls_ca"),
        ({"tls_ca": "ca", "client_certificate": "c", "client_key": "k"}, "tls_ca"),
        ({"allow": ["10.0.0.1/8"]}, "allow"),
        ({"allow": ["everywhere"]}, "allow"),
    ],
)
def test_half_a_set_of_keys_is_one_line(keys, key):
    refused(lambda: parse({"network": keys}), key=f"network.{key}")


@pytest.mark.parametrize(
    ("host", "there"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("node7", "node7"), ("10.0.0.1",) * 2],
)
def test_where_a_lighthouse_is_reached(host, there):
    assert address.reached(host) == there
