"""A Ray cluster of several nodes on this machine, in a process of its own: `python ray_nodes.py DIR [CPUS]`.

With CPUS, those of its head, the head has Ray's dashboard, too, and so the Jobs API.

Orders come as JSON lines on stdin and are answered on stdout: {"add": [{"cpus": 1, "labels": {}}]} by {"nodes":
[number]}, {"remove": number} by {}, {"ask": true} by what Ray knows. The first answer, without an order, is
{"address", "dashboard"}. All nodes end with stdin.
"""

import json
import os
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from ft_hsdp.lifetime import die_with

STORE_BYTES = 80 * 2**20
SYSTEM = {  # a node that is gone is noticed soon
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 3,
    "enable_autoscaler_v2": False,
    "prestart_worker_first_driver": False,  # a process for each CPU, which no job here takes
}


def knows(address: str, nodes: dict[int, Any]) -> dict[str, Any]:
    """What lives, as the state API and the table of placement groups have it."""
    if not ray.is_initialized():
        ray.init(address=address, namespace="ft_hsdp-tests", log_to_driver=False, configure_logging=False)
    numbers = {node.node_id: number for number, node in nodes.items()}
    groups = []
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            at = [numbers.get(node) for node in group["bundles_to_node_id"].values()]
            groups.append({"name": group["name"], "nodes": at})
    actors = [actor for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]
    living = [actor["Name"] for actor in actors]
    pids = {str(actor["Pid"]): numbers.get(actor["Address"]["NodeID"]) for actor in actors}
    alive = sum(bool(node["Alive"]) for node in ray.nodes())
    return {"nodes": alive, "actors": living, "pids": pids, "groups": groups}


def main() -> None:
    """Serve until stdin ends."""
    die_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
    folder, cpus = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    shared: dict[str, Any] = {"object_store_memory": STORE_BYTES}
    head = {
        "num_cpus": cpus,
        "include_dashboard": cpus > 0,
        "dashboard_port": 0,
        "dashboard_agent_listen_port": None,
        "temp_dir": folder,
        "include_log_monitor": False,
        "_system_config": SYSTEM,
        **shared,
    }
    if (
        not cpus
    ):  # nobody looks at Ray's own page: the nodes' agents load little, as in a small installation of Ray
        ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("not wanted")
    os.makedirs("/tmp/ray", exist_ok=True)  # Ray notes the address of the newest cluster there
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    nodes: dict[int, Any] = {}
    try:
        answers.write(json.dumps({"address": cluster.address, "dashboard": cluster.webui_url}) + "\n")
        for line in sys.stdin:
            order = json.loads(line)
            answer: dict[str, Any] = {}
            if "add" in order:
                first = len(nodes)
                for wanted in order["add"]:
                    nodes[len(nodes)] = cluster.add_node(
                        wait=False, num_cpus=wanted["cpus"], labels=wanted["labels"], **shared
                    )
                cluster.wait_for_nodes()
                answer = {"nodes": list(range(first, len(nodes)))}
            elif "ask" in order:
                answer = knows(cluster.address, nodes)
            elif "remove" in order:
                cluster.remove_node(nodes[order["remove"]], allow_graceful=False)
            answers.write(json.dumps(answer) + "\n")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
