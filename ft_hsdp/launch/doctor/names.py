"""Names: what this machine is called, whether that leads back to it, and where the lighthouse listens."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from ft_hsdp.launch.doctor.finding import Bad, Subject, is_loopback


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
    """The names of an address; none where nobody knows one."""
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
