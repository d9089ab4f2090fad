"""Starting: what each rank of a crew is started with, in the berth that it has."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

import ray.util

from ft_hsdp import secret
from ft_hsdp.config import Config, dump, load
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.crew import Crew
from ft_hsdp.launch.processes import ONE_THREAD
from ft_hsdp.launch.ray.berth import Berth, Place
from ft_hsdp.launch.ray.placement import local_ranks
from ft_hsdp.launch.ray.rank_actor import Home, Start
from ft_hsdp.launch.rundir import RunDir


async def starts(berth: Berth, crew: Crew, run: RunDir, urls: tuple[str, ...], home: Home) -> list[Start]:
    """A start for each rank. urls: where the lighthouse listens. Raises Retryable."""
    places, here = berth.places, ray.util.get_node_ip_address()
    alone = loopback(urlsplit(urls[0]).hostname or "")
    far = next((place.seat.address for place in places if place.seat.address != here), None)
    if alone and far is not None:
        raise Retryable(f"{far} cannot reach {urls[0]}; give network.host an address that the cluster reaches")
    first = "127.0.0.1" if alone else places[0].seat.address
    port = await berth.port(first)
    token, key = secret.current(run.token), secret.current(run.checkpoint_key)
    locals_ = local_ranks([place.seat.node for place in places])
    config = load(crew.config)
    found = []
    for place, (local, local_size) in zip(places, locals_, strict=True):
        env = {
            **ONE_THREAD,
            "RANK": str(place.rank),
            "WORLD_SIZE": str(crew.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": first,
            "MASTER_PORT": str(port),
            **_devices(place, places),
        }
        text = dump(_abroad(config, "127.0.0.1" if alone else place.seat.address, home))
        found.append(Start(place.rank, crew.called, crew.number, env, text, token, key, urls, str(run.path)))
    return found


def _abroad(config: Config, address: str, home: Home) -> Config:
    """The configuration of a rank on a node: the node's own address, and its folder for prepared data."""
    changes = {
        "job": config.job.model_copy(update={"runs_dir": home.folder}),
        "network": config.network.model_copy(update={"host": address}),
    }
    return config.model_copy(update=changes)


def _devices(place: Place, places: Sequence[Place]) -> dict[str, str]:
    """The GPUs of all ranks on one node, in the order of their local ranks: each takes the one with its number."""
    gpus = [gpu for other in places if other.seat.node == place.seat.node for gpu in other.seat.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def loopback(host: str) -> bool:
    """Whether only processes of one machine reach an address; a name counts as what it usually means."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
