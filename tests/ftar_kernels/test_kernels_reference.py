"""The oracle itself: sums in ring order, rounded at every hop; relays add nothing."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from ft_hsdp.core.ring import RingPlan, fold_order
from ftar_kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("members", "relays"), [(1, ()), (2, ()), (3, (1,)), (4, (0, 2)), (5, ())])
def test_every_member_ends_with_the_sum_in_ring_order(members, relays, dtype):
    elements, chunk, slots = 203, 8, 2
    torch.manual_seed(members)
    inputs = [None if i in relays else torch.randn(elements).to(dtype) for i in range(members)]
    outs = reference.ring_all_reduce(inputs, torch.empty(elements, dtype=dtype), chunk, slots)
    contributors = frozenset(range(members)) - set(relays)
    want = torch.empty(elements, dtype=dtype)
    for shard in range(members):
        for span in RingPlan(elements, members, chunk, slots).shard_spans(shard):
            first, *others = fold_order(shard, range(members), contributors)
            total = inputs[first][span.start : span.stop]
            for other in others:
                total = (total.float() + inputs[other][span.start : span.stop].float()).to(dtype)
            want[span.start : span.stop] = total
    assert all(torch.equal(out, want) for out in outs)


def test_nobody_contributes_and_the_sum_is_zero():
    outs = reference.ring_all_reduce([None, None, None], torch.full((7,), float("nan")), 2, 2)
    assert all(torch.equal(out, torch.zeros(7)) for out in outs)


def test_halves_are_added_in_float32():
    a, b = torch.tensor([60000.0]).half(), torch.tensor([-60000.0]).half()
    out = torch.empty(1).half()
    reference.reduce_copy(a, b, out)
    assert out.item() == 0
