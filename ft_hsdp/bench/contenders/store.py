"""The bystander: a process outside every ring. It hosts the store, and can spin to take a core from the others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import TCPStore

from ft_hsdp.bench.rank import LOOPBACK, Rank, Seat


class Store(Rank):
    """Hosts the TCPStore at `address`."""

    def __init__(self, seat: Seat) -> None:
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.address = f"{LOOPBACK}:{self._store.port}"

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """It has no ring."""

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """It has nothing to sum."""

    def close(self) -> None:
        """The store goes with its process."""
