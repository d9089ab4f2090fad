"""Draft: a checkpoint's folder until it is published.

Its name says that it is none yet. Rank 0 holds a lock on its manifest for as long as it lives: that tells a draft
that is being written from what a dead writer left.

Durable: the ranks of one replica write checkpoints of immutable snapshots, beside training (S14, W45, W46).

Everything is written into a folder that is no checkpoint, the manifest last, all of it fsynced; then the folder
gets its name. A crash at any moment leaves a whole checkpoint or rubbish, which a later start removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
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
from ft_hsdp.state.checkpoint.checkpoint_manifest import MANIFEST, METADATA, CheckpointManifest, File, TensorPiece
from ft_hsdp.state.layout import Layout
from ft_hsdp.state.replica_group import ReplicaGroup


class Draft:
    """What will be ``folder / name``. Only rank 0 begins and publishes it; ``discard`` is for all."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.path = catalog.unfinished(folder, name)
        self.final = folder / name
        self._manifest: IO[bytes] | None = None

    def begin(self) -> None:
        """Make the folder and lock it.

        Raises:
            OSError: the disk refused.
        """
        shutil.rmtree(self.path, ignore_errors=True)  # of this incarnation, from an attempt that failed
        self.path.mkdir()
        self._manifest = (self.path / MANIFEST).open("xb")
        fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def written_by(self, rank: int) -> dict[str, Any]:
        """Size and hash of each file that DCP wrote on this rank, read back.

        Raises:
            OSError: one cannot be read.
        """
        mine = list(self.path.glob(f"__{rank}_*.distcp"))
        if rank == 0:
            mine.append(self.path / METADATA)
        return {path.name: asdict(checkpoint_manifest.describe(path)) for path in mine}

    def publish(self, manifest: CheckpointManifest, keep: int, key: bytes) -> dict[str, Any]:
        """Sign and write the manifest, make everything durable, name the folder, let older checkpoints go.

        Raises:
            OSError: the disk refused, or the files of another rank are not here.
            Unusable: the manifest could not be read back.
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
            return {"removed": catalog.retire(self._folder, keep, self.final.name), "trouble": ""}
        except (OSError, ConfigError) as error:
            return {"removed": [], "trouble": str(error)}

    def discard(self) -> None:
        """Remove what was begun here and not published, and let the lock go."""
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


_SHOWN = 500  # characters of an error that are worth a reader's time


@dataclass(frozen=True, slots=True)
class Header:
    """What belongs to a packed snapshot: its name, its ledger, the hyper-parameters before lr_scale."""

    state: StateId
    ledger: Ledger
    hyper: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    """Of whom checkpoints are: ``config_hash`` has to fit at a resume, ``config`` is there to be read."""

    incarnation: str
    replicas: int
    config_hash: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint is there: its size in bytes, the seconds it took, and the older ones that went.

    ``trouble`` says why an older one could not be removed.
    """

    state: StateId
    path: Path
    nbytes: int
    seconds: float
    removed: tuple[str, ...]
    trouble: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """It was not begun when a newer one was due."""

    state: StateId


@dataclass(frozen=True, slots=True)
class CheckpointNotPublished:
    """Nothing was published; the reason is the same on all ranks, unless they lost each other."""

    state: StateId
    reason: str


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
    """Writes one checkpoint at a time on a thread of its own; training never waits for it.

    All ranks of the replica make one, and call ``write`` for the same states in the same order. At most two
    snapshots are held: the one that is being written, and the newest that waits. Rank 0 signs with ``key``.

    Raises:
        ConfigError: the folder cannot be made or read.
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
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._key = key
        self._about = about
        self._layout = layout
        self._live = [*params.values(), *optim.values()]
        self._ranks = ranks
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._current: _Request | None = None
        self._last = (-1, -1)
        self._agreeing = False
        self._closing = False
        self._lost = ""
        self.swept: tuple[str, ...] = ()
        if ranks.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                allowed = f"a folder that can be written ({error.strerror})"
                raise ConfigError(catalog.KEY, str(folder), allowed) from error
            self.swept = tuple(catalog.sweep(folder))
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def write(self, buffer: torch.Tensor | None, header: Header) -> Future[Outcome]:
        """Have a packed snapshot (uint8 [layout.nbytes], not to be changed until the outcome) published.

        None: this rank had no memory for the snapshot. That checkpoint fails, on all ranks.

        Returns at once. The future never raises: it has an ``Outcome``. What is called when it is done must not
        block. A state has to be above the one before it.
        """
        request = _Request(header, buffer)
        with self._changed:
            refusal = "the job is ending" if self._closing else ""
            if request.place <= self._last:
                refusal = f"it is not above the one before, of (epoch, step) {self._last}"
            if refusal:
                self._settle(request, CheckpointNotPublished(header.state, refusal))
                return request.future
            self._last = request.place
            self._waiting.append(request)
            self._trim()
            self._changed.notify_all()
        return request.future

    def close(self, deadline_s: float = 60.0) -> None:
        """Finish what was asked for, within ``deadline_s``; what is not done by then has failed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        with self._changed:
            for request in [*filter(None, [self._current]), *self._waiting]:
                self._settle(request, CheckpointNotPublished(request.header.state, "the job ended meanwhile"))
            self._waiting.clear()

    def _settle(self, request: _Request, outcome: Outcome) -> None:
        """Give the outcome, once, and let the snapshot go."""
        with self._changed:
            request.buffer = None
            if not request.future.done():
                request.future.set_result(outcome)

    # The thread.

    def _run(self) -> None:
        while (request := self._next()) is not None:
            outcome: Outcome
            try:
                outcome = self._write(request)
            except Exception as error:  # whatever it was, training goes on
                self._lost = self._lost or _said(error)
                outcome = CheckpointNotPublished(request.header.state, f"the ranks lost each other: {self._lost}")
            self._settle(request, outcome)

    def _trim(self) -> None:
        """Only the newest waits. While ranks agree, any of them may turn out to be the one."""
        while not self._agreeing and len(self._waiting) > 1:
            self._settle(old := self._waiting.pop(0), Superseded(old.header.state))

    def _next(self) -> _Request | None:
        """The request that all ranks write next: the newest that any of them has; None at the end.

        ReplicaGroup make the same calls, not at the same time: one may have passed over what another would begin.
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
            self._lost = _said(error)
            agreed = newest.place
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._waiting[-1].place >= agreed, self._ranks.timeout_s
            )
            while len(self._waiting) > 1 and self._waiting[0].place < agreed:
                self._settle(old := self._waiting.pop(0), Superseded(old.header.state))
            self._agreeing = False
            self._current = self._waiting.pop(0) if self._waiting else None
            self._trim()
            return self._current

    def _newest(self, mine: tuple[int, int]) -> tuple[int, int]:
        epoch, step = max(tuple(json.loads(each)) for each in self._ranks.gather(json.dumps(mine).encode()))
        return int(epoch), int(step)

    def _write(self, request: _Request) -> Outcome:
        """One checkpoint. A collective of the replica's ranks."""
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
            begun = self._all(begin)
            if any(each != begun[0] for each in begun):
                raise dcp.Failed(f"the ranks were given different states: {begun}")
            assert buffer is not None
            views = dcp.views(self._layout, self._live, buffer, ranks)
            pieces = dcp.save(draft.path, views, dcp.stored(self._layout), ranks)
            files = {
                n: File(**f) for each in self._all(lambda: draft.written_by(ranks.rank)) for n, f in each.items()
            }
            fault_injection.reach("checkpoint-write", header.state.step)
            manifest = self._manifest(header, files, pieces)
            published = self._first(lambda: draft.publish(manifest, self._keep, self._key))
        except dcp.Failed as failed:
            return CheckpointNotPublished(header.state, _said(failed))
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
            self._ranks.size,
            self._about.config_hash,
            self._about.config,
            header.ledger,
            header.hyper,
            dcp.stored(self._layout),
            files,
            pieces,
        )

    def _all(self, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``work`` gives on each rank, on all of them. ``dcp.Failed`` on all if it fails on one."""
        told = [json.loads(each) for each in self._ranks.gather(_tried(work))]
        errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
        if errors:
            raise dcp.Failed("; ".join(errors))
        return [each["done"] for each in told]

    def _first(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``work`` gives on rank 0, on all ranks. ``dcp.Failed`` on all if it fails."""
        told = json.loads(self._ranks.hear(_tried(work) if self._ranks.rank == 0 else b""))
        if "error" in told:
            raise dcp.Failed(f"rank 0: {told['error']}")
        done: dict[str, Any] = told["done"]
        return done


def _tried(work: Callable[[], dict[str, Any]]) -> bytes:
    try:
        return json.dumps({"done": work()}).encode()
    except Exception as error:  # the other ranks have to hear of it
        return json.dumps({"error": _said(error)}).encode()


def _said(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:_SHOWN]
