"""What donors and receivers are told, what both know of the state, and what they must be able to do.

Bare sockets, and ft_hsdp's fetch: both into memory that is there already, as the state agent's is. No torch.
"""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ft_hsdp import address
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.fetch import Donor as Address
from ft_hsdp.state.transfer.fetch import FetchRequest, fetch
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, ShardManifest

Bytes = npt.NDArray[np.uint8]
PATTERN = 4 << 20  # bytes after which the content repeats
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class FetchSeat:
    """The state is `tensors` tensors of `nbytes` bytes each; chunks: of torchft's transport."""

    tensors: int
    nbytes: int
    chunks: int = 0

    @property
    def total(self) -> int:
        """Bytes of the state."""
        return self.tensors * self.nbytes

    def content(self) -> Bytes:
        """All tensors in a row: noise, the same in every process."""
        noise = np.random.default_rng(7).integers(0, 256, PATTERN, dtype=np.uint8)
        return np.resize(noise, self.total)

    def digest(self) -> str:
        """What the content must hash to."""
        return digest([self.content()])


def digest(parts: Iterable[Bytes]) -> str:
    """xxh3-128 of some bytes in a row."""
    total = xxhash.xxh3_128()
    for part in parts:
        data: Any = part
        total.update(data)
    return total.hexdigest()


class DonorContender(ABC):
    """Holds the state; `where` is what its receiver must be told."""

    where: str


class ReceiverContender(ABC):
    """Gets the state as often as it is asked to."""

    @abstractmethod
    def take(self) -> None:
        """Have all of it in memory; what was taken before is gone already."""

    @abstractmethod
    def drop(self) -> str:
        """Free what was taken; its digest."""


HOST = "127.0.0.1"
TOKEN = "bench"  # noqa: S105 - guards random numbers
STATE = StateId(0, 1, "0" * 32)
PIECE = 4 << 20


class RawDonor(DonorContender):
    """sendfile of the whole state to whoever connects."""

    def __init__(self, seat: FetchSeat) -> None:
        self._room = SnapshotBuffer(seat.total)
        self._room.bytes[:] = seat.content()
        self._total = seat.total
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
                    begin += os.sendfile(sock.fileno(), self._room.fd, begin, self._total - begin)


class RawReceiver(ReceiverContender):
    """Receives the bytes with recv_into, in pieces."""

    def __init__(self, seat: FetchSeat, where: str) -> None:
        self._room = SnapshotBuffer(seat.total)
        self._port = int(where)

    def take(self) -> None:
        """Receive all bytes into the buffer."""
        view = self._room.memory
        with socket.create_connection((HOST, self._port)) as sock:
            address.tune(sock)
            got = 0
            while got < len(view):
                n = sock.recv_into(view[got : got + PIECE], 0, socket.MSG_WAITALL)
                if n == 0:
                    raise ConnectionError("the donor hung up")
                got += n

    def drop(self) -> str:
        """Wipe the room: what is not received again must not look as if it was."""
        found = digest([self._room.bytes])
        self._room.bytes[:] = 0
        return found


class FetchDonor(DonorContender):
    """The state server, as the state agent has it."""

    def __init__(self, seat: FetchSeat) -> None:
        room = SnapshotBuffer(seat.total)
        room.bytes[:] = seat.content()
        shelf = InMemorySnapshots()
        shelf.put(shard_manifest.seal(_header(seat), room.memory), room)
        self._server = StateServer(HOST, 0, shelf, TOKEN)
        self.where = self._server.address


class FetchReceiver(ReceiverContender):
    """Fetches with `state.transfer.fetch`, which verifies every chunk."""

    def __init__(self, seat: FetchSeat, where: str) -> None:
        header = _header(seat)
        self._expected = ExpectedShard(header.state, header.rank, header.ranks, header.layout, header.nbytes)
        self._room = SnapshotBuffer(seat.total)
        self._donors = [Address(0, where)]

    def take(self) -> None:
        """Fetch the shard into the buffer."""
        request = FetchRequest.exactly(self._expected, self._room.memory)
        fetch(self._donors, request, TOKEN, TIMEOUT_S, threading.Event(), lambda *_: None)

    def drop(self) -> str:
        """Return the digest of the buffer, and zero it."""
        found = digest([self._room.bytes])
        self._room.bytes[:] = 0
        return found


def _header(seat: FetchSeat) -> ShardManifest:
    tensors = tuple(
        shard_manifest.PackedTensor(
            f"{i}", "param", "uint8", (seat.nbytes,), (seat.nbytes,), i * seat.nbytes, seat.nbytes
        )
        for i in range(seat.tensors)
    )
    return ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(tensors), seat.total, tensors, (), ())
