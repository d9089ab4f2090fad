"""`bench ftar`: the time of one all-reduce, every contender in turn, round after round (ABAB).

The workers of all contenders of one ring size are alive at once, so that one is measured right after the other.
`benchmarks.rings` measures with them what happens when members die.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ft_hsdp.bench.command import KIB, MIB, listed, measures_of, rounds_of, sizes_of
from ft_hsdp.bench.processes import Answer, Scope, WorkerLink, ask, collect, greet, spawn_worker
from ft_hsdp.bench.results import (
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
from ft_hsdp.errors import ConfigError, DataCorruption, Retryable

MEASURES = ("bandwidth",)
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MEMBERS = (2, 4)
MOST_MEMBERS = 16
LEAD_S = 0.005  # from the command to the common start: every worker has read it by then
BATCHES = ((256 * KIB, 20), (4 * MIB, 5))  # up to this size, so many all-reduces in a row make a sample
WORKER = "ft_hsdp.bench.allreduce_ranks"

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
    reconfigures: bool = False  # it can join again under a new epoch
    recovers: bool = False  # it outlives the death of a member


def _ftar(transport: str, text: str) -> Contender:
    return Contender(f"{WORKER}:FTAR", text, {"transport": transport}, 2, reconfigures=True, recovers=True)


CONTENDERS: dict[str, Contender] = {
    "tcp": _ftar("tcp", "FTAR over TCP, out of place"),
    "shm": _ftar("shm", "FTAR over shared memory, registered tensors, out of place"),
    "c10d": _ftar("c10d", "FTAR over torch.distributed's gloo (TCP), out of place"),
    "gloo": Contender(f"{WORKER}:Gloo", "torch.distributed.all_reduce over gloo, in place"),
    "torchft": Contender(
        "ft_hsdp.bench.torchft:TorchFT",
        "torchft's ProcessGroupGloo, in place",
        needs="torchft",
        reconfigures=True,
    ),
}


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """What is measured; None where each measure has its own."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...] | None  # of messages, in bytes
    members: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int


def options(args: Namespace) -> AllReduceOptions:
    """Return what `bench ftar` is to do."""
    return options_of(args, MEASURES)


def options_of(args: Namespace, measures: tuple[str, ...]) -> AllReduceOptions:
    """Return which of ``measures`` are meant, and of what. Raises ConfigError for words that are not allowed."""
    return AllReduceOptions(
        measures_of(args, measures),
        sizes_of(args),
        listed("--members", args.members, _members, f"2 to {MOST_MEMBERS}, e.g. 2,4"),
        listed("--contenders", args.contenders, _contender, f"some of {','.join(CONTENDERS)}"),
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
    members, sizes = options.members or MEMBERS, options.sizes or SIZES
    contenders = taking_part("bandwidth", options.contenders or tuple(CONTENDERS), log)
    check_memory(contenders.values(), max(members), max(sizes))
    result, started = begin_result("ftar", log)
    result["contenders"] = {name: contender.text for name, contender in contenders.items()}
    result["bandwidth"] = rows = []
    for count in members:
        with WorkerRings(contenders, count) as all_rings:
            log.say(f"{count} members: {', '.join(all_rings.rings)}")
            for size in sizes:
                rows.append(row := _bandwidth(all_rings, size, options.rounds))
                medians = ", ".join(f"{name} {each['p50_ms']:.3g} ms" for name, each in row["contenders"].items())
                log.say(f"{count} members, {size_name(size)}: {medians}")
    return finish_result(result, goals(result), log, started)


def taking_part(
    measure: str,
    wanted: Sequence[str],
    log: ProgressLog,
    unfit: Callable[[Contender], str] = lambda contender: "",
) -> dict[str, Contender]:
    """Return the contenders that take part in a measure; a note tells of each that does not.

    Args:
        measure: its name.
        wanted: the names of those who should.
        log: takes the notes.
        unfit: returns why a contender cannot take part, "" if it can.

    Raises:
        ConfigError: None of them can.
    """
    found, why = {}, []
    for name in wanted:
        each = CONTENDERS[name]
        if reason := f"not installed: {each.needs}" if version(each.needs) is None else unfit(each):
            why.append(f"{name} is left out of {measure}: {reason}")
        else:
            found[name] = each
    if not found:
        raise ConfigError("--contenders", ",".join(wanted), f"one that can take part ({'; '.join(why)})")
    for text in why:
        log.note(text)
    return found


def _bandwidth(all_rings: WorkerRings, size: int, rounds: int) -> ResultRow:
    all_rings.prepare(size)
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


def check_memory(contenders: Iterable[Contender], members: int, size: int) -> None:
    """Raise ConfigError where tensors of ``size`` bytes do not fit at all members of all contenders at once."""
    copies = sum(contender.copies for contender in contenders) * members
    check_room(copies, size, "all contenders at once take")


class WorkerRing:
    """A contender's workers and their ring."""

    def __init__(self, name: str, links: Iterable[WorkerLink]) -> None:
        self.name = name
        self.links = list(links)  # by member
        self.order = list(range(len(self.links)))  # the ring, clockwise
        self._epoch = 0

    @property
    def active(self) -> list[WorkerLink]:
        """Return the members of the ring, clockwise."""
        return [self.links[member] for member in self.order]

    def join(self, order: Sequence[int] | None = None) -> float:
        """Form a ring of these members under a new epoch.

        Returns:
            Seconds from a common start until all are ready.
        """
        self.order = list(self.order if order is None else order)
        self._epoch += 1
        ring = [(member, self.links[member].address) for member in self.order]
        start = time.monotonic() + LEAD_S
        return self.last(ask(self.active, {"do": "join", "epoch": self._epoch, "ring": ring, "at": start})) - start

    def prepare(self, size: int) -> None:
        """Allocate ``size`` bytes, and sum known values. Raises DataCorruption if a sum is wrong."""
        ask(self.active, {"do": "prepare", "bytes": size})
        self.check()

    def check(self) -> None:
        """Sum known values. Raises DataCorruption if a sum is wrong."""
        for link, answer in zip(self.active, ask(self.active, {"do": "check"}), strict=True):
            if wrong := answer.get("wrong"):
                raise DataCorruption(f"bench: {link.name} has a wrong sum: {wrong}")
            _complete(link, answer)

    def start(self, times: int = 1) -> float:
        """Begin so many all-reduces, one after the other; return the common start."""
        start = time.monotonic() + LEAD_S
        for link in self.active:
            link.send({"do": "run", "times": times, "at": start})
        return start

    def time(self, times: int = 1) -> float:
        """Return the seconds of an all-reduce: from a common start to the slowest rank's end, over ``times``."""
        start = self.start(times)
        return (self.last(collect(self.active)) - start) / times

    def last(self, answers: Sequence[Answer]) -> float:
        """Return the moment when the last member was done. Raises Retryable if one has failed."""
        for link, answer in zip(self.active, answers, strict=True):
            _complete(link, answer)
        return max(float(answer["t"]) for answer in answers)


def _complete(link: WorkerLink, answer: Answer) -> None:
    """Raise Retryable where an undisturbed all-reduce failed."""
    if "raised" in answer:
        raise Retryable(f"bench: {link.name} raised {answer['raised']}: {answer['text']}")


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
            self.rings[name] = WorkerRing(name, [self._start(name, member) for member in range(self.members)])
        for ring in self.rings.values():
            greet(ring.links)
            ring.join()

    def prepare(self, size: int) -> None:
        """Allocate ``size`` bytes everywhere, and see that every sum is right.

        Raises:
            ConfigError: Memory does not suffice.
            DataCorruption: A sum is wrong.
        """
        check_memory(self.contenders.values(), self.members, size)
        for ring in self.rings.values():
            ring.prepare(size)

    def replace(self, name: str, member: int) -> None:
        """Start a fresh worker in the place of one that was killed; it is not in the ring yet."""
        links = self.rings[name].links
        links[member].close()
        links[member] = self._start(name, member)
        greet([links[member]])

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
