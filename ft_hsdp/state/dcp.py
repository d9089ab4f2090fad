"""DCP: tensors of a state in and out of torch.distributed.checkpoint's files.

Its collectives inside the replica and its ``.metadata`` are pickles; the latter is read only after its hash fitted
the manifest's. A checkpoint of one number of ranks loads on any other.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from ft_hsdp.state.contents import Stored
from ft_hsdp.state.layout import Layout
from ft_hsdp.state.ranks import Ranks


class Failed(Exception):
    """DCP did not work on some rank; the message says on which and why, alike on all of them."""


def stored(layout: Layout) -> tuple[Stored, ...]:
    """The tensors of a whole state, as they are in a checkpoint."""
    return tuple(Stored(t.kind, t.name, t.dtype, t.global_shape) for t in layout.tensors)


def key(kind: str, name: str) -> str:
    """What a tensor is called in a checkpoint."""
    return f"{kind}.{name}"


def views(
    layout: Layout, live: Sequence[torch.Tensor], buffer: torch.Tensor, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """The packed shard in ``buffer`` uint8 [layout.nbytes] as tensors on the CPU, sharded as ``live`` ones are."""
    found: dict[str, torch.Tensor] = {}
    for place, model in zip(layout.tensors, live, strict=True):
        dtype: torch.dtype = getattr(torch, place.dtype)
        piece = buffer[place.offset : place.offset + place.nbytes]
        piece = piece.view(dtype).view(place.shape) if place.nbytes else torch.empty(place.shape, dtype=dtype)
        if isinstance(model, DTensor):
            piece = DTensor.from_local(
                piece,
                ranks.mesh,
                model.placements,
                run_check=False,
                shape=model.shape,
                stride=model.stride(),
            )
        found[key(place.kind, place.name)] = piece
    return found


class _Writer(checkpoint.FileSystemWriter):
    """Says what the disk said: torch's own error names its source file and not the reason."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """As the base class.

        Raises:
            OSError: the disk refused.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno or errno.EIO, cause.strerror or str(cause)) from error


def save(path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write this rank's tensors into the folder ``path`` and fsync them. A collective of the replica's ranks.

    Raises:
        Failed: on some rank; all hear of it.
        RuntimeError: the ranks lost each other.
    """
    # Copying ahead would use a CUDA stream, on whatever device is current in this thread.
    writer = _Writer(path, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    try:
        checkpoint.save(dict(tensors), storage_writer=writer, process_group=ranks.group)
    except CheckpointException as failed:
        raise Failed(_told(failed)) from failed


def load(path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks | None) -> None:
    """Fill live tensors in place from a verified checkpoint; a collective of ``ranks``, None: of nobody else.

    Raises:
        Failed: on some rank; all hear of it.
        RuntimeError: the ranks lost each other.
    """
    state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    reader = checkpoint.FileSystemReader(path)
    try:
        if ranks is not None:
            checkpoint.load(state, storage_reader=reader, process_group=ranks.group)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            checkpoint.load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as failed:
        raise Failed(_told(failed)) from failed


def _told(failed: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in sorted(failed.failures.items()))
