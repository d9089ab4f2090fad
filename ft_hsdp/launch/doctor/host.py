"""Checks of this machine: processors, open files, threads, and memory for all ranks and snapshots."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path

import psutil

from ft_hsdp.config import Config
from ft_hsdp.launch.doctor.machine import allowance, gib, parameters, weights
from ft_hsdp.launch.doctor.result import Bad, Subject
from ft_hsdp.mounts import mount_of
from ft_hsdp.state.shared_memory import SEALS

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


BASE_BYTES = 300 * 2**20  # lighthouse, its spare, the supervisor and the fork server, measured
RANK_BYTES = 150 * 2**20  # a forked rank's own memory before it holds a model, measured
AGENT_BYTES = 32 * 2**20  # a state agent's, measured
COPIES = 14  # fp32 copies: weights, gradients, reduced gradients, two moments; two snapshots, and some to spare
HOST_COPIES = 7  # the same where the model is on a GPU: two snapshots, and some to spare
SPARE_COPIES = 2  # of a spare: its model, and what it is filled from
NCCL_BYTES = 64 * 2**20  # in /dev/shm for a rank: its channels to the others of its replica
SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, nothing is put there
_TRIED = 1 << 16


def needed(config: Config, replicas: int) -> int:
    """Bytes of host memory of so many replicas, with all spares and snapshots; about."""
    copies = COPIES if config.train.device == "cpu" else HOST_COPIES
    ranks = replicas * config.ranks_per_replica + config.spares
    spares = config.spares * SPARE_COPIES * weights(config) // config.ranks_per_replica
    return BASE_BYTES + ranks * RANK_BYTES + replicas * (AGENT_BYTES + copies * weights(config)) + spares


def memory(subject: Subject) -> str:
    """Whether the job fits into what this machine, or this container, has left."""
    config, replicas = subject.config, subject.replicas
    need, free, whose = needed(config, replicas), psutil.virtual_memory().available, "this machine"
    limit = allowance().memory
    if limit is not None and limit < free:
        free, whose = limit, "this container's limit"
    spares = f" and {config.spares} spares" if config.spares else ""
    text = (
        f"about {gib(need)} for {parameters(config) / 1e6:.1f} M parameters x {replicas}{spares}; "
        f"{gib(free)} are free of {whose}"
    )
    if need > free:
        raise Bad(f"{text}; use fewer replicas, fewer spares or a smaller model, or raise the limit")
    return text


def memfd(_: Subject) -> str:
    """Whether memory can be shared by descriptor: states and, on one machine, gradients live in it."""
    try:
        fd = os.memfd_create("ft_hsdp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _TRIED)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            with mmap.mmap(fd, _TRIED) as mapped:
                mapped[0] = 1
        finally:
            os.close(fd)
    except OSError as error:
        raise Bad(
            f"memfd_create(2) with seals does not work ({error.strerror}): a sandbox or an old kernel; allow it "
            "in the seccomp profile"
        ) from None
    return "memory can be made, sealed and mapped"


def shm(subject: Subject) -> str:
    """Shared memory with names: NCCL and Ray use it, nothing else here does."""
    config = subject.config
    ranks = subject.replicas * config.ranks_per_replica
    need = ranks * NCCL_BYTES if config.train.device != "cpu" and config.ranks_per_replica > 1 else 0
    if not SHM.is_dir():
        if need:
            raise Bad(f"there is no {SHM}, which NCCL needs; mount a tmpfs there")
        return f"there is no {SHM}; nothing here uses it"
    stat, mount = os.statvfs(SHM), mount_of(SHM)
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    noexec = ", noexec" if mount is not None and "noexec" in mount.options else ""
    text = f"{gib(size)}, {gib(free)} free{noexec}"
    if need and not os.access(SHM, os.W_OK):
        raise Bad(f"{SHM} cannot be written, NCCL needs it; mount a tmpfs there with mode 1777")
    if need > free:
        raise Bad(
            f"{text}; NCCL needs about {gib(need)}: docker run --shm-size, or a Kubernetes emptyDir of Memory"
        )
    return text if need else f"{text}; nothing here uses it"
