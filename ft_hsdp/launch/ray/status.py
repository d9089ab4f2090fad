"""`status --ray-address`: what a job does, asked of its lighthouse's actor from any node of the cluster."""

from __future__ import annotations

from typing import Any, cast

import ray
import ray.util
from ray.exceptions import RayError

from ft_hsdp.errors import ConfigError, LighthouseUnreachable
from ft_hsdp.launch.ray.cluster import KEY, NAMESPACE, connected, destination
from ft_hsdp.launch.ray.lighthouse import actor_name
from ft_hsdp.launch.status import Status

ANSWER_S = 10.0


def status(address: str, job: str | None) -> tuple[Status, list[str]]:
    """The state of a job, by its name or the only one: for programs, and for people.

    Raises ConfigError, ClusterUnreachable, LighthouseUnreachable.
    """
    there = destination(address)
    if "://" in there:
        raise ConfigError(KEY, there, "auto or HOST:PORT of the cluster's head, on a node of the cluster")
    with connected(there):
        return _ask(job)


def _ask(job: str | None) -> tuple[Status, list[str]]:
    """What the lighthouse's actor says."""
    if job is None:
        job = _only(_jobs())
    try:
        actor = cast(Any, ray.get_actor(actor_name(job), namespace=NAMESPACE))
    except ValueError:
        raise LighthouseUnreachable(f"no job {job} runs on this cluster{_instead(_jobs())}") from None
    try:
        answer = cast(tuple[Status, list[str]], ray.get(actor.status.remote(), timeout=ANSWER_S))
    except RayError as error:
        why = f"the lighthouse of {job} does not answer ({type(error).__name__})"
        raise LighthouseUnreachable(why) from None
    return answer


def _jobs() -> list[str]:
    """The names of the jobs that run."""
    head, tail = actor_name("\0").split("\0")
    named: Any = ray.util.list_named_actors(all_namespaces=True)
    ours = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return sorted(n.removeprefix(head).removesuffix(tail) for n in ours if n.startswith(head) and n.endswith(tail))


def _only(jobs: list[str]) -> str:
    if len(jobs) > 1:
        raise ConfigError("--run", None, f"the name of one of {', '.join(jobs)}")
    if not jobs:
        raise LighthouseUnreachable("no job runs on this cluster")
    return jobs[0]


def _instead(jobs: list[str]) -> str:
    return f" (there is {', '.join(jobs)})" if jobs else ""
