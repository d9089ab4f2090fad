"""Exchanges bytes between the ranks of one replica, on a gloo group of its own.

The collectives of training run at the same time. On a shared group the two would receive each other's messages.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

TIMEOUT_S = 600.0  # the longest wait of a rank for another, whose disk may be slow


class ReplicaGroup:
    """The ranks of one replica. All of them make it at the same point: it is a collective of the default group.

    Args:
        timeout_s: The longest wait of a rank for another.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        mesh: The ranks as a one-dimensional CPU mesh.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.mesh = DeviceMesh.from_group(group, "cpu")

    def wait_for(self, timeout_s: float) -> None:
        """Let a rank wait for another for ``timeout_s`` seconds from now on."""
        self.timeout_s = timeout_s
        _set_pg_timeout(timedelta(seconds=timeout_s), self.group)

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes that each rank passed, in rank order, on all ranks. Blocks. A collective.

        Raises:
            RuntimeError: A rank is gone or too late. The group cannot be used any more.
        """
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest + 1)), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [text.numpy().tobytes()[: int(size)] for text, size in zip(texts, sizes, strict=True)]

    def broadcast(self, mine: bytes = b"") -> bytes:
        """Return the bytes that rank 0 passed, on all ranks. Blocks. A collective.

        Raises:
            RuntimeError: A rank is gone or too late. The group cannot be used any more.
        """
        size = torch.tensor([len(mine)])
        dist.broadcast(size, group=self.group, group_src=0)
        text = bytearray(mine if self.rank == 0 else bytes(int(size))) + b" "
        padded = torch.frombuffer(text, dtype=torch.uint8)
        dist.broadcast(padded, group=self.group, group_src=0)
        return padded.numpy().tobytes()[: int(size)]
