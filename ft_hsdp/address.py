""" "host:port" of a listener, where an IPv6 host stands in brackets ("[::1]:8765"), and sockets bound to one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from ft_hsdp.errors import ConfigError

BACKLOG = 1024  # of a lighthouse
GLOO_INTERFACES, NCCL_INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return host and port of an address.

    Raises:
        ValueError: it is no address.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host) != bracketed or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(f"{address[:60]!r} is not host:port; an IPv6 address stands in brackets: [::1]:8765")
    return host[1:-1] if bracketed else host, int(port)


def parse_url(url: str) -> SplitResult | None:
    """Return the parts of a URL; None if it has no host that can be looked up, or a port that is none."""
    try:
        found = urlsplit(url)
        return found if found.hostname and found.hostname.encode("idna") and found.port != 0 else None
    except ValueError:
        return None


def family(host: str) -> socket.AddressFamily:
    """Return the family of the sockets that reach `host`.

    A name that is no IP address is looked up, which may block.
    """
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def loopback(host: str) -> bool:
    """Return whether only processes of one machine reach `host`. Of the names, only `localhost` counts."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def unspecified(host: str) -> bool:
    """Return whether `host` stands for all addresses of a machine, such as 0.0.0.0: no peer can connect to it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    return False


def reached(host: str) -> str:
    """Return the name or address by which this machine's processes reach what listens on `host`."""
    return ("::1" if ":" in host else "127.0.0.1") if unspecified(host) else host


def bound(host: str, port: int = 0, *, only_6: bool = True) -> socket.socket:
    """Return a TCP socket bound to `port` (0: a free one) of `host`, which does not listen yet.

    With an IPv6 address it takes no IPv4 packets, unless `only_6` is false.

    Raises:
        OSError: it cannot be bound.
    """
    sock = socket.socket(family(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_6))
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def listen(host: str, port: int, *, known: bool) -> socket.socket:
    """Return the listening socket of a lighthouse.

    Args:
        host: name or address of this machine.
        port: 0 for a free one.
        known: clients prove who they are, so the address need not be on loopback.

    Raises:
        ConfigError: network.host or network.port cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            "network.host", host, f"an address of this machine ({error.strerror or error})"
        ) from None
    if not known:
        check_loopback(str(address[0]))
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            why = "0 or a free port (another process has this one)"
            raise ConfigError("network.port", port, why) from None
        if error.errno == errno.EACCES:
            raise ConfigError("network.port", port, "0 or a port that this user may listen on") from None
        raise ConfigError("network.host", host, f"an address of this machine ({error.strerror})") from None
    return sock


def check_loopback(host: str) -> None:
    """Raise ConfigError if the IP address `host`, where a lighthouse listens to everybody, is not on loopback."""
    if not loopback(host):
        raise ConfigError("network.host", host, "127.0.0.1 or ::1, unless the run has a token or network.tls_ca")


def everywhere(port: int) -> socket.socket:
    """Return a TCP socket bound to `port` of every address of this host, which does not listen yet.

    Raises:
        OSError: it cannot be bound.
    """
    return bound("::", port, only_6=False) if socket.has_dualstack_ipv6() else bound("0.0.0.0", port)


def source(host: str | None, port: int, version: int = socket.AF_UNSPEC) -> str:
    """Return the IP address from which this machine reaches `port` of `host`. Sends nothing; may look `host` up.

    Raises:
        OSError: `host` is not known or not reached, or has no address of family `version`.
    """
    found, _, _, _, there = socket.getaddrinfo(host, port, version, socket.SOCK_DGRAM)[0]
    with socket.socket(found, socket.SOCK_DGRAM) as sock:
        sock.connect(there)  # the kernel chooses the route
        return str(sock.getsockname()[0])


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Refuse interfaces in an environment that this machine lacks: gloo and NCCL end later, and say it less well.

    Raises:
        ConfigError: On GLOO_SOCKET_IFNAME, where each name has to be one, or NCCL_SOCKET_IFNAME, of which one has
            to fit: names begin as it says, or are equal after "="; after "^" it says which are not used.
    """
    here = [name for _, name in socket.if_nameindex()]
    allowed = f"an interface of this machine: {', '.join(here)}"
    given = environment.get(GLOO_INTERFACES, "")
    if given and not {name.strip() for name in given.split(",")} <= set(here):
        raise ConfigError(GLOO_INTERFACES, given, allowed)
    given = environment.get(NCCL_INTERFACES, "")
    sign, names = given[:1], tuple(name.split(":")[0] for name in given.lstrip("=^").split(","))
    fit = [name for name in here if (name in names if sign == "=" else name.startswith(names))]
    if given and (set(here) <= set(fit) if sign == "^" else not fit):
        raise ConfigError(NCCL_INTERFACES, given, allowed)


def local(sock: socket.socket) -> bool:
    """Return whether the other end of a connected socket is on this machine's loopback."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = ipaddress.ip_address(str(sock.getpeername()[0]).partition("%")[0])
    return (getattr(host, "ipv4_mapped", None) or host).is_loopback


def tune(sock: socket.socket) -> None:
    """Set TCP_NODELAY, and on loopback the congestion control reno.

    A congestion control with pacing, which suits a network, halves the speed of loopback.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if local(sock):
        with contextlib.suppress(OSError):  # the kernel's default serves too
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
