"""What donors and receivers are told, what both know of the state, and what they must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
PATTERN = 4 << 20  # bytes after which the content repeats
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Seat:
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


class Donor(ABC):
    """Holds the state; `where` is what its receiver must be told."""

    where: str


class Receiver(ABC):
    """Gets the state as often as it is asked to."""

    @abstractmethod
    def take(self) -> None:
        """Have all of it in memory; what was taken before is gone already."""

    @abstractmethod
    def drop(self) -> str:
        """Free what was taken; its digest."""
