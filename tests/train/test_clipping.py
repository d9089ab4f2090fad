import math

import pytest
import torch

from ft_hsdp.train.optimizer.clipping import lane_squares, lanes_of

SHAPES = ((10, 4), (7,), (40, 30), (3, 5))
WIDTHS = (4, 3, 1)


def cut(whole: torch.Tensor, width: int, rank: int) -> torch.Tensor:
    """The rows of a rank, as FSDP2 cuts them."""
    chunk = -(-len(whole) // width)
    return whole[rank * chunk : (rank + 1) * chunk]


def summed(grads: list[torch.Tensor], width: int) -> list[float]:
    """The squares of each lane, as a replica of so many ranks has them together."""
    of = lanes_of(SHAPES, WIDTHS)
    ranks = [lane_squares([cut(g, width, r) for g in grads], SHAPES, of, width, r) for r in range(width)]
    for n, lane in enumerate(of):
        assert [r for r in range(width) if ranks[r][n]] == [lane.owner(width)], "each lane has one owner"
    return [ranks[lane.owner(width)][n] for n, lane in enumerate(of)]


@pytest.mark.parametrize("seed", range(5))
def test_replicas_of_any_width_find_the_same_norm(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    grads = [torch.randn(shape, generator=made) for shape in SHAPES]
    first, *others = (summed(grads, width) for width in WIDTHS)
    assert all(other == first for other in others), "to the last bit"
    assert math.sqrt(sum(first)) == pytest.approx(math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads)))
