"""A JobSet: a Job for the lighthouse, and one per node, which is a replica or a machine with an agent.

A Job that fails ends a JobSet or restarts all of it. So a Job fails only for a reason that all share: a refused
configuration (exit code 64). After any other end only the pod is replaced, and the others go on training.
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
    Shape,
    Site,
    check,
    in_pods,
    note,
    shape,
    spread,
)
from ft_hsdp.memory.hosts import DOMAINS_VARIABLE
from ft_hsdp.train.identity import HOST_VARIABLE

PORT = 29500
NO_LIMIT = 2**31 - 1
LEAVE_S = 5  # from the end of the ranks to the end of the pod
ZONE = "metadata.labels['topology.kubernetes.io/zone']"  # that of the node, on the pod since Kubernetes 1.35
INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
NOTHING: Mapping[str, str] = MappingProxyType({})

_HEAD = """\
{job}: a lighthouse and {replicas} replicas of {ranks} ranks{entry}, for JobSet 0.8 or later.

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
    config = in_pods(spread(config, layout), site.claim)
    settings = config.model_copy(update={"network": config.network.model_copy(update={"port": port})})
    secret = site.secret or f"{name}-token"
    runs = site.claim or f"{name}-runs"
    where = f"http://{name}-lighthouse-0-0.{name}:{port}"
    jobs = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.metadata(name, site.namespace, name),
        "spec": {
            **note(f"the lighthouse is {name}-lighthouse-0-0.{name}, also after its pod was replaced"),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            **note(f"the lighthouse ends when each {layout.part} has ended"),
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [layout.part]},
            **note("a Job fails only on a refused configuration, and a restart would not help"),
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                _lighthouse(site, name, secret, runs, where),
                _nodes(config, site, layout, name, secret, where),
            ],
        },
    }
    return pod.manifest(_HEAD, settings, site, jobs, replicas=config.slots, secret=secret)


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
    template = pod.template(name, container, runs, restartPolicy="OnFailure", terminationGracePeriodSeconds=10)
    job = {"parallelism": 1, "completions": 1, "backoffLimit": NO_LIMIT, "template": template}
    return {"name": "lighthouse", "replicas": 1, "template": {"spec": job}}


def _nodes(config: Config, site: Site, layout: Shape, name: str, secret: str, where: str) -> Tree:
    """Return the Jobs of the replicas or machines, of one pod each."""
    memory, mount = pod.shared_memory()
    alone = layout.part == "replica"
    start = ["replica", CONFIG, "--replica", "$(REPLICA)"] if alone else ["host", CONFIG]
    labels = {**({"REPLICA": INDEX} if alone else {}), HOST_VARIABLE: pod.NODE, "ZONE": ZONE}
    container = pod.container(
        layout.part,
        site.image,
        command=["python", *COMMAND],
        args=[*start, "--lighthouse", where],
        env=[*_environment(secret, labels), {"name": DOMAINS_VARIABLE, "value": "zone=$(ZONE)"}],
        resources=pod.resources(layout.cpus, layout.gpus, site.memory_gib),
        mounts=[mount],
    )
    stop_s = math.ceil(config.timeouts.stop_s) + LEAVE_S
    why = "after SIGTERM a rank leaves when its step is committed, within timeouts.stop_s"
    first = {"restartPolicy": "Never", **note(why), "terminationGracePeriodSeconds": stop_s}
    placed = {} if alone else {"affinity": pod.apart(name)}
    template = pod.template(name, container, site.claim, memory, **first, **placed)
    job = {"parallelism": 1, "completions": 1, **_retries(layout), "template": template}
    return {
        "name": layout.part,
        "replicas": layout.count,
        "dependsOn": [{"name": "lighthouse", "status": "Ready"}],
        "template": {"spec": job},
    }


def _retries(layout: Shape) -> Tree:
    """Return what a Job does when its pod ends."""
    refused = {"containerName": layout.part, "operator": "In", "values": [EXIT_CONFIG]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {**note("the configuration was refused"), "action": "FailJob", "onExitCodes": refused},
        {
            **note("the pod was preempted or drained, or its node was lost"),
            "action": "Ignore",
            "onPodConditions": [disrupted],
        },
    ]
    text = "else the pod is replaced without a limit, each time after a longer delay of up to 6 minutes"
    return {**note(text), "backoffLimit": NO_LIMIT, "podFailurePolicy": {"rules": rules}}


def _environment(secret: str, labels: Mapping[str, str] = NOTHING) -> list[Tree]:
    """Return the token, a home folder for a user that the image does not know, and the values of labels."""
    fields = [pod.field(name, path) for name, path in labels.items()]
    variables = {"HOME": "/tmp", "USER": "ft-hsdp"}  # noqa: S108 - the pod's
    fixed = [{"name": name, "value": value} for name, value in variables.items()]
    return [*fields, pod.secret("FT_HSDP_TOKEN", secret, "token"), *fixed]
