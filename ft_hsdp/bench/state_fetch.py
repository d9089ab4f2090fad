"""What the user asked `bench fetch` for.

The goals of `bench fetch`, and how what was seen stands to them.

The result of `bench fetch` as tables.

`bench fetch`: every contender has a donor and a receiver, processes of their own, and they take turns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.console import Console

from ft_hsdp.bench import tables
from ft_hsdp.bench.contenders.fetch import FetchSeat
from ft_hsdp.bench.contenders.roster import version
from ft_hsdp.bench.goals import GoalVerdict, begin_result, finish_result, least, most
from ft_hsdp.bench.options import GIB, KIB, ProgressLog, ResultRow, count_of, measures_of, size_name, sizes_of
from ft_hsdp.bench.results import interleave, ratio, spread
from ft_hsdp.bench.scope import spawn_worker
from ft_hsdp.bench.workers.link import WorkerLink, ask, collect
from ft_hsdp.errors import ConfigError

MEASURES = ("large", "small")
SIZES = (GIB,)


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """measures: which; sizes: of states in large tensors, in bytes; rounds: takes of each contender."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int


def parse(measure: str, *, sizes: str | None, rounds: int) -> FetchOptions:
    """Options from the words of a command line. Raises ConfigError."""
    return FetchOptions(measures_of(measure, MEASURES), sizes_of(sizes) or SIZES, count_of("--rounds", rounds))


RAW_SHARE = 0.8
LARGE_TIMES = 1.3
SMALL_TIMES = 3.0
MEMORY = 1.1
PEERS = ("torchft", "torchft-4")


def verdicts(result: Mapping[str, Any]) -> list[GoalVerdict]:
    """Every goal for which there is a figure."""
    found: list[GoalVerdict] = []
    for row in result["large"]:
        found.append(least("fetch, share of bare sockets' speed", row, RAW_SHARE, times(row, "fetch", "raw")))
        found += _peers(row, "fetch", LARGE_TIMES)
        seen = row["memory"]["fetch"]["times_state"]
        found.append(most("fetch: memory of the receiver, times the state", row, MEMORY, seen))
    for row in result["small"]:
        found += _peers(row, "transport", SMALL_TIMES)
    return found


def times(row: Mapping[str, Any], name: str, other: str) -> float:
    """How many times as fast `name` is as `other`: a ratio of medians."""
    return ratio(row["contenders"][other]["p50_ms"], row["contenders"][name]["p50_ms"])


def _peers(row: Mapping[str, Any], name: str, limit: float) -> Iterator[GoalVerdict]:
    """Beside the best setting of torchft."""
    peers = [peer for peer in PEERS if peer in row["contenders"]]
    if peers and name in row["contenders"]:
        best = min(peers, key=lambda peer: row["contenders"][peer]["p50_ms"])
        text = f"{name} vs torchft, times as fast"
        yield least(text, row, limit, times(row, name, best))


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `bench.run`."""
    console = tables.begin_tables(result, stream)
    for name, text in result["contenders"].items():
        console.print(f"  {name:<10} {text}")
    for row in (*result["large"], *result["small"]):
        _row(row, console)
    tables.end_tables(result, verdicts(result), console)


def _row(row: Mapping[str, Any], console: Console) -> None:
    title = f"{size_name(row['bytes'])} in {row['tensors']} tensors: median of {row['rounds']}"
    anchors = [name for name in ("raw", *PEERS) if name in row["contenders"]]
    heads = ("ms", "GB/s", *(f"times {name}" for name in anchors), "memory, times state (growth)")
    grid = tables.columns(title, "", *heads)
    for name, found in row["contenders"].items():
        ratios = ["" if name == anchor else f"{times(row, name, anchor):.2f}" for anchor in anchors]
        memory = row["memory"][name]
        room = f"{memory['times_state']:.2f} ({memory['growth_times_state']:.2f})"
        grid.add_row(name, f"{found['p50_ms']:.4g}", f"{row['gb_per_s'][name]:.2f}", *ratios, room)
    console.print(grid)


LARGE_TENSORS = 16
SMALL = FetchSeat(2000, 4 * KIB)
WORKER = "ft_hsdp.bench.workers.fetch_worker"
CHUNKED = 4  # of torchft's transport, beside one piece


@dataclass(frozen=True, slots=True)
class Way:
    """A contender: "module:class" of its Donor and Receiver; chunks: for its Seat; needs: a package."""

    text: str
    donor: str
    receiver: str
    chunks: int = 0
    needs: str = "ft_hsdp"


def _way(text: str, module: str, name: str, chunks: int = 0, needs: str = "ft_hsdp") -> Way:
    return Way(
        text, f"ft_hsdp.bench.{module}:{name}Donor", f"ft_hsdp.bench.{module}:{name}Receiver", chunks, needs
    )


_HTTP = "contenders.torchft_fetch"
WAYS: dict[str, Way] = {
    "raw": _way("sendfile and recv_into on bare sockets, into memory that is there", "contenders.fetch", "Raw"),
    "fetch": _way("ft_hsdp's fetch with all checks, into memory that is there", "contenders.fetch", "Fetch"),
    "transport": _way(
        "ft_hsdp's StateTransport: a state dict, in new memory", "contenders.torchft_fetch", "State", 0, "torchft"
    ),
    "torchft": _way("torchft's HTTPTransport, in one piece", _HTTP, "HTTP", 0, "torchft"),
    "torchft-4": _way(f"torchft's HTTPTransport, in {CHUNKED} chunks", _HTTP, "HTTP", CHUNKED, "torchft"),
}
COPIES = 2 * len(WAYS)  # of the state, at most, at the same time


def run(options: FetchOptions, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a process fails.
    """
    log = ProgressLog(stream)
    largest = max(options.sizes) if "large" in options.measures else SMALL.total
    free = psutil.virtual_memory().available
    if COPIES * largest > free:
        allowed = f"what fits {COPIES} times into {free / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(largest), allowed)
    result, started = begin_result("fetch", log)
    ways = {name: way for name, way in WAYS.items() if version(way.needs) is not None}
    for name in WAYS.keys() - ways.keys():
        log.note(f"{name} is left out: {WAYS[name].needs} is not installed")
    result["contenders"] = {name: way.text for name, way in ways.items()}
    seats = [FetchSeat(LARGE_TENSORS, -(-size // LARGE_TENSORS // 4) * 4) for size in options.sizes]
    result["large"] = [measure(s, ways, options.rounds, log) for s in seats if "large" in options.measures]
    result["small"] = [measure(SMALL, ways, options.rounds, log)] if "small" in options.measures else []
    return finish_result(result, verdicts(result), log, started)


def measure(seat: FetchSeat, ways: Mapping[str, Way], rounds: int, log: ProgressLog) -> ResultRow:
    """A row: times of all contenders, and the most memory that their receivers needed."""
    log.say(f"{seat.tensors} tensors of {size_name(seat.nbytes)}: {', '.join(ways)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        seats = {name: replace(seat, chunks=way.chunks) for name, way in ways.items()}
        donors = {n: _start(f"{n}'s donor", w.donor, seats[n], None, folder, stack) for n, w in ways.items()}
        _greet(donors)
        receivers = {
            n: _start(f"{n}'s receiver", w.receiver, seats[n], donors[n].address, folder, stack)
            for n, w in ways.items()
        }
        _greet(receivers)
        last: dict[str, dict[str, Any]] = {}
        seconds = interleave({name: partial(_take, name, receivers[name], last) for name in ways}, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    for name, each in found.items():
        log.say(f"  {name}: {each['p50_ms']:.4g} ms, {_speed(seat, each):.2f} GB/s")
    return {
        "bytes": seat.total,
        "tensors": seat.tensors,
        "rounds": rounds,
        "contenders": found,
        "gb_per_s": {name: round(_speed(seat, each), 3) for name, each in found.items()},
        "memory": {name: _memory(seat, last[name]) for name in ways},
    }


def _take(name: str, receiver: WorkerLink, last: dict[str, dict[str, Any]]) -> float:
    (last[name],) = ask([receiver], {})
    return float(last[name]["t"])


def _speed(seat: FetchSeat, times: Mapping[str, float]) -> float:
    return seat.total / times["p50_ms"] / 1e6


def _memory(seat: FetchSeat, answer: Mapping[str, Any]) -> dict[str, float]:
    """Bytes, and both as times the state: of the whole process, and of what it grew by."""
    base, peak = answer["base"], answer["peak"]
    return {
        "base_bytes": base,
        "peak_bytes": peak,
        "times_state": round(peak / seat.total, 3),
        "growth_times_state": round((peak - base) / seat.total, 3),
    }


def _start(
    name: str, entry: str, seat: FetchSeat, where: str | None, folder: Path, stack: ExitStack
) -> WorkerLink:
    """A process; `stack` ends it."""
    told = [entry, json.dumps(asdict(seat)), *([] if where is None else [where])]
    return spawn_worker(stack, name, WORKER, told, folder / f"{name.replace(' ', '-')}.log")


def _greet(links: Mapping[str, WorkerLink]) -> None:
    """Wait until all are ready. Raises Retryable."""
    for link, answer in zip(links.values(), collect(list(links.values())), strict=True):
        link.greet(answer)
