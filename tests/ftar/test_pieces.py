import pytest
import torch

from ft_hsdp.core.ring import Span
from ft_hsdp.ftar.allreduce import AllReduceOrder
from ft_hsdp.ftar.pieces import PiecedTensor, Values, pieced
from tests.support.ftar.ring_rig import FLAVOURS, Flavour, Shape, rig
from tests.support.ftar.ring_values import KEY, entry

SIZES = (1, 40, 0, 3, 100, 17)


def cut(tensor: torch.Tensor) -> PiecedTensor:
    """The same values in memory of their own for each piece."""
    return PiecedTensor([piece.clone() for piece in tensor.split(SIZES)])


def test_elements_are_found_in_their_piece() -> None:
    whole = torch.arange(float(sum(SIZES)))
    pieces = cut(whole)
    assert (pieces.numel(), tuple(pieces.shape), pieces.dtype) == (161, (161,), torch.float32)
    assert pieces.edges == (1, 41, 44, 144)
    for start, stop in [(0, 1), (1, 41), (7, 9), (41, 44), (44, 144), (150, 161), (161, 161), (41, 41)]:
        assert torch.equal(pieces.at(Span(start, stop)), whole[start:stop])
    pieces.at(Span(41, 44)).fill_(7.0)
    assert torch.equal(pieces.pieces[3], torch.full((3,), 7.0)), "a view, and no copy"
    assert pieced(whole).edges == ()
    assert pieced(pieces) is pieces


@pytest.mark.parametrize("pieces", [[], [torch.ones(2), torch.ones(2).double()], [torch.ones(2, 2)]])
def test_other_pieces_are_refused(pieces: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="allowed: flat contiguous tensors of one type"):
        PiecedTensor(pieces)


def test_local_and_sum_lie_in_the_same_pieces() -> None:
    with pytest.raises(ValueError, match="other pieces"):
        AllReduceOrder(KEY, cut(torch.ones(161)), torch.empty(161), entry(1))
    with pytest.raises(ValueError, match=r"local is torch.float32 \(161,\) in 6 pieces, out is"):
        AllReduceOrder(KEY, cut(torch.ones(161)), torch.empty(160), entry(1))


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda each: each.name)
def test_the_sum_has_the_bits_of_a_sum_in_one_piece(flavour: Flavour) -> None:
    made = torch.Generator().manual_seed(1)
    given = [torch.randn(sum(SIZES), generator=made) for _ in range(3)]
    with rig(flavour, 3, Shape(64, 4)) as ring:
        whole = [torch.empty(sum(SIZES)) for _ in given]
        ring.wait([ring.submit(i, AllReduceOrder(KEY, x, whole[i], entry(i))) for i, x in enumerate(given)])
        for in_place in (False, True):
            locals_ = [cut(x) for x in given]
            outs = locals_ if in_place else [cut(torch.zeros_like(x)) for x in given]
            mixed: list[Values] = [locals_[0] if in_place else given[0], *locals_[1:]]
            orders = [AllReduceOrder(KEY, x, outs[i], entry(i)) for i, x in enumerate(mixed)]
            ring.wait([ring.submit(i, order) for i, order in enumerate(orders)])
            for out, expected in zip(outs, whole, strict=True):
                assert torch.equal(torch.cat(out.pieces), expected)
        ring.wait([ring.submit(i, AllReduceOrder(KEY, None, outs[i], entry(i, 0))) for i in range(3)])
        assert not any(piece.any() for out in outs for piece in out.pieces), "nobody contributes: zeros"
