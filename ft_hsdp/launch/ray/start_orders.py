"""What the ranks of a replica or spare are started with on a Ray cluster: their environment, files and secrets."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import ray.util

from ft_hsdp import secret
from ft_hsdp.address import loopback
from ft_hsdp.config import Config, dump, load
from ft_hsdp.config.entry import is_function, read
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.base import WorkerGroup
from ft_hsdp.launch.backend.processes import ONE_THREAD
from ft_hsdp.launch.ray.actor import ActorSetup, StartOrder
from ft_hsdp.launch.ray.placement import local_ranks
from ft_hsdp.launch.ray.slot import Bundle, ReplicaSlot
from ft_hsdp.launch.run.directory import RunDir


async def start_orders(
    slot: ReplicaSlot, group: WorkerGroup, run: RunDir, urls: tuple[str, ...], setup: ActorSetup
) -> list[StartOrder]:
    """Return a start order for each rank of a group.

    Args:
        slot: Where the ranks run.
        group: The replica or spare.
        run: The run directory on this node; it has the token and the key of the checkpoints.
        urls: Of the lighthouse.
        setup: Of the actors.

    Raises:
        ConfigError: The script that `entry` names is gone.
        Retryable: The lighthouse listens on loopback, and an actor is on another node.
    """
    bundles, here = slot.bundles, ray.util.get_node_ip_address()
    alone = loopback(urlsplit(urls[0]).hostname or "")
    far = next((bundle.location.address for bundle in bundles if bundle.location.address != here), None)
    if alone and far is not None:
        raise Retryable(f"{far} cannot reach {urls[0]}; give network.host an address that the cluster reaches")
    first = "127.0.0.1" if alone else bundles[0].location.address
    port = await slot.port(first)
    token, key = secret.current(run.token), secret.current(run.checkpoint_key)
    locals_ = local_ranks([bundle.location.node for bundle in bundles])
    config = load(group.config)
    script = b"" if config.entry is None or is_function(config.entry) else read(config.entry)
    found = []
    for bundle, (local, local_size) in zip(bundles, locals_, strict=True):
        env = {
            **ONE_THREAD,
            "RANK": str(bundle.rank),
            "WORLD_SIZE": str(group.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": first,
            "MASTER_PORT": str(port),
            **_visible_gpus(bundle, bundles),
        }
        text = dump(_config_for_node(config, "127.0.0.1" if alone else bundle.location.address, setup))
        where = str(run.path)
        about = bundle.rank, group.spec, group.number
        found.append(StartOrder(*about, env, text, token, key, urls, where, slot.hosts, script))
    return found


def _config_for_node(config: Config, address: str, setup: ActorSetup) -> Config:
    """Return the configuration of a rank on a node: with the node's address, and its folder for prepared data."""
    changes = {
        "job": config.job.model_copy(update={"runs_dir": setup.ray.folder}),
        "network": config.network.model_copy(update={"host": address}),
    }
    return config.model_copy(update=changes)


def _visible_gpus(bundle: Bundle, bundles: Sequence[Bundle]) -> dict[str, str]:
    """Return the variable with the GPUs of all ranks on one node, in the order of their local ranks.

    A rank uses the GPU whose index is its LOCAL_RANK.
    """
    gpus = [gpu for other in bundles if other.location.node == bundle.location.node for gpu in other.location.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
