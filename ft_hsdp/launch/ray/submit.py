"""The commands for a Ray cluster: `submit`, and `status --ray-address`.

On a node of the cluster, `submit` runs the same job as `up`: this process is a driver of the cluster, and provides
the job's hosts. From outside, `submit` uses the cluster's Jobs API, and the driver runs on a node of the cluster.
`status` asks a named actor on the driver's node, from any node of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import ray
import ray.job_submission
import ray.util
import requests
from ray.exceptions import RayError

from ft_hsdp.address import loopback, unspecified
from ft_hsdp.config import Config
from ft_hsdp.config.entry import stamped
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, LighthouseUnreachable, Retryable
from ft_hsdp.launch.backend.forkserver import ENTRY
from ft_hsdp.launch.job import prepare_data, run_job, start_run
from ft_hsdp.launch.lighthouse_process import check_port
from ft_hsdp.launch.ray.cluster import (
    KEY,
    NAMESPACE,
    ClusterUnreachable,
    check_listening,
    connected,
    destination,
    first_line,
)
from ft_hsdp.launch.ray.placement import has_room, hosts_of_a_replica
from ft_hsdp.launch.ray.replicas import RayReplicas, actor_name
from ft_hsdp.launch.run.status import Status
from ft_hsdp.launch.run.summary import Summary

ANSWER_S = 10.0


def status(address: str, job: str | None) -> tuple[Status, list[str]]:
    """Return the status of a job, and the lines that show it to people. Blocks.

    Args:
        address: `--ray-address`.
        job: Its name; None if it is the only one.

    Raises:
        ConfigError: The address is not that of a cluster, or several jobs run.
        ClusterUnreachable: There is no cluster, or it refuses this process.
        LighthouseUnreachable: The job does not run, or its lighthouse does not answer.
    """
    there = destination(address)
    if "://" in there:
        raise ConfigError(KEY, there, "auto or HOST:PORT of the cluster's head, on a node of the cluster")
    with connected(there):
        return _ask(job)


def _ask(job: str | None) -> tuple[Status, list[str]]:
    if job is None:
        job = _only(_jobs())
    try:
        actor = cast(Any, ray.get_actor(actor_name(job), namespace=NAMESPACE))
    except ValueError:
        there = f" (there is {', '.join(jobs)})" if (jobs := _jobs()) else ""
        raise LighthouseUnreachable(f"no job {job} runs on this cluster{there}") from None
    try:
        answer = cast(tuple[Status, list[str]], ray.get(actor.status.remote(), timeout=ANSWER_S))
    except RayError as error:
        why = f"the lighthouse of {job} does not answer ({type(error).__name__})"
        raise LighthouseUnreachable(why) from None
    return answer


def _jobs() -> list[str]:
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


STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # time between SIGTERM and SIGKILL to a job's driver; Ray's default is 3
MARGIN_S = 10.0  # for what a driver does besides waiting for replicas: the summary, freeing resources
END_S = 30.0  # from the end of a job's log to its exit code
POLL_S = 0.2


def submit_through_jobs_api(config: Config, file: Path, overrides: Sequence[str], url: str, *, json: bool) -> int:
    """Run `submit` on the cluster whose Jobs API is at `url` and show its log until it ends. Ctrl-C stops the job.

    Args:
        overrides: The overrides of its keys, as given on the command line.
        json: Show the log on stderr, and the document on stdout.

    Returns:
        The exit code of the driver.

    Raises:
        ClusterUnreachable: The Jobs API does not answer, or refuses the job.
        ConfigError: It refuses the runtime environment.
        Retryable: The connection ended before the job did.
    """
    env = job_environment(config)
    command = entrypoint(file, overrides, uploaded="working_dir" in env, json=json)
    check_listening(url)
    job = f"{config.job.name}-{secrets.token_hex(4)}"  # known before the answer: the job may run without one
    client = None
    try:
        client = ray.job_submission.JobSubmissionClient(url)
        client.submit_job(entrypoint=command, runtime_env=env, submission_id=job)
    except KeyboardInterrupt:
        if client is not None:
            with contextlib.suppress(Exception):
                client.stop_job(job)
        raise
    except (RayError, ConnectionError, requests.RequestException) as error:
        may_run = "" if client is None else f"; {job} may run there"
        raise ClusterUnreachable(
            f"the Jobs API at {url} does not take the job: {first_line(error)}{may_run}"
        ) from None
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            KEY, url, f"the Jobs API of a cluster that takes ray.runtime_env ({first_line(error)})"
        ) from None
    end_s = END_S + float(env["env_vars"][STOP_WAIT])
    try:
        try:
            asyncio.run(_follow(client, job, sys.stderr if json else sys.stdout, sys.stdout if json else None))
            return asyncio.run(_code(client, job, end_s))
        except KeyboardInterrupt:
            client.stop_job(job)
            asyncio.run(_code(client, job, end_s))
            raise
    except requests.RequestException as error:
        raise Retryable(f"the Jobs API at {url} is gone: {first_line(error)}; {job} may run on") from None


def job_environment(config: Config) -> dict[str, Any]:
    """Return the job's runtime environment, with enough time for the driver between SIGTERM and SIGKILL.

    Raises:
        ConfigError: ray.runtime_env sets that time, and not to whole seconds.
    """
    waits = config.timeouts
    env = dict(config.ray.runtime_env)
    needed = str(math.ceil(waits.stop_s + waits.gone_s + MARGIN_S))
    variables = {STOP_WAIT: needed, **(env.get("env_vars") or {})}
    if not str(variables[STOP_WAIT]).isdecimal():
        raise ConfigError(f"ray.runtime_env.env_vars.{STOP_WAIT}", variables[STOP_WAIT], "whole seconds")
    return {**env, "env_vars": variables}


def entrypoint(file: Path, overrides: Sequence[str], *, uploaded: bool, json: bool) -> str:
    """Return the command that the cluster runs.

    Args:
        uploaded: ray.runtime_env has a working_dir, which Ray uploads. Else all nodes have the same files.
    """
    config = str(file) if uploaded else str(file.resolve())
    words = ["python", "-m", "ft_hsdp.launch.cli", "submit", config, *overrides, *(["--json"] if json else [])]
    return shlex.join(words)


async def _follow(client: Any, job: str, log: TextIO, document: TextIO | None) -> None:
    """Write the log to `log` until the job ends, and its last JSON line to `document`, if there is one."""
    last = ""
    try:
        async for text in client.tail_job_logs(job):
            for line in text.splitlines(keepends=True):
                if document is not None and line.startswith("{"):
                    last = line
                else:
                    log.write(line)
            log.flush()
    except (RuntimeError, OSError) as error:
        raise Retryable(f"the log of {job} ended: {first_line(error)}; the job may run on") from None
    if document is not None:
        document.write(last)
        document.flush()


async def _code(client: Any, job: str, end_s: float) -> int:
    """Wait up to `end_s` for the end of the job, and return the exit code of its driver."""
    for _ in range(int(end_s / POLL_S)):
        info = await asyncio.to_thread(client.get_job_info, job)
        if info.status.is_terminal():
            if info.driver_exit_code is None and info.message:
                sys.stderr.write(f"{first_line(RuntimeError(info.message))}\n")
            return EXIT_RETRYABLE if info.driver_exit_code is None else int(info.driver_exit_code)
        await asyncio.sleep(POLL_S)
    raise Retryable(f"the Jobs API does not say how {job} ended within {end_s:g} s")


def submit(
    config: Config, address: str, *, stream: TextIO | None = None, entry: str = ENTRY
) -> tuple[int, Summary | None]:
    """Run a job on a cluster until every replica is done, as `up` does on one machine. Blocks.

    Args:
        address: "auto" or HOST:PORT of the cluster.
        stream: Takes what is shown; None: stdout.
        entry: What runs in a rank.

    Returns:
        The exit code, and the summary if there is one.

    Raises:
        ConfigError: The job cannot run on this cluster; nothing was started.
        ClusterUnreachable: There is no cluster, or it refuses this process; nothing was started.
    """
    config = stamped(config)
    check(config)
    for note in not_used(config):
        print(note, file=sys.stderr)  # noqa: T201 - one line for the user
    config = with_hosts(config)
    prepare_data(config)
    with connected(address, config.ray.runtime_env) as (cluster, output):
        alone = cluster.addresses <= {cluster.address} and has_room(config, cluster.resources)
        config = within_reach(config, cluster.address, alone)
        check_port(config)
        run = start_run(config)
        output.keep(run.path / "ray.log")
        replicas = partial(RayReplicas, config, run, cluster=cluster, entry=entry)
        return run_job(config, run, replicas, stream or sys.stdout)


def check(config: Config) -> None:
    """Check that a job can run on a cluster.

    Raises:
        ConfigError: It asks for something that a cluster cannot give, or does not need.
    """
    if config.train.device != "cpu" and "GPU" not in config.ray.bundle:
        raise ConfigError(
            "ray.resources.GPU", 0, f"1 with train.device {config.train.device}: ranks see no other GPUs"
        )
    if config.lighthouse.count > 1:
        raise ConfigError("lighthouse.count", config.lighthouse.count, "1 with submit: Ray starts it again")
    hosts = hosts_of_a_replica(config)
    if config.memory.shrink_to is not None and hosts == 1:
        allowed = "null with ray.strategy STRICT_PACK: a replica on one node loses all its ranks at once"
        raise ConfigError("memory.shrink_to", config.memory.shrink_to, allowed)
    gpus = config.ray.bundle.get("GPU", 0.0) * config.ranks_per_replica
    if hosts == 1 and gpus > 1 and gpus % 1:
        allowed = f"whole GPUs for all {config.ranks_per_replica} ranks of a replica on one node"
        raise ConfigError("ray.resources.GPU", config.ray.bundle["GPU"], allowed)
    nodes = config.slots * hosts
    if (config.memory.copies or 1) > nodes:  # what the nodes that there are allow, the ranks find out
        allowed = f"at most {nodes} here: the ranks are on {nodes} nodes at most; or null: as many as possible"
        raise ConfigError("memory.copies", config.memory.copies, allowed)
    for i, rule in enumerate(config.chaos):
        if rule.kind != "signal":
            allowed = "signal with submit: the other kinds act on processes of this machine"
            raise ConfigError(f"chaos.{i}.kind", rule.kind, allowed)


def not_used(config: Config) -> list[str]:
    """Return a line about each key that counts for nothing on a cluster, if it is given."""
    hosts, found = config.hosts, list[str]()
    if hosts.per_replica:
        spare = f" and hosts.spare: {hosts.spare} are" if hosts.spare else " is"  # that needs hosts.per_replica
        where = "ray.strategy says how many nodes a replica has, and any free node is a spare one"
        found.append(f"hosts.per_replica: {hosts.per_replica}{spare} not used here: {where}")
    if config.spares and hosts_of_a_replica(config) > 1:
        found.append(
            f"spares: {config.spares} is not used here: a spare stands on one node (ray.strategy STRICT_PACK)"
        )
    return found


def with_hosts(config: Config) -> Config:
    """Return the configuration with the hosts that a replica has on a cluster."""
    hosts = hosts_of_a_replica(config)
    changes: dict[str, Any] = {
        "hosts": config.hosts.model_copy(update={"per_replica": hosts if hosts > 1 else None, "spare": 0})
    }
    return config.model_copy(update=changes | ({"spares": 0} if hosts > 1 else {}))


def within_reach(config: Config, own: str, alone: bool) -> Config:
    """Return the configuration with a network.host at which the other nodes reach this one.

    Args:
        own: The address of this node.
        alone: This node is the whole cluster and has room for the job, so loopback is enough.
    """
    host = config.network.host
    if not unspecified(host) and (alone or not loopback(host)):
        return config
    return config.model_copy(update={"network": config.network.model_copy(update={"host": own})})
