"""Contents: the manifest of a durable checkpoint. Canonical JSON, so that every changed byte shows.

It carries an HMAC of the operator's checkpoint key, and it says where in the files every piece of a tensor lies:
who reads a checkpoint needs nothing else, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
from pydantic import TypeAdapter, ValidationError

from ft_hsdp.core import state_id
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId

FORMAT = 2
MANIFEST = "manifest.json"
METADATA = ".metadata"
_FILE = re.compile(r"\.metadata|__\d{1,9}_\d{1,9}\.distcp")


class Unusable(Exception):
    """A checkpoint that is torn or damaged; the message says why."""


class Unauthentic(Exception):
    """A whole checkpoint that nobody with the checkpoint key wrote; the message names it."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint: its size in bytes and the blake3 of its content."""

    nbytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: its kind (param or optim), dtype name and global shape."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One block of a tensor, and the bytes [start, start + nbytes) of the file that hold it.

    ``tensor`` is its place in the manifest's ``tensors``; ``offsets`` and ``sizes`` say which block it is.
    """

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a checkpoint is; written last, so that its presence says that everything else is there.

    ``ledger`` and ``hyper`` (the optimizer's groups before lr_scale) belong to the state. ``replicas`` and
    ``ranks`` are those of the job that wrote it, ``config`` its configuration. ``mac`` is an HMAC
    over all of this, ``digest`` is blake3 over the rest.
    """

    format: int
    state: StateId
    incarnation: str
    replicas: int
    ranks: int
    config_hash: str
    config: dict[str, Any]
    ledger: Ledger
    hyper: tuple[dict[str, Any], ...]
    tensors: tuple[Stored, ...]
    files: dict[str, File]
    pieces: tuple[TensorPiece, ...] = ()
    mac: str = ""
    digest: str = ""


_ADAPTER = TypeAdapter(CheckpointManifest)


def encode(manifest: CheckpointManifest) -> bytes:
    """Canonical JSON of a manifest, with its digest.

    Raises:
        ValueError: it holds what JSON cannot.
    """
    whole = state_id.canonical(_ADAPTER.dump_python(replace(manifest, digest=""), mode="json")).encode()
    digest = blake3.blake3(whole).hexdigest()
    return state_id.canonical(_ADAPTER.dump_python(replace(manifest, digest=digest), mode="json")).encode()


def signed(manifest: CheckpointManifest, key: bytes) -> CheckpointManifest:
    """The manifest with the HMAC of ``key``. Raises ValueError as ``encode``."""
    return replace(manifest, mac=_mac(manifest, key))


def authenticate(name: str, manifest: CheckpointManifest, key: bytes) -> None:
    """Check who wrote a manifest; ``name`` is that of its folder.

    Raises:
        Unauthentic: it was not signed with ``key``, or it was changed since.
    """
    if not hmac.compare_digest(manifest.mac.encode(), _mac(manifest, key).encode()):
        raise Unauthentic(name)


def _mac(manifest: CheckpointManifest, key: bytes) -> str:
    covered = state_id.canonical(_ADAPTER.dump_python(replace(manifest, digest="", mac=""), mode="json")).encode()
    return hmac.new(key, b"ft_hsdp checkpoint\0" + covered, hashlib.sha256).hexdigest()


def decode(data: bytes) -> CheckpointManifest:
    """The manifest in ``data``.

    Raises:
        Unusable: it is not exactly what ``encode`` makes.
    """
    try:
        manifest = _ADAPTER.validate_json(data)
        whole = encode(manifest) == data
    except (ValidationError, ValueError, RecursionError) as error:
        raise Unusable(f"{MANIFEST} is not valid: {str(error).splitlines()[0][:120]}") from error
    if not whole:
        raise Unusable(f"{MANIFEST} does not fit its digest")
    if manifest.format != FORMAT:
        raise Unusable(f"{MANIFEST} has format {manifest.format}, this version reads {FORMAT}")
    if METADATA not in manifest.files or not all(_FILE.fullmatch(name) for name in manifest.files):
        raise Unusable(f"{MANIFEST} names files that no checkpoint has")
    if not all(
        piece.tensor in range(len(manifest.tensors)) and piece.file in manifest.files for piece in manifest.pieces
    ):
        raise Unusable(f"{MANIFEST} names pieces of what it does not have")
    return manifest


def name_of(state: StateId, incarnation: str) -> str:
    """The name of the folder that ``incarnation`` publishes ``state`` under."""
    return f"step-{state.step}-epoch-{state.commit_epoch}-{re.sub(r'[^A-Za-z0-9._-]', '_', incarnation)[:128]}"


def describe(path: Path) -> File:
    """Size and hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = hashlib.file_digest(file, blake3.blake3)  # type: ignore[arg-type] # has update and hexdigest
        return File(file.tell(), content.hexdigest())
