"""Calling: how a process learns which incarnation of which replica it is: at once, or as a spare when needed.

All that does not depend on it is done before: a spare waits with its model built, sharded and warmed up.

Life: which incarnation of which replica a rank is, once it was told.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ft_hsdp import fault_injection
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import own_address
from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.state.agent.launcher import Starter


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where this rank is: in a replica of ``ranks``, at ``leader_host``, in the job of ``run``.

    ``starts_agent``: it is the first of its host, and starts the state agent there. ``listed``: the file that the
    lighthouses' addresses are from, if it is one. ``parent``: who started this rank, if that is to be watched.
    """

    rank: int
    ranks: int
    run: Path
    lighthouses: tuple[str, ...]
    token: str
    leader_host: str
    starts_agent: bool
    listed: Path | None = None
    parent: int | None = None


class Calling(Protocol):
    """Where a process is told."""

    def heard(self) -> IncarnationId | None:
        """What it was told, if it was; does not wait."""

    def wait(self) -> IncarnationId:
        """Say that all is warm, and wait to be told: for as long as it takes, for nothing else is to be done."""


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """Somebody else's launcher: the replica is an argument, the rest stands in torchrun's variables."""

    replica: int

    def heard(self) -> IncarnationId:
        """Known from the start."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        return IncarnationId(self.replica, run_id, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    wait = heard


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """``predecessors``: the incarnations before it; ``began``: when the rank was told, in Unix seconds.

    ``starter``: on the rank that starts the state agent of its host.
    """

    replica: int
    incarnation: str
    predecessors: tuple[str, ...]
    starter: Starter | None
    began: float


def begin(config: Config, place: RankPlace, call: IncarnationId) -> RankIdentity:
    """Become what was called: from now on this rank fails where that incarnation is to, and has a state agent."""
    fault_injection.arm(config.debug.failpoints, call.replica, place.rank, call.restarts)
    if config.takes_faults:
        fault_injection.watch(place.run, call.replica, place.rank)
    starter = _starter(config, place, call.replica) if place.starts_agent else None
    return RankIdentity(call.replica, str(call), tuple(map(str, call.predecessors)), starter, time.time())


def _starter(config: Config, place: RankPlace, replica: int) -> Starter:
    """Start the state agent of this host, if there is none; it lives as long as whoever started this rank."""
    host = own_address(config.network.state_interface or config.network.host, place.lighthouses[0])
    log = place.run / "replicas" / str(replica) / f"agent-{socket.gethostname()}.log"
    starter = Starter(place.token, replica, host, os.getppid(), log, config.timeouts.linger_s, config.network.tls)
    starter.ensure()
    return starter
