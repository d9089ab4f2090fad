"""A network of replicas: each has a namespace of its own and a link to one switch, as machines have.

What stays inside a replica goes over the loopback of its namespace, at full speed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from ft_hsdp.bench.overhead import Loopback
from ft_hsdp.bench.processes import Scope
from ft_hsdp.errors import Retryable

COMMANDS = ("ip", "tc")
INTERFACE = "link0"  # of a replica
BRIDGE = "switch"
SUBNET, SUBNET_V6 = "10.77.0.0/24", "fd77::/64"
PORT = 29500
BURST = "128kb"  # what leaves at once: two of the kernel's largest packets
QUEUE = "10ms"  # longest time in the queue: 1.25 MB at 1 Gbit, as in a switch
COMMAND_S = 30.0  # longest time of one command
RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def unfit() -> str:
    """Return why there can be no such network here, "" if there can."""
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mask = int(status["CapEff"], 16)
    if lacking := [name for name, bit in RIGHTS.items() if not mask >> bit & 1]:
        return f"it makes network namespaces, which needs root (missing: {', '.join(lacking)})"
    return ""


class Network(Loopback, Scope):
    """A context: on entry there are ``replicas`` namespaces and their links, on exit nothing is left of them.

    Raises Retryable where a command fails.
    """

    interface = INTERFACE

    def __init__(self, replicas: int, rate: str = "", congestion: str = "", *, v6: bool = False) -> None:
        """Prepare the network.

        Args:
            replicas: how many there are.
            rate: of each link, each way, as tc says it ("1gbit"); "" sets no limit.
            congestion: control of all TCP in it; "" leaves the machine's default.
            v6: whether the addresses are of IPv6 instead of IPv4.
        """
        self._prefix = f"ft-hsdp-{os.getpid()}"
        self._rate = rate
        self._congestion = congestion
        self._v6 = v6
        self.hub = f"{self._prefix}-hub"
        self.replicas = tuple(f"{self._prefix}-{replica}" for replica in range(replicas))

    def _begin(self, folder: Path) -> None:
        self._add_space(self.hub)
        _run("ip", "-n", self.hub, "link", "add", BRIDGE, "type", "bridge")
        self._up(self.hub, BRIDGE, self.host())
        for number, space in enumerate(self.replicas):
            self._add_space(space)
            self._plug(number, space)

    def renew(self, number: int) -> None:
        """Replace a replica's namespace and link by new ones, without connections; no end hears of it."""
        _run("ip", "-n", self.hub, "link", "delete", _port(number))
        _remove(self.replicas[number])
        self._add_space(self.replicas[number])
        self._plug(number, self.replicas[number])

    def cut(self, number: int) -> None:
        """Unplug a replica from the switch: no end hears of it, and what is sent is lost."""
        _run("ip", "-n", self.hub, "link", "set", _port(number), "nomaster")

    def heal(self, number: int) -> None:
        """Plug a replica in again."""
        _run("ip", "-n", self.hub, "link", "set", _port(number), "master", BRIDGE)

    def host(self, replica: int | None = None) -> str:
        """Return the address of a replica; of the hub, which hangs on the switch without a limit, if None."""
        number = 254 if replica is None else replica + 1
        return f"fd77::{number:x}" if self._v6 else f"10.77.0.{number}"

    def inside(self, replica: int | None, *command: str) -> list[str]:
        """Return the command that does this in a namespace."""
        return ["ip", "netns", "exec", self.hub if replica is None else self.replicas[replica], *command]

    def port(self, number: int, replica: int) -> int:
        """Return a port that is free, because the namespaces are fresh."""
        return PORT + number

    def sent(self) -> list[int]:
        """Return the bytes that each replica has sent over its link so far, with headers."""
        links = json.loads(_run("ip", "-n", self.hub, "-j", "-s", "link"))
        counts = {link["ifname"]: int(link["stats64"]["rx"]["bytes"]) for link in links}
        return [counts[_port(number)] for number in range(len(self.replicas))]

    def _add_space(self, name: str) -> None:
        self.stack.callback(_remove, name)  # first: the command may have worked when it is interrupted
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if self._congestion:
            _run("ip", "netns", "exec", name, "tee", _SETTING, said=self._congestion)

    def _plug(self, number: int, space: str) -> None:
        port = _port(number)
        ends = "type", "veth", "peer", "name", INTERFACE, "netns", space
        _run("ip", "-n", self.hub, "link", "add", port, *ends)
        self.heal(number)
        self._up(self.hub, port)
        self._up(space, INTERFACE, self.host(number))
        for name, device in ((self.hub, port), (space, INTERFACE)) if self._rate else ():
            limit = "rate", self._rate, "burst", BURST, "latency", QUEUE
            _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def _up(self, space: str, device: str, host: str = "") -> None:
        if host:
            form = (f"{host}/64", "nodad") if self._v6 else (f"{host}/24",)  # it is used at once
            _run("ip", "-n", space, "address", "add", *form, "dev", device)
        _run("ip", "-n", space, "link", "set", device, "up")


_SETTING = "/proc/sys/net/ipv4/tcp_congestion_control"


def _port(replica: int) -> str:
    """Return the name of a replica's end at the switch."""
    return f"port{replica}"


def _remove(name: str) -> None:
    """Remove a namespace, if it is there; its links and settings go with it."""
    if (Path("/run/netns") / name).exists():
        _run("ip", "netns", "delete", name)


def _run(*command: str, said: str = "") -> str:
    """Run a command with ``said`` as its input; return its output. Raises Retryable."""
    try:
        done = subprocess.run(command, input=said, text=True, capture_output=True, check=True, timeout=COMMAND_S)
    except subprocess.CalledProcessError as error:
        why = " ".join((error.stderr or f"exit {error.returncode}").split())
        raise Retryable(f"bench: {' '.join(command)}: {why}") from None
    except subprocess.TimeoutExpired:
        raise Retryable(f"bench: {' '.join(command)} took longer than {COMMAND_S:g} s") from None
    return done.stdout
