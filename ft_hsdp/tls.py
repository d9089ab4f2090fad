"""TLS between the lighthouse and its clients: contexts for both sides, from the section `network`.

With `network.tls_ca` both sides show certificates of that authority. Without it only the lighthouse does, and its
clients trust `network.tls_certificate` itself. The files are tested before they are used: a handshake in memory
finds what has expired or does not fit.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from ft_hsdp import address
from ft_hsdp.config.network import NetworkConfig
from ft_hsdp.errors import ConfigError

Trusted = ssl.SSLContext | bool
"""What httpx takes for `verify`."""

_FILE = "a PEM file that this user may read"


def server(network: NetworkConfig) -> ssl.SSLContext | None:
    """Return the lighthouse's context; None: it speaks HTTP. With `tls_ca` clients must show certificates.

    Raises:
        ConfigError: a file is missing, unreadable or no PEM; key and certificate are no pair; the certificate has
            expired, or is not the authority's.
    """
    if network.tls_certificate is None or network.tls_key is None:
        return None
    context = _pair(ssl.PROTOCOL_TLS_SERVER, "tls", network.tls_certificate, network.tls_key)
    judge = _trusting(network)
    judge.check_hostname = False
    _try("network.tls_certificate", network.tls_certificate, context, judge, None)
    if network.tls_ca is not None:
        _trust(context, "network.tls_ca", network.tls_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client(network: NetworkConfig) -> ssl.SSLContext | None:
    """Return the context of a client of the lighthouse; None: HTTP, or HTTPS with what this machine trusts.

    The name or address in the lighthouse's URL must stand in its certificate.

    Raises:
        ConfigError: as of `server`.
    """
    if network.tls_certificate is None and network.tls_ca is None:
        return None
    context = _trusting(network)
    certificate, key, authority = network.client_certificate, network.client_key, network.tls_ca
    if certificate is not None and key is not None and authority is not None:
        judge = _pair(ssl.PROTOCOL_TLS_SERVER, "client", certificate, key)
        _trust(judge, "network.tls_ca", authority)
        judge.verify_mode = ssl.CERT_REQUIRED
        shown = _pair(ssl.PROTOCOL_TLS_CLIENT, "client", certificate, key)
        shown.check_hostname = False
        shown.verify_mode = ssl.CERT_NONE
        _try("network.client_certificate", certificate, judge, shown, None)
        context.load_cert_chain(certificate, key)
    return context


def trusted(network: NetworkConfig) -> Trusted:
    """Return `client` as httpx's `verify` takes it."""
    found = client(network)
    return True if found is None else found


def check(network: NetworkConfig, elsewhere: Sequence[str] = ()) -> str:
    """Return what `doctor` reports of the certificates.

    Args:
        elsewhere: URLs of the lighthouses on other machines; (): they are here. Then the key is tested, too, and
            the host name that local clients use.

    Raises:
        ConfigError: As from `client`, and from `server` if that is here.
    """
    context = None if elsewhere else server(network)
    client(network)
    if any(url.lower().startswith("https:") for url in elsewhere):
        known = network.tls_ca or network.tls_certificate or "the authorities of this machine"
        return f"HTTPS; trusted here: {known}"
    if context is None:
        read = "steps, addresses, events and a viewer's key"
        return f"HTTP, so {read} can be read on the way; use it on one machine or in a private network only"
    assert network.tls_certificate is not None
    context.verify_mode = ssl.CERT_NONE
    host = address.reached(network.host)
    until = _try("network.tls_certificate", network.tls_certificate, context, _trusting(network), host)
    who = "clients need a certificate and a token" if network.tls_ca else "clients need a token"
    return f"HTTPS as {host} until {until}; {who}"


def _trusting(network: NetworkConfig) -> ssl.SSLContext:
    """Return a client's context that trusts the authority, or else the lighthouse's certificate itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if network.tls_ca is not None:
        _trust(context, "network.tls_ca", network.tls_ca)
    elif network.tls_certificate is not None:
        _trust(context, "network.tls_certificate", network.tls_certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _pair(kind: int, prefix: str, certificate: str, key: str) -> ssl.SSLContext:
    _readable(f"network.{prefix}_certificate", certificate)
    _readable(f"network.{prefix}_key", key)
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"network.{prefix}_key", key, f"the key of {certificate}") from None
        if error.reason == "NO_CERTIFICATE_ASSIGNED" or _holds_certificate(certificate):
            raise ConfigError(f"network.{prefix}_key", key, f"{_FILE}, with a key in it") from None
        raise ConfigError(f"network.{prefix}_certificate", certificate, f"{_FILE}, a certificate in it") from None
    except ValueError:
        raise ConfigError(f"network.{prefix}_key", key, "a key without a password") from None
    return context


def _no_password() -> str:
    raise ValueError("a password is wanted")


def _holds_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError):
        return False
    return True


def _trust(context: ssl.SSLContext, key: str, path: str) -> None:
    _readable(key, path)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, ValueError):
        raise ConfigError(key, path, f"{_FILE}, with certificates in it") from None


def _readable(key: str, path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(key, path, f"{_FILE} ({error.strerror})") from None


def _try(key: str, path: str, server: ssl.SSLContext, client: ssl.SSLContext, host: str | None) -> str:
    """Do a handshake in memory, and return until when the server's certificate is valid.

    Raise ConfigError on `key`.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    done: set[int] = set()
    try:
        for turn in range(20):
            end = turn % 2
            try:
                ends[end].do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
            if len(done) == 2:
                break
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(key, path, f"a certificate that can be trusted ({error.verify_message})") from None
    except ssl.SSLError as error:
        raise ConfigError(key, path, f"a certificate that can be used ({error.reason})") from None
    told = ends[0].getpeercert() or {}
    return str(told.get("notAfter", "its end"))
