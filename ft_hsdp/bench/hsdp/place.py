"""Where the replicas of a crew are: in namespaces of their own, or all on this machine's loopback."""

from __future__ import annotations

from typing import Protocol

from ft_hsdp.launch.backend.processes import free_port

LOOPBACK = "127.0.0.1"


class Place(Protocol):
    """hub: where the lighthouse is; replicas: where each of them is; interface: between replicas."""

    hub: str
    replicas: tuple[str, ...]
    interface: str

    def host(self, replica: int | None = None) -> str:
        """The address of a replica; of the hub, if None."""

    def inside(self, space: str, *command: str) -> list[str]:
        """The command that does this at `hub` or at one of `replicas`."""

    def port(self, number: int, replica: int) -> int:
        """A port for the store of crew `number` at a replica: the same for the same place."""


class Loopback:
    """All on this machine, without a limit."""

    hub = ""
    interface = "lo"

    def __init__(self, replicas: int) -> None:
        self.replicas = ("",) * replicas
        self._ports: dict[tuple[int, int], int] = {}

    def host(self, replica: int | None = None) -> str:
        """The loopback's."""
        return LOOPBACK

    def inside(self, space: str, *command: str) -> list[str]:
        """The command itself."""
        return list(command)

    def port(self, number: int, replica: int) -> int:
        """One that was free when it was first asked for."""
        if (number, replica) not in self._ports:
            self._ports[number, replica] = free_port(LOOPBACK)
        return self._ports[number, replica]
