"""`bench quorum --measure agents`: what 256 host agents without ranks cost the lighthouse, and its other clients.

The agents are processes that are forked from one which has loaded all that they need. They take ranks only of a
replica that is not wanted, so they hold their lines and have nothing to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.processes import spawn
from benchmarks.quorum import Ours
from benchmarks.results import ProgressLog, Row, Verdicts, interleave, milliseconds, most, ratio, spread
from ft_hsdp import secret, tls
from ft_hsdp.config import load
from ft_hsdp.control.lighthouse_client import REPLY_S, LighthouseClient, urls_of_run
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.core.restart import RestartPolicy
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.agent import HostAgent
from ft_hsdp.launch.backend.forkserver import ForkServer
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.backend.ranks import LocalRanks
from ft_hsdp.launch.run.directory import RunDir, read_json
from ft_hsdp.lifetime import die_with
from lighthouse.placement.machine import decide
from lighthouse.placement.state import PlacementPolicy
from lighthouse.quorum.events import Event, HostClosed, ProcessesReported
from lighthouse.quorum.state import LighthouseState, Policy

AGENTS, MEMBERS = 256, 12
WATCHED_S, JOIN_S = 10.0, 300.0  # how long the lighthouse's processor time is watched; until all have joined
CORES, DECISION_MS, TIMES = 0.2, 5.0, 1.1  # the goals
SAID = "said"  # in the run's folder: a line for each time that an agent has, or again has, a lighthouse


def measure(stack: ExitStack, folder: Path, rounds: int, log: ProgressLog) -> Row:
    """Return a row: rounds with and without agents beside them, processor time, and how long they take to come."""
    for name in ("alone", "beside"):
        (folder / name).mkdir()
    alone = Ours(stack, folder / "alone", MEMBERS)
    beside = Ours(stack, folder / "beside", MEMBERS, spare=1)
    started = time.monotonic()
    command = tied("benchmarks.agents", str(beside.run.path), str(AGENTS))
    spawn(stack, command, folder / "agents.log")
    joined_s = _until(beside.run, "joined", AGENTS) - started
    log.say(f"{AGENTS} agents have joined after {joined_s:.1f} s")
    cores = [_cores(beside)]
    kinds = {"same": alone.same, "new": alone.new, "same beside": beside.same, "new beside": beside.new}
    seconds = interleave(kinds, rounds)
    lost = time.monotonic()
    beside.again()
    back_s = _until(beside.run, "answers again", AGENTS) - lost
    log.say(f"a new lighthouse has them back after {back_s:.1f} s")
    cores.append(_cores(beside))
    found = {kind: spread(values) for kind, values in seconds.items()}
    times = {kind: ratio(found[f"{kind} beside"]["p50_ms"], found[kind]["p50_ms"]) for kind in ("same", "new")}
    row = {"members": MEMBERS, "agents": AGENTS, "rounds": found, "times": times, "cores": cores}
    return {**row, "joined_s": round(joined_s, 2), "back_s": round(back_s, 2), "decision": decisions()}


def goals(row: Row) -> Verdicts:
    """Yield the verdicts on such a row."""
    yield most(f"{AGENTS} agents: processors of the lighthouse", row, CORES, max(row["cores"]))
    yield most(f"{AGENTS} hosts: a decision, p50 ms", row, DECISION_MS, row["decision"]["p50_ms"])
    for kind, times in row["times"].items():
        yield most(f"a round ({kind}), times that without agents", row, TIMES, times)


def decisions() -> dict[str, float]:
    """Return how long a decision takes with all hosts in use: one joins, and one is lost."""
    placing = PlacementPolicy(4, 4, RestartPolicy(3, 0.0))
    state = LighthouseState.empty(Policy(64, steps=100, evict_s=2.0, placing=placing), term=1)
    now, seconds = 1.0, list[float]()
    reports = [HostReport(f"agent{n}", "a", f"space{n}", 1, "127.0.0.1:1") for n in range(AGENTS + 32)]
    for number, report in enumerate(reports):
        now += 0.001
        events: list[Event] = [ProcessesReported({}, frozenset(), frozenset(), now, report.path, host=report)]
        if number >= AGENTS:
            events.append(HostClosed(reports[number - AGENTS], now))
        for event in events:
            began = time.perf_counter()
            state, _ = decide(state, event)
            if number >= AGENTS:
                seconds.append(time.perf_counter() - began)
    return {"p50_ms": milliseconds(statistics.median(seconds)), "max_ms": milliseconds(max(seconds))}


def _cores(lighthouse: Ours) -> float:
    """Return how many processors the lighthouse uses while nothing happens."""
    process = psutil.Process(lighthouse.process.pid)
    used = [process.cpu_times()]
    time.sleep(WATCHED_S)
    used.append(process.cpu_times())
    before, after = (each.user + each.system for each in used)
    return round((after - before) / WATCHED_S, 3)


def _until(run: RunDir, word: str, count: int) -> float:
    """Return when so many agents have said something. Raises Retryable."""
    deadline, said = time.monotonic() + JOIN_S, run.path / SAID
    while not said.exists() or said.read_text().count(word) < count:
        if time.monotonic() > deadline:
            raise Retryable(f"bench: not all of {count} agents say {word!r} within {JOIN_S:g} s")
        time.sleep(0.05)
    return time.monotonic()


async def _serve(run: RunDir, number: int) -> int:
    """Be an agent until the process ends."""
    config, token = load(run.config), secret.current(run.token)
    reply_s = config.timeouts.evict_s / 3 + REPLY_S
    client = LighthouseClient(
        urls_of_run(read_json(run.lighthouse)), token, tls.client(config.network), run.lighthouse, reply_s
    )

    def say(line: str) -> None:
        with (run.path / SAID).open("a") as file:
            file.write(f"{line}\n")

    ranks = LocalRanks(config, run, ForkServer(run.path))
    agent = HostAgent(config, run, ranks, client, f"agent{number}", only=(config.slots - 1,), say=say)
    return await agent.run()


def main(run: str, count: str) -> None:
    """Fork the agents, and wait; they end with this process."""
    parent = os.getpid()
    for number in range(int(count)):
        if os.fork() == 0:
            die_with(parent)
            os._exit(asyncio.run(_serve(RunDir(Path(run)), number)))
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
