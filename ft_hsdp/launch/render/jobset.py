"""A JobSet: a Job for the lighthouse, and one per replica with a pod for each of its nodes.

A Job that fails ends a JobSet or restarts all of it. So a replica's Job fails only for a reason that all replicas
share: a refused configuration (exit code 64). After any other end only the pod is replaced, and the others go on
training. The pods of a replica on several nodes must restart together; JobSet can do that for one Job since 0.12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import urlsplit

from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_CONFIG
from ft_hsdp.launch.render import pod
from ft_hsdp.launch.render.pod import CONFIG, Tree, label
from ft_hsdp.launch.render.settings import (
    COMMAND,
    CommentedValue,
    Shape,
    Site,
    check,
    in_pods,
    shape,
    spread,
)
from ft_hsdp.memory.hosts import DOMAINS_VARIABLE
from ft_hsdp.train.identity import HOST_VARIABLE

PORT = 29500
STORE_PORT = 29400  # rendezvous of the ranks of several nodes
NO_LIMIT = 2**31 - 1
LEAVE_S = 5  # from the end of the ranks to the end of the pod
ZONE = "metadata.labels['topology.kubernetes.io/zone']"  # that of the node, on the pod since Kubernetes 1.35
INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"  # new with each start of the replica's pods
NOTHING: Mapping[str, str] = MappingProxyType({})

_HEAD = """\
{job}: a lighthouse and {replicas} replicas of {ranks} ranks{entry}, for JobSet {version} or later.

The token that all pods share is not in this file. Create it once:
  kubectl create secret generic {secret}{space} --from-literal=token="$(openssl rand -hex 32)"
Then:
  kubectl apply -f FILE
  kubectl get pods{space} -l jobset.sigs.k8s.io/jobset-name={name}
  kubectl delete -f FILE   (without --claim this deletes the journal as well)
"""


def jobset(config: Config, site: Site) -> str:
    """Return the manifest of a job.

    Raises:
        ConfigError: Kubernetes or its pods cannot run this configuration.
    """
    check(site)
    layout = shape(config, site)
    name = label(config.job.name)
    port = config.network.port or PORT
    config = in_pods(spread(config), site.claim)
    settings = config.model_copy(update={"network": config.network.model_copy(update={"port": port})})
    secret = site.secret or f"{name}-token"
    runs = site.claim or f"{name}-runs"
    where = f"http://{name}-lighthouse-0-0.{name}:{port}"
    jobs = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.metadata(name, site.namespace, name),
        "spec": {
            "network": CommentedValue(
                f"the lighthouse is {name}-lighthouse-0-0.{name}, also after its pod was replaced",
                {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            ),
            "successPolicy": CommentedValue(
                "the lighthouse ends when all replicas have ended",
                {"operator": "All", "targetReplicatedJobs": ["replica"]},
            ),
            "failurePolicy": _failures(layout),
            "replicatedJobs": [
                _lighthouse(site, name, secret, runs, where),
                _replica(config, site, layout, name, secret, where),
            ],
        },
    }
    version = "0.8" if layout.nodes == 1 else "0.12"
    return pod.manifest(_HEAD, settings, site, jobs, replicas=config.slots, secret=secret, version=version)


def _failures(layout: Shape) -> CommentedValue:
    """Return what the JobSet does when a Job fails."""
    if layout.nodes == 1:
        return CommentedValue(
            "a Job fails only on a refused configuration, and a restart would not help", {"maxRestarts": 0}
        )
    alone = {"name": "alone", "action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": ["replica"]}
    text = "only the pods of one replica restart, all together: JobSet 0.12 with its feature gate RestartJob"
    return CommentedValue(text, {"maxRestarts": 0, "rules": [alone]})


def _lighthouse(site: Site, name: str, secret: str, runs: str, where: str) -> Tree:
    """Return the Job of the lighthouse: one pod that restarts in place, with the same address and journal."""
    port = urlsplit(where).port
    probe = {"httpGet": {"path": "/healthz", "port": port}, "periodSeconds": 2}
    container = pod.container(
        "lighthouse",
        site.image,
        command=["python", *COMMAND],
        args=["lighthouse", CONFIG, "--url", where],
        env=_environment(secret),
        ports=[{"containerPort": port}],
        readinessProbe=probe,
        resources=pod.resources(1, 0, 2),
    )
    spec = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 10,
        **pod.rights(),
        "containers": [container],
        "volumes": pod.volumes(f"{name}-config", runs),
    }
    job = {"parallelism": 1, "completions": 1, "backoffLimit": NO_LIMIT, "template": {"spec": spec}}
    return {"name": "lighthouse", "replicas": 1, "template": {"spec": job}}


def _replica(config: Config, site: Site, layout: Shape, name: str, secret: str, where: str) -> Tree:
    """Return the Jobs of the replicas, with a pod for each node of a replica."""
    memory, mount = pod.shared_memory()
    container = pod.container(
        "replica",
        site.image,
        command=["python", *_start(layout, name), *COMMAND],
        args=["replica", CONFIG, "--replica", "$(REPLICA)", "--lighthouse", where],
        env=[
            *_environment(
                secret,
                {
                    "REPLICA": INDEX,
                    **({"JOB_UID": JOB_UID} if layout.nodes > 1 else {}),
                    HOST_VARIABLE: pod.NODE,
                    "ZONE": ZONE,
                },
            ),
            {"name": DOMAINS_VARIABLE, "value": "zone=$(ZONE)"},
        ],
        resources=pod.resources(layout.cpus, layout.gpus, site.memory_gib),
        mounts=[mount],
    )
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": CommentedValue(
            "after SIGTERM a replica leaves when its step is committed, within timeouts.stop_s",
            math.ceil(config.timeouts.stop_s) + LEAVE_S,
        ),
        **pod.rights(),
        "containers": [container],
        "volumes": [*pod.volumes(f"{name}-config", site.claim), memory],
    }
    size = {"parallelism": layout.nodes, "completions": layout.nodes, "completionMode": "Indexed"}
    job = {**size, **_retries(layout), "template": {"spec": spec}}
    return {
        "name": "replica",
        "replicas": config.slots,
        "dependsOn": [{"name": "lighthouse", "status": "Ready"}],
        "template": {"spec": job},
    }


def _retries(layout: Shape) -> Tree:
    """Return what a Job does when a pod ends: on one node the pod is replaced, on several the Job fails."""
    if layout.nodes > 1:
        return {"backoffLimit": 0}
    refused = {"containerName": "replica", "operator": "In", "values": [EXIT_CONFIG]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        CommentedValue("the configuration was refused", {"action": "FailJob", "onExitCodes": refused}),
        CommentedValue(
            "the pod was preempted or drained, or its node was lost",
            {"action": "Ignore", "onPodConditions": [disrupted]},
        ),
    ]
    text = "else the pod is replaced without a limit, each time after a longer delay of up to 6 minutes"
    return {"backoffLimit": CommentedValue(text, NO_LIMIT), "podFailurePolicy": {"rules": rules}}


def _start(layout: Shape, name: str) -> list[str]:
    """Return how the ranks of a pod are started: by the supervisor, or by torchrun for several nodes."""
    if layout.nodes == 1:
        return []
    meet = f"{name}-replica-$(REPLICA)-0.{name}:{STORE_PORT}"
    size = [f"--nnodes={layout.nodes}", f"--nproc-per-node={layout.ranks}", "--max-restarts=0"]
    return [
        "-m",
        "torch.distributed.run",
        *size,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meet}",
        "--rdzv-id=$(JOB_UID)",
    ]


def _environment(secret: str, labels: Mapping[str, str] = NOTHING) -> list[Tree]:
    """Return the token, a home folder for a user that the image does not know, and the values of labels."""
    fields = [pod.field(name, path) for name, path in labels.items()]
    variables = {"HOME": "/tmp", "USER": "ft-hsdp"}  # noqa: S108 - the pod's
    fixed = [{"name": name, "value": value} for name, value in variables.items()]
    return [*fields, pod.secret("FT_HSDP_TOKEN", secret, "token"), *fixed]
