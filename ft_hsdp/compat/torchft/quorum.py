"""The ranks of one ``configure``: how they find each other, their ring, their gloo group, and their first error.

`TorchftRendezvous` runs over torchft's store in two rounds, in each of which every rank writes one key and reads
all. In the first round a rank writes the secret of its communicator and the largest epoch that it has claimed. The
secret of the rank with the largest epoch is kept, because most connections are between ranks that have it; the new
epoch is one larger. In the second round a rank writes its member number and its address.

`connect_gloo` makes torch's own gloo group over the same store, for everything that is not a sum. `Quorum` holds
both and the first error of either.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from ft_hsdp.compat.torchft.work import GlooWork, SumWork, bundles
from ft_hsdp.errors import FTARError, PeerTimeout, RecoverableError
from ft_hsdp.ftar import Communicator


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Connect ``size`` ranks by gloo. Blocks until all of them are there.

    Raises:
        RuntimeError: A rank was not there within ``timeout``.
    """
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    backend._set_sequence_number_for_group()
    for device in {"cpu", *([acc.type] if (acc := torch.accelerator.current_accelerator()) else [])}:
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    return group


SHORTEST_S, LONGEST_S = 0.0002, 0.003  # between two looks at a key: the store's own wait cannot be cancelled


@dataclass(frozen=True, slots=True)
class RingAddresses:
    """The members of the ring of ``epoch``."""

    epoch: int
    members: tuple[tuple[int, str], ...]  # (member number, "host:port") by rank


class TorchftRendezvous:
    """The meeting of ``size`` ranks over ``store``, whose prefix was never used before.

    It takes ``timeout_s`` seconds at most, and ends early when ``cancelled`` is set.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, cancelled: threading.Event) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled

    def meet(self, token: str, epoch: int, admit: Callable[[str], tuple[int, str]]) -> RingAddresses:
        """Agree on secret, epoch and members. Blocks.

        Args:
            token: The secret of this rank's communicator.
            epoch: The largest epoch that this rank has claimed.
            admit: Called with the agreed secret; returns this rank's (member number, "host:port").

        Raises:
            RuntimeError: A rank did not come in time or wrote something invalid, or the rendezvous was cancelled.
        """
        claims = self._exchange("claim", [epoch, token], (int, str))
        floor = max(claim[0] for claim in claims)
        secret = next(claim[1] for claim in claims if claim[0] == floor)
        places = self._exchange("place", list(admit(secret)), (int, str))
        return RingAddresses(floor + 1, tuple((member, address) for member, address in places))

    def _exchange(self, name: str, value: list[int | str], shape: tuple[type, type]) -> list[tuple[int, str]]:
        self._store.set(f"{name}/{self._rank}", json.dumps(value))
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
        raw = self._store.get(key)
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if not isinstance(value, list) or tuple(map(type, value)) != shape:
            raise RuntimeError(f"rank {rank} wrote {raw[:60]!r} under {key}; allowed: a number and a text")
        return value[0], value[1]


# torchft and training loops recognize errors of process groups by gloo's words.
GLOO_WORDS: tuple[tuple[type[FTARError], str], ...] = (
    (PeerTimeout, "Timed out waiting"),
    (RecoverableError, "Connection closed by peer"),
)


class Quorum:
    """The ranks of one ``configure``: their ``ring``, formed in ``communicator``, and their ``gloo`` group."""

    def __init__(self, ring: RingAddresses, communicator: Communicator, gloo: ProcessGroup) -> None:
        self.size = len(ring.members)
        self.error: RuntimeError | None = None  # the first one; it ended the quorum
        self._ranks = {number: rank for rank, (number, _) in enumerate(ring.members)}
        self._communicator = communicator
        self._gloo: ProcessGroup | None = gloo
        self._lock = threading.Lock()
        self._over = False

    def sum(self, tensors: Sequence[Tensor], divisor: int) -> Work:
        """Sum each of ``tensors`` over the ranks in place, and divide by ``divisor``. Returns at once."""
        parts = bundles(tensors)
        works = [self._communicator.all_reduce(b.flat, preserve_input=False) for b in parts]
        return SumWork(tensors, parts, works, divisor, self.fail)

    def run_gloo(self, name: str, *args: Any) -> Work:
        """Start the collective ``name`` of the gloo group, with these arguments.

        Raises:
            RuntimeError: The quorum has been retired.
        """
        gloo = self._gloo
        if gloo is None:
            raise RuntimeError("process group not initialized")
        return GlooWork(getattr(gloo, name)(*args), self.fail)

    def fail(self, error: BaseException) -> RuntimeError:
        """Return ``error`` in torch's words. The first one ends the quorum, and all its ranks learn of it."""
        told = RuntimeError(translated(error, self._ranks))
        with self._lock:
            if not self._over:
                self._over = True
                self.error = RuntimeError(f"aborted: {told}" if str(told) != "aborted" else "aborted")
                self._communicator.abort(str(told))
        return told

    def retire(self) -> None:
        """End the quorum and ignore its later errors. Gloo ends on a thread of its own; nothing waits for it."""
        with self._lock:
            self._over = True
            gloo, self._gloo = self._gloo, None
        if gloo is not None:
            threading.Thread(target=gloo.abort, name="ftar-gloo-end").start()


def translated(error: BaseException, ranks: dict[int, int]) -> str:
    """Return the message of ``error`` in gloo's words, with ranks in place of member numbers."""
    text = re.sub(r"\breplica (\d+)", lambda found: f"rank {ranks.get(int(found[1]), '?')}", str(error))
    words = next((words for kind, words in GLOO_WORDS if isinstance(error, kind)), None)
    if words is None:
        return f"{type(error).__name__}: {text}" if isinstance(error, FTARError) else text
    return f"{words}: {text}"
