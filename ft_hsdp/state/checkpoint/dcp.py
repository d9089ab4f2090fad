"""DCP: tensors of a state in and out of torch.distributed.checkpoint's files.

The ranks agree on the plan in JSON, and the manifest says where every piece lies. DCP's own collectives, which are
pickles, are not used, and its ``.metadata``, one too, is written for torch's tools and never read here. A
checkpoint of one number of ranks loads on any other.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ft_hsdp.state.checkpoint.checkpoint_manifest import CheckpointManifest, Stored, TensorPiece
from ft_hsdp.state.layout import Layout
from ft_hsdp.state.replica_group import ReplicaGroup


class Failed(Exception):
    """DCP did not work on some rank; the message says on which and why, alike on all of them."""


def stored(layout: Layout) -> tuple[Stored, ...]:
    """The tensors of a whole state, as they are in a checkpoint."""
    return tuple(Stored(t.kind, t.name, t.dtype, t.global_shape) for t in layout.tensors)


def key(kind: str, name: str) -> str:
    """What a tensor is called in a checkpoint."""
    return f"{kind}.{name}"


def views(
    layout: Layout, live: Sequence[torch.Tensor], buffer: torch.Tensor, ranks: ReplicaGroup
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


def save(
    path: Path, tensors: Mapping[str, torch.Tensor], about: tuple[Stored, ...], ranks: ReplicaGroup
) -> tuple[TensorPiece, ...]:
    """Write this rank's tensors into the folder ``path`` and fsync them. A collective of the replica's ranks.

    Returns where the pieces of ``about``, the tensors of the whole state, lie now; alike on all ranks.

    Raises:
        Failed: on some rank; all hear of it.
        RuntimeError: the ranks lost each other.
    """
    # Copying ahead would use a CUDA stream, on whatever device is current in this thread.
    writer = _Writer(path, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    planner, first = DefaultSavePlanner(flatten_state_dict=False), ranks.rank == 0
    items: dict[str, WriteItem] = {}

    def plan() -> list[str]:
        planner.set_up_planner(dict(tensors), None, first)
        for item in create_default_local_save_plan(dict(tensors), first).items:
            assert item.tensor_data is not None
            if item.tensor_data.chunk.sizes.numel():
                items[json.dumps([item.index.fqn, *item.tensor_data.chunk.offsets])] = item
        return list(items)

    owner: dict[str, int] = {}
    for rank, names in enumerate(_each(ranks, plan)):
        for name in names:
            owner.setdefault(name, rank)  # of what several hold, the first one writes
    numbers = {key(tensor.kind, tensor.name): number for number, tensor in enumerate(about)}

    def write() -> list[list[Any]]:
        mine = SavePlan([item for name, item in items.items() if owner[name] == ranks.rank])
        writer.set_up_storage_writer(first)
        mine = writer.prepare_global_plan([*(SavePlan([]) for _ in range(ranks.rank)), mine])[ranks.rank]
        written = []
        for result in writer.write_data(mine, planner).wait():
            index, at = result.index, result.storage_data
            sizes = items[json.dumps([index.fqn, *index.offset])].tensor_data.chunk.sizes  # type: ignore[union-attr]
            place = (at.relative_path, at.offset, at.length)
            written.append([numbers[index.fqn], list(index.offset), list(sizes), *place])
        return written

    told = [each for rank in _each(ranks, write) for each in rank]
    pieces = tuple(sorted((TensorPiece(n, tuple(o), tuple(s), *at) for n, o, s, *at in told), key=_order))

    def finish() -> list[str]:
        if first:
            metadata = _metadata(about, pieces, {*numbers})
            where: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
            writer.finish(metadata, [[WriteResult(index, at.length, at) for index, at in where.items()]])
        return []

    _each(ranks, finish)
    return pieces


def load(path: Path, tensors: Mapping[str, torch.Tensor], manifest: CheckpointManifest) -> None:
    """Fill live tensors in place from a checkpoint whose ``manifest`` was authenticated and files verified.

    Raises:
        Failed: a file cannot be read, or does not hold what the manifest says.
    """
    state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    reader, planner = checkpoint.FileSystemReader(path), DefaultLoadPlanner(flatten_state_dict=False)
    try:
        metadata = _metadata(manifest.tensors, manifest.pieces, {*state})
        planner.set_up_planner(state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # of whatever kind: torch's reader and planner have many
        raise Failed(str(error) or type(error).__name__) from error


def _order(piece: TensorPiece) -> tuple[int, tuple[int, ...]]:
    return piece.tensor, piece.offsets


def _metadata(tensors: Sequence[Stored], pieces: Sequence[TensorPiece], names: set[str]) -> Metadata:
    """What DCP has to know of the tensors in ``names``; there are tensors in it and nothing else."""
    found: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    called = [key(tensor.kind, tensor.name) for tensor in tensors]
    for name, tensor in zip(called, tensors, strict=True):
        if name in names:
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            found[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), [])
    for piece in pieces:
        if (name := called[piece.tensor]) in names:
            chunks, offsets = found[name].chunks, torch.Size(piece.offsets)
            where[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(piece.file, piece.start, piece.nbytes)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.sizes)))
    return Metadata(found, storage_data=where)


def _each(ranks: ReplicaGroup, work: Callable[[], list[Any]]) -> list[list[Any]]:
    """What ``work`` gives on each rank, on all of them.

    Raises:
        Failed: it failed on one.
    """
    try:
        mine = json.dumps({"done": work()})
    except Exception as error:  # the other ranks have to hear of it
        mine = json.dumps({"error": str(error) or type(error).__name__})
    told = [json.loads(each) for each in ranks.gather(mine.encode())]
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
    if errors:
        raise Failed("; ".join(errors))
    return [each["done"] for each in told]
