"""OpenMPI's shared-memory all-reduce: `mpirun` starts this module once a rank.

`python -m ft_hsdp.bench.contenders.openmpi SOCKET SPEC`: SPEC is the JSON of a `WorkerSpec` without its member. A
rank waits for its commands in a socket, outside MPI, because MPI spins while it waits.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Sequence

from mpi4py import MPI
from torch import Tensor

from ft_hsdp.bench.contenders.base import AllReduceRank, WorkerSpec
from ft_hsdp.bench.workers.worker import serve_rank


class OpenMPI(AllReduceRank):
    """`MPI.COMM_WORLD.Allreduce`; its ring is that of its mpirun, for life."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._ring = MPI.COMM_WORLD

    def join(self, epoch: int, ring: Sequence[tuple[int, str]]) -> None:
        """Check that the ring is the world."""
        if len(ring) != self._ring.size:
            raise ValueError(f"the world has {self._ring.size} ranks, the ring {len(ring)}")

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``source`` into ``sink``."""
        self._ring.Allreduce([source.numpy(), MPI.FLOAT], [sink.numpy(), MPI.FLOAT], MPI.SUM)


def main() -> int:
    """Connect to the bench and serve it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    spec = dataclasses.replace(WorkerSpec(**json.loads(sys.argv[2])), member=MPI.COMM_WORLD.rank)
    return serve_rank(sock, OpenMPI, spec)


if __name__ == "__main__":
    sys.exit(main())
