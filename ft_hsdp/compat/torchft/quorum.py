"""Plain: the process group beside the ring, for all that is not a sum: torch's own gloo over the same store.

Rendezvous: how the ranks of one `configure` find each other through torchft's store.

Two rounds, in which each rank writes one key and reads all. First: the secret of its communicator and the largest
epoch that it claimed. The secret of whoever claimed most is kept, for most edges are between its holders; the new
epoch is one larger than all. Then: the member and its address.

Quorum: what one `configure` made, a ring and a plain backend, and the first error, which ends both.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from ft_hsdp.compat.torchft.work import PlainWork, SumWork, bundles
from ft_hsdp.errors import FTARError, PeerTimeout, RecoverableError
from ft_hsdp.ftar import Communicator


def gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Connect ``size`` ranks; waits for all of them.

    Raises:
        RuntimeError: they were not there in time.
    """
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    backend._set_sequence_number_for_group()
    for device in {"cpu", *([acc.type] if (acc := torch.accelerator.current_accelerator()) else [])}:
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    return group


SHORTEST_S, LONGEST_S = 0.0002, 0.003  # between two looks: a wait of the store itself cannot be cancelled


@dataclass(frozen=True, slots=True)
class RingAddresses:
    """The ring of ``epoch``: (member, "host:port") by rank."""

    epoch: int
    members: tuple[tuple[int, str], ...]


class TorchftRendezvous:
    """One `configure` of ``size`` ranks over ``store``, whose prefix nobody used before.

    It takes ``timeout_s`` at most, and ends early when ``cancelled`` is set.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, cancelled: threading.Event) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled

    def meet(self, token: str, epoch: int, admit: Callable[[str], tuple[int, str]]) -> RingAddresses:
        """Agree on secret, epoch and members; ``admit`` gets the secret and says which (member, address) this is.

        Raises:
            RuntimeError: a rank did not come in time, wrote nonsense, or the rendezvous was cancelled.
        """
        claims = self._exchange("claim", [epoch, token], (int, str))
        floor = max(claim[0] for claim in claims)
        secret = next(claim[1] for claim in claims if claim[0] == floor)
        places = self._exchange("place", list(admit(secret)), (int, str))
        return RingAddresses(floor + 1, tuple((member, address) for member, address in places))

    def _exchange(self, name: str, mine: list[int | str], shape: tuple[type, type]) -> list[tuple[int, str]]:
        self._store.set(f"{name}/{self._rank}", json.dumps(mine))
        return [self._read(f"{name}/{rank}", rank, shape) for rank in range(self._size)]

    def _read(self, key: str, rank: int, shape: tuple[type, type]) -> tuple[int, str]:
        pause = SHORTEST_S
        while not self._store.check([key]):
            if self._cancelled.is_set():
                raise RuntimeError("aborted: the rendezvous was cancelled")
            if time.monotonic() > self._deadline:
                late = f"timeout after {self._timeout_s * 1e3:.0f}ms"
                raise RuntimeError(f"rank {rank} of {self._size} did not come to the store: {late}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        said = self._store.get(key)
        try:
            value = json.loads(said)
        except ValueError:
            value = None
        if not isinstance(value, list) or tuple(map(type, value)) != shape:
            raise RuntimeError(f"rank {rank} wrote {said[:60]!r} under {key}; allowed: a number and a text")
        return value[0], value[1]


def own_address(store_host: str, store_port: int) -> str:
    """The IPv4 address of this machine from which the store is reached, so that others may call it.

    Raises:
        OSError: the store has no IPv4 address.
    """
    family, kind, _, _, address = socket.getaddrinfo(store_host, store_port, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)  # sends nothing: asks for the route
        return str(sock.getsockname()[0])


# Those who catch errors of process groups know them by gloo's words.
WORDS: tuple[tuple[type[FTARError], str], ...] = (
    (PeerTimeout, "Timed out waiting"),
    (RecoverableError, "Connection closed by peer"),
)


class Quorum:
    """The ranks of ``ring``, which stands in ``communicator``, and their ``plain`` backend."""

    def __init__(self, ring: RingAddresses, communicator: Communicator, plain: ProcessGroup) -> None:
        self.size = len(ring.members)
        self.error: RuntimeError | None = None
        self._ranks = {number: rank for rank, (number, _) in enumerate(ring.members)}
        self._communicator = communicator
        self._plain: ProcessGroup | None = plain
        self._lock = threading.Lock()
        self._over = False

    def sum(self, tensors: Sequence[Tensor], divisor: int) -> Work:
        """Sum each of ``tensors`` over the ranks in place, and divide by ``divisor``."""
        parts = bundles(tensors)
        works = [self._communicator.all_reduce(b.flat, preserve_input=False) for b in parts]
        return SumWork(tensors, parts, works, divisor, self.fail)

    def plainly(self, name: str, *args: Any) -> Work:
        """The collective ``name`` of the plain backend."""
        plain = self._plain
        if plain is None:
            raise RuntimeError("process group not initialized")
        return PlainWork(getattr(plain, name)(*args), self.fail)

    def fail(self, error: BaseException) -> RuntimeError:
        """``error`` in torch's words. The first one ends the quorum, and all ranks hear of it."""
        told = RuntimeError(told_of(error, self._ranks))
        with self._lock:
            if not self._over:
                self._over = True
                self.error = RuntimeError(f"aborted: {told}" if str(told) != "aborted" else "aborted")
                self._communicator.abort(str(told))
        return told

    def retire(self) -> None:
        """It is over: what still fails of it concerns nobody. Gloo waits for its threads, and nobody for gloo."""
        with self._lock:
            self._over = True
            plain, self._plain = self._plain, None
        if plain is not None:
            threading.Thread(target=plain.abort, name="ftar-gloo-end").start()


def told_of(error: BaseException, ranks: dict[int, int]) -> str:
    """What ``error`` says, in gloo's words and with ranks for members."""
    text = re.sub(r"\breplica (\d+)", lambda found: f"rank {ranks.get(int(found[1]), '?')}", str(error))
    words = next((words for kind, words in WORDS if isinstance(error, kind)), None)
    if words is None:
        return f"{type(error).__name__}: {text}" if isinstance(error, FTARError) else text
    return f"{words}: {text}"
