"""`bench fetch`: a state goes from a donor to a receiver, processes of their own; the contenders take turns.

Bare sockets and ft_hsdp's fetch receive into memory that is there already, as the state agent's is.

`python -m ft_hsdp.bench.state_fetch FD MODULE:CLASS SPEC [WHERE]` is a donor, or a receiver that is told WHERE
its donor is. To each command a receiver takes the state, and answers {"t": seconds, "base": bytes, "peak": bytes}:
base is the resident memory before there was room for a state, peak the most so far.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import psutil
import xxhash

from ft_hsdp import address
from ft_hsdp.bench.command import GIB, KIB, measures_of, rounds_of, sizes_of
from ft_hsdp.bench.processes import (
    LOOPBACK,
    Answer,
    Obey,
    WorkerLink,
    ask,
    greet,
    run_worker,
    scratch,
    spawn_worker,
)
from ft_hsdp.bench.results import (
    ProgressLog,
    ResultRow,
    Row,
    Verdicts,
    begin_result,
    finish_result,
    interleave,
    least,
    most,
    size_name,
    spread,
    times_as_fast,
    version,
)
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, DataCorruption
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.fetch import Donor as Address
from ft_hsdp.state.transfer.fetch import FetchRequest, fetch
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, PackedTensor, ShardManifest

Bytes = npt.NDArray[np.uint8]
PATTERN = 4 << 20  # bytes after which the content repeats
PIECE = 4 << 20  # bytes of one receive
FETCH_S = 120.0
TOKEN = "bench"  # noqa: S105 - guards random numbers
STATE = StateId(0, 1, "0" * 32)
LARGE_TENSORS = 16
CHUNKED = 4  # of torchft's transport, beside one piece
WORKER = "ft_hsdp.bench.state_fetch"

RAW_SHARE, LARGE_TIMES, SMALL_TIMES, FETCH_MEMORY = 0.8, 1.3, 3.0, 1.1  # the goals
TORCHFT_FETCHES = ("torchft", "torchft-4")


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """What state is fetched, and how."""

    tensors: int
    nbytes: int  # of each tensor
    chunks: int = 0  # of torchft's transport

    @property
    def total(self) -> int:
        """Return the bytes of the state."""
        return self.tensors * self.nbytes

    def content(self) -> Bytes:
        """Return all tensors in a row: noise, the same in every process."""
        noise = np.random.default_rng(7).integers(0, 256, PATTERN, dtype=np.uint8)
        return np.resize(noise, self.total)

    def buffer(self) -> SnapshotBuffer:
        """Return memory with the content."""
        buffer = SnapshotBuffer(self.total)
        buffer.bytes[:] = self.content()
        return buffer

    def manifest(self) -> ShardManifest:
        """Return the manifest of the state, without checksums."""
        n = self.nbytes
        tensors = tuple(PackedTensor(f"{i}", "param", "uint8", (n,), (n,), i * n, n) for i in range(self.tensors))
        return ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(tensors), self.total, tensors, (), ())


def digest(parts: Iterable[Bytes]) -> str:
    """Return the xxh3-128 of some bytes in a row."""
    total = xxhash.xxh3_128()
    for part in parts:
        data: Any = part
        total.update(data)
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """What `bench fetch` measures."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]  # of states in large tensors, in bytes
    rounds: int  # fetches of each contender


def options(args: Namespace) -> FetchOptions:
    """Return what `bench fetch` is to do."""
    return FetchOptions(measures_of(args, ("large", "small")), sizes_of(args) or (GIB,), rounds_of(args, 7))


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench fetch`."""
    for row in result["large"]:
        yield least("fetch, share of bare sockets' speed", row, RAW_SHARE, times_as_fast(row, "fetch", "raw"))
        yield from _beside_torchft(row, "fetch", LARGE_TIMES)
        seen = row["memory"]["fetch"]["times_state"]
        yield most("fetch: memory of the receiver, times the state", row, FETCH_MEMORY, seen)
    for row in result["small"]:
        yield from _beside_torchft(row, "transport", SMALL_TIMES)


def _beside_torchft(row: Row, name: str, limit: float) -> Verdicts:
    """Compare with the best setting of torchft."""
    peers = [peer for peer in TORCHFT_FETCHES if peer in row["contenders"]]
    if peers and name in row["contenders"]:
        best = min(peers, key=lambda peer: row["contenders"][peer]["p50_ms"])
        yield least(f"{name} vs torchft, times as fast", row, limit, times_as_fast(row, name, best))


@dataclass(frozen=True, slots=True)
class FetchContender:
    """One way to fetch a state."""

    text: str
    donor: str  # "module:class" of what serves the state at `where`
    receiver: str  # of its `ReceiverContender`
    spec: Mapping[str, Any]  # fields of its `FetchSpec`
    needs: str  # a package without which it is left out


def contender(text: str, entry: str, needs: str = "ft_hsdp", **spec: Any) -> FetchContender:
    """Return a contender whose classes have a common name: "module:" and that."""
    entry = f"ft_hsdp.bench.{entry}"
    return FetchContender(text, f"{entry}Donor", f"{entry}Receiver", spec, needs)


CONTENDERS: dict[str, FetchContender] = {
    "raw": contender("sendfile and recv_into on bare sockets, into memory that is there", "state_fetch:Raw"),
    "fetch": contender("ft_hsdp's fetch with all checks, into memory that is there", "state_fetch:Fetch"),
    "transport": contender(
        "ft_hsdp's StateTransport: a state dict, in new memory", "torchft:State", needs="torchft"
    ),
    "torchft": contender("torchft's HTTPTransport, in one piece", "torchft:HTTP", needs="torchft"),
    "torchft-4": contender(
        f"torchft's HTTPTransport, in {CHUNKED} chunks", "torchft:HTTP", needs="torchft", chunks=CHUNKED
    ),
}
SMALL = FetchSpec(2000, 4 * KIB)
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
    return finish_result(result, goals(result), log, started)


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


class ReceiverContender(ABC):
    """Gets the state as often as it is asked to."""

    @abstractmethod
    def take(self) -> None:
        """Receive all of the state into memory; what was taken before is gone already."""

    @abstractmethod
    def drop(self) -> str:
        """Free what was taken; return its digest."""


class BufferReceiver(ReceiverContender):
    """Receives into memory that is there already."""

    def __init__(self, spec: FetchSpec) -> None:
        self._buffer = SnapshotBuffer(spec.total)

    def drop(self) -> str:
        """Wipe the memory, so that what is not received again is missed; return the digest of what was there."""
        found = digest([self._buffer.bytes])
        self._buffer.bytes[:] = 0
        return found


class RawDonor:
    """Sends the whole state with sendfile on each connection."""

    def __init__(self, spec: FetchSpec) -> None:
        self._buffer = spec.buffer()
        self._total = spec.total
        self._listener = socket.create_server((LOOPBACK, 0))
        self.where = str(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock:
                address.tune(sock)
                begin = 0
                while begin < self._total:
                    begin += os.sendfile(sock.fileno(), self._buffer.fd, begin, self._total - begin)


class RawReceiver(BufferReceiver):
    """Receives with recv_into, in pieces."""

    def __init__(self, spec: FetchSpec, where: str) -> None:
        super().__init__(spec)
        self._port = int(where)

    def take(self) -> None:
        """Receive the state into the buffer."""
        view = self._buffer.memory
        with socket.create_connection((LOOPBACK, self._port)) as sock:
            address.tune(sock)
            got = 0
            while got < len(view):
                n = sock.recv_into(view[got : got + PIECE], 0, socket.MSG_WAITALL)
                if n == 0:
                    raise ConnectionError("the donor hung up")
                got += n


class FetchDonor:
    """Serves the state with a state server, as the state agent does."""

    def __init__(self, spec: FetchSpec) -> None:
        buffer, snapshots = spec.buffer(), InMemorySnapshots()
        snapshots.put(shard_manifest.seal(spec.manifest(), buffer.memory), buffer)
        self._server = StateServer(LOOPBACK, 0, snapshots, TOKEN)
        self.where = self._server.address


class FetchReceiver(BufferReceiver):
    """Receives with `state.transfer.fetch`, everything verified."""

    def __init__(self, spec: FetchSpec, where: str) -> None:
        super().__init__(spec)
        found = spec.manifest()
        self._expected = ExpectedShard(found.state, found.rank, found.ranks, found.layout, found.nbytes)
        self._donors = [Address(0, where)]

    def take(self) -> None:
        """Receive the state into the buffer."""
        request = FetchRequest.exactly(self._expected, self._buffer.memory)
        fetch(self._donors, request, TOKEN, FETCH_S, threading.Event(), lambda *_: None)


def set_up() -> tuple[Answer, Obey]:
    """Become the donor or the receiver that the command line names."""
    entry, spec, *where = sys.argv[2:]
    module, _, name = entry.partition(":")
    make = getattr(importlib.import_module(module), name)
    known = FetchSpec(**json.loads(spec))
    wanted = digest([known.content()]) if where else ""
    base = _resident("VmRSS")
    contender = make(known, *where)

    def take(_: Mapping[str, Any]) -> Answer:
        start = time.perf_counter()
        contender.take()
        took = time.perf_counter() - start
        peak = _resident("VmHWM")
        if contender.drop() != wanted:
            raise DataCorruption("what was received is not what was sent")
        return {"t": took, "base": base, "peak": peak}

    return {"address": getattr(contender, "where", "")}, take


def _resident(what: str) -> int:
    """Return the resident memory of this process in bytes, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


if __name__ == "__main__":
    run_worker(set_up)
