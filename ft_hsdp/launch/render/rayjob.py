"""A RayJob: KubeRay creates a cluster for the job, runs `submit` on it, and removes it afterwards.

The section `ray` of the configuration says what a rank asks for. A worker pod has room for all ranks of a replica,
or with SPREAD and STRICT_SPREAD for one rank.
"""

from __future__ import annotations

import json
import math
import shlex

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render import pod
from ft_hsdp.launch.render.pod import CONFIG, Tree, label
from ft_hsdp.launch.render.settings import (
    COMMAND,
    Site,
    check,
    in_pods,
    note,
)
from ft_hsdp.train.identity import HOST_VARIABLE

RAY_VERSION = "2.60.0"  # token authentication needs 2.52 or later
KEEP_S = 600  # of the finished cluster, for its logs

_HEAD = """\
{job}: {replicas} replicas of {ranks} ranks{entry} on a Ray cluster of their own.
For KubeRay 1.5.1 or later (ray.io/v1). The image has ft_hsdp and Ray {version}.

  kubectl apply -f FILE
  kubectl get rayjob{space} {name}
  kubectl delete -f FILE   (without --claim this deletes the files of the run as well)
"""


def rayjob(config: Config, site: Site) -> str:
    """Return the manifest of a job.

    Raises:
        ConfigError: Kubernetes or its pods cannot run this configuration.
    """
    check(site)
    gpus = config.ray.bundle.get("GPU", 0.0)
    if config.train.device == "cuda" and gpus < 1:
        raise ConfigError("ray.resources.GPU", gpus, "1 or more with train.device cuda")
    name = label(config.job.name)
    runs = site.claim or f"{name}-runs"
    config = in_pods(config, site.claim)
    entrypoint = ["python", *COMMAND, "submit", CONFIG]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": pod.metadata(name, site.namespace, name),
        "spec": {
            "entrypoint": shlex.join(entrypoint),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEEP_S,
            **note("only an operator starts the whole job again on a new cluster"),
            "backoffLimit": 0,
            **note("KubeRay's default pod has more rights than this one"),
            "submitterPodTemplate": {"spec": _submitter(site)},
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                **note("KubeRay creates the token and its Secret"),
                "authOptions": {"mode": "token"},
                "headGroupSpec": _head(site, name, runs),
                "workerGroupSpecs": _groups(config, site, name),
            },
        },
    }
    return pod.manifest(_HEAD, config, site, job, replicas=config.replicas, version=RAY_VERSION)


def _submitter(site: Site) -> Tree:
    """Return the pod that submits the entrypoint and shows its output; KubeRay adds the pod's command."""
    container = {
        "name": "ray-job-submitter",
        "image": site.image,
        "resources": pod.resources(0.5, 0, 1),
        "securityContext": pod.no_more_rights(),
    }
    return {"restartPolicy": "Never", **pod.rights(), "containers": [container]}


def _head(site: Site, name: str, runs: str) -> Tree:
    """Return the head: it runs Ray's services, the driver and the lighthouse, but no ranks."""
    container = pod.container("ray-head", site.image, resources=pod.resources(2, 0, 8))
    template = pod.template(name, container, runs)
    return {**note("no ranks are placed here"), "rayStartParams": {"num-cpus": "0"}, "template": template}


def _groups(config: Config, site: Site, name: str) -> list[Tree]:
    """Return a group of workers for each of ray.zones, or one group, with room for all replicas and spares."""
    zones: tuple[str | None, ...] = config.ray.zones or (None,)
    each = config.ranks_per_replica if config.ray.strategy in ("STRICT_PACK", "PACK") else 1
    pods = config.ranks_per_replica // each  # of a replica
    spares = config.spares // each
    groups = []
    for number, zone in enumerate(zones):
        replicas, slots = (len(range(number, most, len(zones))) for most in (config.replicas, config.slots))
        extra = len(range(number, spares, len(zones)))
        head = {
            "groupName": "ranks" if zone is None else f"ranks-{number}",
            "replicas": replicas * pods + extra,
            "minReplicas": 0,
            "maxReplicas": slots * pods + extra,
        }
        groups.append({**head, **_workers(config, site, name, each, zone)})
    return groups


def _workers(config: Config, site: Site, name: str, each: int, zone: str | None) -> Tree:
    """Return a worker with room for `each` ranks, in a zone of the cluster if one is given."""
    ray = config.ray
    labels = {**ray.labels, **({} if zone is None else {ray.zone_label: zone})}
    told = {key: each * amount for key, amount in ray.bundle.items()}
    cpus, gpus = told.pop("CPU", 0.0), told.pop("GPU", 0.0)
    container = pod.container(
        "ray-worker",
        site.image,
        resources=pod.resources(cpus, gpus, site.memory_gib),
        env=[pod.field(HOST_VARIABLE, pod.NODE)],
    )
    placed = {} if zone is None else {"nodeSelector": {"topology.kubernetes.io/zone": zone}}
    return {
        **({**note("for Ray"), "labels": labels} if labels else {}),
        "rayStartParams": {
            "num-cpus": str(math.ceil(cpus)),
            **({"resources": shlex.quote(json.dumps(told))} if told else {}),
        },
        "template": pod.template(name, container, site.claim, **placed),
    }
