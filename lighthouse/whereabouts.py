"""Whereabouts: where a replica may say that it listens. Pure.

Others connect to what a grant names, so an address is let in only where it is the sender's own, or in a network
that the operator allows. Names are refused: what a name means can change between this look and the connection.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable

from ft_hsdp.errors import ProtocolViolation

MAX_ADDRESSES = 64
METADATA = ipaddress.ip_address("fd00:ec2::254")  # the link-local ones are refused anyway

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks = tuple[Network, ...]


def networks(allow: Iterable[str]) -> Networks:
    """``network.allow`` as networks."""
    return tuple(ipaddress.ip_network(text) for text in allow)


@functools.lru_cache(256)
def check(ring: tuple[str, ...], state: tuple[str, ...], peer: str | None, allow: Networks) -> None:
    """Whether who asks from the address ``peer`` (None: from this process) may listen at these "host:port".

    The same replica asks with the same addresses every step, so what was let in is remembered.

    Raises:
        ProtocolViolation: it may not; one line names the address and what is allowed.
    """
    for name, addresses in (("ring", ring), ("state", state)):
        if len(addresses) > MAX_ADDRESSES:
            raise ProtocolViolation(
                f"{name} has {len(addresses)} addresses; at most {MAX_ADDRESSES} times host:port"
            )
        for address in addresses:
            host = _host(name, address)
            if peer is not None:
                _allowed(name, address, host, _plain(ipaddress.ip_address(peer.partition("%")[0])), allow)


def _host(name: str, address: str) -> Address:
    """The host in "host:port"; an IPv6 address may stand in brackets."""
    host, _, port = address.rpartition(":")
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        found = None
    if found is None or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ProtocolViolation(
            f"{name}: {address[:60]!r} is not host:port with an IP address and a port from 1 to 65535"
        )
    return _plain(found)


def _plain(address: Address) -> Address:
    """An IPv4 address instead of its form within IPv6."""
    return getattr(address, "ipv4_mapped", None) or address


def _allowed(name: str, address: str, host: Address, peer: Address, allow: Networks) -> None:
    never = host.is_unspecified or host.is_multicast or host.is_link_local or host == METADATA
    if never or host == ipaddress.ip_address("255.255.255.255"):
        raise ProtocolViolation(
            f"{name}: nobody can be reached at {address}: give network.host an address of its own"
        )
    mine = host == peer or (host.is_loopback and peer.is_loopback)
    if not mine and not any(host in network for network in allow):
        raise ProtocolViolation(
            f"{name}: {address} is neither where its replica asks from ({peer}) nor in a network of network.allow"
        )
