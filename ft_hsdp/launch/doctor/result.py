"""What is examined, what a check finds, and how a check asks a process of its own.

What may hang, or must not stay in this process, is asked of a module that runs as a child.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ft_hsdp.config import Config
from ft_hsdp.launch.backend.processes import environment, tied


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAIL = "fail"  # the job would not start, or not run as it is asked to
    SKIP = "skip"  # it cannot be decided here


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: how it ended, and a line that says what was found or what to do."""

    name: str
    state: CheckState
    text: str

    @property
    def ok(self) -> bool:
        """Whether it stands in the way of nothing."""
        return self.state is not CheckState.FAIL


class Bad(Exception):
    """The check fails; `str()` says what is wrong, and what to do."""


class Undecided(Exception):
    """The check cannot be made here; `str()` says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined: a job on this machine, or this machine's part of it.

    lighthouses: URLs, where they are elsewhere; ray: the job is to run on a Ray cluster; ray_address: of that
    cluster, None where it is not to be contacted.
    """

    config: Config
    lighthouses: tuple[str, ...] = ()
    ray: bool = False
    ray_address: str | None = None

    @property
    def replicas(self) -> int:
        """How many replicas this machine has to have room for."""
        return 1 if self.lighthouses or self.ray or self.ray_address else self.config.replicas

    @property
    def spans(self) -> bool:
        """Whether the job's processes may be on several machines."""
        elsewhere = [urlsplit(url).hostname or "" for url in self.lighthouses]
        cluster = (self.ray_address or "").rpartition("://")[2].rpartition(":")[0]
        return not all(is_loopback(host) for host in (self.config.network.host, *elsewhere, cluster) if host)


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, means the machine that uses it."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


CHILD_S = 18.0  # less than an examination may take


def ask(module: str, *args: str, env: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """The JSON object that `module` prints as its last line; `env` changes its environment, None takes away.

    It dies with this process, and after `CHILD_S` seconds. Raises Undecided.
    """
    changed = {**environment(), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    try:
        done = subprocess.run(
            tied(module, *args),
            env={name: value for name, value in changed.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHILD_S,
        )
    except subprocess.TimeoutExpired:
        raise Undecided(f"no answer within {CHILD_S:g} s; try again, the first time is the slowest") from None
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        answer = None
    if isinstance(answer, dict):
        return answer
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    raise Undecided(f"the check itself failed: {last[:200]}")
