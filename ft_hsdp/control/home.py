"""Home: the address at which the other machines of a job reach this one."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from ft_hsdp.errors import ConfigError


def home(host: str, lighthouse: str) -> str:
    """The IP address to listen at and to advertise for ``host``: a name's first one, an address as it is.

    For 0.0.0.0 and :: it is the one from which this machine reaches ``lighthouse`` (a URL).

    Raises:
        ConfigError: there is none; the line names network.host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        address = str(found[4][0])
        if not ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            return address
        there = urlsplit(lighthouse)
        family, _, _, _, target = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)  # sends nothing: the kernel chooses the way
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            "network.host", host, f"an address of this machine ({error.strerror or error})"
        ) from None
