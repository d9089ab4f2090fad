"""The manifest of a checkpoint: canonical JSON with an HMAC of the operator's checkpoint key.

It says where in the files every piece of a tensor lies. A reader needs no other index: DCP's own is a pickle.
Decoding accepts only what `encode` makes, so every changed byte shows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3
from pydantic import TypeAdapter, ValidationError

from ft_hsdp.core import state_id
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import open_regular

FORMAT = 5
MAX_SIZE = 2**20  # data ranks of a replica, and micro-batches of one
# Bytes. Who reads or writes one needs some twenty times as much memory, and other threads wait meanwhile.
MAX_MANIFEST = 128 << 20
MANIFEST = "manifest.json"
METADATA = ".metadata"  # DCP's index, for torch's tools; never read here
PUBLISHED = re.compile(r"step-(\d{1,19})-epoch-(\d{1,19})-([A-Za-z0-9._-]{1,128})")  # name of a folder
_FILE = re.compile(r"\.metadata|__\d{1,9}_\d{1,9}\.distcp")


class Unusable(Exception):
    """The checkpoint is torn or damaged. The message says why."""


class Unauthentic(Exception):
    """The checkpoint was not signed with the checkpoint key. The message is its folder's name."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint."""

    nbytes: int
    blake3: str  # of its content, 64 hex digits


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    kind: str  # "param", "optim" or "user"
    name: str
    dtype: str  # the name without "torch."
    shape: tuple[int, ...]  # of the whole tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen parameter or a buffer of the model, which is not in the checkpoint."""

    name: str
    dtype: str  # the name without "torch."
    shape: tuple[int, ...]  # of the whole tensor
    digest: str  # xxh3-128 of its row-major bytes, in hex


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One block of a tensor, in the bytes [start, start + nbytes) of a file."""

    tensor: int  # index in the manifest's ``tensors``
    offsets: tuple[int, ...]  # of the block in the whole tensor
    sizes: tuple[int, ...]  # of the block
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Describes a checkpoint. It is written last: if it is there, everything else is."""

    format: int
    state: StateId
    incarnation: str  # the writer's
    replicas: int  # of the job that wrote it
    ranks: int  # data ranks of each replica of that job
    config_hash: str
    config: dict[str, Any]  # of that job, for people to read
    accumulate: int  # micro-batches of a data rank in a batch: with `ranks`, what a unit of the ledger is
    ledger: Ledger
    hyper: tuple[dict[str, Any], ...]  # parameter groups before lr_scale, schedulers, what they were made with
    tensors: tuple[Stored, ...]
    files: dict[str, File]  # by name
    pieces: tuple[TensorPiece, ...] = ()
    user: dict[str, dict[str, Any]] = field(default_factory=dict)  # JSON values of the user's own state, by name
    frozen: tuple[Frozen, ...] = ()  # what else a state dict of the model has
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied tensors: the name here by them
    data: dict[str, str] = field(default_factory=dict)  # facts about the data
    mac: str = ""  # HMAC-SHA256 over the fields above
    digest: str = ""  # blake3 over all other fields, ``mac`` included


_ADAPTER = TypeAdapter(CheckpointManifest)
_ITEM: TypeAdapter[Stored | TensorPiece] = TypeAdapter(Stored | TensorPiece)


def encoded_bytes(item: Stored | TensorPiece) -> int:
    """Return how long an item of a manifest is there, with the comma behind it."""
    return len(_ITEM.dump_json(item)) + 1


def encode(manifest: CheckpointManifest) -> bytes:
    """Return the canonical JSON of a manifest, with its digest.

    Raises:
        ValueError: A value cannot be written as JSON.
    """
    written = _ADAPTER.dump_python(manifest, mode="json")
    digest = blake3.blake3(state_id.canonical({**written, "digest": ""}).encode()).hexdigest()
    return state_id.canonical({**written, "digest": digest}).encode()


def signed(manifest: CheckpointManifest, key: bytes) -> CheckpointManifest:
    """Return the manifest with the HMAC of ``key``.

    Raises:
        ValueError: A value cannot be written as JSON.
    """
    return replace(manifest, mac=_mac(_ADAPTER.dump_python(manifest, mode="json"), key))


def authenticate(name: str, data: bytes, key: bytes) -> None:
    """Check that the manifest in ``data``, which `decode` accepts, of the folder ``name`` was signed with ``key``.

    Raises:
        Unauthentic: It was not signed with ``key``, or was changed since.
    """
    written = json.loads(data)
    if not hmac.compare_digest(written["mac"].encode(), _mac(written, key).encode()):
        raise Unauthentic(name)


def _mac(written: dict[str, Any], key: bytes) -> str:
    covered = state_id.canonical({**written, "digest": "", "mac": ""}).encode()
    return hmac.new(key, b"ft_hsdp checkpoint\0" + covered, hashlib.sha256).hexdigest()


def decode(data: bytes) -> CheckpointManifest:
    """Return the manifest in ``data``, validated.

    Raises:
        Unusable: ``data`` is not exactly what `encode` makes, or too long.
    """
    if len(data) > MAX_MANIFEST:
        raise Unusable(f"{MANIFEST} has more than {MAX_MANIFEST} bytes")
    try:
        written = json.loads(data)
        # The fields of other formats are others, so the format is looked at first.
        found = written.get("format") if isinstance(written, dict) else FORMAT
        if found != FORMAT:
            raise Unusable(f"{MANIFEST} has format {str(found)[:20]}, this version reads {FORMAT}")
        manifest = _ADAPTER.validate_json(data)
        whole = encode(manifest) == data
    except (ValidationError, ValueError, RecursionError) as error:
        raise Unusable(f"{MANIFEST} is not valid: {str(error).splitlines()[0][:120]}") from error
    if not whole:
        raise Unusable(f"{MANIFEST} does not fit its digest")
    if not (0 < manifest.ranks <= MAX_SIZE and 0 < manifest.accumulate <= MAX_SIZE):
        raise Unusable(f"{MANIFEST} has {manifest.ranks} ranks with {manifest.accumulate} micro-batches each")
    if METADATA not in manifest.files or not all(_FILE.fullmatch(name) for name in manifest.files):
        raise Unusable(f"{MANIFEST} names files that no checkpoint has")
    if not all(
        piece.tensor in range(len(manifest.tensors)) and piece.file in manifest.files for piece in manifest.pieces
    ):
        raise Unusable(f"{MANIFEST} names pieces of what it does not have")
    known = {each.name for each in manifest.tensors} | {each.name for each in manifest.frozen}
    if not known.issuperset(manifest.aliases.values()):
        raise Unusable(f"{MANIFEST} has other names of what it does not have")
    return manifest


def name_of(state: StateId, incarnation: str) -> str:
    """Return the name of the folder under which ``incarnation`` publishes ``state``."""
    return f"step-{state.step}-epoch-{state.commit_epoch}-{re.sub(r'[^A-Za-z0-9._-]', '_', incarnation)[:128]}"


def describe(path: Path) -> File:
    """Return the size and hash of the file at ``path``. Reads all of it.

    Raises:
        OSError: The file cannot be read.
    """
    with open_regular(path) as file:
        content = hashlib.file_digest(file, blake3.blake3)  # type: ignore[arg-type] # has update and hexdigest
        return File(file.tell(), content.hexdigest())
