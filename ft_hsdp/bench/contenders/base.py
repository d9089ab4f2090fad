"""Which all-reduces are measured, by the name that users give them, and what each does in one of its workers.

No torch is imported here: the bench's own process needs none.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 60.0  # longest time of one operation of any contender


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to sum."""

    entry: str  # "module:class" of its `AllReduceRank`
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1  # tensors of the measured size that a rank holds
    needs: tuple[str, ...] = ()  # packages without which it is left out
    reconfigures: bool = False  # it can join again under a new epoch
    recovers: bool = False  # it outlives the death of a member


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Which worker a process is."""

    name: str  # of the contender
    member: int  # its id in the ring, from 0
    store: str  # "host:port" of a TCPStore, for those that need one
    token: str  # the secret that all members share
    options: Mapping[str, Any]  # of the contender


class AllReduceRank(ABC):
    """One member of a contender's ring: join, all-reduce, join again. Its end is the end of its process."""

    in_place = False  # whether the sum replaces the input
    address = ""  # what the other members must be told, if anything

    @abstractmethod
    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Form a ring with these (member, address), own entry included; returns when it is ready."""

    @abstractmethod
    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``source`` over the ring into ``sink``, which is ``source`` if `in_place`. Blocks."""

    def empty(self, elements: int) -> Tensor:
        """Return memory for fp32 ``elements``, of the kind that suits this contender best."""
        import torch

        return torch.empty(elements)


def _ftar(transport: str, text: str, *, registered: bool = False) -> Contender:
    options = {"transport": transport, "registered": registered}
    entry = "ft_hsdp.bench.contenders.allreduce:FTAR"
    return Contender(entry, text, options, copies=2, reconfigures=True, recovers=True)


CONTENDERS: dict[str, Contender] = {
    "tcp": _ftar("tcp", "FTAR over TCP, out of place"),
    "shm": _ftar("shm", "FTAR over shared memory, registered tensors, out of place", registered=True),
    "c10d": _ftar("c10d", "FTAR over torch.distributed's gloo (TCP), out of place"),
    "gloo": Contender(
        "ft_hsdp.bench.contenders.allreduce:Gloo", "torch.distributed.all_reduce over gloo, in place"
    ),
    "torchft": Contender(
        "ft_hsdp.bench.contenders.torchft:TorchFT",
        "torchft's ProcessGroupGloo, in place",
        needs=("torchft",),
        reconfigures=True,
    ),
}


def absent(contender: Contender) -> str:
    """Return why a contender cannot take part on this machine, "" if it can."""
    missing = [name for name in contender.needs if version(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
