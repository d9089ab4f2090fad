"""torch.distributed's own all-reduce over gloo: the first anchor.

FTAR, with each of its transports.

The bystander: a process outside every ring. It hosts the store, and can spin to take a core from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from ft_hsdp import record_layer
from ft_hsdp.bench.contenders.base import LOOPBACK, TIMEOUT_S, AllReduceRank, WorkerSeat
from ft_hsdp.ftar import Communicator, Settings


class Gloo(AllReduceRank):
    """`torch.distributed.all_reduce` of the default group."""

    in_place = True

    def __init__(self, seat: WorkerSeat) -> None:
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
        """Sum ``sink`` in place over the ranks."""
        dist.all_reduce(sink)

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


class FTAR(AllReduceRank):
    """`Communicator.all_reduce` out of place, as the trainer uses it.

    Options: transport; registered: whether the tensors lie in memory of the communicator; tls: network.tls.
    """

    def __init__(self, seat: WorkerSeat) -> None:
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
        """Close the FTAR communicator."""
        self._ring.close()

    def empty(self, elements: int) -> Tensor:
        """Registered memory, or any."""
        return self._ring.empty(elements) if self._registered else torch.empty(elements)


class StoreHost(AllReduceRank):
    """Hosts the TCPStore at `address`."""

    def __init__(self, seat: WorkerSeat) -> None:
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.address = f"{LOOPBACK}:{self._store.port}"

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """It has no ring."""

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """It has nothing to sum."""

    def close(self) -> None:
        """The store goes with its process."""
