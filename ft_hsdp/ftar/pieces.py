"""Values that lie in several pieces of memory, and are summed as if they were put together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ft_hsdp.core.ring import Span


class PiecedTensor:
    """A flat tensor whose elements lie in several pieces of host memory. It is never copied.

    Args:
        pieces: flat contiguous tensors of one type, in order; at least one.

    Raises:
        ValueError: there is none, they have several types, or one is not flat and contiguous.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        if not pieces or any(p.dtype != pieces[0].dtype or p.dim() != 1 or not p.is_contiguous() for p in pieces):
            raise ValueError(f"pieces: {len(pieces)}; allowed: flat contiguous tensors of one type, at least one")
        self.pieces = tuple(pieces)
        self._starts = tuple(accumulate((p.numel() for p in pieces), initial=0))

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole: (elements,)."""
        return torch.Size((self.numel(),))

    def numel(self) -> int:
        return self._starts[-1]

    def element_size(self) -> int:
        return self.pieces[0].element_size()

    @property
    def edges(self) -> tuple[int, ...]:
        """Elements at which a piece that is not the first one begins; `RingPlan.edges`."""
        return tuple(sorted({start for start in self._starts if 0 < start < self._starts[-1]}))

    def at(self, span: Span) -> Tensor:
        """Return elements that lie in one piece.

        Args:
            span: Elements of the whole, across no edge.

        Returns:
            Flat [span.size], a part of the piece.
        """
        index = min(bisect_right(self._starts, span.start), len(self.pieces)) - 1
        start = self._starts[index]
        return self.pieces[index][span.start - start : span.stop - start]


Values = Tensor | PiecedTensor
"""What is summed, or receives a sum. Only the CPU's data plane takes a `PiecedTensor`."""


def pieced(values: Values) -> PiecedTensor:
    """Return flat values as pieces: a tensor is one."""
    return values if isinstance(values, PiecedTensor) else PiecedTensor((values,))
