"""Which block of a parameter a rank has, and the rows of a log that say so."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torchs
from torch.distributed.tensor.placement_types import _StridedShard

from ft_hsdp.memory.parameters import MOST, CutParameter, folded, unfolded

TWO_TIMES = (_StridedShard(0, split_factor=2), Shard(0))


@pytest.mark.parametrize("shape", [(16, 6), (7, 3), (1, 5), (10, 4)])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((4,), (Shard(0),)), ((2, 2), TWO_TIMES), ((2, 2), (Shard(0), Shard(1))), ((2, 2), (Shard(0), Replicate()))],
)
def test_a_rank_has_the_block_that_torch_gives_it(shape, mesh, placements) -> None:
    parameter = CutParameter(
        shape, tuple((n, getattr(how, "dim", -1)) for n, how in zip(mesh, placements, strict=True))
    )
    assert parameter.ranks == 4
    for rank in range(4):
        local, offset = torchs(shape, mesh, [rank] if len(mesh) == 1 else [rank // 2, rank % 2], placements)
        block = parameter.block(rank)
        assert tuple(end - begin for begin, end in block) == local
        assert 0 in local or tuple(begin for begin, _ in block) == offset


words = st.sampled_from(["layers", "0", "1", "2", "12", "01", "w", "*", "w2"])
kinds = st.builds(CutParameter, st.sampled_from([(4, 2), (3,)]), st.just(((2, 0), (2, -1))))


@given(st.dictionaries(st.lists(words, min_size=1, max_size=4).map(".".join), kinds))
def test_rows_give_the_parameters_again_or_say_nothing(parameters) -> None:
    rows = json.loads(json.dumps(folded(parameters)))
    odd = any({"01", "*"} & {*name.split(".")} for name in parameters)
    assert unfolded(rows) == parameters or (odd and rows == [])


def test_equal_layers_and_experts_are_one_row_and_a_long_log_is_left_out() -> None:
    expert = CutParameter((64, 32), ((8, 0),))
    model = {f"layers.{n}.experts.{m}.w{k}": expert for n in range(3, 61) for m in range(256) for k in (1, 2)}
    assert [row[:2] for row in folded(model)] == [
        [f"layers.*.experts.*.w{k}", [[[3, 60]], [[0, 255]]]] for k in (1, 2)
    ]
    assert folded({f"a{n}": expert for n in range(MOST // 20)}) == []
