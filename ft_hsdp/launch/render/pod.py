"""The parts that all pods of a rendered job share: the job's name, their rights, volumes and secrets.

The name is a DNS label (RFC 1035), as Kubernetes demands, and short enough for the suffixes of pods.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render.settings import FOLDER, Site, comment, document, dump, what_runs

LONGEST = 42  # a pod's name is a label of at most 63 characters, of which "-lighthouse-0-0-abcde" takes 21


def label(name: str) -> str:
    """Return `name` in lower case, with dashes for characters that a label may not have, and a letter first.

    Raises:
        ConfigError: On job.name, if the result is empty or too long.
    """
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if made and not made[0].isalpha():
        made = f"job-{made}"
    if not 0 < len(made) <= LONGEST:
        allowed = f"a name of which Kubernetes can make a label of 1 to {LONGEST} letters, digits and dashes"
        raise ConfigError("job.name", name, allowed)
    return made


CONFIG_FOLDER = "/etc/ft_hsdp"
CONFIG = f"{CONFIG_FOLDER}/config.yaml"
USER = 1000
RUNS_GIB = 10

NODE = "spec.nodeName"  # the field with the name of a pod's node: pods on one node are lost together

Tree = dict[str, Any]


def metadata(name: str, namespace: str | None, job: str) -> Tree:
    """Return the metadata of an object of `job`."""
    placed = {} if namespace is None else {"namespace": namespace}
    return {
        "name": name,
        **placed,
        "labels": {"app.kubernetes.io/name": "ft-hsdp", "app.kubernetes.io/instance": job},
    }


def manifest(head: str, config: Config, site: Site, job: Tree, **facts: object) -> str:
    """Return the file of a job: a comment, its configuration, a volume for the runs if it has none, and the job.

    Args:
        head: Text of the comment, with places for what is known of every job, and for ``facts``.
        config: Is in the file.
        site: What the site gives the pods.
        job: The object that runs the job.
        **facts: More that the comment says.
    """
    name = label(config.job.name)
    parts = [config_map(name, site.namespace, dump(config))]
    if site.claim is None:
        parts.append(runs_claim(name, site.namespace))
    told = {
        "job": config.job.name,
        "name": name,
        "ranks": config.ranks_per_replica,
        "entry": what_runs(config),
        "space": "" if site.namespace is None else f" -n {site.namespace}",
    }
    return comment(head.format(**told, **facts)) + "---\n".join(document(part) for part in (*parts, job))


def config_map(job: str, namespace: str | None, settings: str) -> Tree:
    """Return the ConfigMap with the configuration `settings`."""
    head = {"apiVersion": "v1", "kind": "ConfigMap"}
    return {**head, "metadata": metadata(f"{job}-config", namespace, job), "data": {"config.yaml": settings}}


def runs_claim(job: str, namespace: str | None) -> Tree:
    """Return the claim of a volume that outlives its pod. One pod at a time writes it."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(f"{job}-runs", namespace, job),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{RUNS_GIB}Gi"}},
        },
    }


def rights() -> Tree:
    """Return the security context of a pod: Kubernetes' level "restricted", and no access to the cluster's API."""
    context = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {"automountServiceAccountToken": False, "securityContext": context}


def no_more_rights() -> Tree:
    """Return the security context of a container, which drops all capabilities."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def container(name: str, image: str, **more: Any) -> Tree:
    """Return a container without rights, with the configuration and the folder of runs mounted.

    Args:
        more: Further keys; those in `mounts` are added to the two above.
    """
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "runs", "mountPath": FOLDER},
        *more.pop("mounts", ()),
    ]
    return {
        "name": name,
        "image": image,
        **more,
        "volumeMounts": mounts,
        "securityContext": no_more_rights(),
    }


def template(job: str, container: Tree, claim: str | None, *more: Tree, **first: Any) -> Tree:
    """Return a pod of `job` without rights, with the volumes that its container mounts.

    Args:
        job: Names the volume with the configuration.
        container: Its only one.
        claim: Of the volume with the runs; None: they end with the pod.
    """
    runs: Tree = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    volumes = [{"name": "config", "configMap": {"name": f"{job}-config"}}, {"name": "runs", **runs}, *more]
    return {"spec": {**first, **rights(), "containers": [container], "volumes": volumes}}


def apart(job: str) -> Tree:
    """Return that no two machines of a JobSet are on one node, whose name they have."""
    labels = {"jobset.sigs.k8s.io/jobset-name": job, "jobset.sigs.k8s.io/replicatedjob-name": "machine"}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def shared_memory() -> tuple[Tree, Tree]:
    """Return a volume and its mount, for a /dev/shm as large as the memory of the pod. The default is 64 MiB."""
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return volume, {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108 - that of the pod


def resources(cpus: float, gpus: float, memory_gib: int | None) -> Tree:
    """Return the resources of a container. It may use more processors that are idle, but not more memory."""
    fixed: Tree = {} if memory_gib is None else {"memory": f"{memory_gib}Gi"}
    if gpus:
        fixed["nvidia.com/gpu"] = str(math.ceil(gpus))
    return {"requests": {"cpu": quantity(cpus), **fixed}, **({"limits": fixed} if fixed else {})}


def quantity(amount: float) -> str:
    """Return an amount as Kubernetes writes it: "2", "500m"."""
    return str(int(amount)) if float(amount).is_integer() else f"{round(amount * 1000)}m"


def field(variable: str, path: str) -> Tree:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def secret(variable: str, name: str, key: str) -> Tree:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
