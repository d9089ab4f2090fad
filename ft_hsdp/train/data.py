"""Data: batches as a pure function of their place, and their prefetch.

A place is (data shard, index, rank, micro-batch). Nothing here has a cursor: which index of which data shard is
next stands in the committed state (FT-HSDP §4.1), so a replica that recovers reads exactly what it would have
read.

`Batches` reads memory-mapped tokens in a random order, drawn by `Permutation` without a table. `Prefetcher` reads
batches before they are asked for, on a thread of its own. Which batch comes next is known for certain only when
its step begins; before that it is a guess. A wrong guess costs a read and nothing else.

`stream` derives a seed for each use from the job's, so that no generator is part of a state. What is random about
a batch depends on its place in the data alone: a replica that runs it again, or another one that runs it instead,
draws the same numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.tokens import Tokens

_ROUNDS = 6
_MASK = 2**64 - 1


def stream(seed: int, use: str, *place: object) -> int:
    """Return the 63-bit seed of ``use`` (at most 8 letters) at ``place``."""
    text = "/".join(map(str, (seed, *place)))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=f"ft_hsdp.{use}".encode()).digest()
    return int.from_bytes(digest, "little") >> 1


class Permutation:
    """A bijection on range(n), drawn by (seed, turn): a Feistel network with cycle walking.

    Memory does not grow with n, and a place costs a few microseconds. The same arguments give the same
    permutation on every machine.
    """

    def __init__(self, n: int, seed: int, turn: int) -> None:
        """Draw the permutation ``turn`` of ``seed``; ValueError if n is less than 1."""
        if n < 1:
            raise ValueError(f"a permutation of {n} things: n must be at least 1")
        self.n = n
        self._half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        digest = hashlib.blake2b(
            f"{seed}/{turn}/{n}".encode(), digest_size=8 * _ROUNDS, person=b"ft_hsdp.permute"
        ).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        """Return where ``place`` goes; IndexError outside 0..n-1."""
        if not 0 <= place < self.n:
            raise IndexError(f"{place} is not in 0..{self.n - 1}")
        # The network permutes 0..4^half-1, a domain below 4n+4; walking its cycle until the value
        # falls below n gives a permutation of 0..n-1.
        while True:
            place = self._encrypt(place)
            if place < self.n:
                return place

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half, value & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return left << self._half | right


def _mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class Batches:
    """The batches of every data shard.

    The tokens are cut into windows of ``seq_len`` inputs that do not overlap. The windows of one pass are dealt
    in a random order, another for each pass: as long as all shards stand at one index, no window is dealt twice
    in a pass, and all are dealt. Batch ``index`` of data shard ``shard`` is batch ``index * shards + shard`` of
    the whole data, whatever the number of shards.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        rows: int,
        seed: int,
        shards: int,
        *,
        ranks: int = 1,
        accumulate: int = 1,
    ) -> None:
        """Cut the tokens into batches.

        Args:
            tokens: The text of all passes.
            seq_len: Inputs of a sequence.
            rows: Sequences for each rank and micro-batch.
            seed: Of the random order.
            shards: Data shards of the job (`core.ledger.BatchAssigner`).
            ranks: Ranks of a replica.
            accumulate: Micro-batches of a step.

        Raises:
            ConfigError: On data.path: the text is too small for one batch of each shard.
            ValueError: A number is less than 1.
        """
        for name, value in {
            "seq_len": seq_len,
            "rows": rows,
            "shards": shards,
            "ranks": ranks,
            "accumulate": accumulate,
        }.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.tokens = tokens
        self.seq_len = seq_len
        self.rows = rows
        self.seed = seed
        self.shards = shards
        self.ranks = ranks
        self.accumulate = accumulate
        self.windows = (len(tokens) - 1) // seq_len
        step = shards * ranks * accumulate * rows
        if self.windows < step:
            raise ConfigError(
                "data.path",
                f"{len(tokens)} tokens",
                f"at least {step * seq_len + 1} tokens: one step reads {step} sequences of {seq_len}",
            )
        self._order = lru_cache(maxsize=4)(lambda turn: Permutation(self.windows, seed, turn))

    def windows_of(self, shard: int, index: int, rank: int, micro: int = 0) -> list[tuple[int, int]]:
        """Return (pass, window) of each row of a batch; ValueError outside the job's layout."""
        for name, value, end in (
            ("shard", shard, self.shards),
            ("rank", rank, self.ranks),
            ("micro", micro, self.accumulate),
        ):
            if not 0 <= value < end:
                raise ValueError(f"{name} is {value}; it must be from 0 to {end - 1}")
        if index < 0:
            raise ValueError(f"index is {index}; it must be at least 0")
        batch = ((index * self.shards + shard) * self.ranks + rank) * self.accumulate + micro
        places = range(batch * self.rows, (batch + 1) * self.rows)
        return [(p // self.windows, self._order(p // self.windows)[p % self.windows]) for p in places]

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [rows, seq_len] each; targets are the inputs one token later."""
        picked = np.empty((self.rows, self.seq_len + 1), dtype=np.int64)
        for row, (_, window) in enumerate(self.windows_of(shard, index, rank, micro)):
            start = window * self.seq_len
            picked[row] = self.tokens.array[start : start + self.seq_len + 1]
        both = torch.from_numpy(picked)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


Out = TypeVar("Out", covariant=True)
Batch = TypeVar("Batch")

CLOSE_S = 1.0


class Source(Protocol[Out]):
    """Data whose batches are a pure function of their place: any rank may be asked for any of them, and again."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Out:
        """Return micro-batch ``micro`` of rank ``rank`` in batch ``index`` of data shard ``shard``."""


@dataclass(frozen=True, slots=True)
class Place:
    """One micro-batch of this rank."""

    shard: int
    index: int
    micro: int


class Prefetcher(Generic[Batch]):
    """Reads one rank's part of the data, one micro-batch ahead, on a thread of its own.

    Only that thread calls the source. An error of the source is raised where the batch is asked for; one in the
    read of a wrong guess is forgotten.
    """

    def __init__(self, source: Source[Batch], rank: int, accumulate: int) -> None:
        """Read micro-batches of ``rank``, ``accumulate`` for each batch."""
        self._source = source
        self._rank = rank
        self._accumulate = accumulate
        self._orders: SimpleQueue[tuple[Place, Future[Batch]] | None] = SimpleQueue()
        self._ahead: tuple[Place, Future[Batch]] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def guess(self, shard: int, index: int) -> None:
        """Begin to read this batch, which will probably be the next one. Does not block."""
        self._order(Place(shard, index, 0))

    def batches(self, shard: int, index: int, following: tuple[int, int]) -> Iterator[Batch]:
        """Yield the micro-batches of a batch, in order. Blocks while one is read.

        Args:
            shard: The batch's data shard.
            index: Its index there.
            following: (shard, index) of the batch that will probably come after it.

        Raises:
            RuntimeError: The prefetcher is closed.
        """
        for micro in range(self._accumulate):
            batch = self._order(Place(shard, index, micro)).result()
            last = micro == self._accumulate - 1
            self._order(Place(*following, 0) if last else Place(shard, index, micro + 1))
            yield batch

    def close(self) -> None:
        """End the thread; waits for a read that hangs for a second only."""
        self._closed = True
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._orders.put(None)
        self._thread.join(CLOSE_S)

    def _order(self, place: Place) -> Future[Batch]:
        """Return the read of ``place``: the one that is ahead, or one begun now, in place of another one ahead."""
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        if self._ahead is not None:
            if self._ahead[0] == place:
                return self._ahead[1]
            self._ahead[1].cancel()
        future: Future[Batch] = Future()
        self._ahead = (place, future)
        self._orders.put(self._ahead)
        return future

    def _read(self) -> None:
        while (order := self._orders.get()) is not None:
            place, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._source.batch(place.shard, place.index, self._rank, place.micro))
            except BaseException as error:
                future.set_exception(error)


def move(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``: a tensor, or tuples, lists and mappings of them."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(item, device) for item in batch)
    return batch
