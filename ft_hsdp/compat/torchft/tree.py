"""Tree: a state dict as typed JSON and a list of tensors, and back. Nothing is unpickled.

A node is None, a bool, an int, a str, or a list whose first word says what it is:

    ["float", hex]   ["list", nodes]   ["tuple", nodes]   ["dict", [[key, node], ...]]   ["tensor", index]
    ["dtensor", index, device type, ranks of the mesh, its names, placements, shape, stride]

Subclasses (OrderedDict, Parameter) arrive as what they are kinds of; an empty shard is a tensor like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ft_hsdp.errors import DataCorruption, InvalidArgument

MAX_DEPTH = 50  # a node of a dict is three levels of JSON, of which pydantic reads 200
Json = Any


def flatten(value: object) -> tuple[Json, list[Tensor]]:
    """The node of a state dict, and its tensors (of DTensors the local shards) on whatever device.

    Raises:
        InvalidArgument: there is something in it that cannot be sent; the message says where.
    """
    tensors: list[Tensor] = []
    return _node(value, "state_dict", 0, tensors), tensors


def unflatten(node: Json, tensors: Sequence[Tensor]) -> Any:
    """The state dict of a node.

    Raises:
        DataCorruption: it is no node, or names a tensor that is not there.
    """
    try:
        return _value(node, tensors)
    except DataCorruption:
        raise
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError, RecursionError, OverflowError) as error:
        raise DataCorruption(f"not a state dict: {str(error).splitlines()[:1]}") from error


def _node(value: object, where: str, depth: int, tensors: list[Tensor]) -> Json:
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"{where[:100]}: nested deeper than {MAX_DEPTH}")
    match value:
        case None | bool() | int():
            return value if value is None else bool(value) if isinstance(value, bool) else int(value)
        case str():
            return _text(value, where)
        case float():
            return ["float", value.hex()]
        case DTensor():
            return _dtensor(value, tensors)
        case Tensor() if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
            tensors.append(value.detach())
            return ["tensor", len(tensors) - 1]
        case list() | tuple():
            nodes = [_node(v, f"{where}[{i}]", depth + 1, tensors) for i, v in enumerate(value)]
            return ["list" if isinstance(value, list) else "tuple", nodes]
        case dict():
            pairs = [
                [_node(_key(k, where), where, depth + 1, tensors), _node(v, f"{where}[{k!r}]", depth + 1, tensors)]
                for k, v in value.items()
            ]
            return ["dict", pairs]
    kinds = "dense tensors, DTensors, str, int, float, bool, None, and lists, tuples and dicts of them"
    raise InvalidArgument(f"{where[:100]}: a {type(value).__qualname__} cannot be sent; allowed: {kinds}")


def _key(key: object, where: str) -> object:
    if not isinstance(key, str | int | float | bool | None):
        raise InvalidArgument(f"{where[:100]}: a key of type {type(key).__qualname__} cannot be sent")
    return key


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{where[:100]}: a text that is not Unicode cannot be sent") from error
    return str(value)


def _dtensor(value: DTensor, tensors: list[Tensor]) -> Json:
    tensors.append(value._local_tensor.detach())
    mesh = value.device_mesh
    names = mesh.mesh_dim_names
    about = [mesh.device_type, mesh.mesh.tolist(), None if names is None else list(names)]
    placements = [_placed(p) for p in value.placements]
    return ["dtensor", len(tensors) - 1, *about, placements, list(value.shape), list(value.stride())]


def _placed(placement: Placement) -> Json:
    match placement:
        case Replicate():
            return ["replicate"]
        case Shard(dim=dim) if type(placement) is Shard:
            return ["shard", dim]
        case Partial(reduce_op=op) if type(placement) is Partial:
            return ["partial", op]
    raise InvalidArgument(f"a DTensor placed as {placement} cannot be sent")


def _value(node: Json, tensors: Sequence[Tensor]) -> Any:
    match node:
        case None | bool() | int() | str():
            return node
        case ["float", str(text)]:
            return float.fromhex(text)
        case ["list", list(nodes)]:
            return [_value(n, tensors) for n in nodes]
        case ["tuple", list(nodes)]:
            return tuple(_value(n, tensors) for n in nodes)
        case ["dict", list(pairs)]:
            return {_value(k, tensors): _value(v, tensors) for k, v in pairs}
        case ["tensor", int(index)] if 0 <= index < len(tensors):
            return tensors[index]
        case ["dtensor", int(index), str(device), ranks, names, list(placements), list(shape), list(stride)] if (
            0 <= index < len(tensors)
        ):
            return _sharded(tensors[index], device, ranks, names, placements, shape, stride)
    raise DataCorruption(f"not a node of a state dict: {str(node)[:40]!r}")


def _sharded(
    local: Tensor, device: str, ranks: Json, names: Json, placements: Json, shape: Json, stride: Json
) -> DTensor:
    """A DTensor on a mesh that equals the sender's, but has no process groups."""
    dims = None if names is None else tuple(names)
    mesh = DeviceMesh(device, torch.tensor(ranks, dtype=torch.int), mesh_dim_names=dims, _init_backend=False)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(_placement(p) for p in placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # from_local drops what another rank's mesh has


def _placement(node: Json) -> Placement:
    match node:
        case ["replicate"]:
            return Replicate()
        case ["shard", int(dim)]:
            return Shard(dim)
        case ["partial", str(op)]:
            return Partial(op)
    raise DataCorruption(f"not a placement: {str(node)[:40]!r}")
