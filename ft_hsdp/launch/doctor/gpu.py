"""The check of GPUs: their number, capability and memory, and the versions of driver, CUDA and NCCL.

torch is imported in a child process (`probe`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.launch.doctor.host import gib, weights
from ft_hsdp.launch.doctor.result import Bad, Subject, ask

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
        words = file.read_text().splitlines()[0].split()
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
