"""The values of `Job.log`: what may be logged, and which replica's value counts.

All replicas run the same loop and log the same names. The value of the contributor with the lowest id to the last
committed step counts, so each value is written once: no second replica writes it, and none that starts again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ft_hsdp.analysis.commits import MAX_VALUES, VALUE_NAME
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.loop.callbacks import CommittedStep

NAME_ALLOWED = "1 to 64 letters, digits and . _ / - as the name, which begins with a letter"


def checked(values: object, known: set[str]) -> dict[str, float | None]:
    """Return the values that a training loop logs, as numbers; None stands for one that is not finite.

    Args:
        known: The names that were logged before; the new ones are added.

    Raises:
        ConfigError: They are something else, or there are more than `MAX_VALUES` names.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("job.log", values, "a mapping of names to numbers")
    numbers = {_name(name): _number(str(name), value) for name, value in values.items()}
    if len(known | set(numbers)) > MAX_VALUES:
        new = min(set(numbers) - known)
        raise ConfigError("job.log", new, f"at most {MAX_VALUES} names in a job")
    known.update(numbers)
    return numbers


def _name(name: object) -> str:
    if not isinstance(name, str) or not VALUE_NAME.fullmatch(name):
        raise ConfigError("job.log", name, NAME_ALLOWED)
    return name


def _number(name: str, value: object) -> float | None:
    """Return a value as a number, None if it is not finite; numpy's numbers have ``item`` as tensors have."""
    shown = value
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ConfigError(f"job.log({name})", f"a tensor of shape {list(value.shape)}", "a number")
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"job.log({name})", shown, "a number")
    return float(value) if math.isfinite(value) else None


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
