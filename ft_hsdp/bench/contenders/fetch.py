"""A state goes from one process to another: bare sockets, and ft_hsdp's fetch. No torch.

Both receive into memory that is there already, as the state agent's is.

`python -m ft_hsdp.bench.contenders.fetch FD MODULE:CLASS SPEC [WHERE]` is a donor, or a receiver that is told
WHERE its donor is. It greets when it is ready. To each command a receiver takes the state, and answers
{"t": seconds, "base": bytes, "peak": bytes}: base is the resident memory before there was room for a state, peak
the most so far.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ft_hsdp import address
from ft_hsdp.bench.workers.link import Answer, Obey, run_worker
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
HOST = "127.0.0.1"
TOKEN = "bench"  # noqa: S105 - guards random numbers
STATE = StateId(0, 1, "0" * 32)


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


class DonorContender(ABC):
    """Serves the state to its receiver."""

    where: str  # what its receiver must be told


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


class RawDonor(DonorContender):
    """Sends the whole state with sendfile on each connection."""

    def __init__(self, spec: FetchSpec) -> None:
        self._buffer = spec.buffer()
        self._total = spec.total
        self._listener = socket.create_server((HOST, 0))
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
        with socket.create_connection((HOST, self._port)) as sock:
            address.tune(sock)
            got = 0
            while got < len(view):
                n = sock.recv_into(view[got : got + PIECE], 0, socket.MSG_WAITALL)
                if n == 0:
                    raise ConnectionError("the donor hung up")
                got += n


class FetchDonor(DonorContender):
    """Serves the state with a state server, as the state agent does."""

    def __init__(self, spec: FetchSpec) -> None:
        buffer, snapshots = spec.buffer(), InMemorySnapshots()
        snapshots.put(shard_manifest.seal(spec.manifest(), buffer.memory), buffer)
        self._server = StateServer(HOST, 0, snapshots, TOKEN)
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
    base = _memory("VmRSS")
    contender = make(known, *where)

    def take(_: Mapping[str, Any]) -> Answer:
        start = time.perf_counter()
        contender.take()
        took = time.perf_counter() - start
        peak = _memory("VmHWM")
        if contender.drop() != wanted:
            raise DataCorruption("what was received is not what was sent")
        return {"t": took, "base": base, "peak": peak}

    return {"address": getattr(contender, "where", "")}, take


def _memory(what: str) -> int:
    """Return the resident memory of this process in bytes, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


if __name__ == "__main__":
    run_worker(set_up)
