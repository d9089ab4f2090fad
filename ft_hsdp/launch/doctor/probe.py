"""What must be asked in a child process, because it imports torch or Ray; printed as one line of JSON.

`python -m ft_hsdp.launch.doctor.probe gpu DEVICE RANKS` prints what torch knows of the GPUs here, and `probe ray
ADDRESS` the versions and nodes of a Ray cluster. It asks the cluster's GCS, as `ray status` does, so it starts no
job and no process. The key `error` says why there is no answer.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any

from ft_hsdp.errors import ConfigError

ANSWER_S = 8.0  # for each question to the GCS


def main() -> None:
    """Print the answer to what the command line asks."""
    match sys.argv[1:]:
        case ["gpu", device, ranks]:
            try:
                answer = _gpus(device, int(ranks))
            except (ConfigError, RuntimeError) as error:  # RuntimeError: CUDA cannot be initialized
                answer = {"error": " ".join(str(error).split())}
        case ["ray", address]:
            try:
                answer = _cluster(address)
            except Exception as error:  # Ray's errors have no common base
                words = str(error).splitlines()[0][:300] if str(error) else ""
                answer = {"error": f"{type(error).__name__}: {words}"}
        case _:
            sys.exit("gpu DEVICE RANKS, or ray ADDRESS")
    print(json.dumps(answer))  # noqa: T201 - the doctor reads it


def _gpus(device: str, ranks: int) -> dict[str, Any]:
    import torch

    from ft_hsdp.train.device import describe

    found = describe(device, ranks)
    gpus = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        free, _ = torch.cuda.mem_get_info(number)
        gpus.append({"name": torch.cuda.get_device_name(number), "capability": f"{major}.{minor}", "free": free})
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "missing"
    return {
        "found": found,
        "gpus": gpus,
        "built_for": torch.cuda.get_arch_list(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "triton": metadata.version("triton"),
    }


def _cluster(address: str) -> dict[str, Any]:
    from ray._private import services
    from ray._private.authentication import authentication_token_setup as tokens
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as every other driver does
    address = services.canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
    client = GcsClient(address=address)
    about = json.loads(
        client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=ANSWER_S) or b"{}"
    )
    nodes = [
        {"resources": dict(node.resources_total), "labels": dict(node.labels)}
        for node in client.get_all_node_info(timeout=ANSWER_S).values()
        if node.state == node.ALIVE
    ]
    return {
        "address": address,
        "ray": about.get("ray_version", "unknown"),
        "python": about.get("python_version", "unknown"),
        "nodes": nodes,
    }


if __name__ == "__main__":
    main()
