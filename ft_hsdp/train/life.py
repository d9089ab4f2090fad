"""Life: which incarnation of which replica a rank is, once it was told."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from ft_hsdp import failpoints, faults
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import home
from ft_hsdp.state.agent.launcher import Starter
from ft_hsdp.train.calling import Call
from ft_hsdp.train.ground import Place


@dataclass(frozen=True, slots=True)
class Life:
    """``predecessors``: the incarnations before it; ``began``: when the rank was told, in Unix seconds.

    ``starter``: on the rank that starts the state agent of its host.
    """

    replica: int
    incarnation: str
    predecessors: tuple[str, ...]
    starter: Starter | None
    began: float


def begin(config: Config, place: Place, call: Call) -> Life:
    """Become what was called: from now on this rank fails where that incarnation is to, and has a state agent."""
    failpoints.arm(config.debug.failpoints, call.replica, place.rank, call.restarts)
    if config.takes_faults:
        faults.watch(place.run, call.replica, place.rank)
    *before, incarnation = call.lives
    starter = _starter(config, place, call.replica) if place.starts_agent else None
    return Life(call.replica, incarnation, tuple(before), starter, time.time())


def _starter(config: Config, place: Place, replica: int) -> Starter:
    """Start the state agent of this host, if there is none; it lives as long as whoever started this rank."""
    host = home(config.network.state_interface or config.network.host, place.lighthouses[0])
    log = place.run / "replicas" / str(replica) / f"agent-{socket.gethostname()}.log"
    starter = Starter(place.token, replica, host, os.getppid(), log, config.timeouts.linger_s, config.network.tls)
    starter.ensure()
    return starter
