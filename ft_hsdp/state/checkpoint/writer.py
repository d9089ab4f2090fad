"""Writes checkpoints of immutable snapshots beside training. All ranks of a replica take part.

`Checkpointer` is the thread that writes; its `write` returns at once. It writes into a `drafts.Draft`, which
becomes the checkpoint when all of it is there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ft_hsdp import fault_injection
from ft_hsdp.claim import Claim, FolderOwner
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.mounts import Ability, need
from ft_hsdp.state.checkpoint import catalog, checkpoint_manifest, dcp
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    CheckpointManifest,
    File,
    Frozen,
    TensorPiece,
)
from ft_hsdp.state.checkpoint.drafts import Draft, sweep
from ft_hsdp.state.replica_group import Failed, ReplicaGroup, in_short
from ft_hsdp.state.transfer.shard_manifest import Layout


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
    data_ranks: int = 1  # of a batch: those of a replica with all its ranks
    data: Mapping[str, str] = field(default_factory=dict)  # facts about the data
    given: Mapping[str, Any] = field(default_factory=dict)  # what optimizers and schedule were made with
    owner: FolderOwner | None = None  # the job, which must have the folder alone; None: no other job can use it


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

    Raises:
        ConfigError: The folder cannot be made or read, or another job has it.
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
        self._claim: Claim | None = None
        if ranks.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                need(folder, catalog.KEY, Ability.RENAME)
                if about.owner is not None:
                    claim = Claim(folder, about.owner)
                    self._claim = claim.take(catalog.KEY, str(folder), "a folder that no other running job has")
            except OSError as error:
                allowed = f"a folder that can be written ({error.strerror})"
                raise ConfigError(catalog.KEY, str(folder), allowed) from error
            sweep(folder)
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
        if self._claim is not None:
            self._claim.release()

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
                self._lost = self._lost or in_short(error)
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
            self._lost = in_short(error)
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
                self._check_claim()
                draft.begin()
            return asdict(header.state)

        try:
            begun = ranks.on_all(begin)
            if any(each != begun[0] for each in begun):
                why = Failed(f"the ranks were given different states: {begun}")
                return CheckpointNotPublished(header.state, in_short(why))
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
            published = ranks.on_rank_zero(lambda: self._publish(draft, manifest))
        except Failed as failed:
            return CheckpointNotPublished(header.state, in_short(failed))
        finally:
            draft.discard()
        removed, trouble = tuple(published["removed"]), str(published["trouble"])
        nbytes = sum(file.nbytes for file in files.values())
        return Published(header.state, draft.final, nbytes, time.monotonic() - began, removed, trouble)

    def _publish(self, draft: Draft, manifest: CheckpointManifest) -> dict[str, Any]:
        self._check_claim()
        return draft.publish(manifest, self._keep, self._key)

    def _check_claim(self) -> None:
        """Raise Retryable if another job has the folder now: this process was frozen for too long."""
        if self._claim is not None:
            self._claim.check()

    def _manifest(
        self, header: Header, files: dict[str, File], pieces: tuple[TensorPiece, ...]
    ) -> CheckpointManifest:
        return CheckpointManifest(
            checkpoint_manifest.FORMAT,
            header.state,
            self._about.incarnation,
            self._about.replicas,
            self._about.data_ranks,
            self._about.config_hash,
            self._about.config,
            self._about.accumulate,
            header.ledger,
            (*header.hyper, dict(self._about.given)) if self._about.given else header.hyper,
            dcp.stored(self._layout),
            files,
            pieces,
            header.user,
            self._about.frozen,
            dict(self._about.aliases),
            dict(self._about.data),
        )
