import math

import pytest
import torch

from ft_hsdp.train.optimizer.clipping import PIECE, lane_squares, lanes_of, square_sum

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


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-15, 1e18, 1e30, math.inf, math.nan])
def test_a_norm_of_what_fp32_cannot_square_is_right(scale: float) -> None:
    values = torch.randn(5 * PIECE + 3, generator=torch.Generator().manual_seed(0)) * scale
    wanted = float(values.double().square().sum())
    assert float(square_sum(values)) == pytest.approx(wanted, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("numel", [0, 1, PIECE, 3 * PIECE + 5, 40 * PIECE])
def test_a_norm_has_the_same_bits_wherever_its_tensor_lies_and_with_any_number_of_threads(numel: int) -> None:
    values, room = torch.randn(numel, generator=torch.Generator().manual_seed(numel)), torch.empty(numel + 3)
    found = {float(square_sum(room[at : at + numel].copy_(values))) for at in (0, 1, 3)}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 3)
    found.add(float(square_sum(values)))
    torch.set_num_threads(threads)
    (same,) = found
    assert same == pytest.approx(float(values.double().square().sum()), rel=1e-6)
