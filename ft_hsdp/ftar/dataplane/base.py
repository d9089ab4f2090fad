"""The protocols between the engine and the data plane, which copies and adds chunks.

`cpu` and `gpu` implement them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ft_hsdp.core.ring import ProcessChunk, RingPlan
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.pieces import Values
from ft_hsdp.ftar.transport.base import Chunk


@dataclass(frozen=True, slots=True)
class Processed:
    """A chunk that the data plane has finished."""

    process: ProcessChunk
    payload: Tensor | None  # what to send on
    chunk: Chunk | None  # the received chunk, which is not needed any more


class PlaneJob(Protocol):
    """One all-reduce on a data plane.

    The engine's thread owns it; only `buffer_for` is called on receiving threads.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements of chunks."""
        ...

    @property
    def depth(self) -> int:
        """How many chunks may be posted and not finished at once."""
        ...

    def buffer_for(self, frame: Frame) -> Tensor:
        """Return the flat CPU tensor, of the size of the frame's span, into which its payload is received."""
        ...

    def post(self, process: ProcessChunk, chunk: Chunk | None) -> None:
        """Begin to copy, reduce or store a chunk (FT-HSDP §4.2). Blocks at most for the work itself."""
        ...

    def completed(self) -> list[Processed]:
        """Return the chunks that were finished since the last call, in the order of posting."""
        ...

    def free(self, chunk: Chunk) -> None:
        """Allow the buffer of `chunk` to be used again."""
        ...

    def close(self, failed: bool) -> None:
        """End the all-reduce; `failed` tells that chunks may be missing."""
        ...


class Plane(Protocol):
    """Makes the jobs of one group, and owns the buffers that live as long as the group."""

    def open(
        self,
        local: Values | None,
        out: Values,
        plan: RingPlan,
        after: Any = None,
        wire: torch.dtype | None = None,
    ) -> PlaneJob:
        """Begin an all-reduce.

        Args:
            local: flat and contiguous, [n]: this member's values; None: relay what arrives.
            out: flat and contiguous, [n], of the same type: receives the sum.
            plan: how the message is cut into chunks; none lies in two pieces of `local` or `out`.
            after: what completes `local`; on a GPU an event. None: it is complete.
            wire: type of chunks, in which `plan` is cut; None: that of `out`.

        Returns:
            The job; only one may be open at a time.
        """
        ...
