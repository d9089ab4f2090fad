"""torch.distributed's own all-reduce over gloo: the first anchor."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from ft_hsdp.bench.rank import TIMEOUT_S, Rank, Seat


class Gloo(Rank):
    """`torch.distributed.all_reduce` of the default group."""

    in_place = True

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Make the default group; a process can do it once."""
        host, _, port = self._seat.store.rpartition(":")
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{self._seat.name}/{epoch}", store),
            rank=[member for member, _ in ring].index(self._seat.member),
            world_size=len(ring),
            timeout=timeout,
        )

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum in place."""
        dist.all_reduce(sink)

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group()
