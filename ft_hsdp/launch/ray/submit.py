"""The commands for a Ray cluster: `submit`, and `status --ray-address`.

`submit` on a node of the cluster runs the job of `up` there: this process is the job's supervisor, and a driver of
the cluster. From outside, `submit` goes through the cluster's Jobs API: the driver then runs on a node of it.
`status` asks the job's lighthouse, which is a named actor, from any node of the cluster.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import ray
import ray.job_submission
import ray.util
import requests
from ray.exceptions import RayError

from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, LighthouseUnreachable, Retryable
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.job import JobResources, JobRun
from ft_hsdp.launch.lighthouse_process import check_port, furnish
from ft_hsdp.launch.local import prepare_data
from ft_hsdp.launch.ray.backend import RayBackend, loopback
from ft_hsdp.launch.ray.cluster import (
    KEY,
    NAMESPACE,
    Cluster,
    ClusterUnreachable,
    connected,
    destination,
    first_line,
    knock,
)
from ft_hsdp.launch.ray.lighthouse import RayLighthouse, actor_name
from ft_hsdp.launch.ray.placement import roomy
from ft_hsdp.launch.run.directory import Row, RunDir, claim, identity, write_json
from ft_hsdp.launch.run.status import Status
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.launch.run.terminal import Terminal

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


PATIENCE = "RAY_JOB_STOP_WAIT_TIME_S"  # between SIGTERM and SIGKILL to a job's driver; 3 where it is not set
MARGIN_S = 10.0  # for what a driver does besides waiting for replicas: the summary, the cluster's resources
END_S = 30.0  # from the end of a job's log to its exit code
LOOK_S = 0.2


def submit_through_jobs_api(config: Config, file: Path, overrides: Sequence[str], url: str, *, json: bool) -> int:
    """Have the cluster whose Jobs API is at `url` run `launcher.py submit`; follow its log; its exit code.

    Ctrl-C stops the job there. With `json` the log goes to stderr, and the document to stdout.
    Raises ClusterUnreachable, ConfigError, Retryable.
    """
    env = patient(config)
    command = entrypoint(file, overrides, uploaded="working_dir" in env, json=json)
    knock(url)
    try:
        client = ray.job_submission.JobSubmissionClient(url)
        job = client.submit_job(entrypoint=command, runtime_env=env)
    except (RayError, ConnectionError, requests.RequestException) as error:
        raise ClusterUnreachable(f"the Jobs API at {url} does not take the job: {first_line(error)}") from None
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            KEY, url, f"the Jobs API of a cluster that takes ray.runtime_env ({first_line(error)})"
        ) from None
    end_s = END_S + float(env["env_vars"][PATIENCE])
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


def patient(config: Config) -> dict[str, Any]:
    """The job's runtime environment, in which Ray does not kill a driver that was told to stop before it has.

    Raises ConfigError.
    """
    waits = config.timeouts
    env = dict(config.ray.runtime_env)
    needed = str(math.ceil(waits.stop_s + waits.gone_s + MARGIN_S))
    variables = {PATIENCE: needed, **(env.get("env_vars") or {})}
    if not str(variables[PATIENCE]).isdecimal():
        raise ConfigError(f"ray.runtime_env.env_vars.{PATIENCE}", variables[PATIENCE], "whole seconds")
    return {**env, "env_vars": variables}


def entrypoint(file: Path, overrides: Sequence[str], *, uploaded: bool, json: bool) -> str:
    """The command that the cluster runs; without an uploaded folder all nodes have the same files."""
    config = str(file) if uploaded else str(file.resolve())
    words = ["python", "-m", "ft_hsdp.launch.cli", "submit", config, *overrides, *(["--json"] if json else [])]
    return shlex.join(words)


async def _follow(client: Any, job: str, log: TextIO, document: TextIO | None) -> None:
    """Show the log until the job ends; its last line is the document, where one is wanted."""
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
    """The exit code of the job's driver, once it has ended."""
    for _ in range(int(end_s / LOOK_S)):
        info = await asyncio.to_thread(client.get_job_info, job)
        if info.status.is_terminal():
            if info.driver_exit_code is None and info.message:
                sys.stderr.write(f"{first_line(RuntimeError(info.message))}\n")
            return EXIT_RETRYABLE if info.driver_exit_code is None else int(info.driver_exit_code)
        await asyncio.sleep(LOOK_S)
    raise Retryable(f"the Jobs API does not say how {job} ended within {end_s:g} s")


def submit(
    config: Config, address: str, *, stream: TextIO | None = None, entry: str = ENTRY
) -> tuple[int, Summary | None]:
    """Run a job on the cluster at `address` ("auto" or HOST:PORT) until every replica is done; see `up`.

    entry: what runs in a rank.

    Raises ConfigError and ClusterUnreachable before anything is started.
    """
    check(config)
    prepare_data(config)
    out = stream or sys.stdout
    with connected(address, config.ray.runtime_env) as (cluster, said):
        alone = cluster.addresses <= {cluster.address} and roomy(config, cluster.resources)
        config = within_reach(config, cluster.address, alone)
        check_port(config)
        run = RunDir(Path(config.job.runs_dir).resolve() / config.job.name)
        claim(run)
        said.keep(run.path / "ray.log")
        furnish(run, config)
        write_json(run.supervisor, identity())
        with Terminal(config, out) as terminal:
            return asyncio.run(JobRun(config, run, terminal, there(config, run, cluster, entry=entry)).run())


def there(
    config: Config, run: RunDir, cluster: Cluster, *, entry: str = ENTRY, preload: tuple[str, ...] = PRELOAD
) -> Callable[[Callable[[Row], None]], JobResources]:
    """The means of a cluster. entry, preload: see `ForkServer`."""

    def means(emit: Callable[[Row], None]) -> JobResources:
        lighthouse = RayLighthouse(run, cluster.node, emit)
        backend = RayBackend(config, run, lambda: lighthouse.urls, cluster.cwd, emit, entry=entry, preload=preload)
        return JobResources(backend, lighthouse)

    return means


def check(config: Config) -> None:
    """Raise ConfigError for what a cluster cannot give, or does not need."""
    if config.train.device != "cpu" and not config.ray.gpus_per_rank:
        raise ConfigError(
            "ray.gpus_per_rank", 0, f"1 with train.device {config.train.device}: ranks see no other GPUs"
        )
    if config.lighthouse.count > 1:
        raise ConfigError("lighthouse.count", config.lighthouse.count, "1 with submit: Ray starts it again")
    for i, rule in enumerate(config.chaos):
        if rule.kind != "signal":
            allowed = "signal with submit: the other kinds act on processes of this machine"
            raise ConfigError(f"chaos.{i}.kind", rule.kind, allowed)


def within_reach(config: Config, own: str, alone: bool) -> Config:
    """The configuration with an address at which other nodes reach this one, whose address is `own`.

    alone: the cluster is this node, and has room for the job; then loopback does.
    """
    host = config.network.host
    if not _everywhere(host) and (alone or not loopback(host)):
        return config
    return config.model_copy(update={"network": config.network.model_copy(update={"host": own})})


def _everywhere(host: str) -> bool:
    """Whether an address means all of a machine's own, so that none is known to others."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
