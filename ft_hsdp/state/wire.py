"""Wire: the manifest in front of a packed shard, and the checks on both. No pickle: JSON and raw bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import blake3
import xxhash
from pydantic import TypeAdapter, ValidationError

from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import DataCorruption

CHUNK_BYTES = 4 << 20
MAX_MANIFEST = 16 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a packed shard is: of which state and rank, in which layout, with which checksums.

    ``checksums`` are xxh3-64 of each chunk of CHUNK_BYTES, ``digest`` is blake3 over everything else. ``hyper``
    are the optimizer's parameter groups before lr_scale, ``cursors`` the ledger.
    """

    state: StateId
    rank: int
    ranks: int
    layout: str
    nbytes: int
    checksums: tuple[str, ...]
    digest: str
    cursors: tuple[int, ...]
    hyper: tuple[dict[str, Any], ...]


_MANIFEST = TypeAdapter(Manifest)


def checksum(chunk: memoryview) -> str:
    """xxh3-64 of one chunk, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(chunk)


def checksums(data: memoryview) -> tuple[str, ...]:
    """The checksum of each chunk of ``data``."""
    return tuple(checksum(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES))


def digest(manifest: Manifest) -> str:
    """blake3 over all of a manifest but its own digest, 64 hex digits."""
    return blake3.blake3(encode(replace(manifest, digest=""))).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Canonical JSON of a manifest."""
    document = _MANIFEST.dump_python(manifest, mode="json")
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes) -> Manifest:
    """The manifest in ``data``.

    Raises:
        DataCorruption: too large, not valid, or its digest does not fit the rest.
    """
    if len(data) > MAX_MANIFEST:
        raise DataCorruption(f"manifest of {len(data)} bytes; allowed: {MAX_MANIFEST}")
    try:
        manifest = _MANIFEST.validate_json(data)
        fits = digest(manifest) == manifest.digest
    except (ValidationError, ValueError, RecursionError) as error:
        raise DataCorruption(f"manifest is not valid: {str(error).splitlines()[0][:120]}") from error
    if not fits:
        raise DataCorruption("manifest's digest does not fit the rest of it")
    return manifest


def expect(manifest: Manifest, state: StateId, rank: int, ranks: int, layout: str, nbytes: int) -> None:
    """Check that a manifest is of what was asked for, before anything is received.

    Raises:
        DataCorruption: it is of another state, rank, layout or size.
    """
    claims = (manifest.state, manifest.rank, manifest.ranks, manifest.layout, manifest.nbytes)
    names = ("state", "rank", "ranks", "layout", "nbytes")
    for name, claimed, wanted in zip(names, claims, (state, rank, ranks, layout, nbytes), strict=True):
        if claimed != wanted:
            raise DataCorruption(f"manifest is of {name} {claimed}, wanted {wanted}")
    if len(manifest.checksums) != -(-nbytes // CHUNK_BYTES):
        raise DataCorruption(f"manifest has {len(manifest.checksums)} checksums for {nbytes} bytes")
