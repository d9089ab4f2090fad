"""Limits: processors, open files, threads, and memory that may be pinned."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from ft_hsdp.launch.doctor.cgroup import allowance
from ft_hsdp.launch.doctor.finding import Bad, Subject
from ft_hsdp.launch.doctor.sizes import gib

FDS_PER_REPLICA = 64
THREADS_PER_RANK = 16  # 13 were measured
OTHER_THREADS = 40  # lighthouse, supervisor, fork server
AGENT_THREADS = 8
RDMA = Path("/sys/class/infiniband")


def cpus(subject: Subject) -> str:
    """How many processors there are for how many ranks; too few are slow but right."""
    config = subject.config
    ranks = subject.replicas * config.ranks_per_replica
    have: float = len(os.sched_getaffinity(0))
    quota = allowance().cpus
    container = ""
    if quota is not None and quota < have:
        have, container = quota, " by this container's limit"
    shared = f"; {ranks} ranks share them, which is slow but right" if ranks > have else ""
    return f"{have:g} processors{container}{shared}"


def files(subject: Subject) -> str:
    """Whether the busiest process, the lighthouse, may open enough files."""
    need = 128 + FDS_PER_REPLICA * subject.config.slots
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return f"{_shown(soft)} open files are allowed per process"
    do = f"run `ulimit -n {need}`"
    if hard != resource.RLIM_INFINITY and hard < need:
        do = f"raise the hard limit of {hard}: LimitNOFILE of systemd, docker run --ulimit nofile={need}"
    raise Bad(f"{soft} open files are allowed per process, {need} are needed; {do}")


def processes(subject: Subject) -> str:
    """Whether all threads may be started: they count as processes."""
    config = subject.config
    replicas = subject.replicas
    ranks = replicas * config.ranks_per_replica + config.spares
    need = ranks * (THREADS_PER_RANK + config.train.threads - 1) + replicas * AGENT_THREADS + OTHER_THREADS
    left, whose = _user_threads_left(), "this user"
    container = allowance().threads
    if container is not None and (left is None or container < left):
        left, whose = container, "this container"
    if left is None:
        return f"about {need} threads; this user may start any number"
    if left < need:
        raise Bad(
            f"about {need} threads are needed, {left} more are allowed to {whose}; raise `ulimit -u`, the pids "
            "limit of the container, or use fewer ranks"
        )
    return f"about {need} threads; {left} more are allowed to {whose}"


def _user_threads_left() -> int | None:
    """How many more threads this user may have; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:  # the kernel lets root
        return None
    used, me = 0, os.getuid()
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        used += (process.info["num_threads"] or 0) if uids is not None and uids.real == me else 0
    return max(0, int(soft) - used)


def memlock(subject: Subject) -> str:
    """Whether RDMA may pin its buffers: NCCL between machines, where there are such cards."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "any amount" if soft == resource.RLIM_INFINITY else gib(soft)
    cards = sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []
    if not cards:
        return f"{shown} may be pinned; no RDMA card is here"
    if os.environ.get("NCCL_IB_DISABLE") == "1" or subject.config.ranks_per_replica == 1:
        return f"{shown} may be pinned; NCCL does not use {', '.join(cards)}"
    if soft != resource.RLIM_INFINITY:
        raise Bad(
            f"{shown} may be pinned, NCCL pins more on {', '.join(cards)}; run `ulimit -l unlimited`, docker run "
            "--ulimit memlock=-1, or set NCCL_IB_DISABLE=1"
        )
    return f"any amount may be pinned, for {', '.join(cards)}"


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
