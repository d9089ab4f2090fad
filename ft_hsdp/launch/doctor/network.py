"""Checks of the network: names, ports, services on other machines, and the clock.

Names: this machine's name and address, and where the lighthouse listens. Ports: the lighthouse's, as many
listening sockets as the job needs, and the state interface. Services: the lighthouse and etcd, if they run on
other machines. The clock is compared with the lighthouse's, or the kernel is asked whether it is synchronized.
Training does not read the time of day, but events and metrics carry it, and TLS depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from ft_hsdp import secret, tls
from ft_hsdp.address import check_interfaces, loopback, reached, unspecified
from ft_hsdp.control.lighthouse_client import Unproved, get_proved, own_address
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.doctor.result import Bad, Subject, Undecided
from ft_hsdp.launch.lighthouse_process import check_port
from ft_hsdp.launch.run.directory import run_of
from ft_hsdp.secret import TOKEN_VARIABLE
from lighthouse.ha.etcd import Etcd, EtcdRefused, EtcdUnreachable, prefix


def hostname(subject: Subject) -> str:
    """Check that this machine's name has an address of this machine, and report the name of that address.

    If the ranks of a replica are on several machines, each is reached at the address of its machine's name.
    """
    name = socket.gethostname()
    try:
        found = addresses(name)
    except OSError as error:
        why = f"{name}, this machine's name, has no address ({error.strerror or error})"
        if subject.spans:
            raise Bad(f"{why}; add one to /etc/hosts or to your name server") from None
        return f"{why}; a job on one machine needs none"
    first = found[0]
    if subject.spans and loopback(first):
        raise Bad(
            f"{name}, this machine's name, is {first}: other machines would connect to themselves; in /etc/hosts, "
            "give the name the address of the network card (Debian writes 127.0.1.1 there)"
        )
    if not ours(first):
        why = f"{name}, this machine's name, is {first}, which is no address of this machine"
        if subject.spans:
            raise Bad(f"{why}; correct /etc/hosts or your name server")
        return f"{why}; a job on one machine does not need it"
    back = names_of(first)
    if _short(name) in map(_short, back):
        return f"{name} is {first}, and {first} is {name}"
    return f"{name} is {first}, but {first} {f'is {back[0]}' if back else 'has no name'}, which only affects logs"


def host(subject: Subject) -> str:
    """Check `network.host`, where the lighthouse and the replicas listen."""
    given = subject.config.network.host
    if unspecified(given):
        return f"{given}: all addresses of this machine"
    try:
        found = addresses(given)
    except OSError as error:
        why = error.strerror or error
        raise Bad(
            f"network.host {given} has no address ({why}); set it to an address of this machine, or 0.0.0.0"
        ) from None
    first = found[0]
    text = given if first == given else f"{given} is {first}"
    if subject.spans and loopback(first):
        raise Bad(
            f"network.host {text}: other machines cannot reach it; set it to 0.0.0.0, or this machine's address"
        )
    if not ours(first):
        raise Bad(f"network.host {text}, which is no address of this machine; set it to 0.0.0.0, or one that is")
    return f"{text}, an address of this machine" + ("" if subject.spans else "; other machines cannot reach it")


def addresses(name: str) -> list[str]:
    """Return the addresses of a name, the preferred one first. Blocks while the resolver works.

    Raises:
        OSError: It has none.
    """
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
    """Return whether this machine may listen at `address`."""
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
PER_RANK = 3  # listening sockets of FTAR and gloo, measured
PER_REPLICA = 3  # of the leader's hub, the store of the process group, and the state agent
TRIED = 64  # of the needed sockets, at most this many are opened
CONNECT_S = 2.0


def port(subject: Subject) -> str:
    """Check that the lighthouse can listen here."""
    if subject.lighthouses:
        raise Undecided(f"not examined: the lighthouse is at {', '.join(subject.lighthouses)}")
    config = subject.config
    check_port(config)
    network = config.network
    if network.port == 0:
        return f"{network.host}, any free port"
    last = f" to {network.port + config.lighthouse.count - 1} are" if config.lighthouse.count > 1 else " is"
    return f"{network.host}:{network.port}{last} free"


def sockets(subject: Subject) -> str:
    """Check that there are enough ports for all sockets that listen on this machine."""
    config = subject.config
    listeners = subject.replicas * (config.ranks_per_replica * PER_RANK + PER_REPLICA) + config.lighthouse.count
    low, high = local_range()
    if listeners > (high - low) // 2:  # outgoing connections take theirs from the same range
        raise Bad(
            f"{listeners} sockets will listen, but they share ports {low} to {high} with connections; widen the "
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
                f"only {opened} of {listeners} sockets could listen ({why}); end the processes that use the ports"
            ) from None
    return f"{listeners} sockets will listen, opened {opened}; they share ports {low} to {high} with connections"


def local_range(file: Path = RANGE) -> tuple[int, int]:
    """Return the first and last of the ports that the kernel assigns.

    Raises:
        Undecided: The kernel does not say.
    """
    try:
        low, high = map(int, file.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        raise Undecided(f"{file} does not give the range of ports") from None
    return low, high


def interface(subject: Subject) -> str:
    """Check `network.state_interface` and `network.interfaces`: listen at each, and connect once.

    Also that the interfaces exist which the environment names for gloo and NCCL.
    """
    check_interfaces(os.environ)
    network = subject.config.network
    states = [("network.state_interface", network.state_interface)] if network.state_interface else []
    ranks = [network.of_rank(local) for local in range(max(1, len(network.interfaces)))]
    return "; ".join(_listens(subject, key, given) for key, given in states + ranks)


def _listens(subject: Subject, key: str, given: str) -> str:
    host = subject.config.network.host
    here = f"http://{reached(host)}" if ":" not in host else "http://[::1]"
    address = own_address(given, subject.lighthouses[0] if subject.lighthouses else here, key)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with (
            socket.create_server((address, 0), family=family, backlog=1) as server,
            socket.create_connection(server.getsockname()[:2], timeout=CONNECT_S),
        ):
            return f"{key} {given}: {address}"
    except OSError as error:
        why = error.strerror or error
        raise Bad(
            f"{key} {given}: a connection to {address} fails ({why}); set it to an address of this machine"
        ) from None


ANSWER_S = 2.0
ETCD_S = 5.0  # for all endpoints


def lighthouse(subject: Subject) -> str:
    """Check that a lighthouse answers, and report its address."""
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
        raise Bad(str(error)) from None
    lacks = "" if tokens(subject) else f"; {TOKEN_VARIABLE} is not set, which `host` and `replica` need"
    return (found[0] if len(found) == 1 else f"one of {', '.join(subject.lighthouses)} answers") + lacks


def tokens(subject: Subject) -> tuple[str, ...]:
    """Return the job's tokens, if this machine has them. Raises ConfigError if they cannot be used."""
    return secret.given(TOKEN_VARIABLE) or secret.read(run_of(subject.config).token, "")


def healthz(subject: Subject) -> httpx.Response:
    """Return the answer of the first lighthouse that gives one; proved, if this machine has the job's token.

    Raises:
        LighthouseUnreachable: None answers.
    """
    problem, token = "", "".join(tokens(subject)[:1])
    for url in subject.lighthouses:
        try:
            trusted = tls.trusted(subject.config.network)
            where = f"{url}/healthz"
            if token:
                return get_proved(where, token, ANSWER_S, trusted).raise_for_status()
            return httpx.get(where, timeout=ANSWER_S, trust_env=False, verify=trusted).raise_for_status()
        except Unproved:
            problem = f"{url} does not know the token of this machine; set {TOKEN_VARIABLE} to the job's"
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            why = str(error) or type(error).__name__
            problem = f"{url} does not answer ({why}); start it, or open its port in the firewalls between"
    raise LighthouseUnreachable(problem)


def etcd(subject: Subject) -> str:
    """Check that at least one endpoint of etcd answers a read, and report the others."""
    endpoints, keys = subject.config.lighthouse.etcd, prefix(subject.config.job.name)
    problems = []
    for endpoint in endpoints:
        client = Etcd.with_secrets((endpoint,), ETCD_S / len(endpoints))
        try:
            client.get(f"{keys}/doctor")
        except EtcdRefused as error:
            raise Bad(f"{endpoint}: {error}; are user and password right, and may the user read {keys}?") from None
        except EtcdUnreachable as error:
            problems.append(str(error))
        finally:
            client.close()
    answering = len(endpoints) - len(problems)
    if answering == 0:
        raise Bad(f"{problems[0]}; start etcd, or correct lighthouse.etcd")
    return f"{answering} of {len(endpoints)} endpoints answer" + (f" ({problems[0]})" if problems else "")


# With more, the order of events of several machines is wrong, and certificates may not be valid yet.
WRONG_S = 60.0
_UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex(2)
_ASIDE = "the lighthouse refuses events that are more than a day off; TLS and logs suffer earlier"


def clock(subject: Subject) -> str:
    """Check this machine's clock against the lighthouse's, or ask the kernel whether it is synchronized."""
    if subject.lighthouses:
        try:
            least, most = beside_lighthouse(subject)
        except LighthouseUnreachable as error:
            raise Undecided(f"{error}, so its clock is not known") from None
        off = 0.0 if least <= 0 <= most else min(least, most, key=abs)
        if abs(off) > WRONG_S:
            raise Bad(
                f"{abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} the lighthouse; start chrony or "
                f"systemd-timesyncd on both ({_ASIDE})"
            )
        return (
            f"{abs(off):.0f} s from the lighthouse's" if abs(off) >= 1 else "within a second of the lighthouse's"
        )
    if synchronized():
        return "the kernel reports it as synchronized"
    why = "the kernel reports it as not synchronized"
    if not subject.spans:
        return f"{why}; a job on one machine does not need it"
    raise Undecided(
        f"{why}, which is usual in containers; compare it with --lighthouse URL, or start chrony on the host "
        f"({_ASIDE})"
    )


def beside_lighthouse(subject: Subject) -> tuple[float, float]:
    """Return by how many seconds the lighthouse's clock is ahead of this one, at least and at most.

    The bounds differ by one second, the resolution of its answer, and by the time that the answer took.

    Raises:
        LighthouseUnreachable: No lighthouse answers.
        Undecided: The answer has no date.
    """
    before = time.time()
    response = healthz(subject)
    after = time.time()
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        raise Undecided("the lighthouse's answer has no date") from None
    return there - after, there + 1.0 - before


class _Timex(ctypes.Structure):
    """struct timex; the fields after the first one are not read."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 512))


def synchronized() -> bool:
    """Return whether a time service sets the kernel's clock.

    Raises:
        Undecided: The kernel does not answer.
    """
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        raise Undecided("adjtimex(2) fails here; check that the clock is synchronized")
    return bool(state != _UNSYNCHRONIZED)
