"""torchft's reconfigurable process group over gloo: the nearest peer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import ReduceOp
from torchft.process_group import ProcessGroupGloo

from ft_hsdp.bench.contenders.base import TIMEOUT_S, AllReduceRank, WorkerSeat


class TorchFT(AllReduceRank):
    """`ProcessGroupGloo.allreduce`, configured as torchft's Manager does it."""

    in_place = True

    def __init__(self, seat: WorkerSeat) -> None:
        self._seat = seat
        self._group = ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S))

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Configure with a fresh prefix of the store."""
        self._group.configure(
            f"{self._seat.store}/{self._seat.name}/{epoch}",
            f"replica_{self._seat.member}",
            [member for member, _ in ring].index(self._seat.member),
            len(ring),
        )

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``sink`` in place over the ranks."""
        self._group.allreduce([sink], ReduceOp.SUM).wait()

    def close(self) -> None:
        """Abort the group; its own shutdown leaves the connections open."""
        self._group.abort(errored=False)
