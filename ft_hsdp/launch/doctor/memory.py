"""Memory: enough for all ranks and their snapshots, in segments that can be sealed."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import psutil

from ft_hsdp.config import Config
from ft_hsdp.launch.doctor.cgroup import allowance
from ft_hsdp.launch.doctor.finding import Bad, Subject
from ft_hsdp.launch.doctor.sizes import gib, parameters, weights
from ft_hsdp.mounts import mount_of
from ft_hsdp.state.shared_memory import SEALS

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
