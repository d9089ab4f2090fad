"""The pieces of a job, one by one: a lighthouse and replicas in shells of their own, or under torchrun."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time

import httpx

from ft_hsdp import secret, tls
from ft_hsdp.config import Config, agreed, dump, load
from ft_hsdp.control.lighthouse_client import parse_urls, urls_of_run
from ft_hsdp.core.replica_state import difference
from ft_hsdp.errors import (
    EXIT_CONFIG,
    EXIT_HARDWARE,
    EXIT_OK,
    EXIT_RETRYABLE,
    ConfigError,
    LighthouseUnreachable,
)
from ft_hsdp.jsonl import Journal
from ft_hsdp.launch.backend.local import LocalBackend
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.job import END_S
from ft_hsdp.launch.lighthouse_link import LighthouseLink
from ft_hsdp.launch.lighthouse_process import check_port
from ft_hsdp.launch.local import prepare_data
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import (
    Row,
    RunDir,
    Tailer,
    another,
    claim,
    read_json,
    run_of,
    write_job_files,
    write_json,
)
from ft_hsdp.launch.supervisor import Outcome, ReplicaSupervisor
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.sentences import tell
from lighthouse.store import finished

INJECTIONS_S = 0.2  # between two looks at the log of failures on purpose


def lighthouse(config: Config, url: str | None = None) -> int:
    """Become the lighthouse of `config`'s job, or one of several where lighthouse.etcd elects which one leads.

    `url`: where others reach it, if that is not where it listens, such as a name of its pod. A run directory that
    is under way is continued; a new one takes the token of the environment, if it is there.
    """
    run = run_of(config)
    said = read_json(run.lighthouse)
    if another(said) and not config.lighthouse.etcd:
        raise ConfigError("job.name", run.name, f"a name without a lighthouse (pid {said['pid']} is one)")
    check_port(config)
    if _over(run) or not run.config.exists():
        claim(run, ended=not run.supervisor.exists())
        write_job_files(run, config, os.environ.get(TOKEN_VARIABLE))
    else:
        _same_hash(run, config)
        run.config.write_text(dump(config))
    where = () if url is None else ("--url", parse_urls(url, "--url")[0])
    command = [sys.executable, "-m", "lighthouse", "--run", str(run.path), *where]
    os.execve(sys.executable, command, environment())  # noqa: S606 - no shell is what we want


def _over(run: RunDir) -> bool:
    """Whether the job of `run` has ended, or was an `up`'s: then its folder is moved aside.

    That is for the lighthouse's own store to say: the first final.json is written while others still train. Where
    the store is elsewhere (lighthouse.etcd), every replica has to have its final state.
    """
    if run.supervisor.exists():
        return True
    store = run.path / "lighthouse" / "store.sqlite"
    if store.exists():
        return finished(store)
    replicas = run.replicas()
    return bool(replicas) and all(run.final(n).exists() for n in replicas)


def replica(config: Config, replica_id: int, url: str | None = None) -> int:
    """Run one replica of `config`'s job to its end; the exit code. `url`: one, or several after commas.

    Under torchrun (RANK is set) this process is one rank of it, else it supervises all ranks. `url` with
    FT_HSDP_TOKEN in the environment replaces lighthouse.json and token of the run directory.
    Raises LighthouseUnreachable after timeouts.reach_s, but for a rank that torchrun has started again: it waits.
    """
    if not 0 <= replica_id < config.slots:
        raise ConfigError(
            "--replica", replica_id, f"0 to {config.slots - 1} (there are {config.slots} replicas at most)"
        )
    run = run_of(config)
    if url is not None:
        _introduce(run, config, url)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # it was here before: the job is under way
    urls = wait_for_lighthouse(run, tls.trusted(config.network), math.inf if again else config.timeouts.reach_s)
    prepare_data(config)
    if "RANK" in os.environ:
        from ft_hsdp.train import trainer  # torch is only needed here

        return int(trainer.main(config, replica_id, run.path))
    return asyncio.run(_supervise(config, run, replica_id, urls))


def wait_for_lighthouse(run: RunDir, trusted: tls.Trusted, timeout_s: float) -> tuple[str, ...]:
    """The addresses of the lighthouses of `run`, once one of them answers. Raises LighthouseUnreachable."""
    deadline = time.monotonic() + timeout_s
    problem = f"there is no {run.lighthouse}; start `ft-hsdp lighthouse` first, or give --lighthouse"
    while True:
        urls = urls_of_run(read_json(run.lighthouse)) if run.token.exists() else ()
        for url in urls:
            try:
                httpx.get(f"{url}/healthz", timeout=1.0, trust_env=False, verify=trusted).raise_for_status()
                return urls
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{url}: {error or type(error).__name__}"
        if time.monotonic() > deadline:
            raise LighthouseUnreachable(f"the lighthouse does not answer within {timeout_s:g} s: {problem}")
        time.sleep(0.1)


async def _supervise(config: Config, run: RunDir, replica_id: int, urls: tuple[str, ...]) -> int:
    """Supervise one replica, with a fork server of its own."""
    folder = run.replica(replica_id)
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "config.yaml"  # its own: whether it fits the job is for the lighthouse to say
    config_file.write_text(dump(config))
    events = Journal(run.supervision(replica_id))

    def emit(event: Row) -> None:
        events(event)
        link.note(event)
        print(tell(event), file=sys.stderr)  # noqa: T201 - progress of a command

    progress = Progress()
    backend = LocalBackend(
        run,
        boot_s=config.timeouts.boot_s,
        spawn_s=config.timeouts.spawn_s,
        spares=config.spares // config.ranks_per_replica,
        folder=folder / "spares",
        emit=emit,
        quiet_s=config.restart.hold_s,
    )
    token, context = secret.current(run.token), tls.client(config.network)
    link = LighthouseLink(urls, token, progress, lambda _, *what: one.evict(*what), context, run.lighthouse)
    one = ReplicaSupervisor(
        replica_id,
        config,
        run,
        backend=backend,
        link=link,
        progress=progress,
        emit=emit,
        survivors=lambda: True,
        config_file=config_file,
    )
    stopped: list[int] = []
    stopping: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if not stopped:
            stopped.append(number)
            stopping.append(asyncio.create_task(one.stop(config.timeouts.stop_s)))
        elif number == signal.SIGINT and one.current is not None:  # schedulers repeat SIGTERM, people Ctrl-C
            one.current.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    reporting = asyncio.create_task(link.run())
    injections = asyncio.create_task(_note_injections(run, replica_id, link))
    try:
        await progress.wait_for(lambda: progress.heard or bool(stopped), config.timeouts.reach_s)
        outcome = await one.run()
        if outcome.kind == "stopped":
            link.lost(replica_id)  # others need not wait for it, unless it is started again
        await progress.wait_for(lambda: link.settled, END_S / 10)
    finally:
        reporting.cancel()
        injections.cancel()
        await asyncio.gather(reporting, injections, *stopping, return_exceptions=True)
        await backend.close()
        events.close()
    first = one.current.first if one.current is not None else None
    return exit_code(outcome, stopped, first.code if first is not None else None)


async def _note_injections(run: RunDir, replica_id: int, link: LighthouseLink) -> None:
    """Have the lighthouse hear of the failures that `ft-hsdp chaos` makes here from now on."""
    log = Tailer(run.injections(replica_id))
    for _ in log.all():
        pass
    while True:
        await asyncio.sleep(INJECTIONS_S)
        for event in log.poll():
            link.note(event)


def exit_code(outcome: Outcome, stopped: list[int], rank: int | None) -> int:
    """Of `ft-hsdp replica`, whose outcome is known; stopped: the signals that it was sent; rank: the code of the
    rank that ended first."""
    if stopped:
        return 128 + stopped[0]
    if outcome.kind not in ("done", "drained"):
        print(outcome.reason, file=sys.stderr)  # noqa: T201 - the one line that says why
    if outcome.kind == "lost" and rank == EXIT_HARDWARE:
        return EXIT_HARDWARE
    return {"done": EXIT_OK, "drained": EXIT_OK, "config": EXIT_CONFIG}.get(outcome.kind, EXIT_RETRYABLE)


def _introduce(run: RunDir, config: Config, url: str) -> None:
    """Make a run directory for a job whose lighthouse is elsewhere."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not run.token.exists():
        raise ConfigError(TOKEN_VARIABLE, "", "the job's token, where --lighthouse is given")
    if not run.config.exists():
        write_job_files(run, config, token)
    elif token and not (run.token.exists() and secret.current(run.token) == token):
        secret.write_private(run.token, token)  # others may read it at this moment: not without need
    urls = parse_urls(url)
    if set(urls_of_run(read_json(run.lighthouse))) != set(urls):
        write_json(run.lighthouse, {"pid": 0, "url": urls[0], "urls": list(urls)})


def _same_hash(run: RunDir, config: Config) -> None:
    """Raise ConfigError where `run` was made for a job that trains something else, or by other rules."""
    found = difference(agreed(config), agreed(load(run.config)))
    if found is not None:
        raise ConfigError(
            found[0], found[1], f"{found[2]}, as in the run {run.name}; another job.name is another run"
        )
