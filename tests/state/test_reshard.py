from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import reshard
from ft_hsdp.state.reshard import Piece
from ft_hsdp.state.wire import Tensor

ALIGN = 64
SIZES = {"uint8": 1, "float16": 2, "float32": 4, "int64": 8}
Whole = tuple[np.ndarray, bool]


def shard(whole: list[Whole], rank: int, ranks: int) -> tuple[list[Tensor], np.ndarray]:
    """The tensors and the packed bytes of one rank: cut by torch.chunk's rule, packed as Layout does."""
    tensors, parts, offset = [], [], 0
    for i, (array, cut) in enumerate(whole):
        mine = array
        if cut:
            size = -(-len(array) // ranks)
            mine = array[rank * size : (rank + 1) * size]
        tensors.append(Tensor(f"t{i}", "param", str(array.dtype), mine.shape, array.shape, offset, mine.nbytes))
        padded = -(-mine.nbytes // ALIGN) * ALIGN
        parts.append(np.frombuffer(mine.tobytes() + bytes(padded - mine.nbytes), np.uint8))
        offset += padded
    return tensors, np.concatenate([*parts, np.empty(0, np.uint8)])


@st.composite
def wholes(draw: st.DrawFn) -> list[Whole]:
    found: list[Whole] = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(sorted(SIZES)))
        seed = draw(st.integers(0, 2**16))
        raw = np.random.default_rng(seed).integers(1, 255, int(np.prod(shape)) * SIZES[dtype], dtype=np.uint8)
        found.append((raw.view(dtype).reshape(shape), bool(shape) and draw(st.booleans())))
    return found


@given(wholes(), st.integers(1, 7), st.integers(1, 7))
def test_every_shard_of_every_sharding_is_made_of_every_other(whole: list[Whole], had: int, wants: int) -> None:
    sources = [shard(whole, r, had) for r in range(had)]
    for rank in range(wants):
        tensors, packed = shard(whole, rank, wants)
        made = np.zeros_like(packed)
        plan = reshard.pieces(tensors, rank, wants, [t for t, _ in sources])
        for p in plan:
            assert p.nbytes > 0
            made[p.target : p.target + p.nbytes] = sources[p.source][1][p.offset : p.offset + p.nbytes]
        assert made.tobytes() == packed.tobytes()
        assert sum(p.nbytes for p in plan) == sum(t.nbytes for t in tensors), "bytes are taken twice"
        for a, b in itertools.pairwise(plan):
            joined = (a.source, a.offset + a.nbytes, a.target + a.nbytes) == (b.source, b.offset, b.target)
            assert not joined, "contiguous pieces are two"


def test_one_rank_of_the_same_sharding_is_itself() -> None:
    whole = [(np.arange(64, dtype=np.float32).reshape(16, 4), True), (np.arange(64, dtype=np.uint8), True)]
    tensors, packed = shard(whole, 1, 2)
    others = [shard(whole, r, 2)[0] for r in range(2)]
    assert reshard.pieces(tensors, 1, 2, others)[0] == Piece(1, 0, 0, 128 + 32)
    assert len(packed) == 192


def test_what_is_whole_everywhere_is_not_taken_from_one_rank_by_all() -> None:
    whole = [(np.arange(9, dtype=np.int64), False)]
    sources = [shard(whole, r, 3)[0] for r in range(3)]
    taken = [reshard.pieces(shard(whole, r, 6)[0], r, 6, sources)[0].source for r in range(6)]
    assert taken == [0, 1, 2, 0, 1, 2]


def test_other_tensors_are_refused() -> None:
    whole = [(np.arange(12, dtype=np.float32).reshape(6, 2), True)]
    sources = [shard(whole, r, 2)[0] for r in range(2)]
    (mine,), _ = shard(whole, 0, 1)
    for other in (
        replace(mine, name="x"),
        replace(mine, dtype="int32"),
        replace(mine, kind="optim"),
        replace(mine, global_shape=(6, 3)),
    ):
        with pytest.raises(DataCorruption, match="does not have tensor"):
            reshard.pieces([other], 0, 1, sources)
    with pytest.raises(DataCorruption, match="does not have tensor"):
        reshard.pieces([mine], 0, 1, [sources[0], []])
    with pytest.raises(DataCorruption, match="not cut by rows"):
        reshard.pieces([replace(mine, shape=(6, 1), nbytes=24)], 0, 2, sources)
    with pytest.raises(DataCorruption, match="has 4 rows on rank 0 of 2"):
        reshard.pieces([replace(mine, shape=(4, 2), nbytes=32)], 0, 2, sources)
