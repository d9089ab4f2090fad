"""How a process becomes one rank of a replica: from torchrun's environment and the files of the run.

`join` chooses the device, starts the state agent of its host, and forms the process group on which FSDP2 shards
the model. Nothing here talks to the lighthouse: the job is joined in `Job.batches`, when all is warm.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ft_hsdp import address, handshake, record_layer, secret
from ft_hsdp.config import Config, load
from ft_hsdp.control.lighthouse_client import parse_urls, urls_of_run
from ft_hsdp.control.rank_store import RankStore, connect, serve
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.train.identity import FromEnvironment, IncarnationSource, RankPlace, backend, begin, choose
from ft_hsdp.train.job import Job


def join(
    config: Config | str | Path,
    replica: int | IncarnationSource,
    run: Path | None = None,
    lighthouse: str | None = None,
) -> Job:
    """Make this process one rank of a replica.

    Reads the rank, the number of ranks and the address of rank 0 from torchrun's environment. A collective: blocks
    until all ranks of the replica are there, at most `timeouts.ranks_s`. Also sets torch's number of threads.

    Args:
        config: The job's configuration, or its file; the same for all replicas.
        replica: The replica's id, from 0. ft_hsdp's own launcher passes the source from which a spare hears of it.
        run: The run's directory; None takes the one that the configuration names.
        lighthouse: The lighthouse's URL, or several with commas between; None reads them from the run's directory.

    Returns:
        The rank's part in the job. It joins the job with the first batch.

    Raises:
        ConfigError: The configuration cannot be used, or the run does not exist.
        Retryable: The other ranks of the replica did not come in time, or rank 0 cannot listen.
    """
    if not isinstance(config, Config):
        config = load(Path(config))
    source = FromEnvironment(replica) if isinstance(replica, int) else replica
    if isinstance(replica, int) and not 0 <= replica < config.slots:
        raise ConfigError(
            "replica", replica, f"0 to {config.slots - 1} (there are {config.slots} replicas at most)"
        )
    run = run or Path(config.job.runs_dir) / config.job.name
    file = run / "lighthouse.json"
    allowed = "the directory of a run with a lighthouse"
    try:
        urls = parse_urls(lighthouse) if lighthouse else urls_of_run(json.loads(file.read_text()))
        token = os.environ.get(TOKEN_VARIABLE) or secret.current(run / "token")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("run", str(run), f"{allowed} ({error})") from error
    if not urls:
        raise ConfigError("run", str(run), f"{allowed} (lighthouse.json names none)")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != config.ranks_per_replica:
        raise ConfigError("WORLD_SIZE", ranks, f"ranks_per_replica, which is {config.ranks_per_replica}")
    record_layer.use(config.network.tls)
    handshake.use(config.timeouts.hello_s)
    device = choose(config.train.device, int(os.environ.get("LOCAL_RANK", rank)))
    torch.set_num_threads(config.train.threads)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    first = os.environ.get("LOCAL_RANK", str(rank)) == "0"
    parent = os.getppid() if isinstance(source, FromEnvironment) else None  # ours are killed with their parent
    place = RankPlace(rank, ranks, run, urls, token, host, first, None if lighthouse else file, parent)
    assigned = source.poll()
    identity = None if assigned is None else begin(config, place, assigned)  # the state agent starts meanwhile
    incarnation = "" if identity is None else identity.incarnation
    store = _connect_ranks(rank, ranks, incarnation, backend(device), config, token)
    return Job(config, place, source, identity, device, store)


def _connect_ranks(
    rank: int, ranks: int, incarnation: str, backend: str, config: Config, token: str
) -> RankStore | None:
    """Form the process group of a replica; return its store, if `Job.close` has to close that.

    The ranks meet within timeouts.ranks_s. Later a rank may wait for another in a collective for twice
    ftar.timeout_s, and at least as long: where there are other replicas, they have said before who hangs.

    torchrun's agent keeps one store over all restarts of its workers: without the incarnation as a prefix the
    ranks would find the addresses of the incarnation before there.

    Raises:
        Retryable: The ranks have not met.
    """
    meeting = timedelta(seconds=config.timeouts.ranks_s)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    interface = _interface(host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
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
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=ranks, timeout=meeting)
    later_s = max(2 * config.ftar.timeout_s, config.timeouts.ranks_s)
    _set_pg_timeout(timedelta(seconds=later_s), dist.group.WORLD)
    return ours


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` alone.

    If that is a name, it listens everywhere: the name may mean another address here than where the other ranks
    are.

    Raises:
        Retryable: It cannot listen there.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        named = True
    else:
        named = False
    try:
        sock = address.everywhere(port) if named else address.bound(host, port)
        sock.listen(handshake.BACKLOG)
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


__all__ = ["join"]
