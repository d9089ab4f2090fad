"""`python -m ft_hsdp.launch.doctor.gpu_probe DEVICE RANKS` prints what torch knows of the GPUs here, as JSON."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any

import torch

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.device import describe


def main() -> None:
    """Print one line with a JSON object; its key `error` says why there is no answer."""
    name, ranks = sys.argv[1:]
    try:
        answer = {"found": describe(name, int(ranks)), **_facts()}
    except (ConfigError, RuntimeError) as error:  # RuntimeError: CUDA cannot be initialized
        answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer))  # noqa: T201 - the doctor reads it


def _facts() -> dict[str, Any]:
    gpus = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        free, _ = torch.cuda.mem_get_info(number)
        gpus.append({"name": torch.cuda.get_device_name(number), "capability": f"{major}.{minor}", "free": free})
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "missing"
    return {
        "gpus": gpus,
        "built_for": torch.cuda.get_arch_list(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "triton": metadata.version("triton"),
    }


if __name__ == "__main__":
    main()
