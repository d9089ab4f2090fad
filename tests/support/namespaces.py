"""A network of replicas: each has a namespace of its own and a link to one switch, as machines have.

What stays inside a replica goes over the loopback of its namespace, at full speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.processes import Scope
from ft_hsdp.errors import Retryable

INTERFACE = "link0"  # of a replica
BRIDGE = "switch"
COMMAND_S = 30.0  # longest time of one command
RIGHTS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def unfit() -> str:
    """Return why there can be no such network here, "" if there can."""
    if shutil.which("ip") is None:
        return "not installed: ip"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mask = int(status["CapEff"], 16)
    if lacking := [name for name, bit in RIGHTS.items() if not mask >> bit & 1]:
        return f"it makes network namespaces, which needs root (missing: {', '.join(lacking)})"
    return ""


class Network(Scope):
    """A context: on entry there are ``replicas`` namespaces and their links, on exit nothing is left of them.

    Raises Retryable where a command fails.
    """

    def __init__(self, replicas: int, *, v6: bool = False) -> None:
        prefix = f"ft-hsdp-{os.getpid()}"
        self._v6 = v6
        self.hub = f"{prefix}-hub"
        self.replicas = tuple(f"{prefix}-{replica}" for replica in range(replicas))

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
        """Return the address of a replica; of the hub if None."""
        number = 254 if replica is None else replica + 1
        return f"fd77::{number:x}" if self._v6 else f"10.77.0.{number}"

    def inside(self, replica: int, *command: str) -> list[str]:
        """Return the command that does this in a namespace."""
        return ["ip", "netns", "exec", self.replicas[replica], *command]

    def _add_space(self, name: str) -> None:
        self.stack.callback(_remove, name)  # first: the command may have worked when it is interrupted
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _plug(self, number: int, space: str) -> None:
        port = _port(number)
        ends = "type", "veth", "peer", "name", INTERFACE, "netns", space
        _run("ip", "-n", self.hub, "link", "add", port, *ends)
        self.heal(number)
        self._up(self.hub, port)
        self._up(space, INTERFACE, self.host(number))

    def _up(self, space: str, device: str, host: str = "") -> None:
        if host:
            form = (f"{host}/64", "nodad") if self._v6 else (f"{host}/24",)  # it is used at once
            _run("ip", "-n", space, "address", "add", *form, "dev", device)
        _run("ip", "-n", space, "link", "set", device, "up")


def _port(replica: int) -> str:
    """Return the name of a replica's end at the switch."""
    return f"port{replica}"


def _remove(name: str) -> None:
    """Remove a namespace, if it is there; its links and settings go with it."""
    if (Path("/run/netns") / name).exists():
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    """Run a command. Raises Retryable."""
    try:
        subprocess.run(command, text=True, capture_output=True, check=True, timeout=COMMAND_S)
    except subprocess.CalledProcessError as error:
        why = " ".join((error.stderr or f"exit {error.returncode}").split())
        raise Retryable(f"{' '.join(command)}: {why}") from None
    except subprocess.TimeoutExpired:
        raise Retryable(f"{' '.join(command)} took longer than {COMMAND_S:g} s") from None
