"""One replica on two hosts loses one, and there is no other: it goes on with half its ranks, and grows back later.

Steps wait instead of computing. The host is away until the replica has trained some steps without it. A step is
new when it was not committed before the host was lost.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from benchmarks.memory import Loss, loss
from benchmarks.returns import return_phases, stages_in
from ft_hsdp.bench.command import kills_of
from ft_hsdp.bench.jobs import SEED, JobUnderTest, Kill, Setup
from ft_hsdp.bench.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    milliseconds,
    most,
    spread,
)
from ft_hsdp.jsonl import LineWriter
from ft_hsdp.launch.injection import inflict, parse_options
from ft_hsdp.launch.run.directory import Row, RunDir

LONE_MS, LONE_STEPS = 2000.0, 1  # the goals
STEP_S = 0.1
PLACE_S = 0.1  # how long a lost host is awaited: it counts
RANKS, HOSTS, LEFT = 4, 2, 2
CALM = 6  # steps of an incarnation before the next change, at least
SHRINKS: Mapping[str, Any] = {
    "timeouts": {"place_s": PLACE_S},
    "quorum": {"on_lost_head": "rollback"},
    "debug": {"faults": True},
}


def options(args: Namespace) -> int:
    """Return how many hosts `bench lone` loses."""
    return kills_of(args, 20)


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench lone`."""
    for row in result["lone"]:
        there = f"{row['ranks']} ranks to {row['left']}"
        yield most(f"{there}: host lost to new step - 1 step, p50 ms", row, LONE_MS, row["beyond"]["p50_ms"])
        yield most(f"{there}: steps lost", row, LONE_STEPS, row["lost_steps"]["max"])
        yield most(f"{row['left']} ranks to {row['ranks']}: steps repeated", row, 0, row["grow"]["repeated"])


def run(count: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("lone", log)
    result["lone"] = lone(count, log)
    return finish_result(result, goals(result), log, started)


class LostHost:
    """A host of a replica whose ranks and state agent are killed, and that is away until it is told to be back."""

    def __init__(self, run: RunDir, replica: int, rank: int) -> None:
        """Kill what runs on the host of a rank, and log it. Raises ConfigError where nothing runs there."""
        self._run = run
        self._replica = replica
        self._made = inflict(run, parse_options(kind="host", replica=replica, rank=rank))
        self.t: float = self._made.event["t"]  # Unix time
        self.incarnation = str(self._made.event["incarnation"])
        self._log(self._made.event)

    def back(self) -> None:
        """Let the host have ranks again."""
        self._log(self._made.lifted("the bench has it back"))

    def _log(self, event: Row) -> None:
        log = LineWriter(self._run.injections(self._replica))
        log.write(event)
        log.close()


@dataclass(frozen=True, slots=True)
class Growth:
    """How a replica got all its ranks back."""

    pause_s: float  # from the last commit of the fewer ranks to the first one of all
    repeated: int  # committed steps that were trained again


def growth(rows: Sequence[Row]) -> Growth | None:
    """Return how the newest incarnation of a replica followed the one before; None if it has committed nothing.

    Args:
        rows: The commits of the replica, up to and with the first one of the newest incarnation.
    """
    if len(rows) < 2 or rows[-1]["incarnation"] == rows[-2]["incarnation"]:
        return None
    last, first = rows[-2:]
    return Growth(first["t"] - last["t"], last["step"] + 1 - first["step"])


def calm(rows: Sequence[Row], steps: int) -> bool:
    """Return whether the newest ``steps`` commits are of one incarnation."""
    return len(rows) >= steps and len({row["incarnation"] for row in rows[-steps:]}) == 1


def lone(count: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row: the only replica loses a host ``count`` times, and gets it back. Raises Retryable."""
    sections = {"hosts": {"per_replica": HOSTS}, "memory": {"shrink_to": LEFT}, **SHRINKS}
    setup = Setup(replicas=1, ranks=RANKS, wait_s=STEP_S, sections=sections)
    chance, kills, losses, growths = random.Random(SEED), list[Kill](), list[Loss](), list[Growth]()
    names = []  # of the incarnations with fewer ranks
    with JobUnderTest(setup) as job:
        rows = job.rows[0]
        for _ in range(count):
            steps = CALM + chance.randrange(CALM)
            job.wait(lambda steps=steps: calm(rows, steps), "all ranks train")  # type: ignore[misc]
            time.sleep(chance.uniform(0, STEP_S))
            rank = chance.randrange(RANKS)
            host = LostHost(job.run, 0, rank)
            job.wait(partial(_new, rows, host.t), "a new step")
            found = loss(rows, host.t)
            assert found is not None
            losses.append(found)
            kills.append(Kill(host.t, 0, rank, host.incarnation))
            names.append(str(rows[-1]["incarnation"]))
            job.wait(lambda: calm(rows, CALM), "fewer ranks train on")
            host.back()
            job.wait(lambda: rows[-1]["incarnation"] != names[-1], "all ranks train again")
            at = next(n for n, row in enumerate(rows) if row["incarnation"] == rows[-1]["incarnation"])
            grown = growth(rows[: at + 1])
            assert grown is not None
            growths.append(grown)
            log.say(
                f"lone: {found.new_s:.2f} s to a new step of fewer ranks, {found.lost_steps} steps again; "
                f"{grown.pause_s:.2f} s to grow, {grown.repeated} steps again"
            )
        step_s = job.step_s()
    return [
        {
            "replicas": 1,
            "ranks": RANKS,
            "hosts": HOSTS,
            "left": LEFT,
            "kills": count,
            "place_ms": milliseconds(PLACE_S),
            "step_ms": milliseconds(step_s),
            "new": spread([each.new_s for each in losses]),
            "beyond": spread([max(0.0, each.new_s - step_s) for each in losses]),
            "lost_steps": _steps([each.lost_steps for each in losses]),
            "phases": phases(kills, names, losses, job.events),
            "grow": {
                "pause": spread([each.pause_s for each in growths]),
                "repeated": max(each.repeated for each in growths),
            },
        }
    ]


def _new(rows: Sequence[Row], t: float) -> bool:
    return loss(rows, t) is not None


def _steps(found: Sequence[int]) -> dict[str, float]:
    return {"p50": statistics.median(found), "max": max(found)}


def phases(
    kills: Sequence[Kill], names: Sequence[str], losses: Sequence[Loss], events: Sequence[Row]
) -> dict[str, float]:
    """Return the median milliseconds of each phase from the loss of a host to a new step.

    Args:
        kills: What was killed.
        names: The incarnation with fewer ranks that followed each kill.
        losses: When each new step was.
        events: All events of the job.
    """
    stages, shrunk = stages_in(events), [event["t"] for event in events if event["event"] == "Shrunk"]
    found = []
    for kill, name, lost in zip(kills, names, losses, strict=True):
        ends, _ = stages(kill, name)
        place = next((t for t in sorted(shrunk) if t > kill.t), None)
        first, *rest = ends.items()
        found.append(return_phases(kill.t, dict([first, ("place", place), *rest]), kill.t + lost.new_s))
    return {phase: milliseconds(statistics.median(each[phase] for each in found)) for phase in found[0]}
