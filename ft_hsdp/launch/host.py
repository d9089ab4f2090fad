"""`host` and `replica`: one machine of a job. Each runs an agent (`launch.agent`) until the job has ended.

That of `host` takes ranks of each replica, that of `replica` all ranks of one. Under torchrun `replica` is a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys

from ft_hsdp import secret
from ft_hsdp.claim import Claim
from ft_hsdp.config import Config
from ft_hsdp.config.entry import stamped
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.errors import ConfigError, LighthouseUnreachable, LocalSystemError
from ft_hsdp.event_table import tell
from ft_hsdp.launch import burn_in
from ft_hsdp.launch.agent import HostAgent, agent_path
from ft_hsdp.launch.backend.forkserver import PRELOAD
from ft_hsdp.launch.backend.gpus import check_device, free_gpus, gpus_here
from ft_hsdp.launch.backend.held import HeldForks
from ft_hsdp.launch.backend.ranks import LocalRanks
from ft_hsdp.launch.job import prepare_data, what_is_kept
from ft_hsdp.launch.lighthouse_process import reach
from ft_hsdp.launch.run.directory import JobFiles, Row, RunDir, Tailer, supervised, write_config
from ft_hsdp.launch.standalone import alone, claimed, enter, name_of_agent
from ft_hsdp.lifetime import stop_signals
from ft_hsdp.protocol import ProcessReport

INJECTIONS_S = 0.2  # between two reads of the log of injected failures


def host(config: Config, url: str | None, holder: int, again: bool) -> int:
    """Run the ranks that the lighthouse assigns to this machine, until the job has ended; return the exit code.

    Blocks.

    Args:
        url: The address of a lighthouse, or several after commas, as `replica` takes it.
        holder: The descriptor of the socket to this process's holder.
        again: An earlier agent had joined the job: this one waits for a lighthouse without a limit.

    Raises:
        ConfigError: The address, the token or the configuration does not fit the job.
        LighthouseUnreachable: No lighthouse answers within timeouts.reach_s.
        Retryable: The lighthouse refuses this host, or the fork server does not start.
        LocalSystemError: `hosts.check` has found something.
        InvalidArgument: The configuration or the script is not the job's.
    """
    config = stamped(config)
    check_device(config, config.hosts.per_replica or 1)
    run, urls, claim = enter(config, url, math.inf if again else config.timeouts.reach_s)
    prepare_data(config)
    return claimed(claim, run, lambda claim: serve(config, run, urls, claim, holder))


def replica(config: Config, replica_id: int, url: str | None, holder: int | None, again: bool = False) -> int:
    """Run one replica of a job on this machine until it is done, and return the exit code. Blocks.

    Under torchrun (RANK is set) this process is one of its ranks, else the agent of a host for this replica alone.

    Args:
        url: The address of a lighthouse, or several after commas. It needs FT_HSDP_TOKEN in the environment. None:
            as in the run directory.
        holder: The descriptor of the socket to this process's holder; None under torchrun.
        again: As for `host`.

    Raises:
        ConfigError: The id, the address, the token or the configuration does not fit the job.
        LighthouseUnreachable: No lighthouse answers within timeouts.reach_s. A rank that torchrun started again
            waits without a limit.
        Retryable: The lighthouse refuses this host, or the fork server does not start.
    """
    if not 0 <= replica_id < config.slots:
        raise ConfigError(
            "--replica", replica_id, f"0 to {config.slots - 1} (there are {config.slots} replicas at most)"
        )
    config = stamped(config)
    if holder is not None:
        check_device(config)
        if (hosts := config.hosts.per_replica or 1) > 1:
            allowed = "1 where `replica` starts a whole replica; else start `host` on each of its machines"
            raise ConfigError("hosts.per_replica", hosts, allowed)
    again = again or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # torchrun's: the job has begun
    run, urls, claim = enter(config, url, math.inf if again else config.timeouts.reach_s)
    prepare_data(config)
    if holder is None:  # torchrun may have the other ranks of the replica on other machines
        from ft_hsdp.launch.backend import entry  # torch is only needed here

        return int(entry.main(config, replica_id, run.path))
    return claimed(claim, run, lambda claim: serve(config, run, urls, claim, holder, replica_id))


async def serve(
    config: Config,
    run: RunDir,
    urls: tuple[str, ...],
    claim: Claim,
    holder: int,
    replica_id: int | None = None,
) -> int:
    """Be the agent of this machine, for one replica or for each, until the job has ended; return the exit code."""

    def emit(event: Row) -> None:
        reporter.event(event)
        _say(tell(event))

    _say(what_is_kept(config))
    if config.hosts.spare:
        _say(f"hosts.spare: {config.hosts.spare} is not used here: a machine that no replica needs is spare")
    timeouts, goes_on = config.timeouts, "another one is started, the ranks go on"
    forks = await HeldForks.connect(
        holder, lambda pid, why: emit(supervised("ForkServerLost", f"{why}: {goes_on}", pid=pid))
    )
    client = LighthouseClient(*reach(config, run, urls, timeouts.evict_s / 3))
    reporter = Reporter("supervisor", client.tell)
    path, whole = agent_path(config, os.environ, replica_id), (config.hosts.per_replica or 1) == 1
    name = path.rpartition("/")[2]
    await alone(
        name, lambda: forks.take_name(name_of_agent(secret.current(run.token), name)), waits=replica_id is not None
    )
    file = run.path / f"host-{name}.yaml"
    write_config(file, config)  # only now: another process may have been this host
    if config.hosts.check and forks.told.agents == 1:  # another agent had joined, and may have ranks
        _say(f"hosts.check: {name} is tried for {config.hosts.check:g} s")
        if why := await burn_in.failure(config, file, run.path):
            report = HostReport(path, forks.told.life, "", 1, "")
            with contextlib.suppress(LighthouseUnreachable):
                await client.report(ProcessReport(host=report, unfit=why))
            raise LocalSystemError(f"host {name} is refused: {why}")
    hosts = config.hosts.per_replica or 1
    most = config.ranks_per_replica // hosts + (config.spares if whole else 0)
    ranks = LocalRanks(
        config,
        run,
        forks,
        gpus=await free_gpus(gpus_here(config, hosts), most, forks.take_name, _say),
        file=file,
        spares=run.path / f"spares-{name}" if replica_id is None else run.replica(replica_id) / "spares",
        whole=whole,
        emit=emit,
    )
    agent = HostAgent(config, run, ranks, client, path, replica=replica_id, emit=emit, say=_say)
    agent.resume(forks.told, forks.watch)
    # A signal that comes meanwhile ends this process at once.
    await forks.start(run.path, (*PRELOAD, *config.preload), timeouts.boot_s, timeouts.spawn_s)
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, agent.stop, number)
    await forks.ready()
    reporter.start()
    beside = [asyncio.create_task(JobFiles(run).keep(claim, emit))]
    if replica_id is not None:
        beside.append(asyncio.create_task(_note_injections(run, replica_id, reporter)))
    try:
        return await agent.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await ranks.close()
        await reporter.close()
        await client.close()


async def _note_injections(run: RunDir, replica_id: int, reporter: Reporter) -> None:
    """Send the lighthouse the events of the failures that `ft-hsdp chaos` injects here from now on."""
    log = Tailer(run.injections(replica_id))
    list(log.all())  # those of before
    while True:
        await asyncio.sleep(INJECTIONS_S)
        for event in log.poll():
            reporter.event(event)


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - progress of a command
