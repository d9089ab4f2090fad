"""Ports: the lighthouse's own, as many listening sockets as the job needs, and the state interface."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from ft_hsdp import tls
from ft_hsdp.control.lighthouse_client import home
from ft_hsdp.launch.doctor.finding import Bad, Subject, Undecided
from ft_hsdp.launch.lighthouse_process import check_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
PER_RANK = 3  # listening sockets: FTAR, and gloo's, measured
PER_REPLICA = 3  # the leader's hub, the store of its process group, the state agent
TRIED = 64  # so many are really opened
CONNECT_S = 2.0


def port(subject: Subject) -> str:
    """Whether the lighthouse can listen."""
    if subject.lighthouses:
        raise Undecided(f"not looked at: the lighthouse is at {', '.join(subject.lighthouses)}")
    config = subject.config
    check_port(config)
    network = config.network
    if network.port == 0:
        return f"{network.host}, any free port"
    last = f" to {network.port + config.lighthouse.count - 1} are" if config.lighthouse.count > 1 else " is"
    return f"{network.host}:{network.port}{last} free"


def sockets(subject: Subject) -> str:
    """Whether there are ports enough for all who listen here."""
    config = subject.config
    listeners = subject.replicas * (config.ranks_per_replica * PER_RANK + PER_REPLICA) + config.lighthouse.count
    low, high = local_range()
    if listeners > (high - low) // 2:  # outgoing connections take theirs from the same range
        raise Bad(
            f"{listeners} sockets will listen, ports {low} to {high} are for them and for connections; widen the "
            "range: sysctl net.ipv4.ip_local_port_range"
        )
    opened = 0
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(min(listeners, TRIED)):
                stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
                opened += 1
        except OSError as error:
            why = error.strerror or error
            raise Bad(
                f"only {opened} of {listeners} sockets could listen ({why}); end what holds the ports"
            ) from None
    return f"{listeners} will listen; opened {opened} of them, ports {low} to {high} are for all"


def local_range(file: Path = RANGE) -> tuple[int, int]:
    """First and last of the ports that the kernel gives to those who ask for any. Raises Undecided."""
    try:
        low, high = map(int, file.read_text().split())
    except (OSError, ValueError):
        raise Undecided(f"{file} does not say which ports there are") from None
    return low, high


def interface(subject: Subject) -> str:
    """Whether states can be served at `network.state_interface`: bound, and connected to once."""
    network = subject.config.network
    key, given = (
        ("network.state_interface", network.state_interface)
        if network.state_interface
        else ("network.host", network.host)
    )
    reached = f"http://{tls.reached(network.host)}" if ":" not in network.host else "http://[::1]"
    address = home(given, subject.lighthouses[0] if subject.lighthouses else reached)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with (
            socket.create_server((address, 0), family=family, backlog=1) as server,
            socket.create_connection(server.getsockname()[:2], timeout=CONNECT_S),
        ):
            return f"{key} {given}: states are served at {address}"
    except OSError as error:
        why = error.strerror or error
        raise Bad(
            f"{key} {given}: nobody can connect to {address} ({why}); give an address of this machine"
        ) from None
