"""What the ranks of a replica tell each other where they are threads of one process."""

from __future__ import annotations

import threading

from ft_hsdp.state.replica_group import ReplicaGroup
from tests.support.state.agent_helpers import DEADLINE_S


class ThreadGroup(ReplicaGroup):
    def __init__(self, rank: int, barrier: threading.Barrier, told: list[bytes]) -> None:
        self.rank, self.size = rank, len(told)
        self._barrier, self._told = barrier, told

    @classmethod
    def of(cls, size: int) -> list[ThreadGroup]:
        """That of each rank."""
        barrier, told = threading.Barrier(size, timeout=DEADLINE_S), [b""] * size
        return [cls(rank, barrier, told) for rank in range(size)]

    def gather(self, mine: bytes) -> list[bytes]:
        self._told[self.rank] = mine
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def broadcast(self, mine: bytes = b"") -> bytes:
        return self.gather(mine)[0]
