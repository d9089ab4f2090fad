"""How a process becomes one rank of a replica: from torchrun's environment and the files of the run.

`join` chooses the device, starts the state agent of its host, and forms the process group on which FSDP2 shards
the model, or takes the one that there is. Nothing here talks to the lighthouse: the job is joined in
`Job.batches`, when all is warm.

A process that a launcher of ft_hsdp has started for an `entry` is `launched`: it knows its configuration and where
it hears of its incarnation, and `join` needs no arguments. Elsewhere they may be in the environment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ft_hsdp import address, caller_gate, record_layer, secret
from ft_hsdp.config import Config, load
from ft_hsdp.config.entry import stamped
from ft_hsdp.control.lighthouse_client import parse_urls, urls_of_run
from ft_hsdp.control.rank_store import RankStore, connect, serve
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, Retryable
from ft_hsdp.jsonl import read_object
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.agent.starter import Starter
from ft_hsdp.train.device import backend, be_deterministic, choose, prepare
from ft_hsdp.train.identity import FromEnvironment, IncarnationSource, RankPlace, begin
from ft_hsdp.train.job import Job
from ft_hsdp.train.replay.job import Recorded, ReplayJob
from ft_hsdp.train.replay.planned import Variant, VariantJob
from ft_hsdp.train.replay.trial import Trial, TrialJob
from ft_hsdp.train.tracer import limit_flight_recorder

CONFIG_VARIABLE = "FT_HSDP_CONFIG"  # the configuration's file, for `join` without arguments
REPLICA_VARIABLE = "FT_HSDP_REPLICA"  # the replica's id
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
LOOK_S = 0.1  # between two looks for the lighthouse of the run


@dataclass(slots=True)
class Launch:
    """What a launcher of ft_hsdp knows of the rank that it started in this process."""

    config: Config
    source: IncarnationSource
    run: Path  # the run's directory
    # The steps that the entry repeats, if this is a replay; those that are planned; or how it is tried.
    recorded: Recorded | Variant | Trial | None = None
    starter: Starter | None = None  # of the state agent, if it was started already


@dataclass(slots=True)
class RankGroup:
    """torch's default process group, of the ranks of one replica; there is one in a process."""

    store: RankStore | None  # to be closed with it; None: it is torch's own
    made: bool  # whether it was made here, so that it is destroyed here

    def close(self) -> None:
        """Destroy the group, unless it was there before, and close its store."""
        if self.made and dist.is_initialized():
            dist.destroy_process_group()
        self.made = False
        if self.store is not None:
            self.store.close()
        _process.joined, _process.job = False, None


@dataclass(slots=True)
class _Process:
    """What this process is."""

    launch: Launch | None = None  # set by `launched`
    asked: bool = False  # whether `join` was called
    joined: bool = False  # whether it is a rank now
    job: Job | None = None  # of the rank that it is


_process = _Process()


def launched(launch: Launch) -> None:
    """Note what `join` takes when it is called without arguments.

    Args:
        launch: What the launcher knows of this rank.
    """
    _process.launch = launch


def has_joined() -> bool:
    """Return whether `join` was called in this process."""
    return _process.asked


def joined_job() -> Job | None:
    """Return what `join` has returned in this process; None before, and once the job is closed."""
    return _process.job


def expected_launch() -> Launch | None:
    """Return what `join` takes when it is called without arguments; None if no launcher has started this process.

    Raises:
        ConfigError: torchrun has started it, and its environment does not name the configuration and the replica.
    """
    started = _process.launch is not None or all(name in os.environ for name in _RANK_VARIABLES)
    return _given(None, None, None) if started else None


def join(
    config: Config | str | Path | None = None,
    replica: int | IncarnationSource | None = None,
    run: Path | None = None,
    lighthouse: str | None = None,
) -> Job:
    """Make this process one rank of a replica.

    Takes the rank, the number of ranks and the address of rank 0 from torchrun's environment. If there is a
    default process group already, it must be of this replica's ranks; it is used, and it stays. Also sets torch's
    number of threads.

    A collective. Blocks until the run has a lighthouse, at most `timeouts.reach_s`, and then until all ranks of
    the replica are there, at most `timeouts.ranks_s`.

    Args:
        config: The job's configuration, or its file; the same for all replicas. None: what the launcher knows, if
            the job has an `entry`, else the file that `FT_HSDP_CONFIG` names.
        replica: The replica's id, from 0. None: what the launcher knows, else `FT_HSDP_REPLICA`. ft_hsdp's own
            launcher passes the source from which a spare hears of it.
        run: The run's directory; None takes the one that the configuration names.
        lighthouse: The lighthouse's URL, or several with commas between; None reads them from the run's directory.

    Returns:
        The rank's part in the job. It joins the job with the first batch. `Job.config` is the configuration.

    Raises:
        ConfigError: The configuration cannot be used, this process is a rank already, or the default process group
            is of other ranks.
        LighthouseUnreachable: The run has no lighthouse in time.
        Retryable: The other ranks of the replica did not come in time, or rank 0 cannot listen.
    """
    if _process.joined or (_process.launch is not None and _process.asked):
        raise ConfigError("ft_hsdp.join", "a second call", "one: this process is a rank of its replica already")
    given = _given(config, replica, run)
    config, source = given.config, given.source
    if given.recorded is not None:
        return _repeat(config, given.run, given.recorded)
    run = given.run.absolute()
    file = run / "lighthouse.json"
    urls = parse_urls(lighthouse) if lighthouse else _find_lighthouse(file, config.timeouts.reach_s)
    token = secret.worker_token(next(iter(secret.given(TOKEN_VARIABLE)), "") or _token(run))
    os.environ.pop(TOKEN_VARIABLE, None)  # torchrun's ranks have it; what they start needs it no more
    rank, ranks = _own_rank(config)
    record_layer.use(config.network.tls)
    caller_gate.use(config.timeouts.hello_s)
    prepare(config.train.device, max(config.timeouts.step_s, config.timeouts.pause_s))
    on_host = int(os.environ.get("LOCAL_RANK", rank))
    device = choose(config.train.device, on_host)
    _settle(config)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    parent = os.getppid() if isinstance(source, FromEnvironment) else None  # ours are killed with their parent
    place = RankPlace(rank, ranks, run, urls, token, host, on_host, None if lighthouse else file, parent)
    assigned = source.poll()
    # The state agent starts meanwhile.
    identity = None if assigned is None else begin(config, place, assigned, given.starter)
    if dist.is_initialized():
        group = RankGroup(None, made=False)
    else:
        incarnation = "" if identity is None else identity.incarnation
        store = _connect_ranks(rank, ranks, incarnation, backend(device), config, token, device)
        group = RankGroup(store, made=True)
    _process.asked = _process.joined = True
    _process.job = Job(config, place, source, identity, device, group.close)
    return _process.job


def _repeat(config: Config, run: Path, recorded: Recorded | Variant | Trial) -> ReplayJob:
    """Return the job of a rank without a lighthouse: it repeats recorded steps, has planned ones, or is tried."""
    rank, ranks = _own_rank(config)
    prepare(config.train.device, config.timeouts.step_s)
    on_host = int(os.environ["LOCAL_RANK"])
    device = choose(config.train.device, on_host)
    _settle(config)
    token = os.environ[TOKEN_VARIABLE]
    place = RankPlace(rank, ranks, run, (), token, os.environ["MASTER_ADDR"], on_host)
    group = RankGroup(_connect_ranks(rank, ranks, "replay", backend(device), config, token, device), made=True)
    _process.asked = _process.joined = True
    job: ReplayJob
    match recorded:
        case Trial():
            job = TrialJob(config, place, device, recorded, group.close)
        case Variant():
            job = VariantJob(config, place, device, recorded, group.close)
        case Recorded():
            job = ReplayJob(config, place, device, recorded, group.close)
    _process.job = job
    return job


def _settle(config: Config) -> None:
    """Set what the bits of a sum depend on: the number of threads, and which operators there are."""
    torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        be_deterministic()


def _given(
    config: Config | str | Path | None, replica: int | IncarnationSource | None, run: Path | None
) -> Launch:
    """Return what `join` was given, by the launcher, as arguments, or in the environment.

    Raises:
        ConfigError: It was given nothing, or twice, or it cannot be used.
    """
    launch = _process.launch
    if launch is not None:
        given = {"config": config, "replica": replica, "run": run}
        for name, value in given.items():
            if value is not None:
                allowed = "no argument, as the launcher of this job's entry has given it"
                raise ConfigError(f"ft_hsdp.join({name})", value, allowed)
        return launch
    config = os.environ.get(CONFIG_VARIABLE) if config is None else config
    if config is None:
        how = f"a configuration: as an argument, in {CONFIG_VARIABLE}, or this script as `entry` of one"
        raise ConfigError("ft_hsdp.join(config)", None, how)
    config = stamped(config if isinstance(config, Config) else load(Path(config)))
    ids = f"0 to {config.slots - 1} (there are {config.slots} replicas at most)"
    if replica is None:
        text = os.environ.get(REPLICA_VARIABLE)
        if text is None or not text.isdecimal():
            allowed = f"{ids}, as an argument or in {REPLICA_VARIABLE}"
            raise ConfigError("ft_hsdp.join(replica)", text, allowed)
        replica = int(text)
    if isinstance(replica, int) and not 0 <= replica < config.slots:
        raise ConfigError("replica", replica, ids)
    source = FromEnvironment(replica) if isinstance(replica, int) else replica
    return Launch(config, source, run or Path(config.job.runs_dir) / config.job.name)


def _find_lighthouse(file: Path, reach_s: float) -> tuple[str, ...]:
    """Return the addresses of the lighthouses in a run's lighthouse.json; wait until one has written it.

    A rank that torchrun started again waits without a limit, as later for the lighthouse's answers.

    Raises:
        LighthouseUnreachable: There is no such file within ``reach_s``.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    until = math.inf if again else time.monotonic() + reach_s
    while True:
        urls = urls_of_run(read_object(file))
        with contextlib.suppress(OSError, ConfigError):  # a token that is missing or blank may be put back
            if urls and (os.environ.get(TOKEN_VARIABLE) or secret.current(file.parent / "token")):
                return urls
        if time.monotonic() > until:
            how = "start `ft-hsdp lighthouse` with the same configuration first"
            raise LighthouseUnreachable(f"the run has no lighthouse within {reach_s:g} s: no {file}; {how}")
        time.sleep(LOOK_S)


def _token(run: Path) -> str:
    """Return the job's token from the run's directory.

    Raises:
        ConfigError: There is none.
    """
    try:
        return secret.current(run / "token")
    except (OSError, ValueError) as error:
        raise ConfigError("run", str(run), f"the directory of a run with a lighthouse ({error})") from error


def _own_rank(config: Config) -> tuple[int, int]:
    """Return this process's rank in its replica, and the number of ranks there.

    Raises:
        ConfigError: There are other ranks than a replica's, or no launcher has started this process.
    """
    if dist.is_initialized():
        rank, ranks, key = dist.get_rank(), dist.get_world_size(), "the default process group's size"
    else:
        missing = next((name for name in _RANK_VARIABLES if name not in os.environ), None)
        if missing is not None:
            raise ConfigError(missing, None, "a process that torchrun, or a launcher of ft_hsdp, has started")
        rank, ranks, key = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "WORLD_SIZE"
    if config.memory.shrink_to is not None and config.memory.shrink_to <= ranks <= config.ranks_per_replica:
        return rank, ranks
    if ranks != config.ranks_per_replica:
        raise ConfigError(
            key, ranks, f"ranks_per_replica, which is {config.ranks_per_replica}: one replica's ranks"
        )
    return rank, ranks


def _connect_ranks(
    rank: int, ranks: int, incarnation: str, backend: str, config: Config, token: str, device: torch.device
) -> RankStore | None:
    """Form the process group of a replica; return its store, if `Job.close` has to close that.

    The ranks meet within timeouts.ranks_s. Later a rank may wait for another in a collective for twice
    ftar.timeout_s, and at least as long: where there are other replicas, they have said before who hangs.

    torchrun's agent keeps one store over all restarts of its workers: without the incarnation as a prefix the
    ranks would find the addresses of the incarnation before there.

    Raises:
        ConfigError: The environment names an interface that this machine lacks.
        Retryable: The ranks have not met.
    """
    meeting = timedelta(seconds=config.timeouts.ranks_s)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address.check_interfaces(os.environ)
    interface = _interface(host)
    if interface is not None:
        os.environ.setdefault(address.GLOO_INTERFACES, interface)
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ours: RankStore | None = None
    store: dist.Store
    if agents or backend != "gloo":
        listener = _listener(host, port).detach() if rank == 0 and not agents else None
        store = dist.TCPStore(host, port, ranks, listener is not None, meeting, master_listen_fd=listener)
    elif rank == 0:
        store = ours = serve(ranks, token, _listener(host, port) if ranks > 1 else None, config.timeouts.ranks_s)
    else:
        store = ours = connect(rank, token, host, port, config.timeouts.ranks_s)
    prefixed = dist.PrefixStore(incarnation, store)
    limit_flight_recorder()
    # NCCL connects here, within the time for ranks to meet, and not in the first step.
    named = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=ranks, timeout=meeting, device_id=named)
    later_s = max(2 * config.ftar.timeout_s, config.timeouts.ranks_s, config.timeouts.pause_s)
    _set_pg_timeout(timedelta(seconds=later_s), dist.group.WORLD)
    return ours


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` alone.

    If that is a name, it listens everywhere: the name may mean another address here than where the other ranks
    are.

    Raises:
        Retryable: It cannot listen there.
    """
    named = True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        named = False
    try:
        sock = address.everywhere(port) if named else address.bound(host, port)
        sock.listen(caller_gate.BACKLOG)
    except OSError as error:
        where = address.join(host, port)
        raise Retryable(f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT {where}: {error.strerror}") from error
    return sock


def _interface(host: str) -> str | None:
    """Return the interface from which this host reaches ``host``; gloo listens on its address. None: not known."""
    try:
        mine = address.source(host, 9)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == mine for each in addresses):
            return str(name)
    return None


__all__ = ["Launch", "RankGroup", "expected_launch", "has_joined", "join", "joined_job", "launched"]
