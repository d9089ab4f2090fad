"""The public API of training: a user's own FSDP2 loop, made fault-tolerant.

    job = ft_hsdp.join(config, replica=0)
    model = job.shard(model)
    optim = job.optimizer(torch.optim.AdamW(model.parameters()), schedule)
    for batch in job.batches(dataset):
        model(batch).backward()
        optim.step()

`Job` is one rank's part in the job. Retry, catch-up and commit happen inside ``batches`` and ``step`` (FT-HSDP
§4.1, §4.3): there the main thread takes orders from its `Mailbox` and carries them out, in the order in which the
leader gave them to all ranks of the replica. Everything else runs on the control loop (`train.runtime`).

All methods are for the main thread, except `Job.leave`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ft_hsdp import fault_injection
from ft_hsdp.config import Config, config_hash
from ft_hsdp.control.rank_store import RankStore
from ft_hsdp.core import state_id
from ft_hsdp.core.effects import DropGradient, Exit, RunBatch, WriteCheckpoint
from ft_hsdp.core.ledger import BatchAssigner
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError
from ft_hsdp.train.checkpointing import CheckpointSaver, missed, open_checkpoints, restore
from ft_hsdp.train.data import Prefetcher, Source, move, stream
from ft_hsdp.train.fsdp import FP32, Sharded
from ft_hsdp.train.gradients import Feeding, Reducer
from ft_hsdp.train.identity import IncarnationSource, RankIdentity, RankPlace, begin
from ft_hsdp.train.live_state import LiveState
from ft_hsdp.train.optimizer import Groups, Schedule, create_state
from ft_hsdp.train.orders import ApplyOrder, LoadOrder, Mailbox
from ft_hsdp.train.runtime import RankRuntime
from ft_hsdp.train.step_log import StepLog, Timing, exposed

Batch = TypeVar("Batch")


class Ended(FtHsdpError):
    """Raised in the user's loop when the job ends this replica before the end of training."""

    def __init__(self, code: int, reason: str) -> None:
        """Keep the exit code.

        Args:
            code: The code with which the process should exit.
            reason: Why the job ends this replica.
        """
        super().__init__(reason)
        self.exit_code = code


class Optimizer:
    """The optimizer that `Job.optimizer` returns; use it in place of the wrapped one."""

    def __init__(self, job: Job) -> None:
        """Make the optimizer of ``job``; only `Job.optimizer` calls this."""
        self._job = job

    @property
    def clip(self) -> float | None:
        """The largest norm of the reduced gradient; None does not clip.

        Set it before the first batch, on all ranks. Gradients are not reduced yet after backward, so clipping has
        to happen inside ``step``.
        """
        return self._job._clip

    @clip.setter
    def clip(self, norm: float | None) -> None:
        """Set the largest norm to ``norm``."""
        self._job._clip = norm

    def step(self) -> bool:
        """Reduce, vote, commit and apply one step (FT-HSDP §4.1).

        Blocks until the step is committed, with or without this replica's gradient, until this replica is left
        behind, or until the job ends it. With accumulation, all but the last micro-batch of a step return at once.

        Returns:
            True if the gradient of this replica is in the committed step.

        Raises:
            ConfigError: The optimizer was changed so that its state would not be part of the committed one.
        """
        return self._job._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, whatever ``set_to_none`` says: the gradients are dropped when the step is committed."""


class Job:
    """One rank's part in the job; `ft_hsdp.join` makes it.

    The order of calls is `shard`, `optimizer`, optionally `warm_up`, then `batches`.
    """

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        source: IncarnationSource,
        identity: RankIdentity | None,
        device: torch.device,
        store: RankStore | None = None,
    ) -> None:
        """Make the part of one rank.

        Args:
            config: The job's configuration.
            place: Where this rank runs.
            source: Where a spare hears of its incarnation.
            identity: Which incarnation this rank is of; None for a spare that has not been assigned one yet.
            device: Where the model's shards are.
            store: The process group's store, to be closed with it; None if it is torch's own.
        """
        self.config = config
        self.device = device
        self.rank = place.rank
        self.ranks = place.ranks  # of this replica
        self.built_in = False  # whether the trainer of this package runs it, so that a replay can repeat it
        self._place = place
        self._source = source
        self._identity = identity
        self._store = store
        self._mailbox = Mailbox()
        self._assigner = BatchAssigner(config.data.assignment, config.slots)
        # Made by `shard`, `optimizer` and `batches`, in this order.
        self._sharded: Sharded
        self._model = ""  # class of the model
        self._groups: Groups | None = None
        self._live_state: LiveState
        self._runtime: RankRuntime | None = None
        self._reducer: Reducer | None = None
        self._saver: CheckpointSaver | None = None
        self._log: StepLog | None = None  # on rank 0
        # The step under way.
        self._feeding: Feeding | None = None
        self._losses: list[float] = []  # one for each micro-batch
        self._micro = 0
        self._accumulate = 1
        self._clip: float | None = None
        self._tokens = 0  # of the step, over the ranks of this replica
        self._since = time.monotonic()  # the last commit
        self._leaves = False
        self._committed = False  # whether this incarnation has applied a step

    # The user's few lines.

    @property
    def replica(self) -> int:
        """The id of the replica to which this rank belongs.

        Raises:
            RuntimeError: This process is a spare, which is assigned to a replica only when its first batch is due.
        """
        if self._identity is None:
            raise RuntimeError("job.replica is not known before the first batch: this process is a spare")
        return self._identity.replica

    def shard(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module] | None = None,
        policy: MixedPrecisionPolicy = FP32,
    ) -> nn.Module:
        """Shard ``model`` in place with FSDP2 over this replica's ranks, on the device of the configuration.

        A collective of the replica's ranks.

        Args:
            model: With the same initial weights on all ranks and replicas; its parameters are fp32.
            parts: Modules that are sharded each for itself, in forward order; one bucket of gradients each. None
                takes ``model.shards()`` if there is one, else every module in its ModuleLists. The embedding and
                the output should be parts of their own, or their gradients go last and are not hidden behind
                backward.
            policy: May compute in bf16; the parameters' shards and the sums of gradients stay fp32.

        Returns:
            ``model``.

        Raises:
            InvalidArgument: A parameter is not fp32.
        """
        if parts is None:
            shards = getattr(model, "shards", None)
            lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
            parts = shards() if callable(shards) else [part for each in lists for part in each]
        if self.device.type != "cpu":
            model.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        self._model = f"{type(model).__module__}.{type(model).__qualname__}"
        self._sharded = Sharded(model, parts, mesh, self._ready, policy)
        model.register_forward_hook(self._saw_loss)
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None = None) -> Optimizer:
        """Wrap ``optimizer``, which holds the parameters of the sharded model and is the only one.

        Its state is made now, as torch would make it in the first step; a state that was loaded before stays.

        Args:
            optimizer: Made after ``shard``, from the sharded model's parameters.
            schedule: ``schedule(step)`` (from 1) is a factor on the learning rate; None keeps it constant. A torch
                scheduler is refused: its state would not be part of the committed one.

        Returns:
            The optimizer for the loop.

        Raises:
            ConfigError: There is one already, a torch scheduler is attached, a parameter is not the sharded
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
        ledger = self._assigner.begin()
        self._live_state = LiveState(self._sharded, groups, ledger, self.rank, self.ranks, offload)
        return Optimizer(self)

    def warm_up(self, once: Callable[[], None]) -> None:
        """Run ``once`` before check-in, so that the first step is as fast as the later ones.

        Args:
            once: A forward and backward on any batch; its gradient is thrown away.
        """
        once()
        self._sharded.clear()
        self._losses.clear()

    def batches(self, source: Source[Batch], accumulate: int = 1) -> Iterator[Batch]:
        """Yield the batches that this replica has to train, each exactly once; end when training has ended.

        The first ``next`` joins the job. A spare blocks there until a replica needs it. A replica that is behind
        catches up inside, so only a contributor gets a batch. torch's generator is seeded from the batch's place
        before each micro-batch, for dropout and the like.

        Args:
            source: The data.
            accumulate: Micro-batches for each step; each is yielded by itself.

        Yields:
            One micro-batch of this rank, on the job's device.

        Raises:
            Ended: The job ends this replica.
            ConfigError: The optimizer or the checkpoints cannot be used.
            AgentGone: This host has no state agent, and none could be started.
        """
        self._accumulate = accumulate
        if self._groups is not None:
            self._groups.check()
        prefetcher = Prefetcher(source, self.rank, accumulate)
        ledger = self._live_state.ledger
        prefetcher.guess(*self._assigner.assign(ledger, 0 if self._identity is None else self.replica))
        try:
            self._check_in(prefetcher)
            while True:
                match self._mailbox.get():
                    case RunBatch(step):
                        yield from self._feed(prefetcher, step)
                    case Exit(code, reason):
                        self.close()
                        if code != EXIT_OK:
                            raise Ended(code, reason)
                        return
                    case order:
                        self._do(order)
        finally:
            prefetcher.close()

    def leave(self) -> None:
        """Leave the job at the next commit, without disturbing it.

        Does not block. From any thread, and from a signal handler.
        """
        self._leaves = True
        if self._runtime is not None:
            self._runtime.leave()

    @property
    def over(self) -> bool:
        """Whether this rank holds the final state."""
        state = self._live_state.state
        return state is not None and state.step >= self.config.train.steps

    def close(self) -> None:
        """Leave the process group and end all threads. Blocks for at most `timeouts.save_s` and a little."""
        if self._saver is not None:
            self._saver.close(self.config.timeouts.save_s)
            self._saver = None
        log, self._log = self._log, None
        if log is not None:
            log.close()
        runtime, self._runtime = self._runtime, None  # a signal may come at any time
        if runtime is not None:
            runtime.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._store is not None:
            self._store.close()

    # Joining the job.

    def _check_in(self, prefetcher: Prefetcher[Any]) -> None:
        """Do all that any rank can do, wait for the incarnation if this is a spare, and join the job as that."""
        live_state, config = self._live_state, self.config
        runtime = RankRuntime(config, self._place, self.device, self._sharded.sizes, live_state, self._mailbox)
        self._runtime = runtime
        live_state.state = state_id.initial(config_hash(config), state_id.digest(runtime.facts.weights))
        warm = time.time()
        if self._identity is None:
            self._identity = begin(config, self._place, self._source.wait())
            warm = self._identity.began
        runtime.start(self._identity)
        self._reducer = runtime.reducer
        if self.rank == 0:
            runtime.journal.note(
                self._identity.began, "ReplicaBooted", "its processes know which replica they are"
            )
            parameters = sum(p.numel() for p in self._sharded.params.values())
            why = "model, optimizer and process group are ready"
            runtime.journal.note(warm, "ReplicaWarmed", why, model=self._model, parameters=parameters)
            folder = self._place.run / "replicas" / str(self.replica)
            incarnation, lost = self._identity.incarnation, runtime.journal.lost
            self._log = StepLog(folder, incarnation, runtime.reporter.commit, lost)
        checkpoints, checkpointer = open_checkpoints(
            config,
            self._place.run,
            self._identity.incarnation,
            live_state,
            runtime.ranks,
            self._assigner.shards,
        )
        self._saver = CheckpointSaver(checkpointer, runtime.snapshots, self.rank, runtime.report)
        current = config.state.snapshot == "every_step"
        restore(live_state, runtime.snapshots, runtime.ranks, checkpoints, current, runtime.journal)
        prefetcher.guess(*self._assigner.assign(live_state.ledger, self.replica))
        runtime.snapshots.mark_current(live_state.state)
        step = live_state.state.step
        wanted = missed(config, checkpoints.folder, step, runtime.journal) if self.rank == 0 else 0
        runtime.check_in(live_state.state, wanted)
        if self._leaves:
            runtime.leave()
        self._conclude_at_end()

    # One step.

    def _saw_loss(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim() == 0:
            self._losses.append(float(output.detach()))

    def _ready(self, bucket: int, flat: torch.Tensor) -> None:
        """Take the local gradient of a bucket to the reducer; FSDP2 calls it inside backward."""
        if self._reducer is not None and self._runtime is not None:
            loss = sum(self._losses) / len(self._losses) if self._losses else float("nan")
            self._reducer.ready(bucket, flat, loss)
            self._runtime.moved()

    def _feed(self, prefetcher: Prefetcher[Batch], step: int) -> Iterator[Batch]:
        """Yield the micro-batches of this replica's next batch."""
        assert self._runtime is not None
        assert self._reducer is not None
        ledger = self._live_state.ledger
        shard, index = self._assigner.assign(ledger, self.replica)
        self._feeding = Feeding(step, shard, index)
        self._losses.clear()
        self._reducer.open(self._feeding)
        if self._log is not None:
            self._log.fed(step, shard, index)
        after = self._assigner.predict(ledger, self.replica)
        for micro, batch in enumerate(prefetcher.batches(shard, index, after)):
            self._micro = micro
            self._sharded.sync(micro == self._accumulate - 1)
            if self._log is not None:
                self._tokens = _tokens(batch) * self.ranks * self._accumulate
            number = index * self._assigner.shards + shard
            torch.manual_seed(stream(self.config.train.seed, "batch", number, self.rank, micro))
            self._runtime.moved()
            yield move(batch, self.device)

    def _step(self) -> bool:
        """After backward, carry orders out until the step that was fed is committed or given up.

        Raises:
            RuntimeError: An order to train another batch came before the verdict on this one.
        """
        if self._micro < self._accumulate - 1:
            return False
        assert self._feeding is not None
        if self._groups is not None:
            self._groups.check()
        step, began = self._feeding.step, time.monotonic()
        while True:
            order = self._mailbox.get()
            if isinstance(order, RunBatch):
                raise RuntimeError(f"told to feed step {order.step} while step {step} is open")
            if isinstance(order, Exit):
                self._mailbox.put(order)  # for `batches`, which ends the loop
                return False
            self._do(order, time.monotonic() - began)
            if isinstance(order, DropGradient):
                return False
            if isinstance(order, ApplyOrder) and order.record.step == step:
                return self.replica in order.record.contributors

    def _do(self, order: ApplyOrder | DropGradient | LoadOrder | WriteCheckpoint, waited_s: float = 0.0) -> None:
        """Carry out an order; ``waited_s`` is how long `step` has waited for it."""
        assert self._runtime is not None
        match order:
            case ApplyOrder():
                self._apply(order, waited_s)
            case DropGradient():
                assert self._reducer is not None
                self._reducer.open(None)
                self._sharded.clear()
            case LoadOrder(manifest, packed):
                self._live_state.load(manifest, packed)
                self._runtime.snapshots.mark_current(manifest.state)
                self._conclude_at_end()
            case WriteCheckpoint(state):
                assert self._saver is not None
                self._saver.save(state)
        self._runtime.moved()

    def _apply(self, order: ApplyOrder, waited_s: float) -> None:
        """Apply a committed step. Nothing may fail here: an error ends the rank, and with it the replica."""
        assert self._runtime is not None
        assert self._reducer is not None
        record, live_state = order.record, self._live_state
        self._reducer.open(None)
        now = time.monotonic()
        if self._log is not None:  # before it is applied: a replica that serves a state has logged what led to it
            traffic = self._reducer.traffic
            waits = exposed(now, waited_s, traffic.ended, traffic.held_up)
            if live_state.offload is not None:
                waits["offload"] = live_state.offload.lap()  # of the update before
            timing = Timing(now - self._since, waits, traffic.bytes_sent, traffic.seconds)
            tokens = self._tokens * len(record.contributors)
            mine = self.replica in record.contributors
            ledger, given_up = record.ledger(live_state.ledger), record.given_up(live_state.ledger)
            self._log.committed(record, live_state.rate(record), tokens, timing, mine, ledger, given_up)
            for shard, index in given_up:
                reason = f"its gradient was not finite in {record.retries} steps (train.poison_retries)"
                facts = {"step": record.step, "shard": shard, "index": index}
                self._runtime.journal.event("BatchGivenUp", reason, **facts)
            if not self._committed:
                how = "contributes to it" if mine else "was behind"
                self._runtime.journal.event("FirstStepCommitted", f"this replica {how}", step=record.step)
                self._committed = True
        fault_injection.reach("apply-begin", record.step)
        live_state.apply(record, order.reduced, self._clip, self._accumulate)
        fault_injection.reach("apply-end", record.step)
        self._runtime.snapshots.mark_current(record.state_id)
        self._reducer.give_back(order.reduced)
        self._since = now
        self._conclude_at_end()

    def _conclude_at_end(self) -> None:
        """If the final state is here, serve it, write its digest down, then report that. A collective."""
        assert self._runtime is not None
        state = self._live_state.state
        assert state is not None
        if state.step < self.config.train.steps:
            return
        self._runtime.snapshots.request(state, self.config.timeouts.final_wait_s)
        digest = self._live_state.digest()
        if self._log is not None:
            self._log.final(state, digest, self.built_in, config_hash(self.config))
        self._runtime.concluded()


def _tokens(batch: Any) -> int:
    """Return the number of tokens in one rank's micro-batch: the elements of its first tensor."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    return int(first.numel()) if isinstance(first, torch.Tensor) else 0


__all__ = ["Ended", "Job", "Optimizer", "Source"]
