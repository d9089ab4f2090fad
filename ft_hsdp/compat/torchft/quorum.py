"""Quorum: what one `configure` made, a ring and a plain backend, and the first error, which ends both."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ft_hsdp.compat.torchft.bundle import bundles
from ft_hsdp.compat.torchft.rendezvous import Ring
from ft_hsdp.compat.torchft.work import PlainWork, SumWork
from ft_hsdp.errors import FTARError, PeerTimeout, RecoverableError
from ft_hsdp.ftar import Communicator

# Those who catch errors of process groups know them by gloo's words.
WORDS: tuple[tuple[type[FTARError], str], ...] = (
    (PeerTimeout, "Timed out waiting"),
    (RecoverableError, "Connection closed by peer"),
)


class Quorum:
    """The ranks of ``ring``, which stands in ``communicator``, and their ``plain`` backend."""

    def __init__(self, ring: Ring, communicator: Communicator, plain: ProcessGroup) -> None:
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
