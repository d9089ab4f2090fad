"""Connects this process to a Ray cluster, as a driver of it."""

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
from urllib.parse import SplitResult

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a driver keeps the devices that it was given

import ray
import ray.util
from ray.exceptions import RayError, RayTaskError

from ft_hsdp.address import parse_url
from ft_hsdp.errors import EXIT_UNREACHABLE, ConfigError, FtHsdpError, Retryable
from ft_hsdp.jsonl import open_to_append

NAMESPACE = "ft_hsdp"
CONNECT_S = 5.0  # longest wait for a TCP connection to the address
JOIN_S = 30.0  # longest wait for `ray.init`
KEY = "--ray-address"


class ClusterUnreachable(FtHsdpError):
    """There is no cluster at the address, or it refuses this process."""

    exit_code = EXIT_UNREACHABLE


@dataclass(frozen=True, slots=True)
class Cluster:
    node: str  # Ray's id of this process's node
    address: str  # of this process's node
    cwd: str  # this process's working directory, which actors use too; "" if Ray gives each actor a copy of one

    @property
    def addresses(self) -> set[str]:
        return {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}

    @property
    def free(self) -> tuple[dict[str, float], int]:
        """Return what nothing has set aside, by Ray's names, and the number of nodes. Blocks shortly."""
        return dict(ray.available_resources()), sum(bool(node["Alive"]) for node in ray.nodes())

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources of all nodes together, in use or not, by Ray's names for them."""
        return dict(ray.cluster_resources())


class RayOutput(io.TextIOBase):
    """Stands in for stdout while Ray prints to it. It keeps the text until there is a file for it."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._file: Path | None = None

    def keep(self, file: Path) -> None:
        """Append to `file` from now on, first the text so far."""
        self._file = file
        early, self._early = "".join(self._early), []
        self.write(early)

    def write(self, text: str) -> int:
        """Append `text` to the file, or keep it until there is one. A full disk loses it."""
        if self._file is None:
            self._early.append(text)
        elif text:
            with contextlib.suppress(OSError), open_to_append(self._file) as file:
                file.write(text.encode())
        return len(text)


def destination(address: str) -> str:
    """Return what `--ray-address` names: "auto", HOST:PORT, or the http(s) URL of the Jobs API.

    Raises:
        ConfigError: It is none of these.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "") or address
    if address != "auto":
        _parse(address)
    return address


def _parse(address: str) -> SplitResult:
    """Return the parts of HOST:PORT, or of an http(s) URL. Raises ConfigError as `destination`."""
    parts = parse_url(address if "://" in address else f"//{address}")
    if parts is not None and (parts.scheme in ("http", "https") or (parts.netloc == address and parts.port)):
        return parts
    allowed = (
        "auto or HOST:PORT of the cluster's head, on a node of it; from elsewhere http://HOST:8265, its Jobs "
        "API (ranks could not reach a ray:// client, which is no node)"
    )
    raise ConfigError(KEY, address, allowed)


@contextlib.contextmanager
def connected(address: str, runtime_env: dict[str, Any] | None = None) -> Iterator[tuple[Cluster, RayOutput]]:
    """Connect as a driver for the length of the context. Meanwhile stdout goes to the `RayOutput`.

    Args:
        address: "auto" or HOST:PORT.
        runtime_env: `ray.runtime_env`.

    Raises:
        ConfigError: Ray refuses the runtime environment.
        ClusterUnreachable: There is no cluster, or it refuses this process.
    """
    if address != "auto":
        check_listening(address)
    output = RayOutput()
    with contextlib.redirect_stdout(output):
        with _deadline(address):
            try:
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    runtime_env=_without_given(runtime_env or {}),
                    configure_logging=False,
                    log_to_driver=False,
                )
            except (RayError, ConnectionError, TimeoutError) as error:
                raise ClusterUnreachable(_refused(address, error)) from None
            except (ValueError, TypeError) as error:
                names = ", ".join(map(str, runtime_env or ()))  # the values may be secrets
                raise ConfigError("ray.runtime_env", names, f"what Ray takes ({first_line(error)})") from None
        try:
            context = ray.get_runtime_context()
            cwd = "" if "working_dir" in dict(context.runtime_env) else os.getcwd()
            yield Cluster(context.get_node_id(), ray.util.get_node_ip_address(), cwd), output
        finally:
            ray.shutdown()


def check_listening(address: str) -> None:
    """Connect to HOST:PORT or to a URL once. Blocks for up to `CONNECT_S`.

    Raises:
        ConfigError: As from `destination`.
        ClusterUnreachable: Nothing listens there.
    """
    parts = _parse(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        raise ClusterUnreachable(f"nothing answers at {address}: {error.strerror or error}") from None


@contextlib.contextmanager
def _deadline(address: str) -> Iterator[None]:
    """End this process, with one line, if Ray takes longer than `JOIN_S`: its attempt cannot be interrupted."""
    stderr = os.dup(2)

    def give_up() -> None:
        os.write(stderr, f"the Ray cluster at {address} does not accept a driver within {JOIN_S:g} s\n".encode())
        os._exit(EXIT_UNREACHABLE)

    timer = threading.Timer(JOIN_S, give_up)
    timer.daemon = True
    timer.start()
    sys.stderr.flush()
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # Ray's libraries print there what the exception says as well
    try:
        yield
    finally:
        timer.cancel()
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _without_given(runtime_env: dict[str, Any]) -> dict[str, Any] | None:
    """Return ray.runtime_env without the keys that this driver's Ray job sets already: Ray refuses a key twice."""
    given: dict[str, Any] = {}
    if text := os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        from json import loads

        given = loads(text).get("runtime_env") or {}
    return {key: value for key, value in runtime_env.items() if key not in given} or None


def _refused(address: str, error: Exception) -> str:
    where = "no Ray cluster runs on this machine" if address == "auto" else f"the Ray cluster at {address}"
    if address == "auto" and "ould not find" in str(error):
        return f"{where}: start one (`ray start --head`), or give {KEY}"
    return (
        f"{where} refuses this process (do RAY_AUTH_MODE and the token match the cluster's?): {first_line(error)}"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error of Ray, cut to 300 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def cause(error: RayError) -> FtHsdpError:
    """Return what an actor raised, or a Retryable that says in one line why there is no answer."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, FtHsdpError):
        return error.cause
    lines = [line.strip() for line in str(error).splitlines()]
    telling = next((line for line in lines if line.startswith("The actor died because")), "")
    return Retryable(telling[:300] or first_line(error))
