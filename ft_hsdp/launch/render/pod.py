"""What all pods of a rendered job share: the job's name, their rights, their files, and the secrets' source.

The name is a DNS label (RFC 1035), as Kubernetes demands, with room for what is added to it.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render.settings import FOLDER

LONGEST = 42  # a pod's name is a label, too: 63 without "-lighthouse-0-0-abcde"


def label(name: str) -> str:
    """`name` in lower case, with a dash for what a label may not have, and a letter first.

    Raises ConfigError on job.name where that is too long, or nothing is left.
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

Tree = dict[str, Any]


def metadata(name: str, namespace: str | None, job: str) -> Tree:
    """Of an object of `job`."""
    placed = {} if namespace is None else {"namespace": namespace}
    return {
        "name": name,
        **placed,
        "labels": {"app.kubernetes.io/name": "ft-hsdp", "app.kubernetes.io/instance": job},
    }


def config_map(job: str, namespace: str | None, settings: str) -> Tree:
    """The configuration as an object."""
    head = {"apiVersion": "v1", "kind": "ConfigMap"}
    return {**head, "metadata": metadata(f"{job}-config", namespace, job), "data": {"config.yaml": settings}}


def runs_claim(job: str, namespace: str | None) -> Tree:
    """A volume that one pod at a time writes: what must outlive it."""
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
    """What a pod may do: Kubernetes' level "restricted", and nothing with the cluster itself."""
    context = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {"automountServiceAccountToken": False, "securityContext": context}


def no_more_rights() -> Tree:
    """securityContext of a container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def container(name: str, image: str, **more: Any) -> Tree:
    """A container that gains no rights, with the configuration and the runs mounted."""
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


def volumes(config: str, claim: str | None) -> list[Tree]:
    """The configuration, and the runs: in a claim, or in the pod as long as it lives."""
    runs: Tree = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    return [{"name": "config", "configMap": {"name": config}}, {"name": "runs", **runs}]


def shared_memory() -> tuple[Tree, Tree]:
    """A volume and its mount: /dev/shm as large as the memory of the pod, not 64 MiB."""
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return volume, {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108 - that of the pod


def resources(cpus: float, gpus: float, memory_gib: int | None) -> Tree:
    """Of a container. More processors may be used where they are free; memory and GPUs are what was asked for."""
    fixed: Tree = {} if memory_gib is None else {"memory": f"{memory_gib}Gi"}
    if gpus:
        fixed["nvidia.com/gpu"] = str(math.ceil(gpus))
    return {"requests": {"cpu": quantity(cpus), **fixed}, **({"limits": fixed} if fixed else {})}


def quantity(amount: float) -> str:
    """As Kubernetes writes it: "2", "500m"."""
    return str(int(amount)) if float(amount).is_integer() else f"{round(amount * 1000)}m"


def secret(variable: str, name: str, key: str) -> Tree:
    """An environment variable that comes from a Secret."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
