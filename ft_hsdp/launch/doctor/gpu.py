"""GPUs: how many, of what capability and memory, and with which NCCL. torch is asked in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_hsdp.launch.doctor.machine import gib, weights
from ft_hsdp.launch.doctor.result import Bad, Subject, ask

DRIVER = Path("/proc/driver/nvidia/version")
GPU_COPIES = 5  # fp32, on the GPU: weights, gradients, reduced gradients, two moments
OFFLOADED = 2  # of them in host memory with optim.offload


def device(subject: Subject) -> str:
    """Whether each rank of a replica has a GPU here; on the CPU that there is none is a fact."""
    config = subject.config
    if config.train.device == "cpu":
        there = f"; a GPU is here, driver {driver()}" if driver() else "; no GPU is here, and none is needed"
        return f"ranks compute on the CPU{there}"
    answer = ask("ft_hsdp.launch.doctor.gpu_probe", config.train.device, str(config.ranks_per_replica))
    if "error" in answer:
        raise Bad(str(answer["error"]))
    gpus = answer["gpus"][: config.ranks_per_replica]
    for number, gpu in enumerate(gpus):
        _fits(number, gpu, answer["built_for"], subject)
    kinds = ", ".join(dict.fromkeys(f"{g['name']} (capability {g['capability']})" for g in gpus))
    versions = (
        f"driver {driver() or 'unknown'}, CUDA {answer['cuda']}, NCCL {answer['nccl']}, triton {answer['triton']}"
    )
    return f"{answer['found']}: {kinds}; {versions}"


def driver(file: Path = DRIVER) -> str:
    """The version of NVIDIA's driver; "" where there is none."""
    try:
        words = file.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def _fits(number: int, gpu: dict[str, Any], built_for: list[str], subject: Subject) -> None:
    """Raise Bad where torch has no kernels for a GPU, or a rank's part of the model has no room on it."""
    config = subject.config
    oldest = min((int(arch.rpartition("_")[2].rstrip("abf")) for arch in built_for), default=0)
    major, minor = map(int, str(gpu["capability"]).split("."))
    if 10 * major + minor < oldest:
        raise Bad(
            f"GPU {number} ({gpu['name']}) has capability {gpu['capability']}, this torch is built for "
            f"{built_for[0]} and newer; install another build of torch"
        )
    copies = GPU_COPIES - (OFFLOADED if config.optim.offload else 0)
    need = copies * weights(config) // config.ranks_per_replica
    if need > gpu["free"]:
        raise Bad(
            f"GPU {number} ({gpu['name']}) has {gib(gpu['free'])} free, a rank needs more than {gib(need)}; end "
            "what uses it, use more ranks per replica, or optim.offload"
        )
