"""Checks of this machine: processors, open files, threads, memory for all ranks and snapshots, and GPUs.

The number, capability and memory of GPUs, and the versions of driver, CUDA and NCCL, come from a child process
that imports torch (`probe`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path
from typing import Any

import psutil

from ft_hsdp.analysis.costs import Assumptions
from ft_hsdp.analysis.plan import parameters, plan
from ft_hsdp.analysis.plan_table import size_of
from ft_hsdp.config import Config
from ft_hsdp.config.entry import title
from ft_hsdp.control_groups import allowance
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.doctor.result import Bad, Subject, Undecided, ask
from ft_hsdp.memory.copies import OWN_SLOTS, SLOTS
from ft_hsdp.memory.hosts import DOMAINS_VARIABLE, known, locate
from ft_hsdp.mounts import SOCKETS_IN, mount_of, too_long_for_sockets
from ft_hsdp.state.shared_memory import SEALS
from ft_hsdp.train.identity import host_name

DRIVER = Path("/proc/driver/nvidia/version")
GPU_COPIES = 5  # fp32 copies of the model on the GPU: weights, gradients, reduced gradients, two moments
OFFLOADED = 2  # of these are in host memory with optim.offload


def device(subject: Subject) -> str:
    """Check that each rank of a replica has a GPU here, with memory for all that use it.

    With train.device cpu, only report what there is.
    """
    config = subject.config
    if config.train.device == "cpu":
        found = f"this machine has a GPU, driver {driver()}" if driver() else "no GPU is needed, and there is none"
        return f"ranks compute on the CPU; {found}"
    answer = ask("gpu", config.train.device, str(config.ranks_per_replica))
    if "error" in answer:
        raise Bad(str(answer["error"]))
    ranks = subject.replicas * config.ranks_per_replica
    gpus = answer["gpus"][:ranks]
    each = -(-ranks // len(gpus))
    for number, gpu in enumerate(gpus):
        _fits(number, gpu, answer["built_for"], config, each)
    kinds = ", ".join(dict.fromkeys(f"{g['name']} (capability {g['capability']})" for g in gpus))
    versions = (
        f"driver {driver() or 'unknown'}, CUDA {answer['cuda']}, NCCL {answer['nccl']}, triton {answer['triton']}"
    )
    shared = f", each for {each} of {ranks} ranks" if each > 1 else ""
    return f"{answer['found']}{shared}: {kinds}; {versions}"


def driver(file: Path = DRIVER) -> str:
    """Return the version of NVIDIA's driver; "" if there is none."""
    try:
        words = file.read_text(encoding="utf-8", errors="replace").splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _fits(number: int, gpu: dict[str, Any], built_for: list[str], config: Config, ranks: int) -> None:
    """Check that torch has kernels for a GPU, and that it has memory for so many ranks. Raises Bad."""
    oldest = min((int(arch.rpartition("_")[2].rstrip("abf")) for arch in built_for), default=0)
    major, minor = map(int, str(gpu["capability"]).split("."))
    if 10 * major + minor < oldest:
        raise Bad(
            f"GPU {number} ({gpu['name']}) has capability {gpu['capability']}, this torch is built for "
            f"{built_for[0]} and newer; install another build of torch"
        )
    copies = GPU_COPIES - (OFFLOADED if config.optim.offload else 0)
    need = ranks * copies * weights(config) // config.ranks_per_replica
    if need > gpu["free"]:
        raise Bad(
            f"GPU {number} ({gpu['name']}) has {gib(gpu['free'])} free, {_ranks(ranks)} more than {gib(need)}; "
            "end the processes that use it, use more GPUs, raise ranks_per_replica, or set optim.offload"
        )


def _ranks(number: int) -> str:
    return "a rank needs" if number == 1 else f"its {number} ranks need"


FDS_PER_REPLICA = 64
THREADS_PER_RANK = 24  # of rank 0; others have 20
OTHER_THREADS = 40  # lighthouse, supervisor, fork server
AGENT_THREADS = 8
RDMA = Path("/sys/class/infiniband")


def cpus(subject: Subject) -> str:
    """Report how many processors there are for the ranks. Too few make the job slow, and change no result."""
    config = subject.config
    ranks = subject.replicas * config.ranks_per_replica
    have: float = len(os.sched_getaffinity(0))
    quota = allowance().cpus
    container = ""
    if quota is not None and quota < have:
        have, container = quota, " by this container's limit"
    shared = f"; {ranks} ranks share them, which is slow and changes no result" if ranks > have else ""
    return f"{have:g} processors{container}{shared}"


def files(subject: Subject) -> str:
    """Check that the process with the most connections, the lighthouse, may open enough files."""
    need = 128 + FDS_PER_REPLICA * subject.config.slots
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files are allowed per process"
    do = f"run `ulimit -n {need}`"
    if hard != resource.RLIM_INFINITY and hard < need:
        do = f"raise the hard limit of {hard}: LimitNOFILE of systemd, docker run --ulimit nofile={need}"
    raise Bad(f"{soft} open files are allowed per process, {need} are needed; {do}")


def processes(subject: Subject) -> str:
    """Check that all threads may be started: limits of processes count threads."""
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
            f"about {need} threads are needed, {whose} may start {left} more; raise `ulimit -u` or the pids "
            "limit of the container, or use fewer ranks"
        )
    return f"about {need} threads; {whose} may start {left} more"


def _user_threads_left() -> int | None:
    """Return how many more threads this user may start; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:  # the limit does not apply to root
        return None
    used, me = 0, os.getuid()
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        used += (process.info["num_threads"] or 0) if uids is not None and uids.real == me else 0
    return max(0, int(soft) - used)


def memlock(subject: Subject) -> str:
    """Check that NCCL may pin the buffers of RDMA cards, if this machine has such cards."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "any amount" if soft == resource.RLIM_INFINITY else gib(soft)
    cards = sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else []
    if not cards:
        return f"{shown} may be pinned; there is no RDMA card"
    if os.environ.get("NCCL_IB_DISABLE") == "1" or subject.config.ranks_per_replica == 1:
        return f"{shown} may be pinned; NCCL does not use {', '.join(cards)}"
    if soft != resource.RLIM_INFINITY:
        raise Bad(
            f"{shown} may be pinned, NCCL pins more on {', '.join(cards)}; run `ulimit -l unlimited`, docker run "
            "--ulimit memlock=-1, or set NCCL_IB_DISABLE=1"
        )
    return f"any amount may be pinned, for {', '.join(cards)}"


def domains(subject: Subject) -> str:
    """Report where this machine stands, and who says so: copies of a state are kept apart by that."""
    where, source = locate(host_name(os.environ), subject.config.hosts.labels, os.environ)
    unknown = [level for level, known in (("zone", where.zone), ("rack", where.rack)) if not known]
    if not unknown:
        return f"{where.name} stands in rack {where.rack} of zone {where.zone}, says {source}"
    found = f"{where}, says {source}; " if source else ""
    which = f"{' and '.join(unknown)} of {where.name} {'is' if unknown[1:] == [] else 'are'} not known"
    return f"{found}the {which}, so it counts as one of its own; hosts.labels or {DOMAINS_VARIABLE} can say it"


BASE_BYTES = 250 * 2**20  # lighthouse, supervisor and fork server, measured
RANK_BYTES = 150 * 2**20  # private memory of a forked rank without a model, measured
AGENT_BYTES = 32 * 2**20  # a state agent, measured
# fp32 copies of the model in host memory: weights, gradients, reduced gradients, two moments (5); two snapshots of
# weights and moments (6); a margin (3).
COPIES = 14
HOST_COPIES = 7  # the same with the model on a GPU: two snapshots (6) and a margin
SNAPSHOT_COPIES = 3  # of a third snapshot, where hosts keep copies for each other
SPARE_COPIES = 2  # of a spare: its model, and the copy from which it is filled
NCCL_BYTES = 64 * 2**20  # in /dev/shm per rank: its channels to the other ranks of its replica
DOCKERS = 64 * 2**20 - 1  # bytes of /dev/shm in a container, if nobody asks for more
SHM = Path("/dev/shm")  # noqa: S108 - it is examined, nothing is written there
_TRIED = 1 << 16


def needed(config: Config, replicas: int) -> int:
    """Return about how many bytes of host memory `replicas` replicas need, with all spares and snapshots."""
    copies = COPIES if config.train.device == "cpu" else HOST_COPIES
    ranks = replicas * config.ranks_per_replica + config.spares
    spares = config.spares * SPARE_COPIES * weights(config) // config.ranks_per_replica
    agents = replicas * (config.hosts.per_replica or 1) + config.hosts.spare
    kept = foreign(config) or 0
    copies += (OWN_SLOTS - SLOTS) * SNAPSHOT_COPIES if kept else 0
    states = replicas * copies * weights(config) + spares + kept
    return BASE_BYTES + ranks * RANK_BYTES + agents * AGENT_BYTES + states


def foreign(config: Config) -> int | None:
    """Return how many bytes of host memory the copies take that hosts keep for each other; None: they cannot."""
    try:
        document = plan(config, Assumptions())
    except ConfigError:  # of copies that cannot be kept; `copies` says so
        return None
    return int(SLOTS * document["copied_bytes_per_step"] * document["every"])


def copies(subject: Subject) -> str:
    """Check that the copies that the job wants can be kept, and say what is not known about its hosts."""
    config = subject.config
    try:
        document = plan(config, Assumptions(), size=1.0 if config.entry is not None else None)
    except ConfigError as error:
        raise Bad(str(error)) from None
    wanted, apart = document["copies"], document["apart"]
    here, _ = locate(host_name(os.environ), config.hosts.labels, os.environ)
    if document["protected"] is None and not known([here], apart):
        raise Undecided(f"{wanted} copies on different {apart}s; no {apart} is known here, see domains")
    if subject.spans and config.hosts.per_replica is None:
        raise Undecided("on how many hosts a replica runs is not known here; see `launcher.py plan --hosts N`")
    if document["protected"] is False:
        return f"a lost host may take the state with it: {document['why']}"
    made = document["copied_bytes_per_step"] > 0
    how = f"{size_of(foreign(config) or 0)} for other hosts" if made and config.entry is None else ""
    how = how or ("hosts keep copies for each other" if made else "healthy replicas are the copies")
    return f"{wanted} copies of each shard, each on another {apart}: {how}"


def memory(subject: Subject) -> str:
    """Check that the job fits into the free memory of this machine and of this container."""
    config, replicas = subject.config, subject.replicas
    free, whose = psutil.virtual_memory().available, "this machine has"
    limit = allowance().memory
    if limit is not None and limit < free:
        free, whose = limit, "this container's limit leaves"
    if config.entry is not None:
        raise Undecided(
            f"{title(config.entry)} makes the model, whose size is not known here; {whose} {gib(free)} free"
        )
    spares = f" and {config.spares} spares" if config.spares else ""
    need, kept = needed(config, replicas), foreign(config)
    if kept is None:
        spares += ", without the copies that cannot be kept (see copies)"
    elif kept:
        spares += f", {size_of(kept)} of it copies for other hosts"
    text = (
        f"about {gib(need)} for {parameters(config) / 1e6:.1f} M parameters x {replicas}{spares}; "
        f"{whose} {gib(free)} free"
    )
    if need > free:
        raise Bad(f"{text}; use fewer replicas, fewer spares or a smaller model, or raise the limit")
    return text


def memfd(_: Subject) -> str:
    """Check that processes can share sealed memory: snapshots and, on one machine, gradients use it."""
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
    return "memory can be created, sealed and mapped"


def shm(subject: Subject) -> str:
    """Check /dev/shm, if NCCL needs it, or data workers of a script may. ft_hsdp itself does not use it."""
    config = subject.config
    ranks = subject.replicas * config.ranks_per_replica
    need = ranks * NCCL_BYTES if config.train.device != "cpu" and config.ranks_per_replica > 1 else 0
    if not SHM.is_dir():
        if need:
            raise Bad(f"there is no {SHM}, which NCCL needs; mount a tmpfs there")
        return f"there is no {SHM}, and this job does not need it"
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
    if config.entry is not None and size < DOCKERS:
        raise Undecided(
            f"{text}; batches of job.loader(num_workers=...) come through it: docker run --shm-size=1g"
        )
    if config.entry is not None and (folder := too_long_for_sockets()):
        raise Undecided(
            f"{text}; TMPDIR {folder} is too long for sockets of data workers: at most {SOCKETS_IN} bytes"
        )
    return text if need else f"{text}; this job does not need it"


def weights(config: Config) -> int:
    """Return the bytes of one fp32 copy of the model."""
    return 4 * parameters(config)


def gib(size: float) -> str:
    """Return a number of bytes as text in GiB."""
    return f"{size / 2**30:.1f} GiB"
