"""Job: a user's own FSDP2 loop, made fault-tolerant.

    job = ft_hsdp.join(config, replica=0)
    model = job.shard(model)
    optim = job.optimizer(torch.optim.AdamW(model.parameters()), schedule)
    for batch in job.batches(dataset):
        model(batch).backward()
        optim.step()

Retry, catch-up and commit happen inside ``batches`` and ``step`` (FT-HSDP §4.1, §4.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ft_hsdp import fault_injection, secret
from ft_hsdp.config import Config, config_hash, resume_hash
from ft_hsdp.control.rank_store import RankStore
from ft_hsdp.core import checkpoint, state_id
from ft_hsdp.core.ledger import BatchAssigner
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError
from ft_hsdp.state.checkpoint import catalog
from ft_hsdp.state.checkpoint.writer import Checkpointer, CheckpointOrigin
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train import device as devices
from ft_hsdp.train.checkpointing import Checkpoints, CheckpointSaver, restore
from ft_hsdp.train.data import Prefetcher, Source
from ft_hsdp.train.device import stream
from ft_hsdp.train.fsdp import FP32, Sharded
from ft_hsdp.train.gradients import Feeding
from ft_hsdp.train.identity import Calling, RankIdentity, RankPlace, begin
from ft_hsdp.train.live_state import LiveState
from ft_hsdp.train.optimizer import Groups, Schedule, create_state
from ft_hsdp.train.orders import ApplyOrder, DropOrder, EndOrder, LoadOrder, Mailbox, RunBatchOrder, SaveOrder
from ft_hsdp.train.runtime import RankGround, RankRuntime
from ft_hsdp.train.step_log import StepLog, Timing, exposed

Batch = TypeVar("Batch")


class Ended(FtHsdpError):
    """The job ends this replica; ``exit_code`` says how."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = code


class Optimizer:
    """What ``job.optimizer`` returns: ``step`` ends when the step is committed or given up by this replica."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def clip(self) -> float | None:
        """Largest norm of the reduced gradient; None does not clip. Set it before the first batch, on all ranks.

        Gradients are not reduced yet after backward, so clipping has to happen inside ``step``.
        """
        return self._job._clip

    @clip.setter
    def clip(self, norm: float | None) -> None:
        self._job._clip = norm

    def step(self) -> bool:
        """Reduce, vote, commit and apply; True if this replica's gradient is in the committed step.

        With accumulation, all but the last micro-batch of a step return at once.

        Raises:
            Ended: the job ends this replica.
        """
        return self._job._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients go with the step."""


class Job:
    """One rank's part in the job; made by ``join``."""

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        calling: Calling,
        life: RankIdentity | None,
        device: torch.device,
        store: RankStore | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.rank = place.rank
        self.ranks = place.ranks
        self._place = place
        self._calling = calling
        self._life = life  # None: this process is a spare that was not called yet
        self._store = store  # of the process group; None: that is torch's own
        self._mailbox = Mailbox()
        self._loss: list[float] = []
        self._micro = 0
        self._accumulate = 1
        self._clip: float | None = None
        self._feeding: Feeding | None = None
        self._since = time.monotonic()
        self._tokens = 0
        self._dealer = BatchAssigner(config.data.assignment, config.slots)
        self._sharded: Sharded
        self._groups: Groups | None = None
        self._held: LiveState
        self._ground: RankGround | None = None
        self._wiring: RankRuntime | None = None
        self._saver: CheckpointSaver | None = None
        self._log: StepLog | None = None
        self._leaves = False
        self._committed = False  # in this life
        self.built_in = False  # whether the trainer of this package runs it, so that a replay can repeat it

    # The user's few lines.

    @property
    def replica(self) -> int:
        """Which replica this rank is of.

        Raises:
            RuntimeError: nobody knows it yet: this process is a spare, and is told when its first batch is due.
        """
        if self._life is None:
            raise RuntimeError("job.replica is not known before the first batch: this process is a spare")
        return self._life.replica

    def shard(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module] | None = None,
        policy: MixedPrecisionPolicy = FP32,
    ) -> nn.Module:
        """Shard ``model`` in place with FSDP2 over this replica's ranks, on the device of the configuration.

        ``parts`` are sharded each for itself, in forward order; None takes ``model.shards()`` if there is one,
        else every module in its ModuleLists. The embedding and the output should be parts of their own, or their
        gradients go last and are not hidden behind backward. ``policy`` may compute in bf16; the parameters'
        shards and the sums of gradients are fp32.
        """
        if parts is None:
            shards = getattr(model, "shards", None)
            lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
            parts = shards() if callable(shards) else [part for each in lists for part in each]
        if self.device.type != "cpu":
            model.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        self._sharded = Sharded(model, parts, mesh, self._ready, policy)
        model.register_forward_hook(self._saw_loss)
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None = None) -> Optimizer:
        """Wrap ``optimizer``, which holds the parameters of the sharded model and is the only one.

        Its state is made now, as torch would make it in the first step; a state that was loaded before stays.

        Args:
            optimizer: made after ``shard``, from the sharded model's parameters.
            schedule: ``schedule(step)`` (from 1) is a factor on the learning rate; None keeps it constant. A torch
                scheduler is refused: its state would not be part of the committed one.

        Raises:
            ConfigError: there is one already, a torch scheduler is attached, a parameter is not the sharded
                model's, or the optimizer's state cannot be made before its first step.
        """
        name = type(optimizer).__name__
        if self._groups is not None:
            first = type(self._groups.optimizer).__name__
            raise ConfigError("job.optimizer", name, f"one optimizer; {first} is there (use its parameter groups)")
        known = {id(p) for p in self._sharded.params.values()}
        strange = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if strange:
            allowed = f"parameters of the model that job.shard returned ({strange} are others)"
            raise ConfigError("job.optimizer", name, allowed)
        groups = self._groups = Groups(optimizer, schedule)
        groups.check()
        create_state(optimizer)
        offload = self.config.optim.offload
        self._held = LiveState(self._sharded, groups, self._dealer.begin(), self.rank, self.ranks, offload)
        return Optimizer(self)

    def warm_up(self, once: Callable[[], None]) -> None:
        """Run ``once`` (a forward and backward on any batch) before check-in; its gradient is thrown away."""
        once()
        self._sharded.clear()
        self._loss.clear()

    def batches(self, source: Source[Batch], accumulate: int = 1) -> Iterator[Batch]:
        """The batches that this replica has to feed, each exactly once; ends with training.

        Checks in first; a spare waits here to be called. A replica that is behind catches up inside, so only a
        contributor gets a batch. torch's generator is seeded from the batch's place before each micro-batch (for
        dropout and the like).
        """
        self._accumulate = accumulate
        if self._groups is not None:
            self._groups.check()
        prefetcher = Prefetcher(source, self.rank, accumulate)
        prefetcher.guess(*self._dealer.assign(self._held.ledger, 0 if self._life is None else self.replica))
        try:
            self._check_in(lambda: prefetcher.guess(*self._dealer.assign(self._held.ledger, self.replica)))
            while True:
                match self._mailbox.get():
                    case RunBatchOrder(step):
                        yield from self._feed(prefetcher, step)
                    case EndOrder(code, reason):
                        self.close()
                        if code != EXIT_OK:
                            raise Ended(code, reason)
                        return
                    case letter:
                        self._do(letter)
        finally:
            prefetcher.close()

    def leave(self) -> None:
        """Leave the job at the next commit, without disturbing it."""
        self._leaves = True
        if self._wiring is not None:
            self._wiring.leave()

    @property
    def over(self) -> bool:
        """Whether this rank holds the final state."""
        return self._held.state is not None and self._held.state.step >= self.config.train.steps

    def close(self) -> None:
        """Leave the process group and end all threads."""
        if self._saver is not None:
            self._saver.close(self.config.timeouts.save_s)
            self._saver = None
        log, self._log = self._log, None
        if log is not None:
            log.close()
        wiring, self._wiring = self._wiring, None  # a signal may come at any time
        if wiring is not None:
            wiring.close()
        ground, self._ground = self._ground, None
        if ground is not None:
            ground.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._store is not None:
            self._store.close()

    # Inside.

    def _check_in(self, prefetch: Callable[[], None]) -> None:
        """Do all that can be done by any rank, wait to know which one this is, and join the job as that."""
        held, config = self._held, self.config
        weights, layout = held.weights_digest(), held.layout.fingerprint
        ground = RankGround(config, self._place, self.device, self._sharded.sizes, weights, layout)
        self._ground = ground
        held.state = state_id.initial(config_hash(config), state_id.digest(ground.common.weights))
        warm = time.time()
        if self._life is None:
            self._life = begin(config, self._place, self._calling.wait())
            warm = self._life.began
        wiring = self._wiring = RankRuntime(config, ground, self._life, held, self._mailbox)
        if self.rank == 0:
            wiring.journal.note(self._life.began, "ReplicaBooted", "its processes know which replica they are")
            wiring.journal.note(warm, "ReplicaWarmed", "model, optimizer and process group are ready")
            folder = self._place.run / "replicas" / str(self.replica)
            self._log = StepLog(folder, self._life.incarnation, wiring.reporter.commit, wiring.journal.lost)
        checkpoints = self._checkpoints(ground.ranks)
        current = config.state.snapshot == "every_step"
        restore(held, wiring.keeper, ground.ranks, checkpoints, current, wiring.journal)
        prefetch()
        wiring.keeper.mark_current(held.state)
        wiring.check_in(held.state, self._missed(checkpoints.folder, held.state.step))
        if self._leaves:
            wiring.leave()
        self._conclude_at_end()

    def _checkpoints(self, ranks: ReplicaGroup) -> Checkpoints:
        """Where the job's checkpoints are; from now on this rank can write them, also if none is ever due."""
        assert self._wiring is not None
        assert self._life is not None
        config, held, place = self.config, self._held, self._place
        folder = Path(config.checkpoint.dir) if config.checkpoint.dir else place.run / "checkpoints"
        about = CheckpointOrigin(
            self._life.incarnation, config.slots, resume_hash(config), config.model_dump(mode="json")
        )
        # Rank 0 alone signs and authenticates; it tells the others what it chose.
        key = secret.run_key(place.run, config.checkpoint.key) if self.rank == 0 else b""
        checkpointer = Checkpointer(
            folder, config.checkpoint.keep, key, about, held.layout, held.params, held.optim, ranks
        )
        self._saver = CheckpointSaver(checkpointer, self._wiring.keeper, self.rank, self._wiring.tell)
        shards = self._dealer.shards
        asked = None if config.checkpoint.trust else key
        return Checkpoints(
            folder, resume_hash(config), config.slots, lambda ledger: ledger.resharded(shards), asked
        )

    def _missed(self, folder: Path, step: int) -> int:
        """From which step on this replica demands a checkpoint: nobody has written the newest one due; 0: none."""
        due = checkpoint.newest_due(step, self.config.checkpoint.every, self.config.train.steps)
        if self.rank != 0 or not due or not catalog.missed(folder, due):
            return 0
        assert self._wiring is not None
        reason = (
            f"that of step {due} was due, and nobody has written or writes it: the next state is written instead"
        )
        self._wiring.journal.event("CheckpointMissing", reason, step=due)
        return step + 1

    def _saw_loss(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim() == 0:
            self._loss.append(float(output.detach()))

    def _ready(self, bucket: int, flat: torch.Tensor) -> None:
        if self._wiring is not None:
            loss = sum(self._loss) / len(self._loss) if self._loss else float("nan")
            self._wiring.reducer.ready(bucket, flat, loss)
            self._wiring.moved()

    def _feed(self, prefetcher: Prefetcher[Batch], step: int) -> Iterator[Batch]:
        """Yield the micro-batches of this replica's next batch."""
        assert self._wiring is not None
        ledger = self._held.ledger
        shard, index = self._dealer.assign(ledger, self.replica)
        self._feeding = Feeding(step, shard, index)
        self._loss.clear()
        self._wiring.reducer.open(self._feeding)
        if self._log is not None:
            self._log.fed(step, shard, index)
        after = self._dealer.predict(ledger, self.replica)
        for micro, batch in enumerate(prefetcher.batches(shard, index, after)):
            self._micro = micro
            self._sharded.sync(micro == self._accumulate - 1)
            if self._log is not None:
                self._tokens = _tokens(batch) * self.ranks * self._accumulate
            number = index * self._dealer.shards + shard
            torch.manual_seed(stream(self.config.train.seed, "batch", number, self.rank, micro))
            self._wiring.moved()
            yield devices.move(batch, self.device)

    def _step(self) -> bool:
        """After backward: wait for the outcome of the step that was fed."""
        if self._micro < self._accumulate - 1:
            return False
        assert self._feeding is not None
        if self._groups is not None:
            self._groups.check()
        step, waited = self._feeding.step, time.monotonic()
        while True:
            letter = self._mailbox.get()
            if isinstance(letter, RunBatchOrder):
                raise RuntimeError(f"told to feed step {letter.step} while step {step} is open")
            if isinstance(letter, EndOrder):
                self._mailbox.put(letter)
                return False
            self._do(letter, time.monotonic() - waited)
            if isinstance(letter, DropOrder):
                return False
            if isinstance(letter, ApplyOrder) and letter.record.step == step:
                return self.replica in letter.record.contributors

    def _do(self, letter: ApplyOrder | DropOrder | LoadOrder | SaveOrder, waited: float = 0.0) -> None:
        match letter:
            case ApplyOrder():
                self._apply(letter, waited)
            case DropOrder():
                assert self._wiring is not None
                self._wiring.reducer.open(None)
                self._sharded.clear()
            case LoadOrder(manifest, packed):
                assert self._wiring is not None
                self._held.load(manifest, packed)
                self._wiring.keeper.mark_current(manifest.state)
                self._conclude_at_end()
            case SaveOrder(state):
                assert self._saver is not None
                self._saver.save(state)
        assert self._wiring is not None
        self._wiring.moved()

    def _apply(self, letter: ApplyOrder, waited: float) -> None:
        """Nothing may fail here: what does ends the rank, and with it the replica."""
        assert self._wiring is not None
        record, reducer = letter.record, self._wiring.reducer
        reducer.open(None)
        now = time.monotonic()
        if self._log is not None:  # before it is applied: whoever serves a state has logged what led to it
            traffic = reducer.traffic
            waits = exposed(now, waited, traffic.ended, traffic.held_up)
            if self._held.offload is not None:
                waits["offload"] = self._held.offload.lap()  # of the update before
            timing = Timing(now - self._since, waits, traffic.bytes_sent, traffic.seconds)
            tokens = self._tokens * len(record.contributors)
            mine = self.replica in record.contributors
            ledger, given_up = record.ledger(self._held.ledger), record.given_up(self._held.ledger)
            self._log.committed(record, self._held.rate(record), tokens, timing, mine, ledger, given_up)
            for shard, index in given_up:
                reason = f"its gradient was not finite in {record.retries} steps (train.poison_retries)"
                facts = {"step": record.step, "shard": shard, "index": index}
                self._wiring.journal.event("BatchGivenUp", reason, **facts)
            if not self._committed:
                how = "contributes to it" if mine else "was behind"
                self._wiring.journal.event("FirstStepCommitted", f"this replica {how}", step=record.step)
                self._committed = True
        fault_injection.reach("apply-begin", record.step)
        self._held.apply(record, letter.reduced, self._clip, self._accumulate)
        fault_injection.reach("apply-end", record.step)
        self._wiring.keeper.mark_current(record.state_id)
        reducer.give_back(letter.reduced)
        self._since = now
        self._conclude_at_end()

    def _conclude_at_end(self) -> None:
        """If the final state is here: serve it, write its digest down, then say so. A collective."""
        assert self._wiring is not None
        assert self._held.state is not None
        if self._held.state.step < self.config.train.steps:
            return
        self._wiring.keeper.request(self._held.state, self.config.timeouts.final_wait_s)
        digest = self._held.digest()
        if self._log is not None:
            self._log.final(self._held.state, digest, self.built_in, config_hash(self.config))
        self._wiring.concluded()


def _tokens(batch: Any) -> int:
    """Tokens in one rank's micro-batch: the elements of its first tensor."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    return int(first.numel()) if isinstance(first, torch.Tensor) else 0


__all__ = ["Ended", "Job", "Optimizer", "Source"]
