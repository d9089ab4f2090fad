"""The connection of this process to a Ray cluster, as a driver of it."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a driver keeps the devices that it was given

import ray
import ray.util
from ray.exceptions import RayError

from ft_hsdp.errors import EXIT_UNREACHABLE, ConfigError, FtHsdpError

NAMESPACE = "ft_hsdp"
DOOR_S = 5.0  # longest time for the address to be answered at all
JOIN_S = 30.0  # longest time for the cluster to let this process in
KEY = "--ray-address"


class ClusterUnreachable(FtHsdpError):
    """There is no cluster at the address, or it does not let us in."""

    exit_code = EXIT_UNREACHABLE


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that this process is connected to. node, address: this process's own node.

    cwd: this process's working directory, in which actors run too; "" where Ray has given each a copy of one.
    """

    node: str
    address: str
    cwd: str

    @property
    def addresses(self) -> set[str]:
        """Of all nodes that live."""
        return {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}

    @property
    def resources(self) -> dict[str, float]:
        """Of all nodes together, in use or not, by Ray's names."""
        return dict(ray.cluster_resources())


class RayOutput(io.TextIOBase):
    """Takes what Ray prints into this process's stdout; a file, once there is one, gets it all."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._file: Path | None = None

    def keep(self, file: Path) -> None:
        """Write to `file` from now on."""
        self._file = file
        early, self._early = "".join(self._early), []
        self.write(early)

    def write(self, text: str) -> int:
        """Take some of it."""
        if self._file is None:
            self._early.append(text)
        elif text:
            with contextlib.suppress(OSError), self._file.open("a") as file:
                file.write(text)
        return len(text)


def destination(address: str) -> str:
    """Where `--ray-address` leads: "auto", HOST:PORT, or the http(s) URL of the Jobs API. Raises ConfigError."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "") or address
    if address == "auto" or urlsplit(address).scheme in ("http", "https"):
        return address
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        allowed = (
            "auto or HOST:PORT of the cluster's head, on a node of it; from elsewhere http://HOST:8265, its Jobs "
            "API (ranks could not reach a ray:// client, which is no node)"
        )
        raise ConfigError(KEY, address, allowed)
    return address


@contextlib.contextmanager
def connected(address: str, runtime_env: dict[str, Any] | None = None) -> Iterator[tuple[Cluster, RayOutput]]:
    """Be a driver of the cluster at "auto" or HOST:PORT. Raises ConfigError, ClusterUnreachable."""
    if address != "auto":
        knock(address)
    said = RayOutput()
    with contextlib.redirect_stdout(said):
        with _deadline(address):
            try:
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    runtime_env=_own(runtime_env or {}),
                    configure_logging=False,
                    log_to_driver=False,
                )
            except (RayError, ConnectionError, TimeoutError) as error:
                raise ClusterUnreachable(_refused(address, error)) from None
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    "ray.runtime_env", runtime_env, f"what Ray takes ({first_line(error)})"
                ) from None
        try:
            context = ray.get_runtime_context()
            cwd = "" if "working_dir" in dict(context.runtime_env) else os.getcwd()
            yield Cluster(context.get_node_id(), ray.util.get_node_ip_address(), cwd), said
        finally:
            ray.shutdown()


def knock(address: str) -> None:
    """Raise ClusterUnreachable if nothing listens at HOST:PORT, or at a URL."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), DOOR_S).close()
    except OSError as error:
        raise ClusterUnreachable(f"nothing answers at {address}: {error.strerror or error}") from None


@contextlib.contextmanager
def _deadline(address: str) -> Iterator[None]:
    """End this process with one line where Ray's attempt to connect takes too long: it cannot be interrupted."""

    stderr = os.dup(2)

    def give_up() -> None:
        os.write(stderr, f"the Ray cluster at {address} does not let us in within {JOIN_S:g} s\n".encode())
        os._exit(EXIT_UNREACHABLE)

    timer = threading.Timer(JOIN_S, give_up)
    timer.daemon = True
    timer.start()
    sys.stderr.flush()
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # Ray's libraries say there what the exception says, too
    try:
        yield
    finally:
        timer.cancel()
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _own(runtime_env: dict[str, Any]) -> dict[str, Any] | None:
    """What of ray.runtime_env is not given already by the Ray job whose driver this is: Ray takes no key twice."""
    given: dict[str, Any] = {}
    if text := os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        from json import loads

        given = loads(text).get("runtime_env") or {}
    return {key: value for key, value in runtime_env.items() if key not in given} or None


def _refused(address: str, error: Exception) -> str:
    where = "no Ray cluster runs on this machine" if address == "auto" else f"the Ray cluster at {address}"
    if address == "auto" and "ould not find" in str(error):
        return f"{where}: start one (`ray start --head`), or give {KEY}"
    return f"{where} does not let us in (are RAY_AUTH_MODE and its token the cluster's?): {first_line(error)}"


def first_line(error: Exception) -> str:
    """What an error of Ray says, as far as it is worth a line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
