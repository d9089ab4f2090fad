"""The pieces of a job, one by one: a lighthouse and replicas in shells of their own, or under torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import httpx

from ft_hsdp.config import Config, config_hash, dump, load
from ft_hsdp.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_RETRYABLE,
    ConfigError,
    LighthouseUnreachable,
)
from ft_hsdp.launch.forkserver import ForkServer
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.lighthouse_process import check_port, furnish
from ft_hsdp.launch.local import END_S, STOP_GRACE_S, prepare_data
from ft_hsdp.launch.processes import TOKEN_VARIABLE, environment
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.rundir import Appender, Row, RunDir, alive, claim, read_json, write_json, write_private
from ft_hsdp.launch.story import tell
from ft_hsdp.launch.supervisor import Outcome, ReplicaSupervisor

REACH_S = 10.0  # longest wait for the lighthouse


def run_of(config: Config) -> RunDir:
    """Where the files of `config`'s job are."""
    return RunDir(Path(config.job.runs_dir).resolve() / config.job.name)


def lighthouse(config: Config) -> int:
    """Become the lighthouse of `config`'s job; a run directory that is under way is continued."""
    run = run_of(config)
    named = read_json(run.lighthouse)
    if alive(named):
        raise ConfigError("job.name", run.name, f"a name without a lighthouse (pid {named['pid']} is one)")
    check_port(config)
    over = run.supervisor.exists() or any(run.final(n).exists() for n in run.replicas())
    if over or not run.config.exists():
        claim(run)
        furnish(run, config)
    else:
        _same_hash(run, config)
        run.config.write_text(dump(config))
    command = [sys.executable, "-m", "lighthouse", "--run", str(run.path)]
    os.execve(sys.executable, command, environment())  # noqa: S606 - no shell is what we want


def replica(config: Config, replica_id: int, url: str | None = None) -> int:
    """Run one replica of `config`'s job to its end; the exit code.

    Under torchrun (RANK is set) this process is one rank of it, else it supervises all ranks. `url` with
    FT_HSDP_TOKEN in the environment replaces lighthouse.json and token of the run directory.
    Raises LighthouseUnreachable after 10 s.
    """
    if not 0 <= replica_id < config.replicas:
        raise ConfigError("--replica", replica_id, f"0 to {config.replicas - 1} (replicas is {config.replicas})")
    run = run_of(config)
    if url is not None:
        _introduce(run, config, url)
    url = wait_for_lighthouse(run)
    prepare_data(config)
    if "RANK" in os.environ:
        from ft_hsdp.train import trainer  # torch is only needed here

        return int(trainer.main(config, replica_id, run.path))
    return asyncio.run(_supervise(config, run, replica_id, url))


def wait_for_lighthouse(run: RunDir, timeout_s: float = REACH_S) -> str:
    """The address of the lighthouse of `run`, once it answers. Raises LighthouseUnreachable."""
    deadline = time.monotonic() + timeout_s
    problem = f"there is no {run.lighthouse}; start `ft-hsdp lighthouse` first, or give --lighthouse"
    while True:
        named = read_json(run.lighthouse)
        if isinstance(named, dict) and run.token.exists():
            url = str(named.get("url"))
            try:
                httpx.get(f"{url}/healthz", timeout=1.0, trust_env=False).raise_for_status()
                return url
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{url}: {error or type(error).__name__}"
        if time.monotonic() > deadline:
            raise LighthouseUnreachable(f"the lighthouse does not answer within {timeout_s:g} s: {problem}")
        time.sleep(0.1)


async def _supervise(config: Config, run: RunDir, replica_id: int, url: str) -> int:
    """Supervise one replica, with a fork server of its own."""
    folder = run.replica(replica_id)
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "config.yaml"  # its own: whether it fits the job is for the lighthouse to say
    config_file.write_text(dump(config))
    events = Appender(run.supervision(replica_id))

    def emit(event: Row) -> None:
        events.append(event)
        print(tell(event), file=sys.stderr)  # noqa: T201 - progress of a command

    progress = Progress()
    forks = ForkServer(run.path)
    link = LighthouseLink(url, run.token.read_text().strip(), progress, lambda _, *what: one.evict(*what))
    one = ReplicaSupervisor(
        replica_id,
        config,
        run,
        forks=forks,
        link=link,
        progress=progress,
        emit=emit,
        survivors=lambda: True,
        config_file=config_file,
    )
    stopped: list[int] = []
    stopping: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if stopped and one.current is not None:
            one.current.kill()
        stopped.append(number)
        stopping.append(asyncio.create_task(one.stop(STOP_GRACE_S)))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    reporting = asyncio.create_task(link.run())
    try:
        outcome = await one.run()
        if outcome.kind != "stopped":
            await progress.wait_for(lambda: link.settled, END_S / 10)
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, *stopping, return_exceptions=True)
        await forks.close()
        events.close()
    return _code(outcome, stopped)


def _code(outcome: Outcome, stopped: list[int]) -> int:
    if stopped:
        return 128 + stopped[0]
    if outcome.kind != "done":
        print(outcome.reason, file=sys.stderr)  # noqa: T201 - the one line that says why
    return {"done": EXIT_OK, "config": EXIT_CONFIG}.get(outcome.kind, EXIT_RETRYABLE)


def _introduce(run: RunDir, config: Config, url: str) -> None:
    """Make a run directory for a job whose lighthouse is elsewhere."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not run.token.exists():
        raise ConfigError(TOKEN_VARIABLE, "", "the job's token, where --lighthouse is given")
    if not run.config.exists():
        furnish(run, config, token)
    elif token:
        write_private(run.token, token)
    if (read_json(run.lighthouse) or {}).get("url") != url.rstrip("/"):
        write_json(run.lighthouse, {"pid": 0, "url": url.rstrip("/")})


def _same_hash(run: RunDir, config: Config) -> None:
    """Raise ConfigError where `run` was made for a job that trains something else."""
    there, here = config_hash(load(run.config)), config_hash(config)
    if there != here:
        raise ConfigError(
            "job.name",
            run.name,
            f"a name whose run has the same configuration (its hash is {there}, not {here})",
        )
