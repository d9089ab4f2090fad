"""`bench fetch`: every contender has a donor and a receiver, processes of their own, and they take turns."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil

from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.fetch.goals import verdicts
from ft_hsdp.bench.fetch.options import Options
from ft_hsdp.bench.fetch.seat import Seat
from ft_hsdp.bench.link import Link, ask, collect
from ft_hsdp.bench.options import GIB, KIB, size_name
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.roster import version
from ft_hsdp.bench.rounds import interleave
from ft_hsdp.bench.spread import spread
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend.processes import environment, tied

LARGE_TENSORS = 16
SMALL = Seat(2000, 4 * KIB)
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


_HTTP = "contenders.torchft_http"
WAYS: dict[str, Way] = {
    "raw": _way("sendfile and recv_into on bare sockets, into memory that is there", "fetch.ours", "Raw"),
    "fetch": _way("ft_hsdp's fetch with all checks, into memory that is there", "fetch.ours", "Fetch"),
    "transport": _way(
        "ft_hsdp's StateTransport: a state dict, in new memory", "fetch.torchft_transports", "State", 0, "torchft"
    ),
    "torchft": _way("torchft's HTTPTransport, in one piece", _HTTP, "HTTP", 0, "torchft"),
    "torchft-4": _way(f"torchft's HTTPTransport, in {CHUNKED} chunks", _HTTP, "HTTP", CHUNKED, "torchft"),
}
COPIES = 2 * len(WAYS)  # of the state, at most, at the same time


def run(options: Options, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a process fails.
    """
    log = Log(stream)
    largest = max(options.sizes) if "large" in options.measures else SMALL.total
    free = psutil.virtual_memory().available
    if COPIES * largest > free:
        allowed = f"what fits {COPIES} times into {free / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(largest), allowed)
    result, started = begin("fetch", log)
    ways = {name: way for name, way in WAYS.items() if version(way.needs) is not None}
    for name in WAYS.keys() - ways.keys():
        log.note(f"{name} is left out: {WAYS[name].needs} is not installed")
    result["contenders"] = {name: way.text for name, way in ways.items()}
    seats = [Seat(LARGE_TENSORS, -(-size // LARGE_TENSORS // 4) * 4) for size in options.sizes]
    result["large"] = [measure(s, ways, options.rounds, log) for s in seats if "large" in options.measures]
    result["small"] = [measure(SMALL, ways, options.rounds, log)] if "small" in options.measures else []
    return finish(result, verdicts(result), log, started)


def measure(seat: Seat, ways: Mapping[str, Way], rounds: int, log: Log) -> Row:
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


def _take(name: str, receiver: Link, last: dict[str, dict[str, Any]]) -> float:
    (last[name],) = ask([receiver], {})
    return float(last[name]["t"])


def _speed(seat: Seat, times: Mapping[str, float]) -> float:
    return seat.total / times["p50_ms"] / 1e6


def _memory(seat: Seat, answer: Mapping[str, Any]) -> dict[str, float]:
    """Bytes, and both as times the state: of the whole process, and of what it grew by."""
    base, peak = answer["base"], answer["peak"]
    return {
        "base_bytes": base,
        "peak_bytes": peak,
        "times_state": round(peak / seat.total, 3),
        "growth_times_state": round((peak - base) / seat.total, 3),
    }


def _start(name: str, entry: str, seat: Seat, where: str | None, folder: Path, stack: ExitStack) -> Link:
    """A process; `stack` ends it."""
    log = folder / f"{name.replace(' ', '-')}.log"
    told = [] if where is None else [where]
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as file:
        process = subprocess.Popen(
            tied("ft_hsdp.bench.fetch.worker", str(theirs.fileno()), entry, json.dumps(asdict(seat)), *told),
            env=environment(),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    stack.callback(_end, process)
    link = Link(name, ours, log)
    stack.callback(link.close)
    return link


def _greet(links: Mapping[str, Link]) -> None:
    """Wait until all are ready. Raises Retryable."""
    for link, answer in zip(links.values(), collect(list(links.values())), strict=True):
        link.greet(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
