"""The part of `Job` for a user's loop: callbacks, state of its own, logged values and pauses.

All replicas log the same names. The value of the contributor with the lowest id to the last committed step counts,
so each value is written once: no second replica writes it, and none that starts again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ft_hsdp.analysis.commits import MAX_VALUES, VALUE_NAME
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data.prefetch import Source
from ft_hsdp.train.loop.callbacks import Callbacks, CommittedStep, OnCommit, OnLeave, OnRejoin
from ft_hsdp.train.loop.user_state import Registered, UserState

NAME_ALLOWED = "1 to 64 letters, digits and . _ / - as the name, which begins with a letter"
LONGEST_NAME = 64  # characters

_log = logging.getLogger(__name__)

CommitCallback = TypeVar("CommitCallback", bound=OnCommit)
RejoinCallback = TypeVar("RejoinCallback", bound=OnRejoin)
LeaveCallback = TypeVar("LeaveCallback", bound=OnLeave)
Batch = TypeVar("Batch")


def checked(values: object, known: set[str]) -> dict[str, float | None]:
    """Return the values that a training loop logs, as numbers; None stands for one that is not finite.

    Args:
        known: The names that were logged before; the new ones are added.

    Raises:
        ConfigError: They are something else, or there are more than `MAX_VALUES` names.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("job.log", values, "a mapping of names to numbers")
    numbers = {_name(name): number(f"job.log({name})", value) for name, value in values.items()}
    if len(known | set(numbers)) > MAX_VALUES:
        new = min(set(numbers) - known)
        raise ConfigError("job.log", new, f"at most {MAX_VALUES} names in a job")
    known.update(numbers)
    return numbers


def _name(name: object) -> str:
    if not isinstance(name, str) or not VALUE_NAME.fullmatch(name):
        raise ConfigError("job.log", name, NAME_ALLOWED)
    return name


def log_measured(job: UserLoop, values: Any) -> None:
    """Log what a trainer of others measures (`UserLoop.log`): nothing of it ends the job.

    The values are of the newest committed step: a trainer's own count is another one once a replica was lost.

    Args:
        job: In the loop, or in a callback; after the job, values are left out, and that is told once.
        values: By any names; see `loggable`.
    """
    if job.left:
        _tell("values after the end of the job are left out")
    else:
        job.log(loggable(values, job.logged_names) if isinstance(values, Mapping) else values)


def loggable(values: Mapping[Any, Any], known: Set[str]) -> dict[str, Any]:
    """Return the part of values that `UserLoop.log` takes, by names that it takes: ``mfu(%)`` is ``mfu_pct``.

    What is no number is left out, and so are new names where a job has no room for more; that is told once.

    Args:
        values: What a trainer measures, by its own names.
        known: The names that were logged before.
    """
    taken: dict[str, Any] = {}
    for key, value in values.items():
        name = _taken_name(str(key))
        try:
            number(name, value)
        except ConfigError:
            _tell(f"{key!r} is left out where it is no number")
        else:
            if len({*known, *taken, name}) <= MAX_VALUES:
                taken[name] = value
            else:
                _tell(f"names after the first {MAX_VALUES} are left out")
    return taken


def _taken_name(key: str) -> str:
    """Return a name as a job takes it; a long one keeps both ends, which tell it from others."""
    if VALUE_NAME.fullmatch(key):
        return key
    letters = key.replace("%", "pct").encode("ascii", "backslashreplace").decode()
    name = re.sub(r"[^A-Za-z0-9_./-]+", "_", letters).strip("_")
    name = name if name[:1].isalpha() else f"value_{name}"
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}_{name[-half:]}"


@lru_cache(maxsize=MAX_VALUES)  # once in this process
def _tell(what: str) -> None:
    _log.warning("job.log: %s", what)


def number(key: str, value: object) -> float | None:
    """Return a value as a number, None if it is not finite; numpy's numbers have ``item`` as tensors have."""
    shown = value
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ConfigError(key, f"a tensor of shape {list(value.shape)}", "a number")
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(key, shown, "a number")
    try:
        found = float(value)
    except OverflowError:  # an int beyond all floats
        return None
    return found if math.isfinite(found) else None


def checked_step(step: object, newest: int) -> int:
    """Return the step that logged values are of; None stands for the ``newest`` one."""
    if step is None:
        return newest
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= newest:
        raise ConfigError("job.log(step)", step, f"a committed step, 0 to {newest}, or None for the newest one")
    return step


def counts(replica: int, newest: int, last: CommittedStep | None) -> bool:
    """Return whether the values of ``replica`` count, and not those of another one.

    Args:
        newest: The committed step that it holds; before the first one, those of replica 0 count.
        last: That step, if the replica has applied it; one that has loaded it leaves its values to those that did.
    """
    if last is None:
        return newest == 0 and replica == 0
    return replica == min(last.contributors, default=-1)


class UserLoop:
    """What a loop registers before its first batch, and tells later; `Job` is one."""

    def __init__(self, longest_pause_s: float) -> None:
        self._longest_pause_s = longest_pause_s
        self._pauses = Pauses()
        self.logged_names: set[str] = set()
        self.left = False  # whether this rank was in the job, and is no more
        self._not_finite: set[str] = set()  # names whose value was not, at least once
        self._callbacks = Callbacks()
        self._user = UserState()
        self._evaluated: tuple[Callable[[Any], object], Source[Any]] | None = None  # what `evaluate` was given

    def on_commit(self, callback: CommitCallback) -> CommitCallback:
        """Have ``callback`` called with each committed step. A decorator, or a call before the first batch.

        It runs on every rank of every replica that applies the step, in order, on the main thread: when the
        weights are updated, and before the state has its name. That includes the steps that are applied while this
        replica catches up. It has to do the same on all replicas, and may use collectives of the replica's ranks.
        An error in it ends this rank. ``sys.exit(0)`` in it does what it does in the loop, after the step.

        Args:
            callback: Called with a `CommittedStep`. The next step waits for it.

        Returns:
            ``callback``.

        Raises:
            ConfigError: It is no function, or the first batch was asked for.
        """
        return self._callbacks.add("on_commit", callback)

    def on_rejoin(self, callback: RejoinCallback) -> RejoinCallback:
        """Have ``callback`` called with the step of each state that replaces the live one.

        That is a state of this host's memory, of a checkpoint, or of another replica. It runs on every rank of
        this replica, on the main thread, when the state is there. A decorator, or a call before the first batch.
        An error in it ends this rank.

        Args:
            callback: Called with the step of the state.

        Returns:
            ``callback``.

        Raises:
            ConfigError: It is no function, or the first batch was asked for.
        """
        return self._callbacks.add("on_rejoin", callback)

    def on_leave(self, callback: LeaveCallback) -> LeaveCallback:
        """Have ``callback`` called with the reason when the job has ended, or this replica leaves it in order.

        It runs on every rank of this replica, on the main thread, before `batches` ends. A decorator, or a call
        before the first batch. An error in it is raised from `batches`.

        Args:
            callback: Called with the reason, in words.

        Returns:
            ``callback``.

        Raises:
            ConfigError: It is no function, or the first batch was asked for.
        """
        return self._callbacks.add("on_leave", callback)

    def register_state(
        self,
        name: str,
        state_dict: Callable[[], Mapping[str, Any]],
        load_state_dict: Callable[[dict[str, Any]], object],
    ) -> None:
        """Make state of yours a part of the committed state: snapshots, fetches, digests, checkpoints and resume.

        It may change in a callback on a commit alone (`on_commit`), and there alike on all replicas. Both
        functions run on the main thread of every rank, ``state_dict`` after each commit.

        Args:
            name: 1 to 64 letters, digits and ``. _ -``; the same on all replicas, as is the order of the calls.
            state_dict: Returns tensors and JSON values by key. The keys, and the shape, type and device of each
                tensor, stay as they are at the first batch. A tensor that is no DTensor, and each JSON value, must
                be the same on all ranks of the replica.
            load_state_dict: Takes such a mapping, of a state that replaces the live one. The tensors may be the
                very ones that ``state_dict`` has returned: they hold the new values already.

        Raises:
            ConfigError: The name or a function cannot be used, or the first batch was asked for.
        """
        self._user.register(Registered(name, state_dict, load_state_dict))

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log values of the training loop, such as the loss of an evaluation, for metrics.jsonl and the curves.

        Call it alike on all replicas and ranks, in the loop or in a callback. The value of rank 0 of the lowest
        contributor to the last committed step counts, so each is written once. It does not block.

        Args:
            values: Numbers, or tensors of one element, by name: 1 to 64 letters, digits and ``. _ / -``. A job has
                at most 64 names. One that is not finite is written as null, with a warning for its name.
            step: The committed step that they are of; None: the newest one.

        Raises:
            ConfigError: A name, a value or the step is something else, or this rank has not joined the job, or has
                left it.
        """
        numbers = checked(values, self.logged_names)
        for name in {name for name, value in numbers.items() if value is None} - self._not_finite:
            self._not_finite.add(name)
            _log.warning("job.log: %s is not finite; it is written as null, now and later", name)
        self._write_logged(checked_step(step, self.step), numbers)

    def evaluate(self, loss_of: Callable[[Batch], object], source: Source[Batch]) -> None:
        """Have the model evaluated after each step that `eval.every` names. A call before `batches`.

        Each contributor to the step computes all batches, shared out to its ranks, once it has applied the step:
        in eval mode, without gradients, and announced as by `pause`, for `timeouts.pause_s` at most. The mean is
        logged as `eval_loss`.

        Args:
            loss_of: Called with a batch on the job's device, as often on each rank; returns the mean loss, which
                depends on the committed state and the batch alone. With `data.weight: tokens` it calls `weigh`.
            source: Its ``batch(0, i, 0, 0)`` is batch i of each evaluation, from 0 to `eval.batches` - 1.

        Raises:
            ConfigError: An argument is something else.
        """
        if not callable(loss_of) or not callable(getattr(source, "batch", None)):
            given = f"{type(loss_of).__name__}, {type(source).__name__}"
            raise ConfigError("job.evaluate", given, "a function, and what has batch(shard, index, rank, micro)")
        self._evaluated = loss_of, source

    @contextlib.contextmanager
    def pause(self, what: str, limit_s: float | None = None) -> Iterator[None]:
        """Announce work that is no training and no hang, such as an evaluation, for a ``with`` block.

        The other replicas wait for this one beyond `ftar.timeout_s`, and `timeouts.step_s` does not count; status
        and page show it. A rank that dies meanwhile, or whose process stands still, is found at once as ever.
        The block may put other weights into the model, if it puts the old ones back: no copy is made of them.

        Args:
            what: What it does, in a few words.
            limit_s: After so many seconds it counts as a hang that begins then. At most `timeouts.pause_s`, which
                is what None stands for.

        Yields:
            Nothing.

        Raises:
            ConfigError: It is within another pause, or an argument is something else.
        """
        with self._pauses.during(*checked_pause(what, limit_s, self._longest_pause_s)):
            yield

    def announced(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Announce what a trainer of others does, as by `pause`, unless it is within another or after the job."""
        return contextlib.nullcontext() if self.left or self._pauses.under_way else self.pause(what)

    @property
    def step(self) -> int:
        """The committed step that this rank holds: `Job` knows it."""
        raise NotImplementedError

    def _write_logged(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Write values of a committed step, if those of this rank count: `Job` does."""
        raise NotImplementedError


MAX_PAUSE = 80  # characters of what a pause is for


@dataclass(eq=False)
class Pauses:
    """The pause that the main thread makes, if there is one, and those of its replica. Any thread may ask."""

    ended: int = 0  # how many there were
    _now: tuple[str, float] | None = None  # what it is for, and until when it may last
    _others: dict[int, float] = field(default_factory=dict)  # by rank: until when its pause may last
    _lent: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # see `lend`

    def lend(self, lent: Callable[[], AbstractContextManager[None]]) -> None:
        """Have each pause be within ``lent()``, where other weights may be in the model (`LiveState.lent`)."""
        self._lent = lent

    @contextlib.contextmanager
    def during(self, what: str, limit_s: float) -> Iterator[None]:
        """Make a pause of a ``with`` block, as `begin` and `end` do."""
        self.begin(what, limit_s)
        try:
            with self._lent():
                yield
        finally:
            self.end()

    def begin(self, what: str, limit_s: float) -> None:
        """Note that the main thread does something else, which is no hang for ``limit_s`` seconds."""
        if self._now is not None:
            raise ConfigError("job.pause", what, f"one pause at a time; {self._now[0]} is under way")
        self._now = what, time.monotonic() + limit_s

    def end(self) -> None:
        self._now = None
        self.ended += 1

    @property
    def under_way(self) -> bool:
        """Whether there is one, also if it has lasted for too long."""
        return self._now is not None

    def left_s(self) -> float:
        """Return for how many seconds the pause may go on; 0: there is none, or it has lasted for too long."""
        now = self._now
        return 0.0 if now is None else max(0.0, now[1] - time.monotonic())

    def told(self, rank: int, left_s: float) -> None:
        """Note for how many seconds another rank of the replica says that its pause may go on."""
        self._others[rank] = time.monotonic() + left_s

    def replica_left_s(self) -> float:
        """Return `left_s` of the longest pause in the replica, for which its other ranks wait."""
        return max(self.left_s(), max(self._others.values(), default=0.0) - time.monotonic())

    @property
    def what(self) -> str:
        """What the pause is for; "" if there is none, or if it has lasted for too long."""
        now = self._now
        return now[0] if now is not None and self.left_s() else ""


def checked_pause(what: object, limit_s: object, longest_s: float) -> tuple[str, float]:
    """Return what a pause is for, and how long it may last."""
    if not isinstance(what, str) or not 0 < len(what) <= MAX_PAUSE or not what.isprintable():
        raise ConfigError("job.pause", what, f"1 to {MAX_PAUSE} characters that say what it does")
    limit = longest_s if limit_s is None else limit_s
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= longest_s:
        allowed = f"more than 0, and at most timeouts.pause_s ({longest_s:g})"
        raise ConfigError("job.pause(limit_s)", limit, allowed)
    return what, limit
