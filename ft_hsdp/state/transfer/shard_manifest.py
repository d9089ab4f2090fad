"""Wire: the manifest of a packed shard, and the checks on both. No pickle: JSON and raw bytes.

On the wire a manifest is its digest, a newline, and canonical JSON. The digest is blake3 over that JSON, so
replicas that hold the same bits of the same state serve the same digest, and one that does not differs in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import blake3
import xxhash
from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config

from ft_hsdp import bounded
from ft_hsdp.core import state_id
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption

CHUNK_BYTES = 4 << 20
MAX_MANIFEST = 16 << 20
DIGEST_HEX = 64

_Size = Annotated[int, Field(strict=True, ge=0, le=2**62)]
_Shape = Annotated[tuple[_Size, ...], Field(max_length=32)]
_Word = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]
_Name = Annotated[str, StringConstraints(max_length=1024)]
_Sum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
_Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

Json: TypeAlias = Any
"""None, bool, int, float, str, and lists and dicts of them."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a shard: dtype name, local and global shape, place in the packed bytes (offset, size)."""

    name: _Name
    kind: _Word
    dtype: _Word
    shape: _Shape
    global_shape: _Shape
    offset: _Size
    nbytes: _Size


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class ShardManifest:
    """What a packed shard is: of which state and rank of how many, what lies where in it, with which checksums.

    ``layout`` is the fingerprint of ``tensors``; ``cursors``, ``holes``, ``takers`` and ``spoilt`` are the ledger,
    ``hyper`` the optimizer's parameter groups before lr_scale; ``checksums`` are xxh3-64 of each chunk of
    CHUNK_BYTES, made from the live tensors while they are packed; () as long as nobody computed them (see `seal`).
    """

    state: StateId
    rank: _Size
    ranks: _Size
    layout: _Hash
    nbytes: _Size
    tensors: tuple[PackedTensor, ...]
    cursors: tuple[_Size, ...]
    hyper: tuple[dict[str, Json], ...]
    holes: tuple[tuple[_Size, _Size], ...] = ()
    takers: tuple[_Size, ...] = ()
    checksums: tuple[_Sum, ...] = ()
    spoilt: tuple[tuple[_Size, _Size, _Size], ...] = ()

    @property
    def ledger(self) -> Ledger:
        """What was trained.

        Raises:
            ValueError: no ledger can be like that.
        """
        return Ledger(self.cursors, self.holes, self.takers, self.spoilt)


_MANIFEST = TypeAdapter(ShardManifest)
_CHECKER = bounded.checker(ShardManifest)


@dataclass(frozen=True, slots=True)
class ExpectedShard:
    """What a receiver knows of a shard before it asks: from its own model, never from a peer."""

    state: StateId
    rank: int
    ranks: int
    layout: str
    nbytes: int


def fingerprint(tensors: Sequence[PackedTensor]) -> str:
    """Hash of all names, types, shapes and places, 32 hex digits: what a fetched shard must have."""
    return state_id.digest([(t.name, t.kind, t.dtype, t.shape, t.global_shape, t.offset) for t in tensors])


def checksum(chunk: memoryview) -> str:
    """xxh3-64 of one chunk, 16 hex digits. Other threads run meanwhile."""
    return xxhash.xxh3_64_hexdigest(chunk)


def checksums(data: memoryview) -> tuple[str, ...]:
    """The checksum of each chunk of ``data``."""
    return tuple(checksum(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES))


class RunningChecksums:
    """The same of bytes that come piece by piece, in order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._room = CHUNK_BYTES
        self._done: list[str] = []

    @property
    def room(self) -> int:
        """How long the next piece may be: to the end of its chunk."""
        return self._room

    def add(self, piece: memoryview) -> None:
        """The next bytes, at most ``room``. Other threads run meanwhile."""
        self._hash.update(piece)
        self._room -= len(piece)
        if self._room == 0:
            self._end()

    def end(self) -> tuple[str, ...]:
        """The checksum of each chunk; nothing comes any more."""
        if self._room < CHUNK_BYTES:
            self._end()
        return tuple(self._done)

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._room = CHUNK_BYTES


def damaged(manifest: ShardManifest, data: memoryview) -> tuple[int, ...]:
    """The numbers of the chunks of ``data`` that do not have their checksum."""
    pairs = zip(checksums(data), manifest.checksums, strict=True)
    return tuple(number for number, (found, wanted) in enumerate(pairs) if found != wanted)


def seal(header: ShardManifest, data: memoryview) -> ShardManifest:
    """The manifest of ``data``, from one that lacks the checksums."""
    return replace(header, checksums=checksums(data))


def encode(manifest: ShardManifest) -> bytes:
    """A manifest as it is served.

    Raises:
        ValueError: it is longer than MAX_MANIFEST bytes.
    """
    document = _MANIFEST.dump_python(manifest, mode="json", warnings=False)
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    data = f"{_digest(body)}\n".encode() + body
    if len(data) > MAX_MANIFEST:
        raise ValueError(f"manifest of {len(data)} bytes; allowed: {MAX_MANIFEST}")
    return data


def digest(encoded: bytes) -> str:
    """The digest that an encoded manifest begins with, 64 hex digits."""
    return encoded[:DIGEST_HEX].decode("ascii")


def decode(data: bytes) -> ShardManifest:
    """The manifest in ``data``.

    Raises:
        DataCorruption: too large, its digest does not fit the rest, or it is not valid.
    """
    manifest = decode_header(data)
    chunks = -(-manifest.nbytes // CHUNK_BYTES)
    if len(manifest.checksums) != chunks:
        raise DataCorruption(f"manifest has {len(manifest.checksums)} checksums for {manifest.nbytes} bytes")
    return manifest


def decode_header(data: bytes) -> ShardManifest:
    """The same for one whose checksums nobody has computed yet: `seal` does."""
    if len(data) > MAX_MANIFEST:
        raise DataCorruption(f"manifest of {len(data)} bytes; allowed: {MAX_MANIFEST}")
    body = data[DIGEST_HEX + 1 :]
    if data[: DIGEST_HEX + 1] != f"{_digest(body)}\n".encode():
        raise DataCorruption("manifest's digest does not fit the rest of it")
    try:
        manifest: ShardManifest = _CHECKER.validate_json(body)
        _ = manifest.ledger
    except ValidationError as error:
        raise DataCorruption(f"manifest is not valid: {bounded.complaint(error)}") from None
    except (ValueError, RecursionError) as error:
        raise DataCorruption(f"manifest is not valid: {str(error)[:120]}") from None
    _consistent(manifest)
    return manifest


def expect(manifest: ShardManifest, expected: ExpectedShard) -> None:
    """Check that a manifest is of what was asked for, before anything is allocated or received.

    Raises:
        DataCorruption: it is of another state, rank, layout or size.
    """
    for name in ("state", "rank", "ranks", "layout", "nbytes"):
        claimed, wanted = getattr(manifest, name), getattr(expected, name)
        if claimed != wanted:
            raise DataCorruption(f"manifest is of {name} {claimed}, wanted {wanted}")
    if fingerprint(manifest.tensors) != expected.layout:
        raise DataCorruption(f"manifest's tensors are not those of layout {expected.layout}")


def _digest(body: bytes) -> str:
    return blake3.blake3(body).hexdigest()


def _consistent(manifest: ShardManifest) -> None:
    """Its tensors lie in order within its bytes."""
    end = 0
    for tensor in manifest.tensors:
        if tensor.offset < end or tensor.offset + tensor.nbytes > manifest.nbytes:
            raise DataCorruption(f"manifest has tensor {tensor.name[:40]!r} where it cannot lie")
        end = tensor.offset + tensor.nbytes
