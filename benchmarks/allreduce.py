"""`bench ftar`: the time of one all-reduce, every contender in turn, round after round (ABAB).

The workers of all contenders of one ring size are alive at once, so that one is measured right after the other.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks.command import KIB, MIB, listed, measures_of, rounds_of, sizes_of
from benchmarks.processes import Scope, WorkerLink, ask, greet, spawn_worker
from benchmarks.results import (
    ProgressLog,
    ResultRow,
    Row,
    Verdicts,
    begin_result,
    check_room,
    finish_result,
    interleave,
    least,
    most,
    size_name,
    spread,
    times_as_fast,
    version,
)
from ft_hsdp.errors import ConfigError, DataCorruption

SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MEMBERS = (2, 4)
MOST_MEMBERS = 16
LEAD_S = 0.005  # from the command to the common start: every worker has read it by then
BATCHES = ((256 * KIB, 20), (4 * MIB, 5))  # up to this size, so many all-reduces in a row make a sample
WORKER = "benchmarks.allreduce_ranks"

LARGE = (64 * MIB, 256 * MIB)
SMALL = 64 * KIB  # up to here latency counts
SPEED: tuple[tuple[str, str, Mapping[int, float]], ...] = (  # contender, anchor, times as fast by members at LARGE
    ("tcp", "gloo", {2: 2.2, 4: 1.5}),
    ("tcp", "torchft", {2: 2.2, 4: 1.5}),
    ("shm", "gloo", {2: 5.0, 4: 2.5}),
    ("c10d", "gloo", {2: 1.0, 4: 1.0}),
)
LATENCY = 2.0


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to sum."""

    entry: str  # "module:class" of its `allreduce_ranks.AllReduceRank`
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1  # tensors of the measured size that a rank holds
    needs: str = "ft_hsdp"  # a package without which it is left out


def _ftar(transport: str, text: str) -> Contender:
    return Contender(f"{WORKER}:FTAR", text, {"transport": transport}, 2)


CONTENDERS: dict[str, Contender] = {
    "tcp": _ftar("tcp", "FTAR over TCP, out of place"),
    "shm": _ftar("shm", "FTAR over shared memory, registered tensors, out of place"),
    "c10d": _ftar("c10d", "FTAR over torch.distributed's gloo (TCP), out of place"),
    "gloo": Contender(f"{WORKER}:Gloo", "torch.distributed.all_reduce over gloo, in place"),
    "torchft": Contender(
        "benchmarks.torchft:TorchFT",
        "torchft's ProcessGroupGloo, in place",
        needs="torchft",
    ),
}


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """What `bench ftar` measures."""

    sizes: tuple[int, ...]  # of messages, in bytes
    members: tuple[int, ...]
    contenders: tuple[str, ...]
    rounds: int


def options(args: Namespace) -> AllReduceOptions:
    """Return what `bench ftar` is to do. Raises ConfigError for words that are not allowed."""
    measures_of(args, ("bandwidth",))
    return AllReduceOptions(
        sizes_of(args) or SIZES,
        listed("--members", args.members, _members, f"2 to {MOST_MEMBERS}, e.g. 2,4") or MEMBERS,
        listed("--contenders", args.contenders, _contender, f"some of {','.join(CONTENDERS)}")
        or tuple(CONTENDERS),
        rounds_of(args, 20),
    )


def _members(word: str) -> int | None:
    return int(word) if re.fullmatch(r"\d{1,3}", word) and 2 <= int(word) <= MOST_MEMBERS else None


def _contender(word: str) -> str | None:
    return word if word in CONTENDERS else None


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench ftar`: every goal for which there is a figure."""
    for row in result["bandwidth"]:
        there = row["contenders"]
        for contender, anchor, limits in SPEED:
            limit = limits.get(row["members"])
            if limit is not None and row["bytes"] in LARGE and {contender, anchor} <= there.keys():
                fast = times_as_fast(row, contender, anchor)
                yield least(f"{contender} vs {anchor}, times as fast", row, limit, fast)
        if row["bytes"] <= SMALL and "gloo" in there:
            for name in ("tcp", "shm", "c10d"):
                if name in there:
                    yield most(
                        f"{name} vs gloo, times the latency", row, LATENCY, times_as_fast(row, "gloo", name)
                    )


def run(options: AllReduceOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``, a line for each figure.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A worker fails.
        DataCorruption: A sum is wrong.
    """
    log = ProgressLog(stream)
    contenders = taking_part(options.contenders, log)
    tensors = sum(contender.copies for contender in contenders.values()) * max(options.members)
    check_room(tensors, max(options.sizes), "all contenders at once take")
    result, started = begin_result("ftar", log)
    result["contenders"] = {name: contender.text for name, contender in contenders.items()}
    result["bandwidth"] = rows = []
    for count in options.members:
        with WorkerRings(contenders, count) as all_rings:
            log.say(f"{count} members: {', '.join(all_rings.rings)}")
            for size in options.sizes:
                rows.append(row := _bandwidth(all_rings, size, options.rounds))
                medians = ", ".join(f"{name} {each['p50_ms']:.3g} ms" for name, each in row["contenders"].items())
                log.say(f"{count} members, {size_name(size)}: {medians}")
    return finish_result(result, goals(result), log, started)


def taking_part(wanted: Sequence[str], log: ProgressLog) -> dict[str, Contender]:
    """Return those that are installed; a note tells of each that is not. Raises ConfigError if none is."""
    found = {name: CONTENDERS[name] for name in wanted if version(CONTENDERS[name].needs) is not None}
    if not found:
        raise ConfigError("--contenders", ",".join(wanted), "one that is installed")
    for name in wanted:
        if name not in found:
            log.note(f"{name} is left out: {CONTENDERS[name].needs} is not installed")
    return found


def _bandwidth(all_rings: WorkerRings, size: int, rounds: int) -> ResultRow:
    for ring in all_rings.rings.values():
        ring.prepare(size)
    times = batch(size)
    seconds = interleave({name: partial(ring.time, times) for name, ring in all_rings.rings.items()}, rounds)
    row: ResultRow = {
        "members": all_rings.members,
        "bytes": size,
        "rounds": rounds,
        "all_reduces_per_sample": times,
        "contenders": {name: spread(values) for name, values in seconds.items()},
    }
    row["times_as_fast"] = {
        name: {other: times_as_fast(row, name, other) for other in seconds if other != name} for name in seconds
    }
    return row


def batch(size: int) -> int:
    """Return the all-reduces in a sample: short ones run in a row, so that the common start does not count."""
    return next((times for limit, times in BATCHES if size <= limit), 1)


class WorkerRing:
    """A contender's workers, in a ring."""

    def __init__(self, links: Iterable[WorkerLink]) -> None:
        self.links = list(links)  # clockwise

    def join(self) -> None:
        """Form the ring. Raises Retryable."""
        greet(self.links)
        ask(self.links, {"do": "join", "ring": [(n, link.address) for n, link in enumerate(self.links)]})

    def prepare(self, size: int) -> None:
        """Allocate ``size`` bytes, and sum known values. Raises DataCorruption if a sum is wrong."""
        ask(self.links, {"do": "prepare", "bytes": size})
        for link, answer in zip(self.links, ask(self.links, {"do": "check"}), strict=True):
            if answer["wrong"]:
                raise DataCorruption(f"bench: {link.name} has a wrong sum: {answer['wrong']}")

    def time(self, times: int) -> float:
        """Return the seconds of an all-reduce: from a common start to the slowest rank's end, over ``times``."""
        start = time.monotonic() + LEAD_S
        answers = ask(self.links, {"do": "run", "times": times, "at": start})
        return (max(float(answer["t"]) for answer in answers) - start) / times


class WorkerRings(Scope):
    """A context: on entry every contender has ``members`` workers in one ring; on exit nothing is left running.

    Raises Retryable if a worker cannot be set up.
    """

    def __init__(self, contenders: Mapping[str, Contender], members: int) -> None:
        self.contenders = dict(contenders)
        self.members = members
        self.rings: dict[str, WorkerRing] = {}  # by contender
        self._token = secrets.token_hex(32)

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        for name in self.contenders:
            self.rings[name] = WorkerRing(self._start(name, member) for member in range(self.members))
        for ring in self.rings.values():
            ring.join()

    def _start(self, name: str, member: int) -> WorkerLink:
        contender, worker = self.contenders[name], f"{name} rank {member}"
        spec = json.dumps(asdict(WorkerSpec(name, member, self._token, contender.options)))
        env = {"GLOO_SOCKET_IFNAME": "lo"}  # FTAR is told its host; so is gloo
        log = self._folder / f"{worker}.log"
        return spawn_worker(self.stack, worker, WORKER, [contender.entry, spec], log, env)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Which worker a process is."""

    name: str  # of the contender
    member: int  # its id in the ring, from 0
    token: str  # the secret that all members share
    options: Mapping[str, Any]  # of the contender
