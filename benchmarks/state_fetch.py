"""`bench fetch`: a state goes from a donor to a receiver, processes of their own; the contenders take turns.

Bare sockets and ft_hsdp's fetch receive into memory that is there already, as the state agent's is.

`python -m benchmarks.state_fetch FD MODULE:CLASS SPEC [WHERE]` is a donor, or a receiver that is told WHERE
its donor is. To each command a receiver takes the state, and answers {"t": seconds}.
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
import xxhash

from benchmarks.command import GIB, measures_of, rounds_of, sizes_of
from benchmarks.processes import (
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
    size_name,
    spread,
    times_as_fast,
    version,
)
from ft_hsdp import address
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
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
WORKER = "benchmarks.state_fetch"

RAW_SHARE, TIMES = 0.8, 1.3  # the goals
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

    sizes: tuple[int, ...]  # of states, in bytes
    rounds: int  # fetches of each contender


def options(args: Namespace) -> FetchOptions:
    """Return what `bench fetch` is to do."""
    measures_of(args, ("large",))
    return FetchOptions(sizes_of(args) or (GIB,), rounds_of(args, 7))


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench fetch`; of torchft its best setting counts."""
    for row in result["large"]:
        yield least("fetch, share of bare sockets' speed", row, RAW_SHARE, times_as_fast(row, "fetch", "raw"))
        peers = [peer for peer in TORCHFT_FETCHES if peer in row["contenders"]]
        if peers:
            best = min(peers, key=lambda peer: row["contenders"][peer]["p50_ms"])
            yield least("fetch vs torchft, times as fast", row, TIMES, times_as_fast(row, "fetch", best))


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
    entry = f"benchmarks.{entry}"
    return FetchContender(text, f"{entry}Donor", f"{entry}Receiver", spec, needs)


CONTENDERS: dict[str, FetchContender] = {
    "raw": contender("sendfile and recv_into on bare sockets, into memory that is there", "state_fetch:Raw"),
    "fetch": contender("ft_hsdp's fetch with all checks, into memory that is there", "state_fetch:Fetch"),
    "torchft": contender("torchft's HTTPTransport, in one piece", "torchft:HTTP", needs="torchft"),
    "torchft-4": contender(
        f"torchft's HTTPTransport, in {CHUNKED} chunks", "torchft:HTTP", needs="torchft", chunks=CHUNKED
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
    check_room(COPIES, max(options.sizes), "donors and receivers take")
    result, started = begin_result("fetch", log)
    there = {name: each for name, each in CONTENDERS.items() if version(each.needs) is not None}
    for name in CONTENDERS.keys() - there.keys():
        log.note(f"{name} is left out: {CONTENDERS[name].needs} is not installed")
    result["contenders"] = {name: each.text for name, each in there.items()}
    specs = [FetchSpec(LARGE_TENSORS, -(-size // LARGE_TENSORS // 4) * 4) for size in options.sizes]
    result["large"] = [measure(spec, there, options.rounds, log) for spec in specs]
    return finish_result(result, goals(result), log, started)


def measure(spec: FetchSpec, contenders: Mapping[str, FetchContender], rounds: int, log: ProgressLog) -> ResultRow:
    """Return a row: times of all contenders."""
    log.say(f"{spec.tensors} tensors of {size_name(spec.nbytes)}: {', '.join(contenders)}")
    with scratch() as (stack, folder):
        start = partial(_start, spec, folder, stack)
        donors = {name: start(f"{name}'s donor", each.donor, each) for name, each in contenders.items()}
        greet(list(donors.values()))
        receivers = {
            name: start(f"{name}'s receiver", each.receiver, each, donors[name].address)
            for name, each in contenders.items()
        }
        greet(list(receivers.values()))
        seconds = interleave({name: partial(_take, receivers[name]) for name in contenders}, rounds)
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
    }


def _start(
    spec: FetchSpec, folder: Path, stack: ExitStack, name: str, entry: str, each: FetchContender, *where: str
) -> WorkerLink:
    arguments = [entry, json.dumps(asdict(replace(spec, **each.spec))), *where]
    return spawn_worker(stack, name, WORKER, arguments, folder / f"{name.replace(' ', '-')}.log")


def _take(receiver: WorkerLink) -> float:
    (answer,) = ask([receiver], {})
    return float(answer["t"])


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
    contender = make(known, *where)

    def take(_: Mapping[str, Any]) -> Answer:
        start = time.perf_counter()
        contender.take()
        took = time.perf_counter() - start
        if contender.drop() != wanted:
            raise DataCorruption("what was received is not what was sent")
        return {"t": took}

    return {"address": getattr(contender, "where", "")}, take


if __name__ == "__main__":
    run_worker(set_up)
