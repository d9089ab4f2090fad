"""What the optimizers and the schedule of a job were made with, as JSON, and how that differs from a checkpoint's.

A resume compares three things: what the constructors were given when the checkpoint was written, what they are
given now, and the value in the checkpoint. An argument that has not changed leaves the checkpoint's value as it
is, also one that a schedule or `job.on_commit` has moved. An argument that has changed wins over it.

Arguments are not recorded where they are given, but where constructors leave them: in parameter groups and
attributes, before a state is loaded. A function is known by its values at a few hundred steps, not by its code: a
closure, a partial or a module's constant count as well then.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ft_hsdp.core import state_id
from ft_hsdp.state.transfer.shard_manifest import Json
from ft_hsdp.train.optimizer.lr_schedule import from_json, to_json

GIVEN = "given"  # the key of all this, in a dict behind the hyper-parameters of a checkpoint
POINTS = 64  # steps of each power of two at which a function is evaluated
LONGEST = 120  # characters of a value that a change names
_COUNTERS = ("last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step")
_FUNCTIONS = ("lr_lambdas", "_scale_fn_custom")  # of LambdaLR, MultiplicativeLR and CyclicLR: number -> factor
_QUIET = ("foreach", "fused", "capturable", "differentiable")  # how something is computed, not what
# Attributes that a constructor computes from its arguments, one of which stands beside them as a rule.
_DERIVED = {"base_lrs", "initial_lr", "min_lr", "last_lr", "schedule_phases", "best", "mode_worse", "attributes"}
_DERIVED |= {"T_i", "total_size", "base_momentums", "max_momentums", "min_lrs"}


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """An argument that differs from the one with which a checkpoint was written."""

    setting: str  # such as "T_max of CosineAnnealingLR"
    old: Json  # as in the checkpoint; None: it was not given
    new: Json


def of_function(function: Callable[[int], Any], steps: int) -> Json:
    """Return what tells a function of the step from others: of each power of two its first value and a digest."""
    if not isinstance(function, FunctionType) and (held := getattr(function, "__dict__", None)):
        with contextlib.suppress(Exception):  # it may count its calls; and hold the job, which cannot be copied
            function = copy.copy(function)
            vars(function).update(from_json(held, to_json(held)))

    def value(step: int) -> Json:
        try:
            found = function(step)
            return to_json([float(x) for x in found] if isinstance(found, Sequence) else float(found))
        except Exception as error:  # beyond its end
            return type(error).__name__

    values, first = [], 1
    while first <= max(1, steps):
        found = [value(step) for step in range(first, 2 * first, max(1, first // POINTS))]
        values.append([first, found[0], state_id.digest(found)])
        first *= 2
    return {"values": values}


def of_scheduler(scheduler: LRScheduler, steps: int) -> dict[str, Json]:
    """Return what a scheduler was made with, and those inside it."""
    found = {key: value for key, value in scheduler.state_dict().items() if key not in _COUNTERS}
    for name, value in vars(scheduler).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, LRScheduler) for each in parts):
            found[name] = [of_scheduler(each, steps) for each in parts]
        elif name in _FUNCTIONS and value is not None:
            known = {id(each): each for each in parts}  # of several groups it is often one
            values = {str(at): of_function(each, steps) for at, each in enumerate(known.values())}
            found[name] = {
                **values,
                "of": [[*known].index(id(each)) for each in parts],
                "attributes": found.get(name),
            }
    return {"class": type(scheduler).__name__, **to_json(found)}


def of_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[Json]) -> dict[str, Json]:
    """Return what an optimizer was made with, ``groups`` of parameters included; its numbers and texts count."""
    found: dict[str, Json] = {"class": type(optimizer).__name__, "groups": list(groups)}
    for name, value in vars(optimizer).items():
        if not name.startswith("_") and name not in ("defaults", "state", "param_groups"):
            try:
                found.setdefault(name, to_json(value))
            except TypeError:
                continue
    return found


def differ(then: Json, now: Json) -> bool:
    return next(_paths(then, now), None) is not None


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[ChangedSetting, ...]:
    """Return what differs between the arguments of a checkpoint and those of now, of as many optimizers."""
    found = [ChangedSetting(path, old, new) for path, old, new in _paths(then["settings"], now["settings"])]
    if not any(each.setting.startswith("lr.") for each in found):
        found += [
            ChangedSetting("schedule" + path, old, new)
            for path, old, new in _paths(then["schedule"], now["schedule"])
        ]
    for a, b in zip(then["optimizers"], now["optimizers"], strict=True):
        then_own, own = ({k: v for k, v in each.items() if k != "groups"} for each in (a, b))
        found += [ChangedSetting(f"{path} of {b['class']}", old, new) for path, old, new in _paths(then_own, own)]
        found += _of_groups(b["class"], a["groups"], b["groups"])
    kinds = [[each["class"] for each in given["schedulers"]] for given in (then, now)]
    if kinds[0] != kinds[1]:
        return (*found, ChangedSetting("the torch schedulers", *kinds))
    for a, b in zip(then["schedulers"], now["schedulers"], strict=True):
        derived = any(each.setting.partition(" of ")[0].endswith("lr") for each in found)
        told = _told(list(_paths(a, b)), derived)
        found += [ChangedSetting(f"{path} of {b['class']}", old, new) for path, old, new in told]
    return tuple(found)


_Found = tuple[str, Json, Json]


def _of_groups(name: str, then: Sequence[Json], now: Sequence[Json]) -> list[ChangedSetting]:
    """Return what differs between the groups of an optimizer; what is alike in several is told once."""
    if len(then) != len(now):
        return [ChangedSetting(f"the number of parameter groups of {name}", len(then), len(now))]
    where: dict[str, tuple[_Found, list[int]]] = {}
    for at, (a, b) in enumerate(zip(then, now, strict=True)):
        paths = list(_paths(a, b))
        if a.get("initial_lr") == b.get("initial_lr") is not None or "max_lr" in (path for path, _, _ in paths):
            paths = [each for each in paths if each[0] != "lr"]  # a scheduler's constructor has set it
        for change in _told(paths, False):
            where.setdefault(repr(change), (change, []))[1].append(at)
    found = []
    for (path, old, new), groups in where.values():
        some = "" if len(groups) == len(now) else f" in group {', '.join(map(str, groups))}"
        found.append(ChangedSetting(f"{path} of {name}{some}", old, new))
    return found


def _told(found: list[_Found], derived: bool) -> list[_Found]:
    """Return what does not follow from others; else, unless others are known (``derived``), the first one."""
    told = [each for each in found if not _DERIVED & {*each[0].split(".")}]
    return told if told or derived else found[:1]


def _paths(then: Json, now: Json, path: str = "") -> Iterator[_Found]:
    """Yield where two values differ, by the names on the way, with both values."""
    if then == now:
        return
    if isinstance(then, dict) and isinstance(now, dict):
        if "values" in then and "values" in now:
            pairs = zip(then["values"], now["values"], strict=False)
            for (first, old, _), (_, new, _) in (pair for pair in pairs if pair[0] != pair[1]):
                same = f"{path}({first} to {2 * first - 1})", "the function before", "another function"
                yield (f"{path}({first})", old, new) if old != new else same
                return
        elif then.get("class") != now.get("class"):
            yield path, then.get("class"), now.get("class")
        else:
            for key in sorted({*then, *now} - {*_QUIET}):
                yield from _paths(
                    then.get(key), now.get(key), f"{path}.{key.lstrip('_')}" if path else key.lstrip("_")
                )
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now) and _nested(now):
        for at, pair in enumerate(zip(then, now, strict=True)):
            yield from _paths(*pair, f"{path}.{at}")
    else:
        yield path, _short(then), _short(now)


def _nested(values: Sequence[Json]) -> bool:
    return any(isinstance(each, dict | list) for each in values)


def _short(value: Json) -> Json:
    if isinstance(value, dict) and ("values" in value or "of" in value):
        return "a function"
    text = json.dumps(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST]}..."
