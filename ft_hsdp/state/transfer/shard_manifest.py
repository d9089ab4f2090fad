"""Manifests of packed shards and of slices of block stores, and the checks of manifests and bytes. No pickle.

A layout follows from this rank's own model and optimizer, never from a peer: a state is accepted only if its
layout is the one that is expected here.

Of whatever a manifest is, an encoded one is its digest, a newline, and canonical JSON. The digest is blake3 over
that JSON. So replicas that hold the same bits of the same state serve the same digest, and a replica that does not
serves another one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import blake3
import xxhash
from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config

from ft_hsdp import bounded
from ft_hsdp.core import state_id
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory import shape
from ft_hsdp.memory.shape import Cut

if TYPE_CHECKING:
    import torch  # the state agent, which reads manifests, starts without it

ALIGN = shape.ALIGN
CHUNK_BYTES = 4 << 20  # bytes that have a checksum of their own
MAX_MANIFEST = 64 << 20  # bytes; who sends one has proved the token
DIGEST_HEX = 64  # characters
MAX_SLICES = 1 << 16  # of one store
MAX_NBYTES = 1 << 50

_Size = Annotated[int, Field(strict=True, ge=0, le=2**62)]
_Shape = Annotated[tuple[_Size, ...], Field(max_length=32)]
_Word = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]
_Name = Annotated[str, StringConstraints(max_length=1024)]
Sum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of them


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a shard, and where it lies in the packed bytes."""

    name: _Name
    kind: _Word  # "param", "optim" or "user"; "tensor" where torchft packs
    dtype: _Word  # the name without "torch."
    shape: _Shape  # of this rank's shard
    global_shape: _Shape  # of the whole tensor
    offset: _Size
    nbytes: _Size
    cut: Cut = "other"  # how the whole tensor is cut over the ranks; only rows are cut for another number of them


@dataclass(frozen=True)  # without slots: it keeps its fingerprint, which each snapshot tells
class Layout:
    """The tensors of one rank's shard in a packed buffer."""

    tensors: tuple[PackedTensor, ...]  # in order of their offsets
    nbytes: int  # of the packed buffer

    @staticmethod
    def of(
        params: Mapping[str, torch.Tensor],
        optim: Mapping[str, torch.Tensor],
        user: Mapping[str, torch.Tensor] | None = None,
        others: Mapping[str, torch.Tensor] | None = None,
    ) -> Layout:
        """Return the layout of the tensors ``params``, ``optim``, ``user`` and ``others``, by name.

        They may be DTensors.
        """
        tensors: list[PackedTensor] = []
        offset = 0
        for kind, named in (
            ("param", params),
            ("optim", optim),
            ("user", user or {}),
            ("tensor", others or {}),
        ):
            for name, tensor in named.items():
                shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
                nbytes = shard.numel() * shard.element_size()
                dtype = str(shard.dtype).removeprefix("torch.")
                tensors.append(
                    PackedTensor(
                        name, kind, dtype, tuple(shard.shape), tuple(tensor.shape), offset, nbytes, _cut(tensor)
                    )
                )
                offset += shape.aligned(nbytes)
        return Layout(tuple(tensors), offset)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a hash of all names, types, shapes and offsets. A fetched shard must have the same."""
        return fingerprint(self.tensors)

    @property
    def whole(self) -> str:
        """Hash of the names, types and shapes of the whole tensors, whatever part of them this shard has."""
        return state_id.digest([(t.name, t.kind, t.dtype, t.global_shape) for t in self.tensors])


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class ShardManifest:
    """Describes the packed shard of one rank of one state.

    ``cursors``, ``holes`` and ``spoilt`` are its ledger.
    """

    state: StateId
    rank: _Size
    ranks: _Size  # of the replica
    layout: _Hash  # the fingerprint of ``tensors``
    nbytes: _Size  # of the packed shard
    tensors: tuple[PackedTensor, ...]
    cursors: tuple[_Size, ...]
    hyper: tuple[dict[str, Json], ...]  # the optimizer's parameter groups before lr_scale
    holes: tuple[tuple[_Size, _Size, _Size], ...] = ()
    # xxh3-64 of each chunk of CHUNK_BYTES, made from the live tensors while they are packed; () until `seal`.
    checksums: tuple[Sum, ...] = ()
    spoilt: tuple[tuple[_Size, _Size, _Size, _Size], ...] = ()
    user: dict[str, dict[str, Json]] = field(default_factory=dict)  # JSON values of the user's own state, by name
    part: tuple[_Size, _Size] | None = None  # (rank, ranks) of whom only a part of the shard is for (`parts`)

    @property
    def ledger(self) -> Ledger:
        """The ledger of what was trained.

        Raises:
            ValueError: The fields are not those of a valid ledger.
        """
        return Ledger(self.cursors, self.holes, self.spoilt)

    @property
    def chunk(self) -> int:
        """Bytes that have a checksum of their own."""
        return CHUNK_BYTES

    def check(self) -> None:
        """Check the ledger, and that the tensors lie in order, without overlap, within the shard's bytes.

        Raises:
            ValueError: Something is wrong.
        """
        _ = self.ledger
        end = 0
        for tensor in self.tensors:
            if tensor.offset < end or tensor.offset + tensor.nbytes > self.nbytes:
                raise ValueError(f"tensor {tensor.name[:40]!r} is where it cannot lie")
            end = tensor.offset + tensor.nbytes


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class SliceName:
    """Which slice of which store, and its size."""

    store: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]  # digest of what the store is
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]  # that the user gave it
    slice: Annotated[int, Field(strict=True, ge=0, lt=MAX_SLICES)]
    slices: Annotated[int, Field(strict=True, gt=0, le=MAX_SLICES)]  # of the store
    nbytes: Annotated[int, Field(strict=True, gt=0, le=MAX_NBYTES)]
    piece: Annotated[int, Field(strict=True, gt=0, le=1 << 30)]  # bytes that have a checksum of their own
    parts: Annotated[int, Field(strict=True, gt=0, le=MAX_SLICES)] = 1  # slices of a share, as in `BlockLayout`


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class SliceManifest:
    """Describes the bytes of a slice."""

    about: SliceName
    checksums: tuple[Sum, ...]  # xxh3-64 of each piece

    @property
    def nbytes(self) -> int:
        """The size of the slice."""
        return self.about.nbytes

    @property
    def chunk(self) -> int:
        """Bytes that have a checksum of their own."""
        return self.about.piece


Manifest: TypeAlias = ShardManifest | SliceManifest
M = TypeVar("M", bound=Manifest)
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
_checker: Callable[[Any], Any] = functools.cache(bounded.checker)


@dataclass(frozen=True, slots=True)
class ExpectedShard:
    """What a receiver demands of a shard. It knows this from its own model, never from a peer."""

    state: StateId
    rank: _Size
    ranks: _Size
    layout: _Hash  # the fingerprint of its tensors
    nbytes: _Size
    part: tuple[_Size, _Size] | None = None  # (rank, ranks) of whom a part of it is for; None: the whole shard


MAX_HELD = 4096  # rows of one list of held shards
MAX_HELD_BYTES = 4 << 20  # of such a list


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A complete shard that a state agent keeps: one row of what it answers to GET /v1/held."""

    state: StateId
    replica: _Size  # whose shard it is
    rank: _Size
    ranks: _Size  # of that replica
    layout: _Hash  # the fingerprint of its tensors
    nbytes: _Size
    settled: bool  # all ranks of that replica have a snapshot of the state
    host: Annotated[str, StringConstraints(max_length=255)] = ""  # the agent's


Held = tuple[HeldShard, ...]


def prepare() -> None:
    """Build now what encodes and checks shards: a few milliseconds, which each process would take otherwise."""
    for kind in (Held, ShardManifest):
        _adapter(kind)
        _checker(kind)


def encode_held(shards: Sequence[HeldShard]) -> bytes:
    """Return the JSON list of the first `MAX_HELD` of ``shards``."""
    return _adapter(Held).dump_json(tuple(shards[:MAX_HELD]))


def decode_held(data: bytes) -> Held:
    """Return the shards in a JSON list, ``data``, that another host's agent sent.

    Raises:
        DataCorruption: It is too long, or not valid.
    """
    if len(data) > MAX_HELD_BYTES:
        raise DataCorruption(f"list of {len(data)} bytes; allowed: {MAX_HELD_BYTES}")
    try:
        rows: Held = _checker(Held).validate_json(data)
    except ValidationError as error:
        raise DataCorruption(f"list of held shards is not valid: {bounded.complaint(error)}") from None
    if len(rows) > MAX_HELD:
        raise DataCorruption(f"list of {len(rows)} held shards; allowed: {MAX_HELD}")
    return rows


def _cut(tensor: torch.Tensor) -> Cut:
    """Return how FSDP2, or the user, has cut a tensor over the ranks of the replica."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return "whole"
    if len(placements) != 1:
        return "other"
    if placements[0].is_replicate():
        return "whole"
    return "rows" if placements[0].is_shard(0) and type(placements[0]).__name__ == "Shard" else "other"


def fingerprint(tensors: Sequence[PackedTensor]) -> str:
    """Return a hash of all names, types, shapes and offsets of ``tensors``, 32 hex digits."""
    return state_id.digest([(t.name, t.kind, t.dtype, t.shape, t.global_shape, t.offset) for t in tensors])


def checksums(*pieces: memoryview, chunk: int = 0) -> tuple[str, ...]:
    """Return the xxh3-64 of each ``chunk`` bytes (0: CHUNK_BYTES) of consecutive pieces, 16 hex digits."""
    sums = RunningChecksums(chunk)
    for piece in pieces:
        sums.add(piece)
    return sums.end()


class RunningChecksums:
    """Computes `checksums` of bytes that come piece by piece, in order.

    Args:
        chunk: Bytes that have a checksum of their own; 0: CHUNK_BYTES.
    """

    def __init__(self, chunk: int = 0) -> None:
        self._hash = xxhash.xxh3_64()
        self._chunk = self._room = chunk or CHUNK_BYTES
        self._done: list[str] = []

    def add(self, piece: memoryview) -> None:
        """Add the next bytes, ``piece``. Releases the GIL."""
        while len(piece):
            self._hash.update(piece[: self._room])
            piece, self._room = piece[self._room :], max(0, self._room - len(piece))
            if self._room == 0:
                self._end()

    def end(self) -> tuple[str, ...]:
        """Return the checksum of each chunk, after the last piece."""
        if self._room < self._chunk:
            self._end()
        return tuple(self._done)

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._room = self._chunk


def damaged(manifest: Manifest, data: memoryview) -> tuple[int, ...]:
    """Return the numbers of the chunks of ``data`` whose checksum differs from the manifest's.

    Raises:
        ValueError: ``data`` has another number of chunks than the manifest.
    """
    pairs = zip(checksums(data, chunk=manifest.chunk), manifest.checksums, strict=True)
    return tuple(number for number, (found, wanted) in enumerate(pairs) if found != wanted)


def seal(header: ShardManifest, data: memoryview) -> ShardManifest:
    """Return ``header`` with the checksums of ``data``."""
    return replace(header, checksums=checksums(data))


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as bytes: its digest, a newline, and canonical JSON.

    Raises:
        ValueError: It would be longer than MAX_MANIFEST bytes.
    """
    document = _adapter(type(manifest)).dump_python(manifest, mode="json", warnings=False)
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    data = blake3.blake3(body).hexdigest().encode() + b"\n" + body
    if len(data) > MAX_MANIFEST:
        raise ValueError(f"manifest of {len(data)} bytes; allowed: {MAX_MANIFEST}")
    return data


def digest(encoded: bytes) -> str:
    """Return the digest that an encoded manifest begins with, 64 hex digits. It is not verified."""
    return encoded[:DIGEST_HEX].decode("ascii", "backslashreplace")


def decode(data: bytes, kind: type[M] = ShardManifest) -> M:  # type: ignore[assignment]
    """Return the manifest in ``data``, of class ``kind``, with all its checksums. Takes time linear in its length.

    Raises:
        DataCorruption: It is too long, its digest does not fit, it is not valid, or it lacks checksums.
    """
    manifest = decode_header(data, kind)
    if len(manifest.checksums) != -(-manifest.nbytes // manifest.chunk):
        raise DataCorruption(f"manifest has {len(manifest.checksums)} checksums for {manifest.nbytes} bytes")
    return manifest


def decode_header(data: bytes, kind: type[M] = ShardManifest) -> M:  # type: ignore[assignment]
    """Return the manifest in ``data``, of class ``kind``, validated. It may lack its checksums, as before `seal`.

    Raises:
        DataCorruption: It is too long, its digest does not fit, or it is not valid.
    """
    if len(data) > MAX_MANIFEST:
        raise DataCorruption(f"manifest of {len(data)} bytes; allowed: {MAX_MANIFEST}")
    body = data[DIGEST_HEX + 1 :]
    if data[: DIGEST_HEX + 1] != blake3.blake3(body).hexdigest().encode() + b"\n":
        raise DataCorruption("manifest's digest does not fit the rest of it")
    try:
        manifest: M = _checker(kind).validate_json(body)
        if isinstance(manifest, ShardManifest):
            manifest.check()
    except ValidationError as error:
        raise DataCorruption(f"manifest is not valid: {bounded.complaint(error)}") from None
    except (ValueError, RecursionError) as error:
        raise DataCorruption(f"manifest is not valid: {str(error)[:120]}") from None
    return manifest


def expect(manifest: ShardManifest, expected: ExpectedShard) -> ShardManifest:
    """Return a manifest that is of the expected shard; checked before anything is allocated or received.

    Raises:
        DataCorruption: It is of another state, rank, layout or size.
    """
    for name in ("state", "rank", "ranks", "part", "layout", "nbytes"):
        claimed, wanted = getattr(manifest, name), getattr(expected, name)
        if claimed != wanted:
            raise DataCorruption(f"manifest is of {name} {claimed}, wanted {wanted}")
    if fingerprint(manifest.tensors) != expected.layout:
        raise DataCorruption(f"manifest's tensors are not those of layout {expected.layout}")
    return manifest
