"""`bench memory`: what copies of states in host memory cost, and what they save.

- step: a step of one replica on two hosts, with copies and without: of steps that compute, and that wait as beside
  an accelerator; and the memory of the hosts, beside what `plan` says;
- none: three healthy replicas need no copies: bytes, threads and orders are counted, in ranks and state agents;
- plan: how long the figures of 4,096 hosts take, and whether they are exact;
- gaps, lost, flips: see the modules of these names.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any, TextIO

from ft_hsdp.analysis import survival
from ft_hsdp.analysis.costs import Assumptions
from ft_hsdp.analysis.plan import plan
from ft_hsdp.bench.command import MemoryOptions
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.hsdp.processes import LOOPBACK, PRODUCT, HsdpSetup, TrainingProcesses, job_config
from ft_hsdp.bench.memory.flips import flips
from ft_hsdp.bench.memory.gaps import LEAD, SETTLE_S, STEPS, gaps
from ft_hsdp.bench.memory.lost import lost, union
from ft_hsdp.bench.overhead import SETUP, Trained, in_turns
from ft_hsdp.bench.results import ProgressLog, ResultRow, ratio, ratio_interval, spread
from ft_hsdp.config import parse
from ft_hsdp.launch.run.directory import RunDir, read_jsonl

COPIES: Mapping[str, int] = {"without": 1, "without again": 1, "with": 2}
STEP_SETUPS: Mapping[str, HsdpSetup] = {
    "waiting": replace(SETUP, replicas=1, hosts=2, steps=STEPS, waiting=(1 << 18, 0.5)),
    "computing": replace(SETUP, replicas=1, hosts=2, steps=STEPS),
}
NONE_SETUP = HsdpSetup(replicas=3, ranks=1, waiting=(1 << 16, 0.1), steps=5, sections=SETUP.sections)
LOOK_S = 0.01  # between two looks at the threads of the state agents
PLAN_HOSTS, PLAN_COPIES, PLAN_RUNS = 4096, 4, 7
BRUTE_HOSTS = 10  # all losses of which are tried: 2 groups, the second a ring of 6


def run(options: MemoryOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        Retryable: A process fails.
        DataCorruption: A flipped byte was not found.
    """
    log = ProgressLog(stream)
    result, started = begin_result("memory", log)
    wanted, rounds = options.measures, options.rounds
    result["step"] = steps(rounds["step"], log) if "step" in wanted else []
    result["none"] = none(rounds["none"], log) if "none" in wanted else []
    result["plan"] = plans(log) if "plan" in wanted else []
    result["gaps"] = gaps(rounds["gaps"], log) if "gaps" in wanted else []
    result["lost"] = lost(options.kills, log) if "lost" in wanted else []
    result["union"] = union(max(1, options.kills // 4), log) if "union" in wanted else []
    result["flips"] = flips(options.flips, log) if "flips" in wanted else []
    return finish_result(result, log, started)


@dataclass(slots=True)
class Seen:
    """What is left to see of a contender when its last block is over."""

    commits: list[dict[str, Any]] = field(default_factory=list)  # of replica 0
    counts: Sequence[Mapping[str, Any]] = ()  # of each rank
    agents: list[int] = field(default_factory=list)  # bytes of the segments of each host's agent
    served: int = 0  # bytes that all agents have sent
    agent_threads: int = 0  # of all agents, at most


def _trained(
    setup: HsdpSetup, contenders: Mapping[str, int | None], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Seen]]:
    """Train contenders that differ in `memory.copies`, in turns; return their steps, and what was seen."""
    seen: dict[str, Seen] = {}
    watches: dict[str, AgentWatch] = {}

    def started(name: str, run: RunDir) -> None:
        watches[name] = AgentWatch([pid_of(log) for log in sorted(run.path.parent.glob("agent-*.log"))])

    def look(name: str, run: RunDir, processes: TrainingProcesses) -> None:
        logs = sorted(run.path.parent.glob("agent-*.log"))
        rows, agents = read_jsonl(run.commits(0)), [segments(pid_of(log)) for log in logs]
        seen[name] = Seen(rows, processes.said, agents, watches[name].sent, watches[name].threads)

    trained = {
        name: Trained(PRODUCT, replace(setup, sections={**setup.sections, "memory": {"copies": copies}}))
        for name, copies in contenders.items()
    }
    try:
        return in_turns(trained, rounds, look=look, settle_s=SETTLE_S, lead=LEAD, started=started), seen
    finally:
        for watch in watches.values():
            watch.end()


class AgentWatch:
    """Counts what state agents send, and how many threads they have until `end`.

    Threads are looked at each `LOOK_S`, because those that fetch and serve a copy end with it.

    Args:
        pids: of the agents.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = sum(map(written, pids))
        self.threads = self._now()  # of all agents, at most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look at threads no more."""
        self._over.set()
        self._thread.join()

    @property
    def sent(self) -> int:
        """The bytes that the agents have sent since the begin. Raises OSError if an agent has ended."""
        return sum(map(written, self._pids)) - self._before

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(OSError):
                self.threads = max(self.threads, self._now())

    def _now(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in self._pids)


def written(pid: int) -> int:
    """Return the bytes that a process has written, or sent from memory with sendfile, as state servers do."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def pid_of(log: Path) -> int:
    """Return the pid of a state agent, which has written it into ``log``."""
    said = json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))
    return int(said["pid"])


def segments(pid: int) -> int:
    """Return the bytes of all snapshots and copies in a state agent."""
    found: dict[tuple[int, int], int] = {}  # a mapping has a descriptor of its own: count a segment once
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:ft_hsdp-state" in os.readlink(descriptor):
                segment = descriptor.stat()
                found[segment.st_dev, segment.st_ino] = segment.st_size
    return sum(found.values())


def steps(rounds: int, log: ProgressLog, setups: Mapping[str, HsdpSetup] = STEP_SETUPS) -> list[ResultRow]:
    """Return a row for each kind of step. Raises Retryable where a process fails."""
    rows = []
    for kind, setup in setups.items():
        took, seen = _trained(setup, COPIES, rounds)
        commits = seen["with"].commits[-rounds * (setup.steps + LEAD) :]
        both = max(seen["with"].agents)
        row: ResultRow = {
            "step": kind,
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "hosts": setup.hosts,
            "rounds": rounds,
            "modes": {name: spread(seconds) for name, seconds in took.items()},
            "times": {
                name: ratio_interval(seconds, took["without"])
                for name, seconds in took.items()
                if name != "without"
            },
            "exposed": round(sum(copying(each) for each in commits) / sum(each["step_s"] for each in commits), 5),
            "copied_bytes": round(statistics.median(each.get("copied_bytes", 0) for each in commits)),
            "host_bytes": both,
            "of_plan": ratio(both, planned_bytes(setup)),
        }
        rows.append(row)
        log.say(
            f"{kind}: copies make a step {row['times']['with']['ratio']:.3f} times as long; "
            f"votes wait {100 * row['exposed']:.2f} % of it"
        )
    return rows


def planned_bytes(setup: HsdpSetup, copies: int = COPIES["with"]) -> int:
    """Return what `plan` says of the memory of the fullest host of a job that is trained here."""
    sections = {**setup.sections, "memory": {"copies": copies}}
    config = job_config(replace(setup, sections=sections), LOOPBACK, Path("runs"))
    size = None if setup.waiting is None else config.model.layers * setup.waiting[0]
    return int(plan(config, Assumptions(), setup.hosts, size)["host_bytes"])


def copying(commit: Mapping[str, Any]) -> float:
    """Return the seconds for which a step's votes waited for copies."""
    return float(commit["waits"].get("copies", 0.0))


def none(rounds: int, log: ProgressLog, setup: HsdpSetup = NONE_SETUP) -> list[ResultRow]:
    """Return a row: replicas that are copies enough, with `memory.copies` unset and with 1. Raises Retryable."""
    took, seen = _trained(setup, {"off": 1, "on": None}, rounds)
    on, off = seen["on"], seen["off"]
    row: ResultRow = {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "steps": len(on.commits),
        "bytes": sum(each.get("copied_bytes", 0) for each in on.commits) + on.served,
        "orders": sum(each["ordered"] for each in on.counts),
        "threads": _threads(on) - _threads(off),
        "modes": {name: spread(seconds) for name, seconds in took.items()},
    }
    log.say(f"no copies needed: {row['bytes']} bytes, {row['threads']} threads, {row['orders']} orders")
    return [row]


def _threads(seen: Seen) -> int:
    """Return the threads of all ranks, and those of their agents at most."""
    return sum(each["threads"] for each in seen.counts) + seen.agent_threads


def plans(log: ProgressLog, hosts: int = PLAN_HOSTS, runs: int = PLAN_RUNS) -> list[ResultRow]:
    """Return a row: the time that `plan` takes, and which of its figures are not exact.

    Those of `hosts` are compared with the formula of groups (ReStore §IV-D), and those of `BRUTE_HOSTS`, some of
    which form a ring, with all ways in which hosts can be lost.

    Args:
        log: for the progress.
        hosts: of the one replica; a multiple of `PLAN_COPIES`.
        runs: of `plan`, in this process; each begins without what the ones before it have counted.
    """
    config = parse({"replicas": 1, "memory": {"copies": PLAN_COPIES}})
    took, wrong = [], 0
    for _ in range(runs):
        survival._ways.cache_clear()
        began = time.perf_counter()
        found = plan(config, Assumptions(), hosts)
        took.append(time.perf_counter() - began)
    rows = found["with_copies"]["lost_hosts"]
    wrong += sum(row["state_lost"] != float(_lost_by_groups(hosts, PLAN_COPIES, row["lost"])) for row in rows)
    small = plan(config, Assumptions(), BRUTE_HOSTS)
    kept = [{*shard["holders"], *shard["copies"]} for shard in small["shards"]]
    tried = small["with_copies"]["lost_hosts"]
    wrong += sum(row["state_lost"] != float(_lost_by_trial(kept, row["lost"])) for row in tried)
    row: ResultRow = {
        "hosts": hosts,
        "copies": PLAN_COPIES,
        "took": spread(took),
        "compared": {"by the formula": len(rows), f"of {BRUTE_HOSTS} hosts by trial": len(tried)},
        "not_exact": wrong,
    }
    log.say(f"plan, {hosts} hosts: {row['took']['p50_ms']:.4g} ms, {wrong} figures are not exact")
    return [row]


def _lost_by_groups(hosts: int, copies: int, lost: int) -> Fraction:
    """Return the probability to lose all hosts of a group (ReStore §IV-D), with `lost` hosts at once."""
    groups = hosts // copies
    terms = range(1, min(groups, lost // copies) + 1)
    ways = sum((-1) ** (j + 1) * comb(groups, j) * comb(hosts - j * copies, lost - j * copies) for j in terms)
    return Fraction(ways, comb(hosts, lost))


def _lost_by_trial(kept: Sequence[set[str]], lost: int) -> Fraction:
    """Return the same for any holders of shards, from all ways in which hosts can be lost."""
    ways = [*combinations(sorted(set().union(*kept)), lost)]
    return Fraction(sum(any(holders <= set(gone) for holders in kept) for gone in ways), len(ways))
