"""Mailbox: what the control loop has decided and the main thread has to do, in one order on all ranks.

All ranks of a replica get the same letters in the same order, so that the collectives that follow match.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer.shard_manifest import Manifest


@dataclass(frozen=True, slots=True)
class Feed:
    """Run forward and backward of the next batch, for ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a committed step from its reduced shards, one flat fp32 tensor for each bucket."""

    record: CommitRecord
    reduced: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Drop:
    """The local gradient is of no use: this replica was left behind."""

    reason: str


@dataclass(frozen=True, slots=True)
class Load:
    """Swap a fetched and verified shard in: its manifest, and the packed bytes, uint8."""

    manifest: Manifest
    packed: Bytes


@dataclass(frozen=True, slots=True)
class Save:
    """Have ``state``, which was just reached, written to durable storage."""

    state: StateId


@dataclass(frozen=True, slots=True)
class End:
    """Leave the job with ``code``."""

    code: int
    reason: str


Letter = Feed | Apply | Drop | Load | Save | End


class Mailbox:
    """A queue from the control loop to the main thread."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._arrived = threading.Condition()
        self.waited_for = False  # whether the main thread waits for a letter: then it has nothing else to do

    def put(self, letter: Letter) -> None:
        """Leave a letter."""
        with self._arrived:
            self._letters.append(letter)
            self._arrived.notify()

    def get(self) -> Letter:
        """Wait for the next letter. The wait is bounded by the leader: if it is lost, the process ends."""
        with self._arrived:
            self.waited_for = True
            while not self._letters:
                self._arrived.wait()
            self.waited_for = False
            return self._letters.popleft()
