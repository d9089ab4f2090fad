"""Writes checkpoints of immutable snapshots beside training. All ranks of a replica take part.

Everything is written into a draft, a folder whose name is not that of a checkpoint, the manifest last, and
fsynced. Then the folder is renamed. So a crash at any moment leaves a whole checkpoint, or a draft that a later
start removes. Rank 0 holds a lock on the draft's manifest while it lives: that tells a draft that is being written
from one that a dead writer left.

`Checkpointer` is the thread that writes; its `write` returns at once. `Draft` is the folder until it is published.
`retire` removes older checkpoints then, and `sweep` the drafts of dead writers.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from ft_hsdp import fault_injection
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.checkpoint import catalog, checkpoint_manifest, dcp
from ft_hsdp.state.checkpoint.catalog import PUBLISHED, entries, manifest_of, published
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    MANIFEST,
    METADATA,
    CheckpointManifest,
    File,
    Frozen,
    TensorPiece,
    Unusable,
)
from ft_hsdp.state.replica_group import Failed, ReplicaGroup, one_line
from ft_hsdp.state.transfer.shard_manifest import Layout

_WRITING, _REMOVING = ".writing-", ".removing-"


class Draft:
    """The folder of a checkpoint until it is published as ``folder / name``.

    Only rank 0 calls `begin` and `publish`; every rank calls `discard`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.path = unfinished(folder, name)
        self.final = folder / name
        self._manifest: IO[bytes] | None = None

    def begin(self) -> None:
        """Make the folder and lock it.

        Raises:
            OSError: The folder cannot be made.
        """
        shutil.rmtree(self.path, ignore_errors=True)  # left by an attempt of this incarnation that failed
        self.path.mkdir()
        self._manifest = (self.path / MANIFEST).open("xb")
        fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def written_by(self, rank: int) -> dict[str, Any]:
        """Return {name: size and hash} of the files that DCP wrote on ``rank``. Reads all of them.

        Raises:
            OSError: A file cannot be read.
        """
        mine = list(self.path.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            mine.append(self.path / METADATA)
        return {path.name: asdict(checkpoint_manifest.describe(path)) for path in mine}

    def publish(self, manifest: CheckpointManifest, keep: int, key: bytes) -> dict[str, Any]:
        """Sign and write the manifest, make all of it durable, rename the folder, and remove older checkpoints.

        Args:
            manifest: Without signature and digest.
            keep: How many checkpoints to keep, this one included.
            key: Signs the manifest.

        Returns:
            ``removed``: the names of the older checkpoints that were removed; ``trouble``: why one could not be.

        Raises:
            OSError: Writing failed, or the files of another rank are not in the folder.
            Unusable: The manifest could not be read back.
        """
        assert self._manifest is not None
        for name, file in manifest.files.items():
            if (self.path / name).stat().st_size != file.nbytes:
                raise OSError(f"{name} is not in {self.path} as it was written: ranks of a replica share it")
        if not os.path.samestat(os.fstat(self._manifest.fileno()), (self.path / MANIFEST).stat()):
            raise OSError(f"{self.path} is another folder than the one that was begun")
        data = checkpoint_manifest.encode(checkpoint_manifest.signed(manifest, key))
        checkpoint_manifest.decode(data)  # what cannot be read back must not be published
        self._manifest.write(data)
        self._manifest.flush()
        os.fsync(self._manifest.fileno())
        _sync(self.path)
        fault_injection.reach("checkpoint-rename", manifest.state.step)
        self.path.rename(self.final)
        _sync(self._folder)
        try:
            return {"removed": retire(self._folder, keep, self.final.name), "trouble": ""}
        except (OSError, ConfigError) as error:
            return {"removed": [], "trouble": str(error)}

    def discard(self) -> None:
        """Remove the draft if it was begun here and not published, and release the lock."""
        if self._manifest is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._manifest.close()


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unfinished(folder: Path, name: str) -> Path:
    """Return the path in ``folder`` at which checkpoint ``name`` is written before it is published."""
    return folder / f"{_WRITING}{name}"


def retire(folder: Path, keep: int, own: str) -> list[str]:
    """Remove all but the newest ``keep`` checkpoints in ``folder``, and return the names of those removed.

    The writer of ``own`` calls it after publishing. Only checkpoints older than ``own`` are removed, so a late
    writer removes nothing new; a torn checkpoint does not count as kept.

    Raises:
        OSError: One could not be removed.
    """
    names = [path.name for path in published(folder)]
    if own not in names:
        return []
    newer, older = names[: names.index(own)], names[names.index(own) + 1 :]
    left = keep - 1 - sum(_seems_whole(folder / name) for name in newer)
    gone = []
    for name in older:
        if left > 0 and _seems_whole(folder / name):
            left -= 1
            continue
        rubbish = folder / f"{_REMOVING}{name}"
        (folder / name).rename(rubbish)  # atomic: a crash leaves rubbish and no torn checkpoint
        shutil.rmtree(rubbish)
        gone.append(name)
    return gone


def _seems_whole(path: Path) -> bool:
    """Return whether manifest and sizes of files fit. Contents are verified when they are read."""
    try:
        files = manifest_of(path).files
        return all((path / name).stat().st_size == file.nbytes for name, file in files.items())
    except (Unusable, OSError):
        return False


def sweep(folder: Path) -> list[str]:
    """Remove the unfinished folders of dead writers in ``folder``, and return their names.

    A living writer holds a lock on its manifest.

    Raises:
        ConfigError: The folder cannot be read.
    """
    gone = []
    for path in entries(folder):
        if path.name.startswith((_WRITING, _REMOVING)) and not _locked(path / MANIFEST):
            shutil.rmtree(path, ignore_errors=True)  # another replica may be removing it too
            gone.append(path.name)
    return gone


def missed(folder: Path, due: int) -> bool:
    """Return whether no checkpoint of step ``due`` or later exists or is being written by a living writer.

    Raises:
        ConfigError: The folder cannot be read.
    """
    names = [path.name for path in published(folder)]
    drafts = [path for path in entries(folder) if path.name.startswith(_WRITING)]
    names += [path.name.removeprefix(_WRITING) for path in drafts if _locked(path / MANIFEST)]
    steps = [int(match[1]) for name in names if (match := PUBLISHED.fullmatch(name))]
    return max(steps, default=0) < due


def _locked(manifest: Path) -> bool:
    """Return whether a living writer holds the lock on this manifest."""
    try:
        with manifest.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Header:
    """What belongs to a packed snapshot beside its bytes."""

    state: StateId
    ledger: Ledger
    hyper: tuple[dict[str, Any], ...]  # the optimizer's parameter groups before lr_scale
    user: dict[str, dict[str, Any]] = field(default_factory=dict)  # JSON values of the user's own state, by name


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    """Who writes the checkpoints."""

    incarnation: str
    replicas: int
    config_hash: str  # must be the same when a job resumes from the checkpoint
    config: dict[str, Any]  # for people to read
    accumulate: int = 1  # micro-batches of a data rank in a batch
    frozen: tuple[Frozen, ...] = ()  # what a state dict of the model has beside the state
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of tied tensors
    ranks_per_unit: int = 1  # ranks of a data rank


@dataclass(frozen=True, slots=True)
class Published:
    """The checkpoint of ``state`` is complete and durable."""

    state: StateId
    path: Path
    nbytes: int  # of its files
    seconds: float
    removed: tuple[str, ...]  # names of older checkpoints
    trouble: str  # why an older one could not be removed; "" if all went


@dataclass(frozen=True, slots=True)
class Superseded:
    """The checkpoint was not begun, because a newer one was requested."""

    state: StateId


@dataclass(frozen=True, slots=True)
class CheckpointNotPublished:
    """The checkpoint failed; nothing was published."""

    state: StateId
    reason: str  # the same on all ranks, unless they lost each other


Outcome = Published | Superseded | CheckpointNotPublished


@dataclass(slots=True)
class _Request:
    header: Header
    buffer: torch.Tensor | None
    future: Future[Outcome] = field(default_factory=Future)

    @property
    def place(self) -> tuple[int, int]:
        return (self.header.state.commit_epoch, self.header.state.step)


class Checkpointer:
    """Writes one checkpoint at a time, on a thread of its own. Training never waits for it.

    Every rank of the replica makes one, and calls `write` for the same states in the same order. At most two
    snapshots are kept in memory: the one that is being written, and the newest one that waits.

    Args:
        folder: Where checkpoints are; rank 0 makes it.
        keep: How many checkpoints to keep.
        key: The operator's checkpoint key, with which rank 0 signs.
        about: What the manifest says about the writer.
        layout: The layout of the snapshots.
        params: The live parameters by name, for their sharding only.
        optim: The live optimizer tensors by name, for their sharding only.
        ranks: The ranks of the replica; used on the checkpoint thread.
        user: The live tensors of the user's own state by name, for their sharding only.

    Attributes:
        swept: The names of the drafts of dead writers that were removed (rank 0).

    Raises:
        ConfigError: The folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        key: bytes,
        about: CheckpointOrigin,
        layout: Layout,
        params: Mapping[str, torch.Tensor],
        optim: Mapping[str, torch.Tensor],
        ranks: ReplicaGroup,
        user: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._key = key
        self._about = about
        self._layout = layout
        self._live = [*params.values(), *optim.values(), *(user or {}).values()]
        self._ranks = ranks
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._current: _Request | None = None
        self._last = (-1, -1)  # (epoch, step) of the last request
        self._agreeing = False  # the ranks are agreeing on which request is next
        self._closing = False
        self._lost = ""  # why the ranks lost each other: every later checkpoint fails
        self.swept: tuple[str, ...] = ()
        if ranks.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                allowed = f"a folder that can be written ({error.strerror})"
                raise ConfigError(catalog.KEY, str(folder), allowed) from error
            self.swept = tuple(sweep(folder))
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def write(self, buffer: torch.Tensor | None, header: Header) -> Future[Outcome]:
        """Request a checkpoint of a packed snapshot. Returns at once; called on any thread.

        A request that has not begun when a newer one comes is superseded.

        Args:
            buffer: uint8 [layout.nbytes], which must not change until the outcome. None: this rank had no memory
                for the snapshot, and the checkpoint fails on all ranks.
            header: Its state must be above the one of the request before.

        Returns:
            A future that never raises. Its callbacks run on the checkpoint thread or a caller's; they must not
            block.
        """
        request = _Request(header, buffer)
        with self._changed:
            refusal = "the job is ending" if self._closing else ""
            if request.place <= self._last:
                refusal = f"it is not above the one before, of (epoch, step) {self._last}"
            if refusal:
                self._resolve(request, CheckpointNotPublished(header.state, refusal))
                return request.future
            self._last = request.place
            self._waiting.append(request)
            self._trim()
            self._changed.notify_all()
        return request.future

    def close(self, deadline_s: float = 60.0) -> None:
        """Finish the requested checkpoints within ``deadline_s`` seconds; the others fail. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        with self._changed:
            for request in [*filter(None, [self._current]), *self._waiting]:
                self._resolve(request, CheckpointNotPublished(request.header.state, "the job ended meanwhile"))
            self._waiting.clear()

    def _resolve(self, request: _Request, outcome: Outcome) -> None:
        """Set the outcome of a request, unless it has one, and release its snapshot."""
        with self._changed:
            request.buffer = None
            if not request.future.done():
                request.future.set_result(outcome)

    # The checkpoint thread.
    def _run(self) -> None:
        while (request := self._next()) is not None:
            outcome: Outcome
            try:
                outcome = self._write(request)
            except Exception as error:  # training goes on without checkpoints
                self._lost = self._lost or one_line(error)
                outcome = CheckpointNotPublished(request.header.state, f"the ranks lost each other: {self._lost}")
            self._resolve(request, outcome)

    def _trim(self) -> None:
        """Keep only the newest waiting request. While the ranks agree on one, all are kept: any may be chosen."""
        while not self._agreeing and len(self._waiting) > 1:
            self._resolve(old := self._waiting.pop(0), Superseded(old.header.state))

    def _next(self) -> _Request | None:
        """Return the request that all ranks write next: the newest that any of them has. None at the end.

        The ranks request the same states, but not at the same time: without this agreement, one rank could have
        superseded a request that another one begins.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            newest = self._waiting[-1]
            self._agreeing = not self._lost
        try:
            agreed = newest.place if self._lost else self._newest(newest.place)
        except RuntimeError as error:
            self._lost = one_line(error)
            agreed = newest.place
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._waiting[-1].place >= agreed, self._ranks.timeout_s
            )
            while len(self._waiting) > 1 and self._waiting[0].place < agreed:
                self._resolve(old := self._waiting.pop(0), Superseded(old.header.state))
            self._agreeing = False
            self._current = self._waiting.pop(0) if self._waiting else None
            self._trim()
            return self._current

    def _newest(self, mine: tuple[int, int]) -> tuple[int, int]:
        """Return the largest (epoch, step) that any rank passes."""
        epoch, step = max(tuple(json.loads(each)) for each in self._ranks.gather(json.dumps(mine).encode()))
        return int(epoch), int(step)

    def _write(self, request: _Request) -> Outcome:
        """Write one checkpoint, and return what became of it. A collective of the replica's ranks.

        Raises:
            RuntimeError: The ranks lost each other.
        """
        if self._lost:
            raise RuntimeError(self._lost)
        began, header, ranks, buffer = time.monotonic(), request.header, self._ranks, request.buffer
        draft = Draft(self._folder, checkpoint_manifest.name_of(header.state, self._about.incarnation))

        def begin() -> dict[str, Any]:
            if buffer is None:
                raise MemoryError("no memory for a copy of the state")
            if ranks.rank == 0:
                draft.begin()
            return asdict(header.state)

        try:
            begun = ranks.on_all(begin)
            if any(each != begun[0] for each in begun):
                why = Failed(f"the ranks were given different states: {begun}")
                return CheckpointNotPublished(header.state, one_line(why))
            assert buffer is not None
            views = dcp.views(self._layout, self._live, buffer, ranks)
            pieces = dcp.save(draft.path, views, dcp.stored(self._layout), ranks)
            files = {
                n: File(**f)
                for each in ranks.on_all(lambda: draft.written_by(ranks.rank))
                for n, f in each.items()
            }
            fault_injection.reach("checkpoint-write", header.state.step)
            manifest = self._manifest(header, files, pieces)
            published = ranks.on_rank_zero(lambda: draft.publish(manifest, self._keep, self._key))
        except Failed as failed:
            return CheckpointNotPublished(header.state, one_line(failed))
        finally:
            draft.discard()
        removed, trouble = tuple(published["removed"]), str(published["trouble"])
        nbytes = sum(file.nbytes for file in files.values())
        return Published(header.state, draft.final, nbytes, time.monotonic() - began, removed, trouble)

    def _manifest(
        self, header: Header, files: dict[str, File], pieces: tuple[TensorPiece, ...]
    ) -> CheckpointManifest:
        return CheckpointManifest(
            checkpoint_manifest.FORMAT,
            header.state,
            self._about.incarnation,
            self._about.replicas,
            self._ranks.size // self._about.ranks_per_unit,
            self._about.config_hash,
            self._about.config,
            self._about.accumulate,
            header.ledger,
            header.hyper,
            dcp.stored(self._layout),
            files,
            pieces,
            header.user,
            self._about.frozen,
            dict(self._about.aliases),
        )
