"""The live state of one rank: parameters, optimizer tensors, hyper-parameters, the user's own state, and ledger.

`LiveState` is the only place that changes them. They move together from one committed state to the next: `apply`
adds a committed step, `load` swaps a fetched shard in, `resumed` follows a load from a checkpoint. Snapshots are
copied from here (`pack`) while forward and backward run, which only read what a snapshot reads; an update waits
for a copy that is under way.

`Offload` keeps the optimizer's tensors in host memory, from which they visit the device for the update only
(FT-HSDP §5).
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor, Shard

from ft_hsdp import fault_injection
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory.lanes import lanes
from ft_hsdp.state.checkpoint.checkpoint_manifest import Frozen
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer.shard_manifest import Layout, ShardManifest
from ft_hsdp.train.device import device_summaries, reading, written
from ft_hsdp.train.fsdp import frozen
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.lanes import LanePlan, Spans
from ft_hsdp.train.loop.user_state import UserState, Values
from ft_hsdp.train.optimizer.given import GIVEN, ChangedSetting
from ft_hsdp.train.optimizer.groups import Groups, finish
from ft_hsdp.train.state.packing import as_bytes, local, pack, state_digest, unpack, within

# Replicas of unequal width compare a sixteenth of each lane (`core.state_id`). Ranks with one number hold other
# rows there, and so other bytes. But all owners of a lane hold its rows: of the parameters, and of what the
# optimizer keeps for them. What is not cut, such as counters of steps, is in the first lane of the replica.
Pieces = list[tuple[int, int, int]]  # (index of the tensor, begin, end) in bytes of the rank's shard of it


def lane_pieces(
    plan: LanePlan,
    shapes: Sequence[tuple[int, ...] | None],
    sizes: Sequence[tuple[int, int]],
    width: int,
    rank: int,
) -> list[Pieces]:
    """Return what each lane of a rank has of the state.

    Args:
        shapes: Of each tensor of the state the whole shape; None: it is not cut along dimension 0.
        sizes: Of what this rank holds of each: (bytes, bytes of an element).

    Returns:
        For each lane, in the order of the plan. Rows whose owners have no lane of the gradient are in none.
    """
    found: dict[tuple[int, ...], Pieces] = {lane.owners: [] for lane in plan.lanes}
    for index, (shape, (nbytes, itemsize)) in enumerate(zip(shapes, sizes, strict=True)):
        if shape is None:
            found.get((0,) * len(plan.widths), []).append((index, 0, nbytes))
            continue
        row, first = itemsize * prod(shape[1:]), rank * -(-shape[0] // width)
        for lane in lanes({"": (shape, itemsize)}, plan.widths):
            if lane.owner(width) == rank and lane.owners in found:
                (rows,) = lane.rows
                found[lane.owners].append((index, (rows.start - first) * row, (rows.stop - first) * row))
    return list(found.values())


def lane_digest(step: int, mine: Pieces, shards: Sequence[torch.Tensor], more: bytes) -> str:
    """Return the xxh3-128 of the slice of a lane that is compared after ``step`` steps, in hex."""
    hashed, place = xxhash.xxh3_128(), 0
    begin, end = state_id.slice_bounds(sum(b - a for _, a, b in mine), step)
    for index, a, b in mine:
        start, stop = max(a, a + begin - place), min(b, a + end - place)
        if start < stop:
            piece: Any = shards[index][start:stop].cpu().numpy()
            hashed.update(piece.data)
        place += b - a
    hashed.update(more)
    return hashed.hexdigest()


class Offload:
    """Keeps tensors in pinned host memory; they are on the device between `visit` and `leave` only.

    The tensors stay the same objects; meanwhile their storage on the device is empty. Snapshots are copied from
    the host's memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = [local(t) for t in tensors]
        self.host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in self._device]
        self.moved_s = 0.0
        self._reported = 0.0
        self.leave()

    def leave(self) -> None:
        since = time.monotonic()
        for device, host in zip(self._device, self.host, strict=True):
            host.copy_(device, non_blocking=True)
        self._wait()
        for device in self._device:
            device.untyped_storage().resize_(0)
        self.moved_s += time.monotonic() - since

    def visit(self) -> None:
        since = time.monotonic()
        for device, host in zip(self._device, self.host, strict=True):
            device.untyped_storage().resize_(device.numel() * device.element_size())
            device.copy_(host, non_blocking=True)
        self._wait()
        self.moved_s += time.monotonic() - since

    def lap(self) -> float:
        since, self._reported = self._reported, self.moved_s
        return self._reported - since

    def _wait(self) -> None:
        if any(t.is_cuda for t in self._device):
            torch.cuda.current_stream().synchronize()


class LiveState:
    def __init__(
        self, model: AdoptedModel, groups: Groups, ledger: Ledger, rank: int, ranks: int, offload: bool = False
    ) -> None:
        self._model = model
        self._groups = groups
        self._rank = rank
        self._ranks = ranks
        names = {id(p): n for n, p in model.params.items()}
        self.params: Mapping[str, torch.Tensor] = model.params
        self.counted: Sequence[Spans] = model.counted  # of each gradient bucket, what counts in the norm
        self.optim = groups.tensors(names)  # used while they are `here`
        self.layout = Layout.of(self.params, self.optim)
        self.offload = Offload(list(self.optim.values())) if offload else None
        kept = self.offload.host if self.offload is not None else list(self.optim.values())
        self._live: list[torch.Tensor] = [*self.params.values(), *kept]
        self._user = UserState()
        self.ledger = ledger
        self.state: StateId | None = None  # its name; set before check-in
        self.frozen: tuple[Frozen, ...] = ()  # what the model has beside the state; see `describe_frozen`
        self.aliases: dict[str, str] = {}  # further names of tied tensors, with the name that they have here
        self.changes: tuple[
            ChangedSetting, ...
        ] = ()  # what the script gives otherwise than the one of the checkpoint
        self._lane_pieces: tuple[LanePlan, list[Pieces]] | None = None  # of the newest plan
        self._written: torch.cuda.Event | None = None  # what a copy of the state waits for
        self._recorded = "", ""  # lineage of the state that was packed last, and the digest of its slice then
        self._lock = threading.Condition()  # held by what changes or copies the state
        self._looking = threading.Lock()  # held while a part of the state is compared
        self._lent = False  # whether the user's code may have put other weights in, which are no state
        self._summarize = device_summaries(self._live[0].device)
        if self._summarize is not None:
            self._slice(StateId(0, 0, ""))  # loads what else looks at a slice on the device

    def hold(self, user: UserState) -> None:
        self._user = user
        self.layout = Layout.of(self.params, self.optim, user.tensors)
        self._live += user.tensors.values()

    @property
    def given(self) -> dict[str, Any]:
        """What a checkpoint says behind the hyper-parameters: what optimizers and schedule were made with."""
        return {GIVEN: self._groups.given}

    @property
    def user(self) -> Mapping[str, torch.Tensor]:
        return self._user.tensors

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        if self.offload is None:
            yield
            return
        self.offload.visit()
        try:
            yield
        finally:
            self.offload.leave()

    def weights_digest(self) -> str:
        """Return the xxh3-128 of this rank's packed shard and of the user's JSON values, in hex."""
        hashed, end = xxhash.xxh3_128(), 0
        for place, tensor in zip(self.layout.tensors, self._live, strict=True):  # packed, it would be here twice
            hashed.update(bytes(place.offset - end))
            array: Any = as_bytes(local(tensor)).cpu().numpy()
            hashed.update(array.data)
            end = place.offset + place.nbytes
        hashed.update(bytes(self.layout.nbytes - end))
        hashed.update(self._user.encoded)
        return hashed.hexdigest()

    def tensor_digests(self) -> dict[str, str]:
        """Return by name the xxh3-64 of each tensor of this rank's shard, and of the user's values, in hex."""
        found = {"user values": xxhash.xxh3_64_hexdigest(self._user.encoded)}
        for place, tensor in zip(self.layout.tensors, self._live, strict=True):
            array: Any = as_bytes(local(tensor)).cpu().numpy()
            found[f"{place.kind} {place.name}"] = xxhash.xxh3_64_hexdigest(array.data)
        return found

    def describe_frozen(self, ranks: ReplicaGroup) -> None:
        """Find out what the model has beside the state (`train.fsdp.frozen`). A collective of the replica."""
        found = {n: t for n, t in frozen.tensors(self._model.model).items() if n not in self._model.declared}
        self.frozen = frozen.described(found, ranks)
        self.aliases = frozen.aliases(self._model.model, {**self.params, **found})

    def frozen_digest(self) -> str:
        """Return a digest of `frozen`, the same on all ranks and with any number of them; "": there is nothing."""
        return state_id.digest([asdict(each) for each in self.frozen]) if self.frozen else ""

    def apply(
        self,
        record: CommitRecord,
        reduced: Sequence[torch.Tensor],
        clip: float | None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Apply a committed step; of one without an update, the ledger and the name only. On the main thread.

        Blocks while a snapshot is copied.

        Args:
            reduced: Sums over the contributors, one flat fp32 shard for each bucket; changed in place.
            then: Called when the weights are updated, before the state has its name: the user's callbacks.

        Raises:
            ConfigError: A learning rate scheduler cannot go on.
            RuntimeError: The record does not build on the state that is held.
            CallbackFailed: The user's own state cannot be read.
        """
        with self._lock:
            if self.state is None or record.prev != self.state.lineage:
                raise RuntimeError(f"record of step {record.step} does not build on {self.state}")
            self._model.reshard()
            if record.updates:
                finish(record, reduced[: self._model.gradients], clip, self._model.data_ranks)
                self._model.assign(reduced, min(record.contributors))
                with self.here():
                    self._groups.step(record)
                self._model.capture()  # what hooks of the optimizer have changed
            self._groups.advance(record)
            fault_injection.reach("apply-middle", record.step)
            self._model.clear()
            self._lent = True
            try:
                then()
            except BaseException:  # half of a step is no state, and nobody waits for one
                self.state, self._lent = None, False
                self._lock.notify_all()
                raise
            self._model.capture()
            self._groups.settle()  # a callback may have set a rate
            self._user.refresh()
            self._renew()
            self.ledger = record.ledger(self.ledger)
            self.state = record.state_id
            if fault_injection.hit("state-flip", record.step):
                as_bytes(local(self._live[0]))[0] ^= 1

    def rate(self, record: CommitRecord) -> float:
        return self._groups.rates(record)[0]

    def load(self, manifest: ShardManifest, packed: Bytes) -> None:
        """Swap a verified shard in. Blocks while a snapshot is copied."""
        with self._lock:
            self._groups.adopt(manifest.hyper)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
                buffer = torch.from_numpy(packed)
            unpack(self.layout, buffer, self._live)
            self._become(manifest.state, manifest.ledger, manifest.user)

    def resumed(
        self, state: StateId, ledger: Ledger, hyper: Sequence[dict[str, Any]], user: Values | None = None
    ) -> None:
        """Note that the live tensors hold ``state``, from a checkpoint; `changes` says what differs."""
        with self._lock:
            self.changes = self._groups.resume(hyper, state.step)
            self._become(state, ledger, user or {})

    def _renew(self) -> None:
        """Take the tensors that the user's functions have returned last: they need not be the same objects.

        All changes of the state are before this in the current stream. Streams of other threads wait for none of
        it.
        """
        tensors = self._user.tensors
        if tensors:
            self._live[-len(tensors) :] = tensors.values()
        self._written = written(local(self._live[0]))
        self._lent = False
        self._lock.notify_all()

    @contextlib.contextmanager
    def lent(self, wait: Callable[[], object]) -> Iterator[None]:
        """Let the user's code put other weights in, and the old ones back: they are neither copied nor compared.

        On the main thread. A step that is applied meanwhile ends it.

        Args:
            wait: Blocks until the copies that are due are made; not called in a callback on a commit.
        """
        if self._lent:  # in such a callback
            yield
            return
        wait()
        with self._lock, self._looking:
            self._lent = True
        try:
            yield
        finally:
            with self._lock:
                self._renew()

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return reading(self._live[0].device, self._written)

    def _become(self, state: StateId, ledger: Ledger, user: Values) -> None:
        self._model.reshard()
        self._user.load(user)
        self._renew()
        self._model.clear()
        self.ledger = ledger
        self.state = state

    def pack(self, state: StateId, into: Bytes) -> ShardManifest | None:
        """Copy the shard. Called on the snapshots' thread; blocks during an update, and while it is `lent`.

        Returns:
            The manifest, with checksums of the live tensors; None if the live state is another one by now. Then
            nothing is copied.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._lent)
            if state != self.state:
                return None
            with self._reading():
                sums = pack(self.layout, self._live, torch.from_numpy(into))
            self._recorded = state.lineage, self._slice(state)
            if fault_injection.hit("live-flip", state.step):
                as_bytes(local(self._live[0]))[0] ^= 1
            place, ledger = self.layout, self.ledger
            return ShardManifest(
                state,
                self._rank,
                self._ranks,
                place.fingerprint,
                place.nbytes,
                place.tensors,
                ledger.cursors,
                self._groups.hyper(),
                ledger.holes,
                sums,
                ledger.spoilt,
                dict(self._user.values),
            )

    def slice_digest(self, lineage_held: str) -> str:
        """Return the digest of the slice of the state that the replicas compare with the next vote.

        For use between two updates: an update must not run meanwhile.

        Returns:
            The xxh3-128 in hex; "" if another state is held, or it is `lent`.

        Raises:
            DataCorruption: The slice is not what it was when this state was packed. Only `apply` and `load` change
                a state, so the memory is at fault, or a program that writes into parameters by itself.
        """
        with self._looking:
            state = self.state
            if state is None or state.lineage != lineage_held or self._lent:
                return ""
            digest = self._slice(state)
        recorded, then = self._recorded
        if recorded == lineage_held and then != digest:
            where = f"slice {state_id.slice_number(state.step)} of {state}"
            tensors = [self.layout.tensors[index] for index, _, _ in self._pieces(state)]
            names = [tensor.name for tensor in tensors if tensor.kind == "user"]
            users = f"; state of job.register_state may change in job.on_commit alone: {names[0]}" if names else ""
            raise DataCorruption(f"{where} changed in this rank's memory after the step was applied{users}")
        return digest

    def lane_digests(self, plan: LanePlan) -> list[str]:
        """Return, for each lane of this rank, the digest of the slice that its owners compare with the next vote.

        For use between two updates, like `slice_digest`. [] while the state is `lent`.
        """
        assert self.state is not None
        shards = [local(t) for t in self._live]
        if self._lane_pieces is None or self._lane_pieces[0] is not plan:
            tensors = [*self.params.values(), *self.optim.values(), *self.user.values()]
            cut = [isinstance(t, DTensor) and t.placements == (Shard(0),) for t in tensors]
            shapes = [tuple(t.shape) if by_rows else None for t, by_rows in zip(tensors, cut, strict=True)]
            sizes = [(t.numel() * t.element_size(), t.element_size()) for t in shards]
            self._lane_pieces = plan, lane_pieces(plan, shapes, sizes, self._ranks, self._rank)
        held = [as_bytes(shard) for shard in shards]
        more = [self._user.encoded if lane.ring.number == 0 else b"" for lane in plan.lanes]
        both = zip(self._lane_pieces[1], more, strict=True)
        with self._looking, self._reading():
            if self._lent:
                return []
            return [lane_digest(self.state.step, mine, held, user) for mine, user in both]

    def _pieces(self, state: StateId) -> tuple[tuple[int, int, int], ...]:
        return within(self.layout, *state_id.slice_bounds(self.layout.nbytes, state.step))

    def _slice(self, state: StateId) -> str:
        hashed = xxhash.xxh3_128()
        with self._reading():
            pieces = [as_bytes(local(self._live[index]))[a:b] for index, a, b in self._pieces(state)]
            device = self._live[0].device  # with `optim.offload` others are in host memory
            if self._summarize is not None and (there := [p for p in pieces if p.device == device]):
                rest = -sum(map(len, there)) % 4
                digest, _ = self._summarize(torch.cat([*there, there[0].new_zeros(rest)]), ())()
                hashed.update(digest.encode())
                pieces = [p for p in pieces if p.device != device]
            for piece in pieces:
                array: Any = piece.numpy()
                hashed.update(array.data)
        hashed.update(self._user.encoded)
        return hashed.hexdigest()

    def digest(self) -> str:
        with self.here():
            values = self._user.values
            return state_digest(self.params, self.optim, self._groups.hyper(), self.user, values)
