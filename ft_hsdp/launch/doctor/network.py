"""Checks of the network: names, ports, services elsewhere, and the clock.

Names: what this machine is called, whether that leads back to it, and where the lighthouse listens. Ports: the
lighthouse's own, as many listening sockets as the job needs, and the state interface. Services: the lighthouse
and etcd, if they run elsewhere. The clock is compared with the lighthouse's, or with what the kernel says of it:
nothing in training reads the time of day, but rows of events and metrics carry it, and TLS depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from ft_hsdp import tls
from ft_hsdp.control.lighthouse_client import own_address
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.doctor.result import Bad, Subject, Undecided, is_loopback
from ft_hsdp.launch.lighthouse_process import check_port
from lighthouse.ha.etcd import Etcd, EtcdRefused, EtcdUnreachable


def hostname(subject: Subject) -> str:
    """This machine's name -> its address -> its name.

    Where ranks of one replica are on several machines, each is reached at the address that its own name has.
    """
    name = socket.gethostname()
    try:
        found = addresses(name)
    except OSError as error:
        why = f"{name}, this machine's name, has no address ({error.strerror or error})"
        if subject.spans:
            raise Bad(f"{why}; give it one in /etc/hosts or in your name server") from None
        return f"{why}; a job on one machine needs none"
    first = found[0]
    if subject.spans and is_loopback(first):
        raise Bad(
            f"{name}, this machine's name, is {first}: other machines would connect to themselves; write the "
            "address of its network card beside the name in /etc/hosts (Debian writes 127.0.1.1 there)"
        )
    if not ours(first):
        why = f"{name}, this machine's name, is {first}, which is no address of this machine"
        if subject.spans:
            raise Bad(f"{why}; correct /etc/hosts or your name server")
        return f"{why}; a job on one machine does not mind"
    back = names_of(first)
    if _short(name) in map(_short, back):
        return f"{name} is {first}, and back"
    return f"{name} is {first}; back it is {back[0] if back else 'nobody'}, which only logs show"


def host(subject: Subject) -> str:
    """`network.host`: where the lighthouse listens, and replicas for each other."""
    given = subject.config.network.host
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(given).is_unspecified:
            return f"{given}: every address of this machine"
    try:
        found = addresses(given)
    except OSError as error:
        why = error.strerror or error
        raise Bad(
            f"network.host {given} has no address ({why}); give an address of this machine, or 0.0.0.0"
        ) from None
    first = found[0]
    text = given if first == given else f"{given} is {first}"
    if subject.spans and is_loopback(first):
        raise Bad(
            f"network.host {text}: other machines cannot reach that; give 0.0.0.0, or this machine's address"
        )
    if not ours(first):
        raise Bad(f"network.host {text}, which is no address of this machine; give 0.0.0.0, or one that is")
    return f"{text}, an address of this machine" + ("" if subject.spans else ": no other can reach it")


def addresses(name: str) -> list[str]:
    """The addresses of a name, the preferred one first. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def names_of(address: str) -> list[str]:
    """Return the names of an address; none if the resolver knows none."""
    try:
        name, aliases, _ = socket.gethostbyaddr(address)
    except OSError:
        return []
    return [name, *aliases]


def ours(address: str) -> bool:
    """Whether this machine may listen at `address`."""
    try:
        family, kind, proto, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as sock:
            sock.bind(place)
    except OSError:
        return False
    return True


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


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
    address = own_address(given, subject.lighthouses[0] if subject.lighthouses else reached)
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


ANSWER_S = 2.0
ETCD_S = 5.0  # for all endpoints


def lighthouse(subject: Subject) -> str:
    """Whether a lighthouse answers, and what its name means here."""
    found = []
    for url in subject.lighthouses:
        there = urlsplit(url).hostname or ""
        try:
            first = addresses(there)[0]
        except OSError as error:
            why = error.strerror or error
            raise Bad(f"{there} in {url} has no address ({why}); correct the name, /etc/hosts or DNS") from None
        found.append(f"{url} answers" if first == there else f"{url} answers at {first}")
    try:
        healthz(subject)
    except LighthouseUnreachable as error:
        raise Bad(f"{error}; start it, or open its port in the firewalls between") from None
    return "; ".join(found) if len(found) == 1 else f"one of {', '.join(subject.lighthouses)} answers"


def healthz(subject: Subject) -> httpx.Response:
    """The answer of the first lighthouse that gives one. Raises LighthouseUnreachable."""
    problem = ""
    for url in subject.lighthouses:
        try:
            trusted = tls.trusted(subject.config.network)
            response = httpx.get(f"{url}/healthz", timeout=ANSWER_S, trust_env=False, verify=trusted)
            return response.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            problem = f"{url} does not answer ({str(error) or type(error).__name__})"
    raise LighthouseUnreachable(problem)


def etcd(subject: Subject) -> str:
    """Whether a majority of the endpoints answers a read."""
    endpoints, prefix = subject.config.lighthouse.etcd, subject.config.lighthouse.etcd_prefix
    problems = []
    for endpoint in endpoints:
        client = Etcd.with_secrets((endpoint,), ETCD_S / len(endpoints))
        try:
            client.get(f"{prefix}/doctor")
        except EtcdRefused as error:
            raise Bad(
                f"{endpoint}: {error}; are user and password right, and may the user read {prefix}?"
            ) from None
        except EtcdUnreachable as error:
            problems.append(str(error))
        finally:
            client.close()
    well = len(endpoints) - len(problems)
    if well == 0:
        raise Bad(f"{problems[0]}; start etcd, or correct lighthouse.etcd")
    return f"{well} of {len(endpoints)} endpoints answer" + (f" ({problems[0]})" if problems else "")


WRONG_S = 60.0  # rows of several machines can no longer be told in order; certificates may seem not yet valid
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_ASIDE = "rows more than a day off are refused, TLS and logs suffer earlier"


def clock(subject: Subject) -> str:
    """How far this clock is off, or whether anybody sets it."""
    if subject.lighthouses:
        try:
            least, most = beside_lighthouse(subject)
        except LighthouseUnreachable as error:
            raise Undecided(f"{error}: its clock is not known") from None
        off = 0.0 if least <= 0 <= most else min(least, most, key=abs)
        if abs(off) > WRONG_S:
            raise Bad(
                f"{abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} the lighthouse; start chrony or "
                f"systemd-timesyncd on both ({_ASIDE})"
            )
        return (
            f"{abs(off):.0f} s from the lighthouse's" if abs(off) >= 1 else "within a second of the lighthouse's"
        )
    if synchronised():
        return "synchronised, says the kernel"
    why = "the kernel says that nobody sets it"
    if not subject.spans:
        return f"{why}; a job on one machine does not mind"
    raise Undecided(
        f"{why}, which is usual in containers; compare with --lighthouse URL, or start chrony on the host "
        f"({_ASIDE})"
    )


def beside_lighthouse(subject: Subject) -> tuple[float, float]:
    """By how many seconds the lighthouse's clock is ahead of this one, at least and at most.

    Its answer names a whole second, and took its time. Raises LighthouseUnreachable, Undecided.
    """
    before = time.time()
    response = healthz(subject)
    after = time.time()
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        raise Undecided("the lighthouse does not say what time it is") from None
    return there - after, there + 1.0 - before


class _Timex(ctypes.Structure):
    """struct timex; only what comes first in it is read here."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 512))


def synchronised() -> bool:
    """Return whether a time service sets the kernel's clock. Raises Undecided."""
    try:
        said = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    except (OSError, AttributeError):
        said = -1
    if said < 0:
        raise Undecided("adjtimex(2) cannot be asked here; is the clock synchronised?")
    return bool(said != _UNSYNCHRONISED)
