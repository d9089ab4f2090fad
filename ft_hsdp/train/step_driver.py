"""The steps of one rank: what the user's loop trains in each, and the orders that end it (FT-HSDP §4.1, §4.3).

`StepDriver` is where `Job.batches` and `Optimizer.step` meet. `feed` yields the micro-batches of an open step to
the user's loop; FSDP2 calls `ready` inside backward; `end` carries the leader's orders out until the step is
committed or given up. Orders that come while no step is open go through `carry_out`. All methods are for the main
thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, SupportsFloat, TypeVar

import torch
from torch import nn

from ft_hsdp import fault_injection
from ft_hsdp.config import Config, config_hash
from ft_hsdp.core.effects import DropGradient, Exit, Reduce, RunBatch, WriteCheckpoint
from ft_hsdp.core.ledger import Run, overlaps
from ft_hsdp.core.randomness import stream
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places
from ft_hsdp.errors import EXIT_RETRYABLE, ConfigError, FtHsdpError
from ft_hsdp.train.data.prefetch import Reader, count_tokens, move
from ft_hsdp.train.data.step_plan import MicroBatch, StepPlan, TrainedMicroBatch
from ft_hsdp.train.device import moved_to_host, seed_torch, told
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, weighed
from ft_hsdp.train.fsdp.frozen import ways
from ft_hsdp.train.fsdp.moving_buffers import AT_COMMIT, KEY, WHEN
from ft_hsdp.train.gradients import Feeding
from ft_hsdp.train.identity import fatal_units
from ft_hsdp.train.loop.callbacks import CallbackFailed, Callbacks, CommittedStep, called
from ft_hsdp.train.loop.evaluation import Evaluation
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.orders import ApplyOrder, KeepOrder, LoadOrder, Mailbox
from ft_hsdp.train.runtime import RankRuntime
from ft_hsdp.train.state.checkpointing import CheckpointSaver
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.step_log import StepLog, Timing, exposed

Batch = TypeVar("Batch")

SHOWN_SAMPLES = 32  # of units that are left out
LOOKS = 3  # steps at whose beginning all is compared that training must leave alone; later a little in each


@dataclass(frozen=True, slots=True)
class Joined:
    """What a rank has once it has joined the job."""

    runtime: RankRuntime
    saver: CheckpointSaver
    log: StepLog | None  # on rank 0
    built_in: bool  # whether the trainer of this package runs it, so that a replay can repeat it
    first: bool = False  # whether no process was this replica before in this run
    evaluated: Callable[[StateId, float], object] | None = None  # takes each loss; None: nothing is evaluated


@dataclass(eq=False)
class StepDriver:
    _config: Config
    _data_rank: int  # of its replica
    _data_ranks: int
    _device: torch.device  # where batches go
    _model: AdoptedModel
    groups: Groups
    _live_state: LiveState  # the committed state that this rank holds
    _mailbox: Mailbox  # where the leader's orders come from
    _callbacks: Callbacks  # the user's
    replica: int = 0  # set by `guess`
    evaluation: Evaluation[Any] | None = None  # set by `Job.batches`
    clip: float | None = None  # the largest norm of the reduced gradient
    _joined: Joined | None = None
    _left: bool = False  # the script has ended training
    # Sums whose base is not here yet, by the state that they led to: after a rollback a step comes again.
    _log: dict[StateId, list[torch.Tensor]] = field(default_factory=dict)
    # The step under way.
    plan: StepPlan | None = None
    _last_bucket: torch.Tensor | None = None  # from backward until `end`, which may tell the loss
    _step: int = 0
    _taken: bool = False  # `end` has taken what was yielded last
    _awaited_s: float = 0.0  # that the main thread waited for the quota
    _evaluated_s: float = 0.0  # for which the step before was evaluated
    _tokens: int = 0  # of the newest unit
    _since: float = field(default_factory=time.monotonic)  # the last commit
    _committed: bool = False  # whether this incarnation has applied a step
    _fatal: tuple[Run, ...] = ()  # units that have ended the processes which trained them
    samples_of: Callable[..., tuple[int, list[int]]] | None = None  # of a loader: epoch, samples
    _restored: set[str] = field(default_factory=set)  # tensors of which a change between two steps was taken back
    _fed: int = 0  # steps that this incarnation has begun
    _refuses: bool = False  # what changes outside the state is refused: no replica can have gone far with it
    last: CommittedStep | None = None  # led to the live state; None: it was applied elsewhere
    whole: bool = True  # no error or exit in the user's code has cut short what an order does

    def __post_init__(self) -> None:
        self._weighs = self._config.data.weight == "tokens"  # whether the loop says what each micro-batch weighs
        self._quotas_change = self._config.quorum.batch == "constant"  # grants may differ in the number of units

    @property
    def joined(self) -> bool:
        return self._joined is not None

    @property
    def here(self) -> Joined:
        assert self._joined is not None
        return self._joined

    def guess(self, reader: Reader[Any], replica: int) -> None:
        """Have read what ``replica``, which is this rank's, will take first if all replicas contribute."""
        self.replica = replica
        each = self._config.train.accumulate
        plan, units = self._new_plan(), each * self._data_ranks
        if self._config.data.assignment == "global":
            reader.guess(self._following(plan, replica * units, self._config.replicas * units, each))
        else:
            reader.guess(self._following(plan, 0, units, each))

    def begin(self, joined: Joined) -> None:
        """Take what this rank has since it has joined the job. A collective if the final state is here."""
        self._joined, self._refuses = joined, joined.first
        self._model.undeclared.begin()
        self._fatal = fatal_units(os.environ)
        if self.step:
            self._rejoined()
        self._conclude_at_end()

    @property
    def step(self) -> int:
        """The committed step that this rank holds; within a callback on a commit, that step."""
        if self.last is not None:
            return self.last.step
        state = self._live_state.state
        return 0 if state is None else state.step

    # The model's hooks.

    @property
    def current(self) -> TrainedMicroBatch | None:
        return self.plan.trained[-1] if self.plan is not None and self.plan.trained else None

    def returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Note the loss that the model returned, and have the gradients of its output weighed. A forward hook."""
        current = self.current
        if current is None:
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
            current.loss = told(loss)
        return weighed(output, current.scale, self._model.expert_parallel) if self._weighs else output

    def ready(self, bucket: int, flat: torch.Tensor) -> None:
        """Take the local gradient of a bucket to the reducer; FSDP2 calls it inside backward.

        The loss of a step is what its last bucket says. That one waits for `end`, which comes right after backward
        and may be given the loss.
        """
        if self.plan is None or self._joined is None:
            return
        runtime = self._joined.runtime
        contributions = self.plan.contributions(self.replica)
        if bucket == len(self._model.sizes) - 1:
            self._last_bucket = flat
        else:
            runtime.reducer.ready(bucket, flat, contributions, self.plan.loss())
        runtime.moved()

    # One step.

    def _new_plan(self, places: Places = ()) -> StepPlan:
        shard = 0 if self._config.data.assignment == "global" else self.replica
        each = self._config.train.accumulate
        ledger, own = self._live_state.ledger, self._data_rank
        whole = self._config.data_ranks
        return StepPlan(ledger, shard, self._data_ranks, each, places, self._weighs, own, whole)

    def _following(self, plan: StepPlan, first: int, stride: int, each: int) -> Iterator[MicroBatch]:
        """Yield, without an end, what comes in the steps after that of ``plan`` if nothing changes."""
        for begin in count(first, stride):
            for micro in range(each):
                yield plan.at(begin + micro * self._data_ranks)

    def feed(self, reader: Reader[Batch], order: RunBatch) -> Iterator[Batch]:
        """Yield the micro-batches of this replica in the next step, as ``order`` says."""
        log, runtime = self.here.log, self.here.runtime
        self._model.reshard()  # the loop may have put other weights in, and run a forward
        self._fed += 1
        if self._fed > 1:  # what this step begins with
            self._take_back(order.step, between=True)
            self._look(order.step, every=self._fed <= LOOKS)
            self._refuses = False
        plan = self.plan = self._new_plan(order.places)
        self._step, self._awaited_s, self._last_bucket = order.step, 0.0, None
        reader.trained(plan.at(0))
        each = len(plan.left)
        stride = max(order.following - (order.places[0][0] if order.places else 0), each * self._data_ranks)
        runtime.reducer.open(Feeding(order.step, plan.trainable))
        while plan.left:
            # The first micro-batch is trained before the quota is known, unless the quota may turn out to be that
            # one alone: its backward would not have reduced the gradients inside the replica.
            early = self._config.train.accumulate > 1 or len(plan.left) == 1
            if self._quotas_change and not plan.ordered and (plan.trained or not early or self._fatal):
                self._await_quota(plan)
                continue
            if overlaps(self._fatal, ((m.shard, *units) for m in plan.left for units in m.units)):
                self._leave_out(plan)
                continue
            if plan.trained:
                fault_injection.reach("micro-batch", order.step)
            at = plan.begin()
            self._model.sync(not plan.left)
            if log is not None:
                for first, units in at.units:
                    log.fed(order.step, at.shard, first, units)
            later = self._following(plan, order.following, stride, each)
            try:
                batch = reader.batch(at, chain(plan.left, later))
            except StopIteration as error:  # would look like the end of this generator
                why = f"the data raised StopIteration for {_named(at)}: an iterator in it has ended"
                raise RuntimeError(why) from error
            if log is not None:
                self._tokens = count_tokens(batch)
            number = at.index * self._config.data_shards + at.shard
            seed_torch(stream(self._config.train.seed, "batch", number, at.rank, at.micro))
            runtime.moved()
            self._taken = False
            yield move(batch, self._device)
            self._check_trained(plan)

    def _leave_out(self, plan: StepPlan) -> None:
        """Take a gradient that is not finite to the reducer instead of training what is left, until the verdict.

        Some of it has ended the processes that trained it. So it is left out of the step, and at last given up,
        like a batch whose gradient is never finite.
        """
        runtime, first = self.here.runtime, plan.left[0]
        if self.here.log is not None:
            blamed = [unit for m in plan.left for unit in m.units if overlaps(self._fatal, [(m.shard, *unit)])]
            why = f"some have ended the processes that trained them{self._samples(blamed)}"
            units = sum(n for m in plan.left for _, n in m.units)
            facts = {"step": self._step, "shard": first.shard, "index": first.units[0][0], "units": units}
            runtime.journal.event("BatchLeftOut", why, **facts)
        while plan.left:
            plan.begin()
            plan.trained[-1].weigh(0 if self._weighs else 1)
        contributions = plan.contributions(self.replica)
        for bucket, numel in enumerate(self._model.sizes):
            nothing = torch.full((numel,), math.nan, device=self._device)
            runtime.reducer.ready(bucket, nothing, contributions, plan.loss())
        runtime.moved()
        self._conclude(plan)

    def _samples(self, units: Iterable[tuple[int, int]]) -> str:
        """Return in words which samples are in units of this replica's data shard; "" if that is not known."""
        if self.samples_of is None:
            return ""
        each, whole = self._config.train.accumulate, self._config.data_ranks
        shard = 0 if self._config.data.assignment == "global" else self.replica
        places = [divmod(first + n, each * whole) for first, count in units for n in range(count)]
        found = [s for i, at in places for s in self.samples_of(shard, i, at % whole, at // whole)[1]]
        more = " ..." if len(found) > SHOWN_SAMPLES else ""
        return f"; their samples are {', '.join(map(str, found[:SHOWN_SAMPLES]))}{more}"

    def _check_trained(self, plan: StepPlan) -> None:
        """Check that the loop has trained a micro-batch before it asks for the next one, for which all wait."""
        if self._taken:
            return
        trained = plan.trained[-1]
        if trained.weight != 0 and not self._model.trained():
            which, way = f"no backward for {_named(trained.at)}", "a backward for each batch on each rank"
            out = "leave the loss as it is if it is not finite (train.poison leaves the batch out)"
            raise ConfigError("job.batches", which, f"{way}; to pass over one, {out}, or make it 0 * loss")
        if not plan.left:  # some buckets are made in `end` alone
            which = f"no optim.step after {_named(trained.at)}"
            allowed = "optim.step after each batch; train.accumulate adds gradients up"
            raise ConfigError("job.batches", which, allowed)

    def _await_quota(self, plan: StepPlan) -> None:
        """Wait for the order to reduce the step, which says how many units are this replica's.

        Any other order ends the step. Gradients that were not reduced inside the replica yet cannot be dropped, so
        one more micro-batch is trained before it is carried out.
        """
        began = time.monotonic()
        while not plan.ordered:
            match self._mailbox.get():
                case Reduce(fence, places=places):
                    if fence.step == self._step:
                        plan.extend(places)
                case WriteCheckpoint() as order:
                    self.carry_out(order)
                case order:
                    self._mailbox.put_back(order)
                    plan.close(more=1 if plan.trained else 0)
        self._awaited_s += time.monotonic() - began

    def end(self, loss: object = None) -> bool:
        """After backward, carry orders out until the step is committed or given up; see `Optimizer.step`."""
        plan = self.plan
        if plan is None:
            raise RuntimeError("optim.step comes before the first batch of job.batches")
        if loss is not None and plan.trained:
            plan.trained[-1].loss = scalar(loss)
        if plan.left:
            return False
        self.groups.check()
        self._take_back(self._step, between=False)
        if self._fed == 1:
            self._look(self._step, every=True)
        self._model.finish(self.replica)
        self._taken = True
        flat, self._last_bucket = self._last_bucket, None
        if flat is not None:  # the loss is known now
            last = len(self._model.sizes) - 1
            self.here.runtime.reducer.ready(last, flat, plan.contributions(self.replica), plan.loss())
        self._model.check_gradients()
        return self._conclude(plan)

    def _conclude(self, plan: StepPlan) -> bool:
        """Carry orders out until the step is committed or given up, or has more to train; return as `end` does."""
        step, began = self._step, time.monotonic()
        while True:
            order = self._mailbox.get()
            if isinstance(order, RunBatch):
                raise RuntimeError(f"told to feed step {order.step} while step {step} is open")
            if isinstance(order, Reduce):
                if order.fence.step == step and plan.extend(order.places):
                    fault_injection.reach("refill", step)
                    self._model.release()
                    return False  # a contributor was lost, and this replica trains some of its units
                continue
            if isinstance(order, Exit):
                self._mailbox.put(order)  # for `batches`, which ends the loop
                plan.close()
                return False
            self.carry_out(order, time.monotonic() - began)
            if isinstance(order, DropGradient):
                plan.close()
                return False
            if isinstance(order, ApplyOrder) and order.record.step == step:
                self._callbacks.leave()
                return self.replica in order.record.contributors

    def _take_back(self, step: int, between: bool) -> None:
        """Look for changes of declared tensors that belong to no commit: refused at first, later told once."""
        moving, here = self._model.moving, self.here
        for name in () if moving is None else moving.strayed(between):
            at, ways = ("after", WHEN) if between else ("before", AT_COMMIT)
            if self._refuses:
                raise ConfigError(f"{KEY}[{name}]", f"a change {at} optim.step", f"a change {ways}")
            if here.log is not None and name not in self._restored:
                self._restored.add(name)
                reason = f"a change {at} optim.step is taken back: change it {ways}"
                here.runtime.journal.event("BufferChanged", reason, step=step, tensor=name, over=True)

    def _look(self, step: int, every: bool) -> None:
        """Look for changes outside the committed state; what is found is refused or told, once for each tensor.

        With ``every`` it looks at all that may change; else at a little, the next part in each step.
        """
        watch, log, journal = self._model.undeclared, self.here.log, self.here.runtime.journal
        found = watch.look() if every else watch.look_on()
        if self._refuses:
            watch.refuse(found)
        for place in found if log is not None else ():
            facts = {"step": step, "tensor": place.name}
            if place.kind == "scratch":
                why = "it is not persistent, so no replica gets it from another"
                journal.event("BufferChanged", f"{why}: {ways(place)}", **facts)
            else:
                why = "the state does not have it, so replicas may differ"
                journal.event("JobDoubted", f"{why}: {ways(place)}", **facts)

    def carry_out(
        self,
        order: ApplyOrder | DropGradient | KeepOrder | LoadOrder | Reduce | WriteCheckpoint,
        waited_s: float = 0.0,
    ) -> None:
        runtime = self.here.runtime
        match order:
            case ApplyOrder():
                self._apply(order, waited_s)
            case KeepOrder(state, reduced):
                self._log[state] = [moved_to_host(each) for each in reduced]
                if self._log[state][0] is not reduced[0]:
                    runtime.reducer.give_back(reduced)
            case DropGradient():
                runtime.reducer.open(None)
                self._model.clear()
                self._log.clear()
            case LoadOrder(manifest, packed):
                with self._ends_the_rank():
                    self._live_state.load(manifest, packed)
                self.last, self._refuses = None, False
                self._rejoined()
                runtime.snapshots.mark_current(manifest.state)
                runtime.copies.mark_current(manifest.state)
                self._conclude_at_end()
            case WriteCheckpoint(state):
                self.here.saver.save(state)
        runtime.moved()

    def _apply(self, order: ApplyOrder, waited_s: float) -> None:
        """Apply a committed step. Nothing may fail here: an error ends the rank, and with it the replica."""
        runtime, log = self.here.runtime, self.here.log
        record, live_state = order.record, self._live_state
        runtime.reducer.open(None)
        now = time.monotonic()
        if log is not None:  # before it is applied: a replica that serves a state has logged what led to it
            self._note(log, order, now, waited_s)
        kept = self._log.pop(record.state_id) if order.reduced is None else order.reduced
        reduced = [each.to(self._device) for each in kept]
        fault_injection.reach("apply-begin", record.step)
        last = self.last = CommittedStep.of(record, live_state.rate(record))
        with self._ends_the_rank():
            then = partial(self._callbacks.call, "on_commit", last, self._model.reshard)
            live_state.apply(record, reduced, self.clip, then)
        fault_injection.reach("apply-end", record.step)
        runtime.snapshots.mark_current(record.state_id)
        runtime.copies.mark_current(record.state_id)
        runtime.spans.step(record.step)
        runtime.reducer.give_back(reduced)
        self._since, self._awaited_s = now, 0.0
        if self.replica in record.contributors:  # one that catches up goes on with that
            with self._ends_the_rank():
                called("job.evaluate", self._evaluate, record.state_id)
        self._conclude_at_end()

    def _evaluate(self, state: StateId) -> None:
        """Evaluate a state that was just applied, if it is its turn, and tell the loss. A collective."""
        began, take, evaluation = time.monotonic(), self.here.evaluated, self.evaluation
        loss = None if take is None or evaluation is None else evaluation.at(state.step)
        if take is not None and loss is not None:
            take(state, loss)
            self._evaluated_s = time.monotonic() - began

    def _rejoined(self) -> None:
        with self._ends_the_rank():
            self._callbacks.call("on_rejoin", self.step, self._model.reshard)

    @contextlib.contextmanager
    def _ends_the_rank(self) -> Iterator[None]:
        """End the rank if a function of the user fails within: its state is not that of the other replicas."""
        self.whole = False
        try:
            yield
            self.whole = True
        except CallbackFailed as failed:
            cause = failed.__cause__
            traceback.print_exception(cause)
            code = cause.exit_code if isinstance(cause, FtHsdpError) else EXIT_RETRYABLE
            self.here.runtime.end(str(failed), code)
            raise  # the rank is ending anyway

    def _note(self, log: StepLog, order: ApplyOrder, now: float, waited_s: float) -> None:
        """Write down what a committed step is and has cost. On rank 0."""
        record, live_state, journal = order.record, self._live_state, self.here.runtime.journal
        traffic = self.here.runtime.reducer.traffic
        copying = self.here.runtime.copies.cost()
        packing_s = self.here.runtime.snapshot_s
        waits = exposed(now, waited_s, traffic.ended, traffic.held_up, copying.waited_s, packing_s)
        waits["quorum"] += self._awaited_s
        if live_state.offload is not None:
            waits["offload"] = live_state.offload.lap()  # of the update before
        if self._evaluated_s:
            waits["evaluation"], self._evaluated_s = self._evaluated_s, 0.0
        timing = Timing(now - self._since, waits, traffic.bytes_sent, traffic.seconds, copying.nbytes)
        tokens = record.divisor if self._weighs else self._tokens * record.units
        mine = self.replica in record.contributors
        ledger, given_up = record.ledger(live_state.ledger), record.given_up(live_state.ledger)
        log.committed(record, live_state.rate(record), tokens, timing, mine, ledger, given_up)
        for shard, index, units in given_up:
            reason = f"its gradient was not finite in {record.retries} steps"
            facts = {"step": record.step, "shard": shard, "index": index, "units": units}
            journal.event("BatchGivenUp", reason, **facts)
        if not self._committed:
            how = "contributes to it" if mine else "adds nothing to it"
            data = dict(self.here.runtime.facts.data)
            journal.event("FirstStepCommitted", f"this replica {how}", step=record.step, data=data)
            self._committed = True

    def _conclude_at_end(self) -> None:
        """If the final state is here, serve it, write its digest down, then report that. A collective."""
        if not self.over:
            return
        here, state = self.here, self._live_state.state
        assert state is not None
        here.runtime.snapshots.request(state, self._config.timeouts.final_wait_s)
        self._write_final(of_job=True)
        here.runtime.concluded()

    def _write_final(self, of_job: bool) -> None:
        here, state, digest = self.here, self._live_state.state, self._live_state.digest()
        if here.log is not None and state is not None:
            here.log.final(state, digest, config_hash(self._config), built_in=here.built_in, of_job=of_job)

    @property
    def over(self) -> bool:
        state = self._live_state.state
        return self._left or (state is not None and state.step >= self._config.train.steps)

    def conclude(self, of_job: bool) -> None:
        """Take the live state for the last one, because the script has ended training before. A collective."""
        self._left = True
        self._write_final(of_job)


def _named(at: MicroBatch) -> str:
    return f"batch {at.index} of data shard {at.shard} (unit {at.unit})"


def scalar(loss: object) -> SupportsFloat:
    """Return the loss that the user's loop has given; a tensor may be on its way to host memory."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
        return told(loss)
    if isinstance(loss, int | float) and not isinstance(loss, bool):
        return float(loss)
    shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
    allowed = "a number, or a tensor of one element: the mean over the micro-batch"
    raise ConfigError("optim.step(loss)", shape, allowed)
