"""A JobSet: a Job for the lighthouse, and one per replica with a pod for each of its nodes.

A Job that fails ends a JobSet, or restarts all of it. So a replica's Job fails only where all would: on a
configuration that is refused (64). Whatever else ends a pod, only that pod is replaced, and the others train on.
With several nodes per replica its pods must start again together, which JobSet can do for one Job since 0.12.
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
from ft_hsdp.launch.render.settings import COMMAND, Shape, Site, check, dump, in_pods, shape, spread
from ft_hsdp.launch.render.text import CommentedValue, comment, document

PORT = 29500
STORE_PORT = 29400  # where the ranks of several nodes meet
FOR_EVER = 2**31 - 1
LEAVE_S = 5  # from the end of the ranks to the end of the pod
INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
GANG = "metadata.labels['batch.kubernetes.io/controller-uid']"  # new with each start of the replica's pods
NOTHING: Mapping[str, str] = MappingProxyType({})

_HEAD = """\
{job}: a lighthouse and {replicas} replicas of {ranks} ranks, for JobSet {version} or later.

The token that all pods share is not in this file. Make it once:
  kubectl create secret generic {secret}{space} --from-literal=token="$(openssl rand -hex 32)"
Then:
  kubectl apply -f FILE
  kubectl get pods{space} -l jobset.sigs.k8s.io/jobset-name={name}
  kubectl delete -f FILE   (its journal, too, where no --claim was given)
"""


def jobset(config: Config, site: Site) -> str:
    """The manifest of `config`'s job. Raises ConfigError for what Kubernetes or its pods could not do."""
    check(site)
    held = shape(config, site)
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
                f"the lighthouse is {name}-lighthouse-0-0.{name}, whichever pod it is",
                {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            ),
            "successPolicy": CommentedValue(
                "the lighthouse ends when all replicas have",
                {"operator": "All", "targetReplicatedJobs": ["replica"]},
            ),
            "failurePolicy": _failures(held),
            "replicatedJobs": [
                _lighthouse(site, name, secret, runs, where),
                _replica(config, site, held, name, secret, where),
            ],
        },
    }
    parts = [pod.config_map(name, site.namespace, dump(settings))]
    if site.claim is None:
        parts.append(pod.runs_claim(name, site.namespace))
    space = "" if site.namespace is None else f" -n {site.namespace}"
    said = {"replicas": config.slots, "ranks": config.ranks_per_replica, "secret": secret, "space": space}
    version = "0.8" if held.nodes == 1 else "0.12"
    head = comment(_HEAD.format(job=config.job.name, name=name, version=version, **said))
    return head + "---\n".join(document(part) for part in (*parts, jobs))


def _failures(held: Shape) -> CommentedValue:
    """What a Job that fails means to the JobSet."""
    if held.nodes == 1:
        return CommentedValue(
            "a Job fails only on a configuration that is refused, as it would be again", {"maxRestarts": 0}
        )
    alone = {"name": "alone", "action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": ["replica"]}
    text = (
        "the pods of a replica start again together, and no others: JobSet 0.12 with its feature gate RestartJob"
    )
    return CommentedValue(text, {"maxRestarts": 0, "rules": [alone]})


def _lighthouse(site: Site, name: str, secret: str, runs: str, where: str) -> Tree:
    """One pod, started again where it is: its address stays, and its journal outlives it."""
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
    job = {"parallelism": 1, "completions": 1, "backoffLimit": FOR_EVER, "template": {"spec": spec}}
    return {"name": "lighthouse", "replicas": 1, "template": {"spec": job}}


def _replica(config: Config, site: Site, held: Shape, name: str, secret: str, where: str) -> Tree:
    """A Job per replica, with a pod per node of it."""
    memory, mount = pod.shared_memory()
    container = pod.container(
        "replica",
        site.image,
        command=["python", *_start(held, name), *COMMAND],
        args=["replica", CONFIG, "--replica", "$(REPLICA)", "--lighthouse", where],
        env=[
            *_environment(secret, {"REPLICA": INDEX, **({"GANG": GANG} if held.nodes > 1 else {})}),
        ],
        resources=pod.resources(held.cpus, held.gpus, site.memory_gib),
        mounts=[mount],
    )
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": CommentedValue(
            "after SIGTERM a replica leaves when its step is committed: timeouts.stop_s",
            math.ceil(config.timeouts.stop_s) + LEAVE_S,
        ),
        **pod.rights(),
        "containers": [container],
        "volumes": [*pod.volumes(f"{name}-config", site.claim), memory],
    }
    size = {"parallelism": held.nodes, "completions": held.nodes, "completionMode": "Indexed"}
    job = {**size, **_retries(held), "template": {"spec": spec}}
    return {
        "name": "replica",
        "replicas": config.slots,
        "dependsOn": [{"name": "lighthouse", "status": "Ready"}],
        "template": {"spec": job},
    }


def _retries(held: Shape) -> Tree:
    """What the end of a pod means to its Job: on one node the pod is replaced, on several all of them are."""
    if held.nodes > 1:
        return {"backoffLimit": 0}
    refused = {"containerName": "replica", "operator": "In", "values": [EXIT_CONFIG]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        CommentedValue("the configuration was refused", {"action": "FailJob", "onExitCodes": refused}),
        CommentedValue(
            "preempted, drained, or its node lost", {"action": "Ignore", "onPodConditions": [disrupted]}
        ),
    ]
    text = "else the pod is replaced as often as it takes, each time later, up to 6 minutes"
    return {"backoffLimit": CommentedValue(text, FOR_EVER), "podFailurePolicy": {"rules": rules}}


def _start(held: Shape, name: str) -> list[str]:
    """How the ranks of a pod are started: by our supervisor, on several nodes by torchrun."""
    if held.nodes == 1:
        return []
    meet = f"{name}-replica-$(REPLICA)-0.{name}:{STORE_PORT}"
    size = [f"--nnodes={held.nodes}", f"--nproc-per-node={held.ranks}", "--max-restarts=0"]
    return [
        "-m",
        "torch.distributed.run",
        *size,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meet}",
        "--rdzv-id=$(GANG)",
    ]


def _environment(secret: str, labels: Mapping[str, str] = NOTHING) -> list[Tree]:
    """The token, a home for a user that the image does not know, and what the pod's labels say."""
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in labels.items()]
    home = {"HOME": "/tmp", "USER": "ft-hsdp"}  # noqa: S108 - the pod's
    said = [{"name": name, "value": value} for name, value in home.items()]
    return [*fields, pod.secret("FT_HSDP_TOKEN", secret, "token"), *said]
