"""`python -m ft_hsdp.launch.doctor.ray_probe ADDRESS` prints the versions and nodes of a Ray cluster, as JSON.

It asks the cluster's GCS, as `ray status` does, so it starts no job and no process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ANSWER_S = 8.0


def main() -> None:
    """Print one line with a JSON object; its key `error` says why there is no answer."""
    try:
        answer = _ask(sys.argv[1])
    except Exception as error:  # Ray's errors have no common base
        answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
    print(json.dumps(answer))  # noqa: T201 - the doctor reads it


def _ask(address: str) -> dict[str, Any]:
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
