"""The processes of a job one by one: `lighthouse`, and what those have in common that are started beside it."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from ft_hsdp import protocol, secret, tls
from ft_hsdp.claim import Claim, FolderOwner
from ft_hsdp.config import Config, agreed, load
from ft_hsdp.config.entry import stamped
from ft_hsdp.control.lighthouse_client import Unproved, get_proved, parse_urls, urls_of_run
from ft_hsdp.core.replica_state import ENTRY, difference
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, Retryable
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.lighthouse_process import check_port
from ft_hsdp.launch.run import follow
from ft_hsdp.launch.run.directory import (
    RunDir,
    another,
    make_run,
    read_json,
    run_of,
    write_config,
)
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.train.identity import HOST_VARIABLE
from lighthouse.store import finished

ALONE_S = 0.2  # between two looks whether another process has ended
REFUSED_S = 5.0  # for which a lighthouse may refuse the token: that of an earlier job ends soon


def lighthouse(config: Config, url: str | None = None) -> int:
    """Replace this process by the lighthouse of a job, or by one of several if lighthouse.etcd elects the leader.

    Another process beside it writes metrics.jsonl and summary.json (`run.follow`). The run directory of a job that
    has not ended is continued. A new one takes the token of the environment, if there is one.

    Args:
        url: The address at which others reach it; None: where it listens.

    Raises:
        ConfigError: The job has a lighthouse here, or another configuration, or the address is not free.
    """
    config = stamped(config)
    run = run_of(config)
    recorded = read_json(run.lighthouse)
    if another(recorded) and not config.lighthouse.etcd:
        raise ConfigError("job.name", run.name, f"a name without a lighthouse (pid {recorded['pid']} is one)")
    check_port(config)
    tokens = secret.given(TOKEN_VARIABLE)
    if (ended := _has_ended(run)) or not (run.config.exists() or run.token.exists() or _store(run).exists()):
        token = tokens[0] if tokens else None
        make_run(run, config, token, ended=ended and not run.supervisor.exists())
    else:
        if tokens and not run.token.exists():
            secret.write_private(run.token, tokens[0])
        if not run.token.exists():
            how = f"put it back, or set {TOKEN_VARIABLE}; another job.name is another run"
            raise Retryable(f"{run.token} is missing, and the run was made with a token: {how}")
        _check_agreed(run, config)
        write_config(run.config, config)
    follow.start(run)
    where = () if url is None else ("--url", parse_urls(url, "--url")[0])
    command = [sys.executable, "-m", "lighthouse", "--run", str(run.path), *where]
    os.execve(sys.executable, command, environment())  # noqa: S606 - no shell is what we want


def _has_ended(run: RunDir) -> bool:
    """Return whether the job of a run directory has ended, or was run by `up`: then the directory is moved aside.

    The lighthouse's store decides, because the first final.json is written while other replicas still train. If
    the store is in etcd, every replica must have its final state.
    """
    if run.supervisor.exists():
        return True
    said = finished(_store(run)) if _store(run).exists() else None
    if said is not None:
        return said
    replicas = run.replicas()
    return bool(replicas) and all(run.final(n).exists() for n in replicas)


def _store(run: RunDir) -> Path:
    return run.path / "lighthouse" / "store.sqlite"


def enter(config: Config, url: str | None, reach_s: float) -> tuple[RunDir, tuple[str, ...], Claim | None]:
    """Find the lighthouse of a job whose processes are started one by one, and its run directory here. Blocks.

    Args:
        url: As `host.replica` takes it.

    Returns:
        The run's directory, the addresses of its lighthouses, and the claim on the directory if it was taken.

    Raises:
        ConfigError: The address, the token or the configuration does not fit the job.
        LighthouseUnreachable: No lighthouse answers in time.
    """
    run, trusted = run_of(config), tls.trusted(config.network)
    if url is not None:
        claim = _join_elsewhere(run, config, url, trusted, reach_s)
        return run, urls_of_run(read_json(run.lighthouse)), claim
    urls = wait_for_lighthouse(run, trusted, reach_s)
    _check_agreed(run, config)
    return run, urls, None


def claimed(claim: Claim | None, run: RunDir, work: Callable[[Claim], Coroutine[Any, Any, int]]) -> int:
    """Return what a coroutine returns that runs while this process has a claim on the run's directory. Blocks.

    Args:
        claim: The claim; None: it is not taken yet.
        work: Makes the coroutine.
    """
    if claim is None:
        claim = Claim(run.path, FolderOwner.of(run.name, secret.current(run.token)))
        claim.take("job.name", run.name, "a run that no other job has")
    try:
        return asyncio.run(work(claim))
    finally:
        claim.release()


def name_of_agent(token: str, host: str) -> str:
    """Return the abstract name of a socket that one process of this machine has: the agent of a host of a job."""
    return "ft_hsdp/host/" + protocol.mac(token, "host-agent", host)[:32]


def another_agent(name: str) -> ConfigError:
    """Return the error of a host whose name another agent has."""
    return ConfigError("host", name, f"a host without an agent of this job; {HOST_VARIABLE} gives another name")


async def alone(name: str, take: Callable[[], Awaitable[object]], *, waits: bool = False) -> None:
    """Become the agent of a host of a job.

    Args:
        take: Takes the `name_of_agent`; nothing is returned if another process has it.
        waits: Stand by while another process has it, without an end.

    Raises:
        ConfigError: Another process has it.
    """
    told = False
    while not await take():
        if not waits:
            raise another_agent(name)
        if not told:
            print(f"another process is {name}: this one stands by", file=sys.stderr)  # noqa: T201 - progress
        told = True
        await asyncio.sleep(ALONE_S)


def wait_for_lighthouse(run: RunDir, trusted: tls.Trusted, timeout_s: float) -> tuple[str, ...]:
    """Wait until a lighthouse of a run answers, and return the addresses of all of them. Blocks.

    Args:
        trusted: Whose certificates are accepted.

    Raises:
        LighthouseUnreachable: None answers in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        problem = f"there is no {run.lighthouse}; start `ft-hsdp lighthouse` first, or give --lighthouse"
        urls = urls_of_run(read_json(run.lighthouse))
        try:
            token = secret.current(run.token)
            for url in urls:
                if not (problem := problem_of(url, token, trusted)):
                    return urls
        except OSError as error:
            problem = f"{run.token}: {error.strerror}; put it back" if urls else problem
        except ConfigError as error:  # of the token, or of what listens there
            problem = str(error)
        if time.monotonic() > deadline:
            raise LighthouseUnreachable(f"the lighthouse does not answer within {timeout_s:g} s: {problem}")
        time.sleep(0.1)


def problem_of(url: str, token: str, trusted: tls.Trusted) -> str:
    """Return why the lighthouse at `url` does not answer; "" if it does, and both sides know `token`.

    Raises:
        Unknown: What listens there does not know the token.
    """
    try:
        get_proved(f"{url}/healthz", token, 1.0, trusted).raise_for_status()
    except Unproved:
        raise Unknown(url) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{url}: {error or type(error).__name__}"
    return ""


class Unknown(ConfigError):
    """What listens at an address does not know the token."""

    def __init__(self, url: str) -> None:
        super().__init__(TOKEN_VARIABLE, "...", f"the token of the job whose lighthouse is at {url}")


def _join_elsewhere(run: RunDir, config: Config, url: str, trusted: tls.Trusted, timeout_s: float) -> Claim:
    """Make or update the run directory of a job whose lighthouse is at `url`, and return the claim on it. Blocks.

    Nothing is written before the lighthouse has taken the token.
    """
    urls = parse_urls(url)
    given = secret.given(TOKEN_VARIABLE)
    known: tuple[str, ...] = ()
    try:
        known = secret.read(run.token, "")
    except ConfigError:
        if not given:  # a file that cannot be used is written anew
            raise
    given = given or known
    if not given:
        raise ConfigError(TOKEN_VARIABLE, "", "the job's token, where --lighthouse is given")
    token, deadline, refused = given[0], time.monotonic() + timeout_s, math.inf
    while True:
        try:
            problems = [problem_of(each, token, trusted) for each in urls]
            if "" in problems:
                break
        except Unknown:  # the lighthouse of an earlier job may still be there
            refused = min(refused, time.monotonic() + REFUSED_S)
            if time.monotonic() > min(refused, deadline):
                raise
        else:
            if time.monotonic() > deadline:
                why = problems[0]
                raise LighthouseUnreachable(f"the lighthouse does not answer within {timeout_s:g} s: {why}")
        time.sleep(0.1)
    if run.config.exists() and (token in known or not known):
        if not known:
            secret.write_private(run.token, token)
        claim = Claim(run.path, FolderOwner.of(run.name, secret.current(run.token)))
        claim.take("job.name", run.name, "a name that no running job has")
    else:
        claim = make_run(run, config, token)
    recorded = read_json(run.lighthouse) or {}
    wrote = recorded if recorded.get("pid") else {}  # by the lighthouse, maybe on another machine
    every = list(dict.fromkeys((*urls_of_run(wrote), *urls)))
    if set(urls_of_run(recorded)) != set(every):
        replace_json(run.lighthouse, {"pid": 0, "url": urls[0], **wrote, "urls": every})
    return claim


def _check_agreed(run: RunDir, config: Config) -> None:
    """Raise ConfigError if the directory is of a job with another value of a key on which all replicas agree."""
    try:
        recorded = load(run.config)
    except ConfigError as error:  # the lighthouse's store has the rules, too
        print(f"{run.config} cannot be used: {error}", file=sys.stderr)  # noqa: T201 - one line for the user
        return
    found = difference(agreed(config), agreed(recorded))
    if found is not None:
        same = "the same file: put it back" if found[0] == ENTRY else "the same"
        allowed = (
            f"{found[2]}, as in the run {run.name}: all replicas need {same}; another job.name is another run"
        )
        raise ConfigError(found[0], found[1], allowed)
