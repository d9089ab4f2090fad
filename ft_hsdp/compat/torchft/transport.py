"""A checkpoint transport for torchft: checksummed, authenticated, and without pickle.

The healthy replica sends a copy. Its trainer never waits for a reader, however slow, and may change its state at
once. The copy can be fetched until the next one is sent, or until `StateTransport.shutdown`.

A state dict travels as typed JSON (`flatten`, `unflatten`) and a list of tensors. A node of the JSON is None, a
bool, an int, a str, or a list whose first word says what it is:

    ["float", hex]   ["list", nodes]   ["tuple", nodes]   ["dict", [[key, node], ...]]   ["tensor", index]
    ["dtensor", index, device type, ranks of the mesh, its names, placements, shape, stride]

Subclasses arrive as their base class (an OrderedDict as a dict, a Parameter as a tensor); an empty shard is a
tensor like any other.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchft.checkpointing.transport import CheckpointTransport

from ft_hsdp.compat.torchft.handles import own_host
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption, InvalidArgument
from ft_hsdp.state.shared_memory import InMemorySnapshots, SnapshotBuffer
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.donor_connection import path
from ft_hsdp.state.transfer.fetch import Donor, FetchRequest, NotFetched, fetch
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.parts import Scattered
from ft_hsdp.state.transfer.shard_manifest import ALIGN, Layout, ShardManifest
from ft_hsdp.train.state.packing import pack

MAX_DEPTH = 50  # a node of a dict is three levels of JSON, of which pydantic reads 200
Json = Any


def flatten(value: object) -> tuple[Json, list[Tensor]]:
    """Return the JSON node of a state dict, and its tensors on their devices; of a DTensor the local shard.

    Raises:
        InvalidArgument: A value cannot be sent; the message says where it is.
    """
    tensors: list[Tensor] = []
    return _node(value, "state_dict", 0, tensors), tensors


def unflatten(node: Json, tensors: Sequence[Tensor]) -> Any:
    """Return the state dict of a node.

    Raises:
        DataCorruption: The node is not valid, or names a tensor that is not there.
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
    """Return a DTensor on a mesh that equals the sender's, but has no process groups."""
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


T = TypeVar("T")
LINEAGE = "0" * 32  # of every state: torchft names a state by its step alone
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What torchft's manager passes to the other replicas: where to fetch, and the right to do so."""

    addresses: tuple[str, ...] = Field(min_length=1, max_length=64)
    token: str = Field(max_length=256)


_METADATA = TypeAdapter(_Metadata)


class StateTransport(CheckpointTransport[T]):
    """A checkpoint transport for torchft's Manager (FT-HSDP §4.4).

    State dicts may hold tensors, DTensors, str, int, float, bool and None in lists, tuples and dicts.

    Args:
        timeout: Taken as HTTPTransport takes it, and not used: every call has its own time limit.
        num_chunks: Taken as HTTPTransport takes it, and not used: the size of a state decides how it is cut.
        host: The address at which the others call. Default: the one from which this machine reaches torchft's
            lighthouse.

    Raises:
        InvalidArgument: ``timeout`` is not positive, or ``num_chunks`` is negative.
    """

    def __init__(self, timeout: timedelta | None = None, num_chunks: int = 0, *, host: str | None = None) -> None:
        if timeout is not None and timeout <= timedelta(0):
            raise InvalidArgument(f"timeout: got {timeout}; allowed: more than 0")
        if num_chunks < 0:
            raise InvalidArgument(f"num_chunks: got {num_chunks}; allowed: 0 or more")
        self._snapshots = InMemorySnapshots()
        self._token = secrets.token_hex(32)
        self._server = StateServer(host or own_host(), 0, self._snapshots, self._token)
        self._offered: StateId | None = None

    def metadata(self) -> str:
        """Return JSON with the address of the state server, and the token that it demands."""
        return json.dumps({"addresses": [self._server.address], "token": self._token})

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer a copy of ``state_dict`` as the state of ``step``, in place of the one before.

        Blocks for the copy, not for a reader. Needs memory for one state more.

        Args:
            dst_ranks: Not used: any replica with the token may fetch.
            step: Names the state.
            state_dict: May be changed after the call.
            timeout: Not used.

        Raises:
            InvalidArgument: A value in ``state_dict`` cannot be sent.
        """
        node, tensors = flatten(state_dict)
        layout = Layout.of({}, {}, others={str(index): tensor for index, tensor in enumerate(tensors)})
        buffer = SnapshotBuffer(layout.nbytes)
        sums = pack(layout, tensors, torch.from_numpy(buffer.bytes))
        state = StateId(0, step, LINEAGE)
        about = layout.fingerprint, layout.nbytes, layout.tensors
        manifest = ShardManifest(state, 0, 1, *about, (), ({"tree": node},), checksums=sums)
        try:
            self._snapshots.put(manifest, buffer)
        except ValueError as error:
            raise InvalidArgument(f"the state dict has too much besides tensors: {error}") from error
        if self._offered is not None and self._offered != state:
            self._snapshots.drop(self._offered, 0)
        self._offered = state

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state dict of ``step`` from the replica that gave ``metadata``. Blocks.

        Args:
            src_rank: Not used: ``metadata`` says where to fetch.
            metadata: From `metadata` of the sender.
            step: The state to fetch; it may be offered only later.
            timeout: How long to try.

        Returns:
            The state dict. Its tensors are on the CPU and share one piece of memory.

        Raises:
            TimeoutError: It was not offered, or not received, in time.
            ConnectionError: Every address failed.
            DataCorruption: What was received is not what was sent, or ``metadata`` is not valid.
        """
        offer = _parsed(metadata)
        buffers: list[Tensor] = []

        def memory(manifest: ShardManifest) -> Scattered:
            buffers.append(torch.empty(manifest.nbytes, dtype=torch.uint8))
            return Scattered(memoryview(cast(bytes, buffers[0].numpy())))

        state = StateId(0, step, LINEAGE)
        donors = [Donor(i, address) for i, address in enumerate(offer.addresses)]
        failures: list[str] = []
        try:
            got = fetch(
                donors,
                FetchRequest(path(state, 0), lambda encoded: _checked(encoded, state), memory, step),
                offer.token,
                timeout.total_seconds(),
                threading.Event(),
                lambda donor, why: failures.append(f"{donor.address}: {why}"),
            )
        except NotFetched as error:
            if len(failures) == len(donors):
                raise ConnectionError(f"step {step} was not received: {'; '.join(failures)}") from error
            raise TimeoutError(f"timed out: step {step} from {', '.join(offer.addresses)}: {error}") from error
        return cast(T, unflatten(got.manifest.hyper[0]["tree"], _views(buffers[0], got.manifest.tensors)))

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving; nothing can be fetched afterwards."""
        self._server.close()


def _parsed(metadata: str) -> _Metadata:
    try:
        return _METADATA.validate_json(metadata)
    except ValidationError as error:
        raise DataCorruption("metadata are not those of a StateTransport") from error


def _views(buffer: Tensor, places: tuple[shard_manifest.PackedTensor, ...]) -> list[Tensor]:
    """Return the tensors in ``buffer``, each by one call of torch: there may be thousands."""
    typed = {name: buffer.view(DTYPES[name]) for name in {place.dtype for place in places}}
    views = []
    for place in places:
        stride, step = [], 1
        for length in reversed(place.shape):
            stride.append(step)
            step *= max(1, length)
        flat = typed[place.dtype]
        views.append(flat.as_strided(place.shape, stride[::-1], place.offset // flat.itemsize))
    return views


def _checked(encoded: bytes, state: StateId) -> ShardManifest:
    """Return a manifest that this class could have made; checked before anything is allocated."""
    manifest: ShardManifest = shard_manifest.decode(encoded)
    if (manifest.state, manifest.rank, manifest.ranks) != (state, 0, 1):
        raise DataCorruption(f"manifest is of state {manifest.state}, wanted {state}")
    if manifest.nbytes % ALIGN or len(manifest.hyper) != 1 or set(manifest.hyper[0]) != {"tree"}:
        raise DataCorruption("manifest has no state dict")
    for tensor in manifest.tensors:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None or math.prod(tensor.shape) * dtype.itemsize != tensor.nbytes or tensor.offset % ALIGN:
            raise DataCorruption(
                f"manifest has a tensor of {tensor.dtype} {list(tensor.shape)[:8]} that cannot be"
            )
    return manifest
