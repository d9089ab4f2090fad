"""Plane: what the engine asks of whoever copies and adds; `cpu` and `gpu` answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ft_hsdp.core.ring import ProcessChunk, RingPlan
from ft_hsdp.ftar.frame import Frame
from ft_hsdp.ftar.transport.base import Chunk


@dataclass(frozen=True, slots=True)
class Processed:
    """A chunk that the plane has finished: what to send on, and the arrival that is not needed any more."""

    process: ProcessChunk
    payload: Tensor | None
    chunk: Chunk | None


class PlaneJob(Protocol):
    """One all-reduce on a plane."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        ...

    @property
    def depth(self) -> int:
        """How many chunks it takes at once."""
        ...

    def buffer_for(self, frame: Frame) -> Tensor:
        """Where an arriving chunk goes: a flat CPU tensor of the frame's span. The receiving thread asks."""
        ...

    def post(self, process: ProcessChunk, chunk: Chunk | None) -> None:
        """Copy, reduce or store a chunk (FT-HSDP §4.2); never blocks longer than the work itself."""
        ...

    def completed(self) -> list[Processed]:
        """What has been finished since the last call, in the order of posting."""
        ...

    def free(self, chunk: Chunk) -> None:
        """The chunk's landing place may be used again."""
        ...

    def close(self, failed: bool) -> None:
        """The all-reduce is over."""
        ...


class Plane(Protocol):
    """Makes jobs; owns the buffers that live as long as the group."""

    def open(self, local: Tensor | None, out: Tensor, plan: RingPlan, after: Any = None) -> PlaneJob:
        """An all-reduce of ``local`` (None: relay) into ``out``, both flat, contiguous, of one type.

        ``local`` is complete once ``after`` is (on a GPU an event; None: it is).
        """
        ...
