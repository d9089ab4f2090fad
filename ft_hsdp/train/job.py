"""The public API of training: a user's own FSDP2 loop, made fault-tolerant.

    job = ft_hsdp.join()
    model = job.shard(model)
    optim = job.optimizer(torch.optim.AdamW(model.parameters()), schedule)
    for batch in job.batches(dataset):
        model(batch).backward()
        optim.step()

`Job` is one rank's part in the job. Retry, catch-up and commit happen inside ``batches`` and ``step`` (FT-HSDP
§4.1, §4.3): there the main thread takes orders from its `Mailbox`, in the order in which the leader gave them to
all ranks of the replica, and carries them out (`train.step_driver`). Everything else runs on the control loop
(`train.runtime`).

All methods are for the main thread, except `Job.leave`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ft_hsdp.analysis.commits import EVAL_LOSS
from ft_hsdp.config import Config, config_hash
from ft_hsdp.core import state_id
from ft_hsdp.core.effects import Exit, Reduce, RunBatch
from ft_hsdp.core.events import Leaving
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import EXIT_LEFT, EXIT_OK, ConfigError
from ft_hsdp.jsonl import Journal
from ft_hsdp.train.data.prefetch import Reader, Source
from ft_hsdp.train.data.sources import DataSources, OneLoop, facts_of
from ft_hsdp.train.data.step_plan import checked_weight
from ft_hsdp.train.fsdp.adopted_model import FP32, AdoptedModel, parts_of, shard
from ft_hsdp.train.identity import IncarnationSource, RankIdentity, RankPlace, begin, leaving_on_signals
from ft_hsdp.train.lanes import check_fewer_ranks, check_update
from ft_hsdp.train.loop.callbacks import CommittedStep
from ft_hsdp.train.loop.evaluation import Evaluation
from ft_hsdp.train.loop.user_loop import UserLoop, counts
from ft_hsdp.train.optimizer.committing import Ended, Optimizer
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups, Optimizers, Schedule
from ft_hsdp.train.orders import Mailbox
from ft_hsdp.train.runtime import RankRuntime
from ft_hsdp.train.state.checkpointing import CheckpointSaver, check_manifests, open_checkpoints
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.recovery import check_in, open_log, restored
from ft_hsdp.train.state.snapshots import AgentHome
from ft_hsdp.train.step_driver import Joined, StepDriver
from ft_hsdp.train.step_log import StepLog

_log = logging.getLogger(__name__)

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

Batch = TypeVar("Batch")


class Job(DataSources, UserLoop):
    """One rank's part in the job; `ft_hsdp.join` makes it.

    The order of calls is `shard` or `adopt`, `optimizer`, optionally `warm_up`, then `batches`.
    """

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        source: IncarnationSource,
        identity: RankIdentity | None,
        device: torch.device,
        leave_group: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the part of one rank.

        Args:
            config: The job's configuration.
            place: Where this rank runs.
            source: Where a spare hears of its incarnation.
            identity: Which incarnation this rank is of; None for a spare that has not been assigned one yet.
            device: Where the model's shards are.
            leave_group: Leaves the process group, when the job is closed.
        """
        DataSources.__init__(self, config, place)
        UserLoop.__init__(self, config.timeouts.pause_s)
        self.device = device
        self.rank = place.rank
        self.ranks = place.ranks  # of this replica
        self.buffers: Mapping[str, str] = {}  # for `adopt`, where an integration calls it
        self.built_in = False  # whether the trainer of this package runs it, so that a replay can repeat it
        self._source = source
        self._identity = identity
        self._events: Journal | None = None
        self._early: list[tuple[float, str, str, dict[str, object]]] = []  # events from before there is a journal
        self._leave_group = leave_group
        self._mailbox = Mailbox()
        self._facts: dict[str, str] = {}  # of the data
        # Made by `adopt`, `optimizer` and `batches`, in this order.
        self._adopted: AdoptedModel
        self._groups: Groups | None = None
        self._live_state: LiveState
        self._driver: StepDriver | None = None
        self._runtime: RankRuntime | None = None
        self._saver: CheckpointSaver | None = None
        self._log: StepLog | None = None  # on rank 0
        self._leaves: Leaving | None = None
        self._loop = OneLoop()

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
        buffers: Mapping[str, str] | None = None,
        init: Callable[[], None] | None = None,
    ) -> nn.Module:
        """Shard ``model`` in place with FSDP2 over this replica's ranks, on the device of the configuration.

        It is `fully_shard` for each of ``parts`` and for the model, and then `adopt`. A collective of the ranks of
        the replica.

        Args:
            model: With the same initial weights on all ranks and replicas.
            parts: Modules that are sharded each for itself; one bucket of gradients each. None takes
                ``model.shards()`` if there is one, else every module in its outermost ModuleLists. The embedding
                and the output should be parts of their own, or their gradients go last and are not hidden behind
                backward.
            policy: Types of forward and backward, and of the sums inside the replica. Those over the replicas are
                fp32.
            buffers: As in `adopt`.
            init: Gives a model on the meta device its parameters and buffers, when this rank's shards have memory.

        Returns:
            ``model``.

        Raises:
            ConfigError: It cannot be adopted, or there is one already.
        """
        if self.config.ranks_per_unit > 1:
            allowed = "1 with job.shard: parallelize_module, fully_shard over the data ranks, then job.adopt"
            raise ConfigError("ranks_per_unit", self.config.ranks_per_unit, allowed)
        mesh = init_device_mesh(self.device.type, (self.ranks,))  # FSDP2 moves each part there and shards it
        shard(model, parts_of(model) if parts is None else parts, mesh, policy, init)
        return self.adopt(model, buffers=buffers)

    def adopt(
        self,
        model: nn.Module,
        find_unused_parameters: bool = False,
        batch_norm: str | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> nn.Module:
        """Take over a model that `fully_shard` has sharded over this replica's ranks, whoever called it.

        Nothing of the model changes: not its parameters, not how it is sharded, not its types. Each parameter
        group of FSDP2 with trainable parameters becomes one bucket of gradients. State, snapshots, fetches and
        checkpoints hold the trainable parameters, and the buffers and frozen parameters that ``buffers`` names.
        All others must be the same on all replicas, and training must not change them: if a first step does, the
        job is refused (64); later, the event `JobDoubted` says so once. Does not block.

        Args:
            model: The whole model, with its weights, the same on all replicas. It is what the loop calls. Its
                trainable parameters are of float32 or bfloat16.
            find_unused_parameters: Whether a batch may leave trainable parameters unused, such as experts to which
                no token goes. A parameter that no contributor has used in a step is not updated in it, as in
                torch. It costs one small all-reduce more in each step. Without it such a batch is refused.
            batch_norm: "mean" declares the running statistics of all BatchNorm as "mean". None: such a model is
                refused in train mode, unless ``buffers`` names them.
            buffers: What becomes of buffers and frozen parameters that forward, a hook or the loop changes, by
                patterns of their names; the first pattern that fits counts. "state": part of the state; a step
                gives them the value that rank 0 of its lowest contributor had at `optim.step`. "mean": part of the
                state; a step moves them by the mean over its units of what one forward does. Both cost one
                all-reduce more, "state" one with room for each replica's value. "local": what they hold is of no
                consequence, and compared nowhere. Buffers that are not persistent are local, with one warning.
                What is declared changes between the batch and the end of `optim.step`, or in `on_commit`, which is
                the only place for frozen parameters that are sharded. None: `job.buffers`, which is set where an
                integration calls this.

        Returns:
            ``model``.

        Raises:
            ConfigError: It cannot be adopted, or there is one already.
        """
        if hasattr(self, "_adopted"):
            raise ConfigError("job.adopt", type(model).__name__, "one model in a job: put several into one module")
        self._adopted = AdoptedModel(
            model,
            self.ranks,
            self._ready,
            find_unused_parameters,
            self.config.ranks_per_unit,
            batch_norm,
            self.buffers if buffers is None else buffers,
            self.config.slots,
        )
        check_fewer_ranks(self.config, self._adopted, self.ranks)
        if (moving := self._adopted.moving) is not None:
            self.register_state(moving.state, moving.state_dict, moving.load_state_dict)
        model.register_forward_hook(self._returned)
        return model

    def optimizer(self, optimizer: Optimizers, schedule: Schedule | None = None) -> Optimizer:
        """Wrap the optimizers of the model; each trainable parameter is in exactly one of them.

        Their state is made now, as torch would make it in the first step; a state that was loaded before stays.

        Args:
            optimizer: Made after `shard` or `adopt`, from the model's parameters: one, or several in a list or in
                any other container that iterates over them.
            schedule: ``schedule(step)`` (from 1) is a factor on the learning rates, or one for each parameter
                group; None keeps them constant. Or a torch scheduler of an optimizer, or several of them: then
                each committed step is one ``step()`` of it, and calls in the loop do nothing.

        Returns:
            The optimizer for the loop.

        Raises:
            ConfigError: This is the second call; a torch scheduler is attached that was not given; a parameter is
                frozen nowhere and in no optimizer, or in two, or not the model's; an optimizer's state cannot be
                made before its first step; or replicas may be unequally wide, and its update depends on that.
        """
        if self._groups is not None:
            name = type(optimizer).__name__
            allowed = f"one call ({self._groups.name} is there); it takes several optimizers: [muon, adamw]"
            raise ConfigError("job.optimizer", name, allowed)
        groups = Groups(optimizer, schedule)
        groups.check_parameters(self._adopted.params)
        groups.check()
        groups.check_length(self.config.train.steps)
        for each in groups.optimizers:
            create_state(each)
            check_update(self.config, each)
        self._groups = groups
        offload = self.config.optim.offload
        ledger = Ledger.empty(self.config.data_shards)
        self._live_state = LiveState(self._adopted, groups, ledger, self.rank, self.ranks, offload)
        self._driver = StepDriver(
            self.config,
            self.data_rank,
            self.data_ranks,
            self.device,
            self._adopted,
            groups,
            self._live_state,
            self._mailbox,
            self._callbacks,
        )
        return Optimizer(self._driver)

    def warm_up(self, once: Callable[[], None]) -> None:
        """Run ``once`` before check-in, so that the first step is as fast as the later ones.

        Args:
            once: A forward and backward on any batch; its gradient is thrown away.

        Raises:
            ConfigError: It changes a tensor that is not part of the state (`adopt`).
        """
        self._adopted.settle()
        watch = self._adopted.undeclared
        watch.begin()
        once()
        watch.refuse(watch.look())
        with contextlib.suppress(ConfigError):  # the first step will tell
            self._adopted.check_gradients()
        self._adopted.clear()

    def batches(self, source: Source[Batch], accumulate: int | None = None) -> Iterator[Batch]:
        """Yield the batches that this replica has to train, each exactly once; end when training has ended.

        The first ``next`` joins the job. A spare blocks there until a replica needs it. A replica that is behind
        catches up inside, so only a contributor gets a batch. torch's generator is seeded from the batch's place
        before each micro-batch, for dropout and the like. After a ``break`` another call goes on where that was.

        From then to the end SIGTERM, SIGINT and SIGHUP mean `leave`, unless the program has a handler of its own.

        Args:
            source: The data.
            accumulate: Micro-batches of a rank in a step, each of which is yielded by itself. It must be
                `train.accumulate`, which is what None stands for.

        Yields:
            One micro-batch of this rank, on the job's device.

        Raises:
            Ended: The job ends this replica.
            SystemExit: Such a signal came, and this replica has left before the end.
            ConfigError: Optimizer or checkpoints cannot be used, or ``accumulate`` or the source is another one.
            RuntimeError: An earlier call has raised an error, or the job is closed.
            AgentGone: This host has no state agent, and none could be started.
            CallbackFailed: A callback on leave has raised an error, which is its cause.
        """
        if accumulate not in (None, self.config.train.accumulate):
            allowed = f"train.accumulate, which is {self.config.train.accumulate}, or nothing"
            raise ConfigError("job.batches(accumulate)", accumulate, allowed)
        driver = self._driver
        if driver is None or self._groups is None:
            raise ConfigError("job.batches", None, "a call after job.optimizer(...)")
        self._groups.check()
        self._adopted.check()
        self._callbacks.fix()
        self._user.fix()
        yield from self._loop.rest(source, lambda: self._feed(driver, source), self.over)

    def _feed(self, driver: StepDriver, source: Source[Any]) -> Generator[Any, None, None]:
        self._live_state.hold(self._user)
        driver.evaluation = self._evaluation()
        reader = self._open_reader(source)
        driver.samples_of = getattr(source, "samples_of", None)
        with contextlib.closing(reader), leaving_on_signals(self._ask_to_leave) as told:
            self._facts = facts_of(source, reader, self.config.data.check, self.rank, self.data_ranks)
            if self._identity is not None:
                driver.guess(reader, self.replica)
            self._join(driver, reader)
            while True:
                self._callbacks.leave()
                match self._mailbox.get():
                    case RunBatch() as order:
                        yield from driver.feed(reader, order)
                    case Exit() as end:
                        self._leave_with(driver, end, told)
                        return
                    case order:
                        driver.carry_out(order)

    def weigh(self, tokens: int) -> None:
        """Say how many tokens of the current micro-batch count, with `data.weight: tokens`.

        The loss of a micro-batch stays the mean over its own tokens. Its gradient is multiplied by ``tokens`` in
        backward, and the sum of a step is divided by all tokens in it: the step has the gradient of one big batch,
        the mean over all tokens. Call it for each micro-batch on each rank, after `batches` has yielded it and
        before its backward. It does not block. During `warm_up` it has no effect.

        Args:
            tokens: An integer from 0 to 2**31, for example the number of targets that are not padding. With 0 the
                micro-batch has no gradient, and its loss does not count: it may be 0/0, as long as what it is
                computed from is finite. Forward and backward have to run all the same: FSDP2 calls collectives.

        Raises:
            ConfigError: ``tokens`` is something else, it comes too late, or `data.weight` is units.
        """
        if self.config.data.weight != "tokens":
            raise ConfigError("job.weigh", tokens, "no call, unless data.weight is tokens (it is units)")
        weight, driver = checked_weight(tokens), self._driver
        if driver is not None and driver.evaluation is not None and driver.evaluation.weight is not None:
            driver.evaluation.weight = weight
        elif driver is not None and driver.current is not None:
            driver.current.weigh(weight)

    def leave(self) -> None:
        """Leave the job at the next commit for good, without disturbing it: this replica is not started again.

        If all replicas do that, the job has ended: the last state is written, and the exit code is 0. Does not
        block. From any thread, and from a signal handler.
        """
        self._ask_to_leave("leaves")

    def stop(self) -> None:
        """End the whole job well at the next commit, before `train.steps` are done.

        That step is the last one on all replicas: `batches` ends on each of them, a checkpoint is written if the
        job keeps any, and the exit code is 0. One rank may call it, or several. Does not block. From any thread,
        and from a signal handler.
        """
        self._ask_to_leave("stops")

    def finish(self) -> None:
        """Leave the job for good now, because the script has ended; the launcher of the script calls it.

        The state that this rank holds is the replica's last one. A replica that breaks its loop alone leaves to
        the others what is left to train. If the loops of all end, the job has ended well: the lowest replica that
        holds the state writes it, if the job keeps any. Nothing happens after `batches` has ended by itself.
        Blocks until that is done. A collective of the ranks of this replica.

        Raises:
            Ended: The job ends this replica with an error.
            SystemExit: A signal told this process to leave meanwhile.
            RuntimeError: The script has ended while an order changed the state, which is no committed one.
        """
        driver = self._driver
        if self._runtime is None or driver is None or not driver.joined:
            return
        if not driver.whole:
            raise RuntimeError(f"the script ended while step {driver.step} was applied: use job.stop()")
        self._loop.close()
        with leaving_on_signals(self._ask_to_leave) as told:
            self._ask_to_leave("ended")
            while not isinstance(order := self._mailbox.get(), Exit):
                if not isinstance(order, RunBatch | Reduce):
                    driver.carry_out(order)
            self._leave_with(driver, order, told)

    def _ask_to_leave(self, how: Leaving = "told") -> None:
        self._leaves = self._leaves if self._leaves == "stops" else how
        if self._runtime is not None:
            self._runtime.leave(how)

    def _leave_with(self, driver: StepDriver, end: Exit, told: Sequence[int]) -> None:
        """Leave the job as the leader has ordered; ``told`` are the signals that came.

        Raises:
            Ended: The job ends this replica with an error.
            SystemExit: Such a signal came, and this replica has left before the end.
        """
        try:
            if end.done:
                driver.conclude(end.for_all)
            self._callbacks.call("on_leave", end.reason)
        finally:
            self.close() if self.built_in else self._part()
        if end.code != EXIT_OK:
            raise Ended(end.code, end.reason)
        if self.over and self._identity is not None and self._identity.starter is not None:
            self._identity.starter.end()
        if told and not self.over:
            raise SystemExit(EXIT_LEFT)

    @property
    def step(self) -> int:
        """The committed step that this rank holds, from 1; 0 before the first one."""
        return 0 if self._driver is None else self._driver.step

    @property
    def last(self) -> CommittedStep | None:
        """The committed step that led to the state that this rank holds.

        None before the first one, and while the state is one that was fetched or loaded.
        """
        return None if self._driver is None else self._driver.last

    @property
    def over(self) -> bool:
        """Whether this rank holds the last state: that after `train.steps`, or with which the script has ended."""
        return self._driver is not None and self._driver.over

    def full_state_dict(self) -> dict[str, Any]:
        """Gather the whole model in host memory, in the loop between two steps, or after it.

        A collective of the replica's ranks. Frozen parameters and buffers are in it; parameters are of the types
        that they are trained in.

        Returns:
            On rank 0 the unsharded tensors by name, as the model's ``state_dict`` names them; {} on the others.

        Raises:
            ConfigError: There is no model yet, or the job is closed.
        """
        if not hasattr(self, "_adopted") or not dist.is_initialized():
            allowed = "a call after job.shard or job.adopt, and before job.close"
            raise ConfigError("job.full_state_dict", None, allowed)
        return get_model_state_dict(self._adopted.model, options=WHOLE)

    def close(self) -> None:
        """Leave the job and the process group, and end all threads; when the process ends, at the latest.

        Blocks for at most `timeouts.save_s` and a little.
        """
        self._part()
        atexit.unregister(self._leave_group)
        self._leave_group()

    def _part(self) -> None:
        """Leave the job. The process group stays until the process ends: the model may still be gathered."""
        self._loop.close()
        atexit.register(self._leave_group)  # after a crash nothing is waited for
        if self._saver is not None:
            self._saver.close(self.config.timeouts.save_s)
            self._saver = None
        log, self._log = self._log, None
        if log is not None:
            log.close()
        self._events = None
        runtime, self._runtime = self._runtime, None  # a signal may come at any time
        if runtime is not None:
            self.left = True
            runtime.close()

    # What a store of blocks asks of its job.

    def agent_home(self, caller: str) -> AgentHome | None:
        """Return where the state agent of this rank's host is; None in a replay, which has no agents.

        Raises:
            ConfigError: This process is a spare, and of no replica yet; ``caller`` is named.
        """
        place, identity = self._place, self._identity
        if not place.lighthouses:
            return None
        if identity is None:
            raise ConfigError(caller, "a spare", "a call in the loop: before the first batch it is of no replica")
        return AgentHome(place.token, identity.replica, place.rank, place.ranks, identity.starter, identity.shared)

    def note_event(self, event: str, reason: str, **facts: object) -> None:
        """Write an ``event``, its ``reason`` and ``facts`` into this rank's journal, once there is one.

        It also becomes a line of the rank's log. From any thread.
        """
        _log.warning("%s: %s", event, reason)
        if self._events is not None:
            self._events.event(event, reason, **facts)
        else:
            self._early.append((time.time(), event, reason, facts))

    def _write_logged(self, step: int, numbers: Mapping[str, float | None]) -> None:
        last, state = self.last, None if self._runtime is None else self._live_state.state
        if state is None:
            raise ConfigError("job.log", ", ".join(numbers), "a call in the loop of job.batches, or in a callback")
        if self._log is not None and numbers and counts(self.replica, self.step, last):
            self._log.logged(step, state.commit_epoch if last is None else last.epoch, numbers)

    def _evaluation(self) -> Evaluation[Any] | None:
        given, every = self._evaluated, self.config.eval.every
        if given is None and every:
            raise ConfigError("eval.every", every, "0, or a loop that calls job.evaluate before job.batches")
        model, rank, ranks = self._adopted.model, self.rank, self.ranks
        return given and Evaluation(self.config, *given, model, rank, ranks, self.device, self.pause)

    def _write_evaluated(self, state: StateId, loss: float) -> None:
        if self._log is not None:
            values = {EVAL_LOSS: loss if math.isfinite(loss) else None}
            self._log.logged(state.step, state.commit_epoch, values, state.lineage)

    # The model's hooks; during `warm_up` there is no step.

    def _returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._driver is None else self._driver.returned(module, args, output)

    def _ready(self, bucket: int, flat: torch.Tensor) -> None:
        if self._driver is not None:
            self._driver.ready(bucket, flat)

    # Joining the job.

    def _join(self, driver: StepDriver, reader: Reader[Any]) -> None:
        """Do all that any rank can do, wait for the incarnation if this is a spare, and join the job as that."""
        live_state, config, place = self._live_state, self.config, self._place
        assert self._groups is not None
        check_manifests(config, live_state.layout, self._groups.hyper(), self.rank, self.ranks)
        runtime = RankRuntime(
            config, place, self.device, self._adopted, live_state, self._mailbox, self._pauses, self._facts
        )
        self._runtime = runtime
        live_state.state = state_id.initial(config_hash(config), state_id.digest(runtime.facts.weights))
        warm = time.time()
        if self._identity is None:
            self._identity = begin(config, place, self._source.wait())
            warm = self._identity.began
        identity = self._identity
        runtime.start(identity)
        self._events = runtime.journal
        while self._early:
            at, event, reason, facts = self._early.pop(0)
            runtime.journal.note(at, event, reason, **facts)
        if self.rank == 0:
            self._log = open_log(runtime, warm)
        settings = {f"lr.{key}": value for key, value in config.lr.model_dump().items()}
        self._groups.note_given(config.train.steps, {**settings, "optim.clip": driver.clip})
        checkpoints, checkpointer = open_checkpoints(
            config, place.run, identity.incarnation, live_state, runtime.ranks, runtime.facts.data, place.token
        )
        self._saver = CheckpointSaver(checkpointer, runtime.snapshots, self.rank, runtime.report)
        state = restored(runtime, checkpoints)
        driver.guess(reader, self.replica)
        check_in(runtime, state, checkpoints)
        if self._leaves is not None:
            runtime.leave(self._leaves)
        joined = runtime, self._saver, self._log, self.built_in, not identity.restarts
        driver.begin(Joined(*joined, self._write_evaluated))


__all__ = ["Ended", "Job", "Optimizer", "Source"]
