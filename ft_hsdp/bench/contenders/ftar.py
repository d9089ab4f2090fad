"""FTAR, with each of its transports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ft_hsdp import record_layer
from ft_hsdp.bench.rank import LOOPBACK, TIMEOUT_S, Rank, Seat
from ft_hsdp.ftar import Communicator, Settings


class FTAR(Rank):
    """`Communicator.all_reduce` out of place, as the trainer uses it.

    Options: transport; registered: whether the tensors lie in memory of the communicator; tls: network.tls.
    """

    def __init__(self, seat: Seat) -> None:
        record_layer.use(seat.options.get("tls", "auto"))
        self._registered: bool = seat.options["registered"]
        settings = Settings(transport=seat.options["transport"], timeout_s=TIMEOUT_S)
        job = f"bench-{seat.name}"
        self._ring = Communicator(seat.member, job=job, token=seat.token, host=LOOPBACK, settings=settings)
        self.address = self._ring.address

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Reconfigure; reconnects only what changed."""
        self._ring.reconfigure(epoch, ring)

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum `source` into `sink`, with `source` kept."""
        self._ring.all_reduce(source, out=sink).wait(TIMEOUT_S)

    def close(self) -> None:
        """Close the communicator."""
        self._ring.close()

    def empty(self, elements: int) -> Tensor:
        """Registered memory, or any."""
        return self._ring.empty(elements) if self._registered else torch.empty(elements)
