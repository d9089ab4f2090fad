"""Where a rank computes, and where its random numbers come from.

What replicas agree upon (checksums, digests, snapshots) is made on the host on every device.

`stream` derives a seed for each use from the job's, so that no generator is part of a state. What is random about
a batch depends on its place in the data alone: a replica that runs it again, or another one that runs it instead,
draws the same numbers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ft_hsdp.errors import ConfigError


def stream(seed: int, use: str, *place: object) -> int:
    """Return the 63-bit seed of ``use`` (at most 8 letters) at ``place``."""
    text = "/".join(map(str, (seed, *place)))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=f"ft_hsdp.{use}".encode()).digest()
    return int.from_bytes(digest, "little") >> 1


# A kernel that is loaded on its first launch waits for those that spin; streams that share a queue do too.
_CUDA = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def describe(name: str, ranks: int) -> str:
    """Return in words what ``train.device`` stands for on this machine, with ``ranks`` of a replica here.

    Raises:
        ConfigError: There are too few such devices here, or no kernels for them.
    """
    if name == "cpu":
        return name
    if not torch.cuda.is_available():
        why = "no driver shows one" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise ConfigError("train.device", name, f"cpu, for there is no GPU here ({why})")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("train.device", name, "cpu, or install triton, which FTAR needs on a GPU")
    count = torch.cuda.device_count()
    if count < ranks:  # NCCL refuses two ranks of a replica on one GPU
        raise ConfigError("ranks_per_replica", ranks, f"at most {count}, the number of GPUs here")
    return "1 GPU" if count == 1 else f"{count} GPUs"


def choose(name: str, local_rank: int) -> torch.device:
    """Return the device of the rank that is ``local_rank`` on its machine; it becomes this thread's current one.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "cpu":
        return torch.device("cpu")
    for key, value in _CUDA.items():
        os.environ.setdefault(key, value)
    describe(name, 1)
    device = torch.device(name, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()
    return device


def numerics(device: torch.device) -> str:
    """Return what the bits of a sum depend on besides its operands: build, instruction set or GPU, threads."""
    if device.type == "cpu":
        unit = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        unit = torch.cuda.get_device_name(device)
    return f"torch {torch.__version__}, {unit}, {torch.get_num_threads()} threads"


def backend(device: torch.device) -> str:
    """Return torch.distributed's backend inside a replica; tensors outside the model stay on the CPU."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def move(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``: a tensor, or tuples, lists and mappings of them."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(item, device) for item in batch)
    return batch
