"""torch's learning rate schedulers inside the committed state.

A loop steps its scheduler after each update of its own process. A replica that was away has fewer updates, and one
that came back has none. So the commits step the schedulers: `TorchSchedulers.advance` steps each of them once for
every committed step, also for one that this replica adds nothing to and for one that changes no weight. Their
state goes with the optimizer's hyper-parameters into snapshots and checkpoints, as JSON.

The loop may keep its calls of ``scheduler.step()``: after `job.optimizer` they do nothing. A loop that calls it
once an epoch means something else than a step, so a call is refused unless it follows its own ``optim.step()``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.errors import ConfigError

_ONCE = (
    "one call after each optim.step(), or none: each committed step is one step of the scheduler"
    " (for epochs, count their steps in the scheduler)"
)


def to_json(value: Any) -> Any:
    """Return ``value`` as JSON that `from_json` takes back exactly.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(each) for key, each in value.items()}
        return [[to_json(key), to_json(each)] for key, each in value.items()]
    raise TypeError(f"a {type(value).__name__}")


def from_json(held: Any, new: Any) -> Any:
    """Return what `to_json` made ``new`` of; ``held`` is a value of the same kind, and says of which types.

    Raises:
        ValueError: ``new`` is of another kind.
    """
    if isinstance(held, torch.Tensor) and isinstance(new, bool | int | float | str):
        return torch.full_like(held, float(new))
    if isinstance(held, int | float) and isinstance(new, str):
        return float(new)
    if isinstance(held, tuple | list) and isinstance(new, list):
        known = [*held, *[None] * (len(new) - len(held))]
        made = [from_json(a, b) for a, b in zip(known, new, strict=False)]
        return made if isinstance(held, list) else tuple(made)
    if isinstance(held, Mapping) and isinstance(new, dict | list):
        pairs = new.items() if isinstance(new, dict) else new
        return type(held)({k: from_json(held.get(k), v) for k, v in pairs})  # type: ignore[call-arg]
    if isinstance(held, torch.Tensor | tuple | list | Mapping):
        raise ValueError(f"{str(new)[:40]!r} instead of a {type(held).__name__}")
    return new


class TorchSchedulers:
    """The schedulers of a job's optimizers; from now on the commits step them, and nobody else."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        """Take ``schedulers`` over, in the order in which they are stepped."""
        self.all = list(schedulers)  # in the order in which they are stepped
        self._kinds = [type(each) for each in self.all]
        # What the loop did, for each scheduler: its optim.step() for which a scheduler.step() may still come, and
        # those with this replica's gradient for which none came.
        self._allowed = [0] * len(self.all)
        self._missed = [0] * len(self.all)
        self._ended = False  # whether the last optim.step() ended a step
        for scheduler, (name, state) in zip(self.all, self.state(), strict=True):
            try:
                again = to_json(from_json(scheduler.state_dict(), state))
            except (TypeError, ValueError) as error:
                again = error
            if again != state:
                allowed = "a scheduler whose state can be written as JSON and read again"
                raise ConfigError("job.optimizer", name, f"{allowed} ({again})")
        for at, scheduler in enumerate(self.all):
            self._take_over(at, scheduler)

    def _take_over(self, at: int, scheduler: LRScheduler) -> None:
        """Give a scheduler a class whose ``step`` does nothing; its attributes, and so its state, stay its own."""
        kind = self._kinds[at]

        def step(_: LRScheduler, *arguments: Any, **named: Any) -> None:
            self._called(at, bool(arguments or named))

        def load_state_dict(_: LRScheduler, __: dict[str, Any]) -> None:
            allowed = "a state that is loaded before job.optimizer(...) is called"
            raise ConfigError("load_state_dict", kind.__name__, allowed)

        body = {"step": step, "load_state_dict": load_state_dict, "__module__": kind.__module__}
        scheduler.__class__ = type(kind.__name__, (kind,), body)

    def _called(self, at: int, told: bool) -> None:
        """Check that a call in the loop would have been one for a step."""
        name = self._kinds[at].__name__
        if told and issubclass(self._kinds[at], ReduceLROnPlateau):
            allowed = "no call: each committed step gives the scheduler its loss"
            raise ConfigError("scheduler.step", f"a metric for {name}", allowed)
        if told:
            raise ConfigError("scheduler.step", f"an argument for {name}", _ONCE)
        if self._missed[at] > 1:
            raise ConfigError("scheduler.step", f"a call after {self._missed[at]} steps", _ONCE)
        if not self._allowed[at]:
            raise ConfigError("scheduler.step", f"a call for {name} without an optim.step() before it", _ONCE)
        self._allowed[at] -= 1
        self._missed[at] = 0

    def check_length(self, steps: int) -> None:
        """Check that no scheduler ends before ``steps`` steps."""
        for scheduler in self.all:
            if isinstance(scheduler, OneCycleLR) and scheduler.total_steps - scheduler.last_epoch < steps:
                allowed = f"{steps} or more, which is train.steps"
                raise ConfigError("OneCycleLR", f"total_steps {scheduler.total_steps}", allowed)

    def note_loop(self, contributed: bool) -> None:
        """Note that the loop called ``optim.step()``, and whether the step has this replica's gradient."""
        for at in range(len(self.all)):
            self._allowed[at] = 1 if self._ended else self._allowed[at] + 1  # one for each micro-batch
            self._missed[at] += contributed
        self._ended = contributed

    def advance(self, record: CommitRecord) -> None:
        """Step all schedulers for a committed step, whether it updated anything or not."""
        for kind, scheduler in zip(self._kinds, self.all, strict=True):
            plateau = issubclass(kind, ReduceLROnPlateau)
            if plateau and not record.updates:
                continue  # it has no loss
            if plateau and math.isnan(record.loss):
                raise ConfigError(
                    "job.optimizer", kind.__name__, "another scheduler, or a model that returns its loss"
                )
            _step(kind, scheduler, record.step, *([record.loss] if plateau else []))

    def state(self) -> list[Any]:
        """Return the state of all schedulers as JSON: for each its class and its attributes."""
        states = []
        for kind, scheduler in zip(self._kinds, self.all, strict=True):
            try:
                states.append([kind.__name__, to_json(scheduler.state_dict())])
            except (TypeError, AttributeError) as error:
                allowed = f"a scheduler whose state is numbers and text (it holds {error})"
                raise ConfigError("job.optimizer", kind.__name__, allowed) from error
        return states

    def adopt(self, states: Sequence[Any]) -> None:
        """Take the states of a fetched or resumed state."""
        found, mine = [name for name, _ in states], [kind.__name__ for kind in self._kinds]
        if found != mine:
            raise ValueError(f"learning rate schedulers {found}, expected {mine}")
        for kind, scheduler, (_, state) in zip(self._kinds, self.all, states, strict=True):
            _load(kind, scheduler, state)

    def resume(
        self,
        states: Sequence[Any],
        then: Sequence[Mapping[str, Any]],
        now: Sequence[Mapping[str, Any]],
        anew: Sequence[torch.optim.Optimizer],
        step: int,
    ) -> None:
        """Take the states of a checkpoint, but have those of ``anew`` go all steps up to it once more.

        Args:
            states: Of the checkpoint; (): of other schedulers.
            then: The attributes with which each began when the checkpoint was written.
            now: The attributes with which each begins now; their state is that.
            anew: The optimizers whose rates are computed again.
        """
        moving = []
        for at, (kind, scheduler) in enumerate(zip(self._kinds, self.all, strict=True)):
            plateau = issubclass(kind, ReduceLROnPlateau)
            if not any(scheduler.optimizer is each for each in anew):
                state = dict(states[at][1])
                if plateau:  # what it has learnt from losses stays; a changed argument takes effect from here on
                    held, changed = to_json(scheduler.state_dict()), {*then[at], *now[at]}
                    state |= {k: held[k] for k in changed if k in held and then[at].get(k) != now[at].get(k)}
                _load(kind, scheduler, state)
            elif not plateau:
                moving.append((kind, scheduler))
            elif states:
                allowed = (
                    "the other schedulers as in the checkpoint: earlier losses are not kept, to compute it again"
                )
                raise ConfigError("job.optimizer", kind.__name__, allowed)
        for number in range(1, step + 1):
            for kind, scheduler in moving:
                _step(kind, scheduler, number)


def _step(kind: Any, scheduler: LRScheduler, number: int, *loss: float) -> None:
    scheduler.optimizer._opt_called = True  # type: ignore[attr-defined] # of a skipped step it is not
    try:
        kind.step(scheduler, *loss)
    except Exception as error:
        allowed = f"a scheduler that can go on after step {number} ({error})"
        raise ConfigError("job.optimizer", kind.__name__, allowed) from error


def _load(kind: type[LRScheduler], scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    held = scheduler.state_dict()
    if set(held) != set(state):
        raise ValueError(f"a {kind.__name__} with {sorted(state)}, expected {sorted(held)}")
    kind.load_state_dict(scheduler, from_json(held, state))
