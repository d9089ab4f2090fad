"""What a rank is: where it runs (`RankPlace`), and of which incarnation it is (`RankIdentity`).

The place is known when the process starts. The incarnation may be assigned later: a spare builds, shards and warms
up its model first, and is assigned to a replica when one needs it. `IncarnationSource` is where it hears of that:
torchrun's environment (`FromEnvironment`) or the supervisor (`launch.backend.zygote.AssignmentLine`).

A host is what is lost at once: a machine, as a rule. Where one machine stands for several hosts, FT_HSDP_HOST
names the rank's host, and each host has a state agent of its own; FT_HSDP_NODE names what they are lost with.

The fork server and a supervisor read this module, so it does not need torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ft_hsdp import fault_injection, secret
from ft_hsdp.config import Config
from ft_hsdp.control.lighthouse_client import own_address, urls_of_run
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import read_object
from ft_hsdp.lifetime import stop_signals
from ft_hsdp.memory.hosts import locate, plain
from ft_hsdp.secret import worker_token
from ft_hsdp.state.agent.starter import AgentMain, Starter

HOST_VARIABLE = "FT_HSDP_HOST"  # the name of the rank's host, if its machine has several
NODE_VARIABLE = "FT_HSDP_NODE"  # the machine, if several such hosts are lost with it
HOSTS_VARIABLE = "FT_HSDP_HOSTS"  # the names of the hosts of all ranks of the replica, with commas between
FATAL_VARIABLE = "FT_HSDP_FATAL_UNITS"  # runs of units that have ended the processes which trained them, as JSON


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs, and how it reaches its job."""

    rank: int  # within its replica
    ranks: int  # of its replica
    run: Path  # directory of the run
    lighthouses: tuple[str, ...]  # URLs
    token: str  # of the job
    leader_host: str  # where rank 0 of the replica runs
    local_rank: int  # on its machine; the first one starts the state agent there
    listed: Path | None = None  # the file from which the lighthouses' URLs are, if they are from one
    parent: int | None = None  # pid of the process that started this rank, if this rank has to watch it


class IncarnationSource(Protocol):
    """Where a process hears which incarnation it belongs to."""

    def poll(self) -> IncarnationId | None:
        """Return the incarnation if it is assigned; does not block."""

    def wait(self) -> IncarnationId:
        """Say that this process is warm, and return the incarnation.

        Blocks until it is assigned, for as long as that takes: there is nothing else to do.
        """


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """The source under another launcher: the replica is an argument, the rest is in torchrun's variables."""

    replica: int

    def poll(self) -> IncarnationId:
        """Return the incarnation, which is known from the start."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        return IncarnationId(self.replica, run_id, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    wait = poll


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which incarnation of which replica a rank belongs to, once that is assigned."""

    replica: int
    incarnation: str  # its name
    restarts: int  # so many incarnations of the same run came before it
    starter: Starter | None  # on the rank that starts the state agent of its host
    began: float  # when it was assigned, Unix seconds
    host: str = ""  # the path of its host, such as "zone/rack/host"
    shared: str = ""  # the name of its host if the machine has several, else ""
    hosts: tuple[str, ...] = ()  # where the replica was placed, the same names by rank; (): nobody has said it


def begin(
    config: Config, place: RankPlace, incarnation: IncarnationId, starter: Starter | None = None
) -> RankIdentity:
    """Make this process a rank of ``incarnation``.

    Arms the failpoints of that incarnation, and starts the state agent of this host without waiting for it, if
    that is this rank's task and there is none.

    Args:
        starter: Of the state agent, if it was started before (`early_agent`).
    """
    replica = incarnation.replica
    path = host_path(config.hosts.labels, os.environ)
    fault_injection.arm(config.debug.failpoints, replica, place.rank, incarnation.restarts)
    if config.takes_faults:
        fault_injection.watch(place.run, replica, place.rank)
    if starter is None and place.local_rank == 0:
        starter = agent_starter(config, place, replica)
        starter.ensure()
    shared = os.environ.get(HOST_VARIABLE, "")
    hosts = tuple(filter(None, os.environ.get(HOSTS_VARIABLE, "").split(",")))
    return RankIdentity(replica, str(incarnation), incarnation.restarts, starter, time.time(), path, shared, hosts)


def host_name(environment: Mapping[str, str]) -> str:
    """Return the name of this rank's host, of letters, digits, ".", "_" and "-"."""
    return plain(environment.get(HOST_VARIABLE) or socket.gethostname())


def fatal_units(environment: Mapping[str, str]) -> tuple[Run, ...]:
    """Return the units that have ended the processes which trained them, as this rank's supervisor knows them."""
    return tuple((int(s), int(first), int(n)) for s, first, n in json.loads(environment.get(FATAL_VARIABLE, "[]")))


def host_path(labels: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return where this rank's host stands, as `ft_hsdp.memory.hosts` writes it: a copy is apart if that differs.

    Args:
        labels: `hosts.labels` of the configuration, which come first.

    Raises:
        ConfigError: FT_HSDP_DOMAINS or Slurm's topology cannot be read.
    """
    return str(locate(plain(environment.get(NODE_VARIABLE) or host_name(environment)), labels, environment)[0])


def early_agent(config: Config, run: Path, replica: int, main: AgentMain) -> Starter | None:
    """Start the state agent of this host as a fork of this process, if that is this rank's task.

    To be called before anything of the user's runs: the agent would keep its memory.

    Args:
        main: `state.agent.server.main`.

    Returns:
        What has started it; None if it is not known yet how.
    """
    if os.environ.get("LOCAL_RANK") != "0":
        return None
    with contextlib.suppress(OSError, ConfigError):  # `begin` finds it again, and says so
        urls = urls_of_run(read_object(run / "lighthouse.json"))
        place = RankPlace(0, 1, run.absolute(), urls, worker_token(secret.current(run / "token")), "", 0)
        if urls:
            starter = agent_starter(config, place, replica)
            starter.ensure(fork=main)
            return starter
    return None


def agent_starter(config: Config, place: RankPlace, replica: int) -> Starter:
    """Return what starts the state agent of this host.

    It ends with our own launcher, which started this rank. Another launcher may end for each restart of a replica
    on several hosts: what the agent keeps has to outlive it then.
    """
    network = config.network
    key = "network.state_interface" if network.state_interface else "network.host"
    host = own_address(network.state_interface or network.host, place.lighthouses[0], key)
    log = place.run / "replicas" / str(replica) / f"agent-{host_name(os.environ)}.log"
    linger_s, tls, shared = config.timeouts.linger_s, config.network.tls, os.environ.get(HOST_VARIABLE, "")
    guard = os.getppid() if place.parent is None else None
    return Starter(place.token, replica, host, guard, log, linger_s, tls, shared)


@contextlib.contextmanager
def leaving_on_signals(leave: Callable[[], None]) -> Iterator[list[int]]:
    """Let SIGTERM, SIGINT and SIGHUP call ``leave`` within a ``with`` block, and not end this process at once.

    It is a member there, and whoever stops a whole control group or session signals it beside its supervisor. A
    handler that the program has set stays, and does what it does, and a signal that is ignored stays ignored. In
    another thread than the main one nothing changes: signals are not handled there. Once one of them has come,
    later ones do no more after the block either, because schedulers repeat them; but SIGINT interrupts the second
    time: a user means it.

    Yields:
        The signals that came so far.
    """
    told: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: handler for n in stop_signals() if main and (handler := signal.getsignal(n)) in defaults}

    def note(number: int, _: object) -> None:
        told.append(number)
        leave()
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    for number in before:
        signal.signal(number, note)
    try:
        yield told
    finally:
        if not told and threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
