"""Writes and reads the tensors of a state in the file format of torch.distributed.checkpoint (DCP).

The ranks agree on the plan in JSON, and the manifest says where every piece lies. DCP's own collectives are not
used, because they pickle. Its ``.metadata``, which is a pickle too, is written for torch's tools and never read
here. Its reader loads each tensor with torch's unpickler for weights, which builds nothing but tensors, and only
from files whose bytes were verified. A checkpoint of one number of ranks loads on any other.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, Sequence
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ft_hsdp.state.checkpoint.checkpoint_manifest import CheckpointManifest, Stored, TensorPiece, encoded_bytes
from ft_hsdp.state.replica_group import Failed, ReplicaGroup
from ft_hsdp.state.transfer.shard_manifest import Layout, PackedTensor


def stored(layout: Layout) -> tuple[Stored, ...]:
    """Return the tensors of the whole state of which ``layout`` is a shard, as the manifest describes them."""
    return tuple(Stored(t.kind, t.name, t.dtype, t.global_shape) for t in layout.tensors)


def manifest_bytes(layout: Layout, ranks: int) -> int:
    """Return about how long the manifest is that tells where ``ranks`` ranks wrote the tensors of ``layout``."""
    nbytes, file = 0, f"__{ranks // 2}_0.distcp"
    for number, (tensor, whole) in enumerate(zip(layout.tensors, stored(layout), strict=True)):
        offsets = tuple(length // 2 for length in tensor.global_shape)
        piece = TensorPiece(number, offsets, tensor.shape, file, tensor.offset, tensor.nbytes)
        nbytes += encoded_bytes(whole) + _pieces(tensor, ranks) * encoded_bytes(piece)
    return nbytes


def _pieces(tensor: PackedTensor, ranks: int) -> int:
    """Return on how many ranks a tensor has bytes, each of its blocks once."""
    if tensor.cut == "rows":
        rows = tensor.global_shape[0]
        return -(-rows // max(1, -(-rows // ranks)))
    return min(ranks, math.prod(tensor.global_shape) // max(1, math.prod(tensor.shape)))


def key(kind: str, name: str) -> str:
    """Return the name in a checkpoint of tensor ``name`` of a ``kind`` ("param" or "optim")."""
    return f"{kind}.{name}"


def views(
    layout: Layout, live: Sequence[torch.Tensor], buffer: torch.Tensor, ranks: ReplicaGroup
) -> dict[str, torch.Tensor]:
    """Return the packed shard in ``buffer`` as CPU tensors by name, cut over ``ranks`` as the ``live`` ones.

    Copies nothing. The ``live`` tensors, in the order of the ``layout``, tell their sharding only.
    """
    found: dict[str, torch.Tensor] = {}
    for place, model in zip(layout.tensors, live, strict=True):
        dtype: torch.dtype = getattr(torch, place.dtype)
        piece = buffer[place.offset : place.offset + place.nbytes]
        piece = piece.view(dtype).view(place.shape) if place.nbytes else torch.empty(place.shape, dtype=dtype)
        if isinstance(model, DTensor):
            piece = DTensor.from_local(
                piece,
                _on_host(model.device_mesh, ranks),
                model.placements,
                run_check=False,
                shape=model.shape,
                stride=model.stride(),
            )
        found[key(place.kind, place.name)] = piece
    return found


def _on_host(mesh: DeviceMesh, ranks: ReplicaGroup) -> DeviceMesh:
    """Return a CPU mesh like ``mesh``, by which the place of a shard is found. It cannot communicate."""
    if mesh.ndim == 1 and mesh.size() == ranks.size:
        return ranks.mesh
    return DeviceMesh("cpu", mesh.mesh, _init_backend=False)


class _Writer(checkpoint.FileSystemWriter):
    """A file writer whose errors are those of the disk: torch's name its own source file and not the reason."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write the plan's tensors as the base class does.

        Raises:
            OSError: Writing failed.
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
    """Write this rank's tensors into the folder ``path`` and fsync them. Blocks. A collective of the replica.

    Args:
        path: A folder that all ranks share.
        tensors: This rank's tensors, from `views`.
        about: The tensors of the whole state, from `stored`.
        ranks: The ranks of the replica.

    Returns:
        Where each piece lies now; alike on all ranks.

    Raises:
        Failed: Writing failed on some rank. Raised on all of them.
        RuntimeError: The ranks lost each other.
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
    for rank, names in enumerate(ranks.on_all(plan)):
        for name in names:
            owner.setdefault(name, rank)  # a block that several ranks have is written by the first
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

    told = [each for rank in ranks.on_all(write) for each in rank]
    pieces = tuple(sorted((TensorPiece(n, tuple(o), tuple(s), *at) for n, o, s, *at in told), key=_order))

    def finish() -> list[str]:
        if first:
            metadata = _metadata(about, pieces, {*numbers})
            where: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
            writer.finish(metadata, [[WriteResult(index, at.length, at) for index, at in where.items()]])
        return []

    ranks.on_all(finish)
    return pieces


def load(path: Path, tensors: Mapping[str, torch.Tensor], manifest: CheckpointManifest) -> None:
    """Fill live ``tensors``, by their names in a checkpoint (`key`), from the folder ``path``. Blocks.

    The ``manifest`` was authenticated, and its files verified.

    Raises:
        Failed: A file cannot be read, or does not fit the manifest.
    """
    state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    reader, planner = checkpoint.FileSystemReader(path), DefaultLoadPlanner(flatten_state_dict=False)
    try:
        metadata = _metadata(manifest.tensors, manifest.pieces, {*state})
        planner.set_up_planner(state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:  # torch's reader and planner raise many kinds
        raise Failed(str(error) or type(error).__name__) from error


def _order(piece: TensorPiece) -> tuple[int, tuple[int, ...]]:
    return piece.tensor, piece.offsets


def _metadata(tensors: Sequence[Stored], pieces: Sequence[TensorPiece], names: set[str]) -> Metadata:
    """Return DCP's description of the tensors in ``names``, and of nothing else."""
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
