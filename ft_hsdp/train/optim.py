"""Optimizer: applies committed steps. What is applied follows from the commit record alone.

The user's optimizer does the update; divisor, clipping and learning rate come from the record, so every replica
does the same. The stored learning rate is the one before lr_scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.errors import ConfigError

Schedule = Callable[[int], float]
CLIP_EPS = 1e-6


def finish(record: CommitRecord, reduced: Sequence[torch.Tensor], clip: float | None, accumulate: int) -> None:
    """Turn the raw sums into the gradient, in place: divide by the contributors' weights, clip by the norm.

    The norm in the record was summed in rank order over the replica, so that every replica clips alike.
    """
    for flat in reduced:
        flat.div_(record.divisor * accumulate)
    norm = record.norm / accumulate
    if clip is not None and norm > clip:
        for flat in reduced:
            flat.mul_(clip / (norm + CLIP_EPS))


_SCHEDULE = "learning rates that only job.optimizer(optimizer, schedule) sets, with schedule(step) -> factor"


def _refuse_to_load(optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    raise ConfigError("load_state_dict", name, "a state that is loaded before job.optimizer(...) is called")


class Groups:
    """The parameter groups of a torch optimizer, with the schedule's learning rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
        self.optimizer = optimizer
        self._schedule = schedule
        self._base = [float(g["lr"]) for g in optimizer.param_groups]
        optimizer.register_load_state_dict_pre_hook(_refuse_to_load)

    def check(self) -> None:
        """Make sure that nobody else sets learning rates: a replica that returns would not have theirs.

        Raises:
            ConfigError: a torch scheduler is attached to the optimizer, or a group's learning rate was changed.
        """
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError("job.optimizer", "an optimizer with a torch learning rate scheduler", _SCHEDULE)
        rates = [float(g["lr"]) for g in self.optimizer.param_groups]
        if rates != self._base:
            raise ConfigError("job.optimizer", f"learning rates {rates} instead of {self._base}", _SCHEDULE)

    def rates(self, record: CommitRecord) -> list[float]:
        """The learning rate that ``record`` gives each group."""
        factor = self._schedule(record.step) if self._schedule is not None else 1.0
        return [base * factor * record.lr_scale for base in self._base]

    def step(self, record: CommitRecord) -> None:
        """Update the parameters; afterwards the groups hold the rates before schedule and lr_scale again."""
        for group, rate in zip(self.optimizer.param_groups, self.rates(record), strict=True):
            group["lr"] = rate
        self.optimizer.step()
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            group["lr"] = base

    def hyper(self) -> tuple[dict[str, Any], ...]:
        """The hyper-parameters of each group before lr_scale, as JSON."""
        return tuple({k: _json(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups)

    def adopt(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Take the hyper-parameters of a fetched state.

        Raises:
            ValueError: they are of another optimizer.
        """
        if len(hyper) != len(self.optimizer.param_groups):
            raise ValueError(f"{len(hyper)} parameter groups, expected {len(self.optimizer.param_groups)}")
        for group, new in zip(self.optimizer.param_groups, hyper, strict=True):
            if set(new) != set(group) - {"params"}:
                raise ValueError(f"hyper-parameters {sorted(new)}, expected {sorted(set(group) - {'params'})}")
            for key, value in new.items():
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
        self._base = [float(g["lr"]) for g in self.optimizer.param_groups]


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.item()
    return value


def tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, torch.Tensor | DTensor]:
    """The optimizer's tensors by "parameter.key"; ``names`` maps id(parameter) to its name."""
    found: dict[str, torch.Tensor | DTensor] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in sorted(optimizer.state[param].items()):
                if isinstance(value, torch.Tensor):
                    found[f"{names[id(param)]}.{key}"] = value
    return found
