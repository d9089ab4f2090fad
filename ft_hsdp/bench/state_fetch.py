"""`bench fetch`: a state goes from a donor to a receiver, processes of their own; the contenders take turns."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil

from ft_hsdp.bench import goals
from ft_hsdp.bench.contenders.base import version
from ft_hsdp.bench.contenders.fetch import FetchSpec
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.options import measures_of, rounds_of, sizes_of
from ft_hsdp.bench.results import GIB, KIB, ProgressLog, ResultRow, interleave, size_name, spread
from ft_hsdp.bench.scope import scratch
from ft_hsdp.bench.workers.link import WorkerLink, ask, greet, spawn_worker
from ft_hsdp.errors import ConfigError

LARGE_TENSORS = 16
SMALL = FetchSpec(2000, 4 * KIB)
WORKER = "ft_hsdp.bench.contenders.fetch"
CHUNKED = 4  # of torchft's transport, beside one piece


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """What `bench fetch` measures."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]  # of states in large tensors, in bytes
    rounds: int  # fetches of each contender


def options(args: Namespace) -> FetchOptions:
    """Return what `bench fetch` is to do."""
    return FetchOptions(measures_of(args, ("large", "small")), sizes_of(args) or (GIB,), rounds_of(args, 7))


@dataclass(frozen=True, slots=True)
class FetchContender:
    """One way to fetch a state."""

    text: str
    donor: str  # "module:class" of its `DonorContender`
    receiver: str  # of its `ReceiverContender`
    spec: Mapping[str, Any]  # fields of its `FetchSpec`
    needs: str  # a package without which it is left out


def contender(text: str, module: str, name: str, needs: str = "ft_hsdp", **spec: Any) -> FetchContender:
    """Return a contender whose classes have a common name, in a module of `bench.contenders`."""
    entry = f"ft_hsdp.bench.contenders.{module}:{name}"
    return FetchContender(text, f"{entry}Donor", f"{entry}Receiver", spec, needs)


CONTENDERS: dict[str, FetchContender] = {
    "raw": contender("sendfile and recv_into on bare sockets, into memory that is there", "fetch", "Raw"),
    "fetch": contender("ft_hsdp's fetch with all checks, into memory that is there", "fetch", "Fetch"),
    "transport": contender(
        "ft_hsdp's StateTransport: a state dict, in new memory", "torchft", "State", needs="torchft"
    ),
    "torchft": contender("torchft's HTTPTransport, in one piece", "torchft", "HTTP", needs="torchft"),
    "torchft-4": contender(
        f"torchft's HTTPTransport, in {CHUNKED} chunks", "torchft", "HTTP", needs="torchft", chunks=CHUNKED
    ),
}
COPIES = 2 * len(CONTENDERS)  # of the state, at most, at the same time


def run(options: FetchOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A process fails.
    """
    log = ProgressLog(stream)
    largest = max(options.sizes) if "large" in options.measures else SMALL.total
    free = psutil.virtual_memory().available
    if COPIES * largest > free:
        allowed = f"what fits {COPIES} times into {free / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(largest), allowed)
    result, started = begin_result("fetch", log)
    there = {name: each for name, each in CONTENDERS.items() if version(each.needs) is not None}
    for name in CONTENDERS.keys() - there.keys():
        log.note(f"{name} is left out: {CONTENDERS[name].needs} is not installed")
    result["contenders"] = {name: each.text for name, each in there.items()}
    specs = [FetchSpec(LARGE_TENSORS, -(-size // LARGE_TENSORS // 4) * 4) for size in options.sizes]
    result["large"] = [measure(s, there, options.rounds, log) for s in specs if "large" in options.measures]
    result["small"] = [measure(SMALL, there, options.rounds, log)] if "small" in options.measures else []
    return finish_result(result, goals.fetch(result), log, started)


def measure(spec: FetchSpec, contenders: Mapping[str, FetchContender], rounds: int, log: ProgressLog) -> ResultRow:
    """Return a row: times of all contenders, and the most memory that their receivers needed."""
    log.say(f"{spec.tensors} tensors of {size_name(spec.nbytes)}: {', '.join(contenders)}")
    last: dict[str, dict[str, Any]] = {}
    with scratch() as (stack, folder):
        start = partial(_start, spec, folder, stack)
        donors = {name: start(f"{name}'s donor", each.donor, each) for name, each in contenders.items()}
        greet(list(donors.values()))
        receivers = {
            name: start(f"{name}'s receiver", each.receiver, each, donors[name].address)
            for name, each in contenders.items()
        }
        greet(list(receivers.values()))
        seconds = interleave({name: partial(_take, name, receivers[name], last) for name in contenders}, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    speeds = {name: spec.total / each["p50_ms"] / 1e6 for name, each in found.items()}
    for name, each in found.items():
        log.say(f"  {name}: {each['p50_ms']:.4g} ms, {speeds[name]:.2f} GB/s")
    return {
        "bytes": spec.total,
        "tensors": spec.tensors,
        "rounds": rounds,
        "contenders": found,
        "gb_per_s": {name: round(speed, 3) for name, speed in speeds.items()},
        "memory": {name: _memory(spec, last[name]) for name in contenders},
    }


def _start(
    spec: FetchSpec, folder: Path, stack: ExitStack, name: str, entry: str, each: FetchContender, *where: str
) -> WorkerLink:
    arguments = [entry, json.dumps(asdict(replace(spec, **each.spec))), *where]
    return spawn_worker(stack, name, WORKER, arguments, folder / f"{name.replace(' ', '-')}.log")


def _take(name: str, receiver: WorkerLink, last: dict[str, dict[str, Any]]) -> float:
    (last[name],) = ask([receiver], {})
    return float(last[name]["t"])


def _memory(spec: FetchSpec, answer: Mapping[str, Any]) -> dict[str, float]:
    """Return bytes, and both as times the state: of the whole process, and of what it grew by."""
    base, peak = answer["base"], answer["peak"]
    return {
        "base_bytes": base,
        "peak_bytes": peak,
        "times_state": round(peak / spec.total, 3),
        "growth_times_state": round((peak - base) / spec.total, 3),
    }
