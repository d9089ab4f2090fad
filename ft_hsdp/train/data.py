"""Batches: a pure function of (seed, data shard, index, rank, micro-batch) over memory-mapped tokens.

Nothing here has a cursor. Which index of which data shard is next stands in the committed state
(FT-HSDP §4.1), so a replica that recovers reads exactly what it would have read.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.permutation import Permutation
from ft_hsdp.train.tokens import Tokens


class Batches:
    """The batches of every data shard.

    The tokens are cut into windows of `seq_len` inputs that do not overlap. The windows of one pass
    are dealt in a random order, another for each pass: as long as all shards stand at one index, no
    window is dealt twice in a pass, and all are dealt.

    rows: sequences per rank and micro-batch; shards: data shards of the job (core/deal.py); ranks: ranks
    per replica; accumulate: micro-batches per step. Batch `index` of data shard `shard` is batch
    `index * shards + shard` of the whole data, whatever the number of shards.
    Raises ConfigError on data.path if the text is too small for one batch of each shard.
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
        """(pass, window) of each row of a batch. Raises ValueError outside the job's layout."""
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
        """Inputs and targets, int64 [rows, seq_len] each; targets are the inputs one token later."""
        picked = np.empty((self.rows, self.seq_len + 1), dtype=np.int64)
        for row, (_, window) in enumerate(self.windows_of(shard, index, rank, micro)):
            start = window * self.seq_len
            picked[row] = self.tokens.array[start : start + self.seq_len + 1]
        both = torch.from_numpy(picked)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
