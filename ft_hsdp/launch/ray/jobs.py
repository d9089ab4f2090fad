"""Jobs: `submit` from outside a cluster, through its Jobs API: the job's driver then runs on a node of it."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import ray.job_submission
import requests
from ray.exceptions import RayError

from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, Retryable
from ft_hsdp.launch.ray.cluster import KEY, ClusterUnreachable, first_line, knock

PATIENCE = "RAY_JOB_STOP_WAIT_TIME_S"  # between SIGTERM and SIGKILL to a job's driver; 3 where it is not set
MARGIN_S = 10.0  # for what a driver does besides waiting for replicas: the summary, the cluster's resources
END_S = 30.0  # from the end of a job's log to its exit code
LOOK_S = 0.2


def submit(config: Config, file: Path, overrides: Sequence[str], url: str, *, json: bool) -> int:
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
