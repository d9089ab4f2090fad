"""What a contender does in one of its worker processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 60.0  # longest time of one operation of any contender


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """Which worker this is.

    name: of the contender; member: its id in the ring, from 0; store: "host:port" of a TCPStore for those who
    need one; token: the secret that all members share; options: what distinguishes this contender from others
    of its kind.
    """

    name: str
    member: int
    store: str
    token: str
    options: Mapping[str, Any]


class AllReduceRank(ABC):
    """One member of a contender's ring: join, all-reduce, join again, close."""

    in_place = False
    """Whether the sum replaces the input."""

    address = ""
    """What the other members must be told, where there is something."""

    @abstractmethod
    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Form a ring with these (member, address), own entry included; returns when it is ready."""

    @abstractmethod
    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum `source` over the ring into `sink`, which is `source` if `in_place`; returns when it is there."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this rank holds."""

    def empty(self, elements: int) -> Tensor:
        """Memory for fp32 `elements`, of the kind that this contender likes best."""
        import torch

        return torch.empty(elements)
