"""`bench memory`: what copies of states in host memory cost, and what they save.

- step: a step of one replica on two hosts, with copies and without: of steps that compute, and that wait as beside
  an accelerator; and the memory of the hosts, beside what `plan` says;
- none: three healthy replicas need no copies: bytes, threads and orders are counted;
- gaps, lost, flips: see the modules of these names.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ft_hsdp.bench.command import MemoryOptions
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.hsdp.processes import PRODUCT, HsdpSetup, TrainingProcesses
from ft_hsdp.bench.memory.flips import flips
from ft_hsdp.bench.memory.gaps import SETTLE_S, STEPS, gaps
from ft_hsdp.bench.memory.lost import lost, union
from ft_hsdp.bench.overhead import SETUP, Trained, in_turns
from ft_hsdp.bench.results import ProgressLog, ResultRow, ratio, ratio_interval, spread
from ft_hsdp.launch.run.directory import RunDir, read_jsonl

COPIES: Mapping[str, int] = {"without": 1, "without again": 1, "with": 2}
STEP_SETUPS: Mapping[str, HsdpSetup] = {
    "waiting": replace(SETUP, replicas=1, hosts=2, steps=STEPS, waiting=(1 << 18, 0.5)),
    "computing": replace(SETUP, replicas=1, hosts=2, steps=STEPS),
}
NONE_SETUP = HsdpSetup(replicas=3, ranks=1, waiting=(1 << 16, 0.1), steps=5, sections=SETUP.sections)


def run(options: MemoryOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        Retryable: A process fails.
        DataCorruption: A flipped byte was not found.
    """
    log = ProgressLog(stream)
    result, started = begin_result("memory", log)
    wanted, rounds = options.measures, options.rounds
    result["step"] = steps(rounds, log) if "step" in wanted else []
    result["none"] = none(min(rounds, 5), log) if "none" in wanted else []
    result["gaps"] = gaps(rounds, log) if "gaps" in wanted else []
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


def _trained(
    setup: HsdpSetup, contenders: Mapping[str, int | None], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Seen]]:
    """Train contenders that differ in `memory.copies`, in turns; return their steps, and what was seen."""
    seen: dict[str, Seen] = {}

    def look(name: str, run: RunDir, processes: TrainingProcesses) -> None:
        logs = run.path.parent.glob("agent-*.log")
        rows = read_jsonl(run.commits(0))
        seen[name] = Seen(rows, processes.said, [segments(log) for log in sorted(logs)])

    trained = {
        name: Trained(PRODUCT, replace(setup, sections={**setup.sections, "memory": {"copies": copies}}))
        for name, copies in contenders.items()
    }
    return in_turns(trained, rounds, look=look, settle_s=SETTLE_S), seen


def segments(log: Path) -> int:
    """Return the bytes of all snapshots and copies in a state agent, which has written its pid into ``log``."""
    pid = json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))["pid"]
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
        commits = seen["with"].commits[-rounds * setup.steps :]
        own, both = max(seen["without"].agents), max(seen["with"].agents)
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
            # Of one host each: two slots of its own shards, and as many of those that it keeps.
            "of_plan": ratio(both, 2 * own),
        }
        rows.append(row)
        log.say(
            f"{kind}: copies make a step {row['times']['with']['ratio']:.3f} times as long; "
            f"votes wait {100 * row['exposed']:.2f} % of it"
        )
    return rows


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
        "bytes": sum(each.get("copied_bytes", 0) for each in on.commits) + sum(each["sent"] for each in on.counts),
        "orders": sum(each["ordered"] for each in on.counts),
        "threads": sum(each["threads"] for each in on.counts) - sum(each["threads"] for each in off.counts),
        "modes": {name: spread(seconds) for name, seconds in took.items()},
    }
    log.say(f"no copies needed: {row['bytes']} bytes, {row['threads']} threads, {row['orders']} orders")
    return [row]
