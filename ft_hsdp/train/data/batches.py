"""The batches of the built-in trainer: windows of memory-mapped tokens in a random order."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ft_hsdp.core.randomness import Permutation
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data.facts import array_facts
from ft_hsdp.train.data.samples import JobShape
from ft_hsdp.train.tokens import SEPARATOR, Tokens

IGNORED = -100  # a target that does not count: torch's own ignore_index


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
        ignore_first: bool = False,
    ) -> None:
        """Cut the tokens into batches.

        Args:
            rows: Sequences for each rank and micro-batch.
            ignore_first: Whether the first token of a document does not count as a target: nothing before it is of
                its document.

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
        self._shape = JobShape(shards, shards, ranks, accumulate)
        self.ignore_first = ignore_first
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
        batch = self._shape.number(shard, index, rank, micro)
        places = range(batch * self.rows, (batch + 1) * self.rows)
        return [(p // self.windows, self._order(p // self.windows)[p % self.windows]) for p in places]

    def facts(self, until: float) -> dict[str, str]:
        """Return what the batches depend on; ``until``, by `time.monotonic`, tokens are read. Blocks."""
        return {"seed": str(self.seed), "seq_len": str(self.seq_len), **array_facts(self.tokens.array, until)}

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [rows, seq_len] each; targets are the inputs one token later.

        With ``ignore_first`` the target that follows a separator is `IGNORED`.
        """
        picked = np.empty((self.rows, self.seq_len + 1), dtype=np.int64)
        for row, (_, window) in enumerate(self.windows_of(shard, index, rank, micro)):
            start = window * self.seq_len
            picked[row] = self.tokens.array[start : start + self.seq_len + 1]
        both = torch.from_numpy(picked)
        inputs, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        if self.ignore_first:
            targets[inputs == SEPARATOR] = IGNORED
        return inputs, targets
