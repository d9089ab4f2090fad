"""The user's optimizers inside the committed state: their hyper-parameters, and their update.

`finish` and `Groups.step` apply a committed step. The user's optimizers do the update; divisor, clipping and
learning rate come from the commit record and the committed state alone, so every replica does the same. The stored
learning rate is the one before lr_scale.

A job has one optimizer or several. Everything here goes by their parameter groups, in the order of the optimizers:
base rates, hyper-parameters in a manifest, and the rates of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.optimizer import given
from ft_hsdp.train.optimizer.clipping import CLIP_EPS, clip_groups
from ft_hsdp.train.optimizer.given import GIVEN, ChangedSetting
from ft_hsdp.train.optimizer.lr_schedule import TorchSchedulers, from_json, to_json

SCHEDULERS = "schedulers"  # the key of their states, in a dict behind those of the groups
_SET_BY = (
    "what the job sets: job.optimizer(optimizer, schedule), schedule(step) -> factor or a torch scheduler;"
    " or a callback of job.on_commit, on all replicas alike"
)
_OWN = ("params", "param_names")  # of a group, and no hyper-parameters

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Factor = Callable[[int], float | Sequence[float]]
Schedule = Factor | LRScheduler | Iterable[LRScheduler]


def finish(record: CommitRecord, reduced: Sequence[torch.Tensor], clip: float | None, data_ranks: int) -> None:
    """Turn the sums into the gradient, in place: divide by the contributors' weights, then clip by the norm.

    Each contributor's gradient is a mean over its data ranks already; if replicas are not equally wide, it is the
    sum over them, divided by the largest width.

    The norm in the record was summed in the order of ranks or lanes, so that every replica clips alike.

    Args:
        reduced: A flat fp32 sum for each bucket.
    """
    for flat in reduced:
        flat.div_(record.divisor / max(record.ring_widths, default=data_ranks))
    if clip is not None and record.norm > clip:
        for flat in reduced:
            flat.mul_(clip / (record.norm + CLIP_EPS))


class Groups:
    """The parameter groups of a job's torch optimizers, with the learning rates that the commits give them."""

    def __init__(self, optimizers: Optimizers, schedule: Schedule | None = None) -> None:
        """Take over what `Job.optimizer` is given; only `step`, `advance` and `adopt` change the groups then."""
        self.optimizers = _listed(optimizers)
        self._factor, schedulers = _split(schedule)
        for optimizer in self.optimizers:
            optimizer.register_load_state_dict_pre_hook(_refuse_to_load)
        for group in self.groups:
            _check(group)
        strange = [type(s).__name__ for s in schedulers if all(s.optimizer is not o for o in self.optimizers)]
        if strange:
            raise ConfigError("job.optimizer", ", ".join(strange), "schedulers of the optimizers that are given")
        self._scheduled = [any(s.optimizer is o for s in schedulers) for o in self.optimizers]
        self._schedulers = TorchSchedulers(schedulers) if schedulers else None
        self._names: dict[int, str] = {}  # of the parameters, by id
        self._committed = self._values()
        self.note_given()

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        return ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    def check_parameters(self, params: Mapping[str, torch.Tensor]) -> None:
        """Check that each trainable parameter is in exactly one place."""
        names = self._names = {id(p): name for name, p in params.items()}
        held = [p for group in self.groups for p in group["params"] if p.requires_grad]
        strange = sum(id(p) not in names for p in held)
        if strange:
            allowed = (
                f"parameters of the model that the job took over, trainable ones alone ({strange} are others)"
            )
            raise ConfigError("job.optimizer", self.name, allowed)
        counts = Counter(id(p) for p in held)
        wrong = [name for name, p in params.items() if counts[id(p)] != 1 and (counts[id(p)] or p.requires_grad)]
        if wrong:
            times = counts[id(params[wrong[0]])]
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            got = f"{wrong[0]} in {times or 'no'} optimizer{'s' * (times > 1)}{more}"
            allowed = (
                "each trainable parameter in exactly one; requires_grad_(False) freezes one that is not to train"
            )
            raise ConfigError("job.optimizer", got, allowed)

    def check(self) -> None:
        """Check that only the commits change hyper-parameters: a replica that returns would not have any others.

        Raises:
            ConfigError: A torch scheduler is attached that the job does not step, or a value was changed.
        """
        for optimizer, scheduled in zip(self.optimizers, self._scheduled, strict=True):
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not scheduled:
                allowed = "one that the job steps: job.optimizer(optimizer, scheduler)"
                raise ConfigError("job.optimizer", "an optimizer with a torch learning rate scheduler", allowed)
        now, then = self._values(), self._committed
        if now == then:
            return
        if len(now) != len(then):
            raise ConfigError("job.optimizer", f"{len(now)} parameter groups", f"{len(then)}, as at the beginning")
        changed = {k for a, b in zip(now, then, strict=True) for k in {*a, *b} if a.get(k) != b.get(k)}
        key = "lr" if "lr" in changed else min(changed)
        found, wanted = ([group.get(key) for group in values] for values in (now, then))
        said = "learning rates" if key == "lr" else key
        raise ConfigError("job.optimizer", f"{said} {found} instead of {wanted}", _SET_BY)

    def check_length(self, steps: int) -> None:
        if self._schedulers is not None:
            self._schedulers.check_length(steps)

    def rates(self, record: CommitRecord) -> list[float]:
        groups = self.groups
        factor = 1.0 if self._factor is None else self._factor(record.step)
        factors = list(factor) if isinstance(factor, Sequence) else [float(factor)] * len(groups)
        if len(factors) != len(groups):
            allowed = f"one, or one for each of the {len(groups)} parameter groups"
            raise ConfigError("schedule", f"{len(factors)} factors for step {record.step}", allowed)
        return [float(g["lr"]) * f * record.lr_scale for g, f in zip(groups, factors, strict=True)]

    def step(self, record: CommitRecord) -> None:
        """Clip the groups that ask for it, and update; afterwards the groups hold the rates before lr_scale again.

        A collective of the replica's ranks if a group has a ``clip`` of its own.
        """
        groups = self.groups
        clip_groups(groups, record.ring_widths)
        stored = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.rates(record), strict=True):
            if float(group["lr"]) != rate:
                group["lr"] = from_json(group["lr"], rate)
        for optimizer in self.optimizers:
            optimizer.step()
        for group, rate in zip(groups, stored, strict=True):
            group["lr"] = rate

    def advance(self, record: CommitRecord) -> None:
        """Go on to the step after ``record``, whether it updated anything or not."""
        if self._schedulers is not None:
            self._schedulers.advance(record)
        self.settle()

    def settle(self) -> None:
        """Take the hyper-parameters as they are for those of the committed step; `check` compares with them."""
        self._committed = self._values()

    def note_loop(self, contributed: bool) -> None:
        """Note that the loop called ``optim.step()``, and whether the step has this replica's gradient."""
        if self._schedulers is not None:
            self._schedulers.note_loop(contributed)

    def tensors(self, names: Mapping[int, str]) -> dict[str, torch.Tensor | DTensor]:
        """Return the optimizers' tensors by "parameter.key"; ``names`` maps id(parameter) to its name."""
        return {n: t for optimizer in self.optimizers for n, t in tensors(optimizer, names).items()}

    def _values(self) -> list[dict[str, Any]]:
        return [{k: to_json(v) for k, v in group.items() if k not in _OWN} for group in self.groups]

    def hyper(self) -> tuple[dict[str, Any], ...]:
        """Return the hyper-parameters of each group before lr_scale, then the state of the schedulers, as JSON."""
        schedulers = [{SCHEDULERS: self._schedulers.state()}] if self._schedulers is not None else []
        return (*self._values(), *schedulers)

    def adopt(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Take the hyper-parameters of a fetched or resumed state."""
        groups = self.groups
        values, states = _parts(hyper)
        try:
            if len(values) != len(groups):
                raise ValueError(f"{len(values)} parameter groups, expected {len(groups)}")
            if bool(states) != (self._schedulers is not None):
                raise ValueError(f"torch schedulers: {bool(states)}, expected {not states}")
            for group, new in zip(groups, values, strict=True):
                if set(new) != (mine := set(group) - set(_OWN)):
                    raise ValueError(f"hyper-parameters {sorted(new)}, expected {sorted(mine)}")
                group.update({key: from_json(group[key], value) for key, value in new.items()})
            if self._schedulers is not None:
                self._schedulers.adopt(states[0])
        except (ValueError, TypeError) as error:
            allowed = f"the optimizers of the state that is loaded ({error})"
            raise ConfigError("job.optimizer", self.name, allowed) from error
        self.settle()

    def note_given(self, steps: int = 0, settings: Mapping[str, Any] | None = None) -> None:
        """Note what optimizers and schedule are made with, for `resume`; before a state is loaded."""
        values = iter(self._values())
        optimizers = [
            given.of_optimizer(each, [{**next(values), **self._held(group)} for group in each.param_groups])
            for each in self.optimizers
        ]
        schedulers = self._schedulers.all if self._schedulers is not None else []
        self._initial = self.hyper()
        self.given: dict[str, Any] = {
            "optimizers": optimizers,
            "schedulers": [given.of_scheduler(each, steps) for each in schedulers],
            "schedule": None if self._factor is None else given.of_function(self._factor, steps),
            "settings": dict(settings or {}),
        }

    def _held(self, group: Mapping[str, Any]) -> dict[str, str]:
        names = [self._names[id(p)] for p in group["params"] if id(p) in self._names]
        return {"params": f"{len(names)} ({state_id.digest(names)[:8]})"} if names else {}

    def resume(self, hyper: Sequence[dict[str, Any]], step: int) -> tuple[ChangedSetting, ...]:
        """Take the hyper-parameters of a checkpoint, but what was given otherwise than when it was written.

        A torch schedule with other arguments goes from its first step to ``step`` once more: continued, it would
        be neither the old one nor the new one.

        Args:
            hyper: Of the checkpoint, with what `given` was then.

        Raises:
            ConfigError: The checkpoint is of other optimizers, or a schedule cannot be computed again.
        """
        then = next(each[GIVEN] for each in hyper if set(each) == {GIVEN})
        now = self.given
        classes = [[each["class"] for each in of["optimizers"]] for of in (then, now)]
        if classes[0] != classes[1]:
            allowed = f"the optimizers of the checkpoint, {', '.join(classes[0])}: another one has another state"
            raise ConfigError("job.optimizer", self.name, allowed)
        self.adopt(self._initial)
        values, states = _parts(hyper)
        was, is_now = ([group for each in of["optimizers"] for group in each["groups"]] for of in (then, now))
        anew, others = self._anew(then, values)
        kept = {id(group) for each in self.optimizers if each not in anew for group in each.param_groups}
        beside: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        try:
            for group, value, a, b in zip(self.groups, values, was, is_now, strict=False):
                same = {key for key in value if key in group and a.get(key) == b.get(key)}
                if id(group) in kept:
                    group.update({key: from_json(group[key], value[key]) for key in same})
                elif set(a) == set(b) and not others and len(was) == len(is_now):
                    beside.append((group, value, {key: group[key] for key in same - {"lr"}}))
            if self._schedulers is not None:
                before = () if others else states[0]
                self._schedulers.resume(before, then["schedulers"], now["schedulers"], anew, step)
            for group, value, first in beside:  # what no schedule has set stays, too
                group.update({k: from_json(v, value[k]) for k, v in first.items() if group[k] is v})
        except (ValueError, TypeError) as error:
            allowed = f"the optimizers of the checkpoint ({error})"
            raise ConfigError("job.optimizer", self.name, allowed) from error
        self.settle()
        return given.changes(then, now)

    def _anew(
        self, then: Mapping[str, Any], values: Sequence[Mapping[str, Any]]
    ) -> tuple[list[torch.optim.Optimizer], bool]:
        """Return the optimizers whose schedule is computed again, and whether the schedulers are other ones."""
        both = then["schedulers"], self.given["schedulers"]
        others = [each["class"] for each in both[0]] != [each["class"] for each in both[1]]
        if others or len(values) != len(self.groups):
            return self.optimizers, others
        schedulers = self._schedulers.all if self._schedulers is not None else []
        found, left = [], iter(values)
        for optimizer, a, b in zip(self.optimizers, then["optimizers"], self.given["optimizers"], strict=True):
            moved = False
            for was, now in zip(a["groups"], b["groups"], strict=True):
                value = next(left)
                keys = {*was, *now} - {"params", "clip"}
                changed = {key for key in keys if was.get(key) != now.get(key)}
                # A scheduler keeps arguments of its own in the groups too, and may move any value.
                moved |= any(key not in optimizer.defaults or was.get(key) != value.get(key) for key in changed)
            mine = [
                moved or given.differ(*pair)
                for scheduler, *pair in zip(schedulers, *both, strict=True)
                if scheduler.optimizer is optimizer and not isinstance(scheduler, ReduceLROnPlateau)
            ]
            if any(mine):
                found.append(optimizer)
        return found, False


def _parts(hyper: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the groups' values in ``hyper``, and the schedulers' states in a list of their own, or none."""
    states = [each[SCHEDULERS] for each in hyper if set(each) == {SCHEDULERS}]
    groups = [each for each in hyper if set(each) not in ({SCHEDULERS}, {GIVEN})]
    return [{k: v for k, v in each.items() if k not in _OWN} for each in groups], states


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers; a container of optimizers, which may call itself one, counts as what is in it."""
    one = isinstance(optimizers, torch.optim.Optimizer) and not isinstance(optimizers, Iterable)
    listed: list[Any] = [optimizers] if one else list(optimizers) if isinstance(optimizers, Iterable) else [None]
    if not listed or not all(isinstance(each, torch.optim.Optimizer) for each in listed):
        raise ConfigError("job.optimizer", optimizers, "a torch optimizer, or several: [muon, adamw]")
    return listed


def _split(schedule: Schedule | None) -> tuple[Factor | None, list[LRScheduler]]:
    """Return the function of the step, if it is one, or else the schedulers."""
    if schedule is None:
        return None, []
    listed: list[Any] = [schedule] if isinstance(schedule, LRScheduler) else []
    if not listed and isinstance(schedule, Iterable):
        listed = list(schedule)
    if listed and all(isinstance(each, LRScheduler) for each in listed):
        return None, listed
    if callable(schedule):
        return schedule, []
    raise ConfigError("job.optimizer", schedule, "schedule(step) -> factor, a torch scheduler, or a list of them")


def _check(group: Mapping[str, Any]) -> None:
    if "lr" not in group:
        raise ConfigError("job.optimizer", sorted(set(group) - set(_OWN)), 'parameter groups with "lr"')
    clip = group.get("clip")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ConfigError("clip of a parameter group", clip, "the largest norm of its gradient, above 0, or None")
    for key, value in group.items():
        if key not in _OWN:
            try:
                to_json(value)
            except TypeError as error:
                allowed = f"numbers and text (it is {error})"
                raise ConfigError("job.optimizer", f"{key} of a parameter group", allowed) from None


def _refuse_to_load(optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    raise ConfigError("load_state_dict", name, "a state that is loaded before job.optimizer(...) is called")


def tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor | DTensor]:
    return {
        f"{names[id(param)]}.{key}": value
        for group in optimizer.param_groups
        for param in group["params"]
        for key, value in sorted(optimizer.state.get(param, {}).items())
        if isinstance(value, torch.Tensor)
    }
