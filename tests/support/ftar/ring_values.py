"""Numbers to add, and what their sum has to be, bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ft_hsdp.core.commit import Contribution
from ft_hsdp.core.ring import RingPlan, fold_order
from ft_hsdp.ftar.frame import Entry, Key

KEY = Key(epoch=1, step=1, attempt=0, bucket=0, prev="00" * 16)


def entry(replica: int, weight: int = 1) -> Entry:
    return Entry(replica, (Contribution(replica, weight, replica, 10 + replica, replica / 8),) if weight else ())


def values(count: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """``count`` tensors [n] of many magnitudes: their sum depends on the order of addition."""
    g = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return [torch.randint(-(10**6), 10**6, (n,), generator=g, dtype=dtype) for _ in range(count)]
    return [(torch.randn(n, generator=g) * 10 ** torch.randn(n, generator=g)).to(dtype) for _ in range(count)]


def folded(plan: RingPlan, ring: Sequence[int], locals_: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """The sum in the order that core.ring promises, rounded to ``dtype`` by each member; zeros without any."""
    of = dict(zip(ring, locals_, strict=True))
    out = torch.zeros(plan.elements, dtype=dtype)
    contributors = frozenset(r for r in ring if of[r] is not None)
    for shard in range(plan.members):
        parts = [x for r in fold_order(shard, ring, contributors) if (x := of[r]) is not None]
        for span in plan.shard_spans(shard) if parts else ():
            total = parts[0][span.start : span.stop].to(dtype)
            for part in parts[1:]:
                total = (total + part[span.start : span.stop]).to(dtype)
            out[span.start : span.stop] = total
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same: -0.0 is not 0.0 here."""
    return a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
