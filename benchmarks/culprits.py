"""`bench culprits`: faults in ranks of a real job, and whether the lighthouse names the culprit (FT-HSDP §2.3).

One job of 3 replicas x 2 ranks trains. A rank hangs before, in or after a collective; it is slow, or its
connection to the right neighbour is; it dies; what it sends is lost; its process is stopped; or two of these
happen at once. The bench asks the lighthouse as `diagnose` does, before each fault as well: what it names then,
or besides the culprit, is false. A fault is named if a finding, or a failure, is of exactly its rank; of a
connection, both ends.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from benchmarks.command import kills_of
from benchmarks.jobs import ENDLESS, QUIET_STEPS, JobUnderTest, Setup
from benchmarks.recovery import span
from benchmarks.results import ProgressLog, Verdicts, begin_result, finish_result, least, most
from ft_hsdp.analysis.diagnosis import EVEN_S, Json, describe
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.run.diagnose import ask
from ft_hsdp.launch.run.recorder import events_of
from tests.support import hangs

FAULTS, SEED = 50, 11
KINDS = (
    *("hang_before", "hang_in", "hang_after", "slow_rank", "slow_link"),
    *("dead", "lost_message", "stopped", "two"),
)
HANGS = ("hang_before", "hang_in", "hang_after", "lost_message")
PATIENCE_S = {"slow_rank": 60.0, "slow_link": 60.0}
USUAL_S = 15.0  # longest wait for a name
LOOK_S = 0.25
NAMED, SOON_MS, PRECISE = 0.96, 5000.0, 0.95  # the goals

SETUP = Setup(
    replicas=3,
    ranks=2,
    model="",
    sections={
        "train": {"steps": ENDLESS, "threads": 1, "seed": 1, "micro_batch": 1, "seq_len": 64},
        "model": {"dim": 96, "layers": 3, "heads": 3},
        "data": {"path": "stdlib", "tokenizer": "byte"},
        "ftar": {"timeout_s": 25, "transport": "tcp"},
        "preload": [hangs.MODULE],
        "debug": {"faults": True},
    },
)


@dataclass
class Fault:
    kind: str
    replica: int
    rank: int
    lift: Callable[[], None] = field(default=lambda: None)
    named_s: float | None = None  # after which it was named
    false: int = 0  # findings before and meanwhile that name another one

    def suspects(self, ring: list[int]) -> set[str]:
        """Return the ranks that a finding has to name."""
        names = {f"{self.replica}/{self.rank}"}
        if self.kind in ("lost_message", "slow_link"):
            names.add(f"{ring[(ring.index(self.replica) + 1) % len(ring)]}/{self.rank}")
        return names


def options(args: Namespace) -> int:
    """Return how many faults `bench culprits` makes."""
    return kills_of(args, FAULTS)


def run(count: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where the job fails."""
    log = ProgressLog(stream)
    result, started = begin_result("culprits", log)
    with JobUnderTest(SETUP) as job:
        job.wait_for_all()
        faults = [fault for number in range(count) for fault in one(job, number, log)]
    result["culprits"] = [summary(faults)]
    return finish_result(result, goals(result), log, started)


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench culprits`."""
    for row in result["culprits"]:
        yield least("faults whose culprit is named, share", row, NAMED, row["named"] / row["faults"])
        yield most("from the fault to the name, p50 ms", row, SOON_MS, row["after"]["p50_ms"])
        yield least("precision of the findings", row, PRECISE, row["named"] / (row["named"] + row["false"]))


def summary(faults: list[Fault]) -> dict[str, Any]:
    found = [fault.named_s for fault in faults if fault.named_s is not None]
    kinds = Counter(fault.kind for fault in faults)
    named = Counter(fault.kind for fault in faults if fault.named_s is not None)
    each = {kind: f"{named[kind]} of {kinds[kind]}" for kind in kinds}
    false = sum(fault.false for fault in faults)
    return {"faults": len(faults), "named": len(found), "false": false, "after": span(found), "kinds": each}


def one(job: JobUnderTest, number: int, log: ProgressLog) -> list[Fault]:
    """Make one fault, or two at once, and wait until they are named; return them once the job is whole again."""
    chance, kind = random.Random(SEED * 1000 + number), KINDS[number % len(KINDS)]
    wait_for_steps(job, time.time())
    time.sleep(chance.uniform(0, 2 * job.step_s()))
    replicas = chance.sample(range(SETUP.replicas), 2)
    kinds = [kind] if kind != "two" else chance.sample(HANGS, 2)
    rank = chance.randrange(SETUP.ranks)
    places = zip(kinds, replicas, (rank, 1 - rank), strict=False)  # two faults are in different rings
    faults = [Fault(*place) for place in places]
    ring = ring_of(job)
    until = time.time() + EVEN_S + 10.0  # what ranks tell of the fault before is told no more by then
    while (extra := keys(describe(ask(job.run)))) and time.time() < until:  # findings that name no fault
        time.sleep(1.0)
    began = time.time()
    for fault in faults:
        inject(job, fault)
    until = began + PATIENCE_S.get(kind, USUAL_S)
    document: Json = {}
    while any(fault.named_s is None for fault in faults) and time.time() < until:
        time.sleep(LOOK_S)
        try:
            document = describe(ask(job.run))
        except LighthouseUnreachable:
            continue
        for fault in faults:
            if fault.named_s is None and names(document, fault.suspects(ring), began):
                fault.named_s = time.time() - began
        extra |= {key for key in keys(document) if not any(set(key) & fault.suspects(ring) for fault in faults)}
        if len(faults) > 1 and faults[0].named_s is not None and faults[1].named_s is None:
            faults[0].lift()  # the second one may be seen only then
        if len(faults) > 1 and faults[1].named_s is not None and faults[0].named_s is None:
            faults[1].lift()
    for fault in faults:
        fault.lift()
        told = "not named" if fault.named_s is None else f"named after {fault.named_s:.1f} s"
        log.say(f"{number + 1}: {fault.kind} of {fault.replica}/{fault.rank} {told}")
        if fault.named_s is None:
            log.say(f"   {sorted(keys(document))}")
    if extra:
        log.say(f"{number + 1}: false: {sorted(extra)}")
    faults[0].false = len(extra)
    return faults


def wait_for_steps(job: JobUnderTest, since: float) -> None:
    """Wait until all replicas have contributed to some steps that were committed since then."""

    def there() -> bool:
        newest = [row for rows in job.rows.values() for row in rows[-QUIET_STEPS:]]
        return all(job.whole(row) and row["t"] > since for row in newest)

    job.wait(there, "all replicas contribute again")


def keys(document: Json) -> set[tuple[str, ...]]:
    """Return which ranks each finding names."""
    return {
        tuple(sorted(each["name"] for each in finding["suspects"])) for finding in document.get("findings", ())
    }


def ring_of(job: JobUnderTest) -> list[int]:
    """Return the replicas in the order of the newest ring."""
    rows = [row for row in events_of(job.run) if row["event"] == "EpochGranted"]
    return list(rows[-1]["members"])


def inject(job: JobUnderTest, fault: Fault) -> None:
    if fault.kind == "dead":
        job.kill(fault.replica, fault.rank)
    elif fault.kind == "stopped":
        job.kill(fault.replica, fault.rank, "STOP")
    else:
        fault.lift = hangs.order(job.run.path, fault.kind, fault.replica, fault.rank)


def names(document: Json, suspects: set[str], since: float) -> bool:
    """Return whether exactly these ranks are named, by a finding or by a failure since then."""
    if tuple(sorted(suspects)) in keys(document):
        return True
    failures = [f for f in document["failures"] if f["t"] >= since - 1]
    return any({f"{f['replica']}/{f['rank']}"} == suspects for f in failures)
