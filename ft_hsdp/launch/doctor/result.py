"""What is examined, the result of a check, and how a check runs a probe in a child process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ft_hsdp.address import loopback
from ft_hsdp.config import Config
from ft_hsdp.launch.backend.processes import environment, tied


class CheckState(StrEnum):
    OK = "ok"
    FAIL = "fail"  # the job would not start, or would not run as configured
    SKIP = "skip"  # this machine cannot decide it


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    name: str  # of the check
    state: CheckState
    text: str  # one line: what was found, what to do, or why it is undecided

    @property
    def ok(self) -> bool:
        """Return whether the job may start as far as this check can tell."""
        return self.state is not CheckState.FAIL


class Bad(Exception):
    """The check fails. Its text says what is wrong and what to do."""


class Undecided(Exception):
    """The check cannot be made here. Its text says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined: a job on this machine, or this machine's part of it."""

    config: Config
    lighthouses: tuple[str, ...] = ()  # URLs, if the lighthouses are on other machines
    ray: bool = False  # the job runs on a Ray cluster
    ray_address: str | None = None  # of that cluster; None: do not contact it

    @property
    def replicas(self) -> int:
        """Return the number of replicas for which this machine must have room."""
        return 1 if self.lighthouses or self.ray or self.ray_address else self.config.replicas

    @property
    def spans(self) -> bool:
        """Return whether the job's processes may be on several machines."""
        elsewhere = [urlsplit(url).hostname or "" for url in self.lighthouses]
        cluster = (self.ray_address or "").rpartition("://")[2].rpartition(":")[0]
        return not all(loopback(host) for host in (self.config.network.host, *elsewhere, cluster) if host)


PROBE = "ft_hsdp.launch.doctor.probe"
CHILD_S = 18.0  # less than checks.DEADLINE_S


def ask(*args: str, env: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """Run `probe` in a child process, and return the JSON object that it prints as its last line.

    Blocks. The child is killed after `CHILD_S` seconds, or when this process dies.

    Args:
        args: What is asked; see `probe`.
        env: Changes to the environment; None removes a variable.

    Raises:
        Undecided: The child takes too long, or prints no JSON object.
    """
    changed = {**environment(), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    try:
        done = subprocess.run(
            tied(PROBE, *args),
            env={name: value for name, value in changed.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CHILD_S,
        )
    except subprocess.TimeoutExpired:
        raise Undecided(f"no answer within {CHILD_S:g} s; try again, the first run is the slowest") from None
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        answer = None
    if isinstance(answer, dict):
        return answer
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    raise Undecided(f"the check itself failed: {last[:200]}")
