"""torch.distributed's all-reduce over gloo, FTAR with each of its transports, and the host of the store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ft_hsdp.bench.contenders.base import LOOPBACK, TIMEOUT_S, AllReduceRank, WorkerSpec
from ft_hsdp.ftar import Communicator, Settings


class Gloo(AllReduceRank):
    """`torch.distributed.all_reduce` of the default group."""

    in_place = True

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Make the default group; a process can do it once."""
        host, _, port = self._spec.store.rpartition(":")
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{self._spec.name}/{epoch}", store),
            rank=[member for member, _ in ring].index(self._spec.member),
            world_size=len(ring),
            timeout=timeout,
        )

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``sink`` in place over the ranks."""
        dist.all_reduce(sink)


class FTAR(AllReduceRank):
    """`Communicator.all_reduce` out of place, as the trainer uses it.

    Options: transport; registered: whether the tensors lie in memory of the communicator.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._registered: bool = spec.options["registered"]
        settings = Settings(transport=spec.options["transport"], timeout_s=TIMEOUT_S)
        job = f"bench-{spec.name}"
        self._ring = Communicator(spec.member, job=job, token=spec.token, host=LOOPBACK, settings=settings)
        self.address = self._ring.address

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Reconfigure; reconnects only what changed."""
        self._ring.reconfigure(epoch, ring)

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``source`` into ``sink``, with ``source`` kept."""
        self._ring.all_reduce(source, out=sink).wait(TIMEOUT_S)

    def empty(self, elements: int) -> Tensor:
        """Return registered memory, or any."""
        return self._ring.empty(elements) if self._registered else torch.empty(elements)


class StoreHost(AllReduceRank):
    """A process outside every ring. It hosts the TCPStore at `address`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.address = f"{LOOPBACK}:{self._store.port}"

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Do nothing: it has no ring."""

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Do nothing: it has nothing to sum."""
