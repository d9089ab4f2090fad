"""The check of Ray: its version and, with an address, whether the cluster answers, wants a token, and has room."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

from ft_hsdp.address import parse_url
from ft_hsdp.config import Config
from ft_hsdp.launch.doctor.result import Bad, Subject, Undecided, ask
from ft_hsdp.launch.ray.placement import PlacementRequest, request

CONNECT_S = 2.0
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable
_NO_TOKEN = {"RAY_AUTH_MODE": "disabled", TOKEN: None, "RAY_AUTH_TOKEN_PATH": None}


@dataclass(slots=True)
class Node:
    resources: dict[str, float]  # that no replica has taken yet
    labels: Mapping[str, str]

    def has(self, amounts: Mapping[str, float], times: int = 1) -> bool:
        """Return whether `times` times these amounts are left."""
        return all(self.resources.get(name, 0.0) + 1e-9 >= times * amount for name, amount in amounts.items())

    def take(self, amounts: Mapping[str, float], times: int = 1) -> None:
        """Take `times` times these amounts; a negative number gives them back."""
        for name, amount in amounts.items():
            self.resources[name] -= times * amount


def wanted(subject: Subject) -> bool:
    """Return whether Ray is installed, or the job needs it."""
    return subject.ray or subject.ray_address is not None or util.find_spec("ray") is not None


def ray(subject: Subject) -> str:
    """Check Ray's version and, with an address, the cluster's versions, token and room."""
    try:
        here = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise Bad("Ray is not installed; pip install 'ft_hsdp[ray]'") from None
    if subject.ray_address is None:
        return f"Ray {here}; without --ray-address no cluster is contacted"
    address = subject.ray_address
    _connect(address)
    if "://" in address:
        raise Undecided(f"{address} listens; to examine the cluster, give the address of its GCS, HOST:PORT")
    answer = ask("ray", address, env={TOKEN: os.environ.get(TOKEN)})  # children do not inherit it
    if "error" in answer:
        raise Bad(f"{address}: {answer['error']}")
    _same("Ray", here, str(answer["ray"]))
    _same("Python", platform.python_version(), str(answer["python"]))
    if "error" not in ask("ray", str(answer["address"]), env=_NO_TOKEN):
        raise Bad(
            f"{address} asks for no token: any client that reaches it can run programs there; start it with "
            "RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes a token)"
        )
    return f"Ray {here}; {address} answers and asks for a token; {_room(subject.config, answer['nodes'])}"


def _connect(address: str) -> None:
    """Check that something listens at an address: Ray itself would try for half a minute. Raises Bad."""
    if address == "auto":
        return  # only Ray knows the address
    place = parse_url(address if "://" in address else f"//{address}")
    if place is None or place.port is None:
        raise Bad(f"--ray-address {address}: give HOST:PORT, or auto for the cluster of this machine")
    try:
        socket.create_connection((place.hostname, place.port), timeout=CONNECT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise Bad(
            f"nothing answers at {address} ({why}); start the cluster, or open its port in firewalls"
        ) from None


def _same(what: str, here: str, there: str) -> None:
    if here != there:
        raise Bad(f"{what} is {here} here and {there} in the cluster; Ray needs the same version on both")


def _room(config: Config, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how many replicas the cluster has room for. Raises Bad below quorum.min_replicas."""
    asked = [request(config, replica) for replica in range(config.replicas)]
    have = [Node(dict(node["resources"]), node["labels"]) for node in nodes]
    placed = [r for r, each in enumerate(asked) if place(each, have)]
    text = f"room for {len(placed)} of {config.replicas} replicas on {len(nodes)} nodes"
    if len(placed) == config.replicas:
        return text
    missing = next(each for r, each in enumerate(asked) if r not in placed)
    text = f"{text}; the next one asks for {missing}"
    if len(placed) < config.quorum.min_replicas:
        raise Bad(
            f"{text}; quorum.min_replicas is {config.quorum.min_replicas}: add nodes, or ask for less in ray.*"
        )
    return f"{text}; the job starts with fewer replicas, and grows when nodes are added"


def place(asked: PlacementRequest, nodes: Sequence[Node]) -> bool:
    """Take a replica's resources from the nodes, as Ray would.

    Args:
        nodes: With all resources that they have; those that other jobs use at the moment are not subtracted.

    Returns:
        Whether there was room; if not, the nodes are unchanged.
    """
    fit = [node for node in nodes if all(node.labels.get(name) == value for name, value in asked.labels.items())]
    if asked.strategy == "STRICT_PACK":
        chosen = next((node for node in fit if node.has(asked.bundle, asked.size)), None)
        if chosen is not None:
            chosen.take(asked.bundle, asked.size)
        return chosen is not None
    taken: list[Node] = []
    for _ in range(asked.size):
        left = [node for node in fit if node.has(asked.bundle)]
        if asked.strategy == "STRICT_SPREAD":
            left = [node for node in left if not any(node is each for each in taken)]
        if not left:
            for node in taken:
                node.take(asked.bundle, -1)
            return False
        chosen = (
            min(left, key=lambda node: sum(each is node for each in taken))
            if "SPREAD" in asked.strategy
            else left[0]
        )
        chosen.take(asked.bundle)
        taken.append(chosen)
    return True
