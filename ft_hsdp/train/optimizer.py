"""The user's optimizer inside the committed state: its tensors, and its update.

`create_state` makes the optimizer's tensors before its first step. A state can be fetched, copied and compared
only if all its tensors exist, and torch makes most of them in the first step. They get the values that torch
would have given them. Whether an optimizer allows this is not looked up in a list: it is tried out on small
tensors, and an optimizer that would train differently is refused by name.

`finish` and `Groups.step` apply a committed step. The user's optimizer does the update; divisor, clipping and
learning rate come from the commit record alone, so every replica does the same. The stored learning rate is the
one before lr_scale.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.errors import ConfigError

TRIAL_STEPS = 3
TRIAL_ROWS = 4  # of each dimension of a trial parameter
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _Created(Exception):
    """The state of a parameter group exists now; its update must not run."""


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make all tensors of ``optimizer`` now, as its first step would; what was loaded into it stays.

    No parameter and no learning rate changes. Needs as much memory as the gradients, for a moment.

    Args:
        optimizer: The user's; any class whose state are tensors.

    Raises:
        ConfigError: It would train differently with a state from here, or its state are not tensors alone.
    """
    plan = [(*each, sorted(_try_out(optimizer, trial))) for each, trial in _trials(optimizer)]
    loaded = {id(p) for p, state in optimizer.state.items() if state}
    for group, dims, keys in plan:
        for param in (p for p in group["params"] if p.dim() == dims and id(p) in loaded):
            _check_loaded(optimizer, optimizer.state[param], keys)
    if hasattr(optimizer, "_init_group") or not loaded:
        _create(optimizer)
    elif loaded != {id(p) for p in _parameters(optimizer)}:
        raise _refused(optimizer, "a state was loaded for some of its parameters only")
    for group, dims, keys in plan:
        for param in (p for p in group["params"] if p.dim() == dims):
            _fill(param, optimizer.state[param], keys)


def _check_loaded(optimizer: torch.optim.Optimizer, state: dict[str, Any], keys: list[str]) -> None:
    """Check that a loaded state has the tensors that a step makes; None stands for one that was not made yet."""
    if sorted(k for k in state if isinstance(state[k], torch.Tensor) or (k in keys and state[k] is None)) != keys:
        found = ", ".join(sorted(state))
        raise _refused(
            optimizer, f"a state was loaded that holds {found} instead of {', '.join(keys) or 'nothing'}"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _trials(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[dict[str, Any], int], dict[str, Any]]]:
    """Yield, for each group and each number of dimensions in it, a group of that kind with one small parameter."""
    for group in optimizer.param_groups:
        for dims in sorted({p.dim() for p in group["params"]}):
            like = next(p for p in group["params"] if p.dim() == dims)
            drawn = torch.randn([TRIAL_ROWS] * dims, generator=torch.Generator().manual_seed(0))
            small = drawn.to(device=like.device, dtype=like.dtype).requires_grad_()
            yield (group, dims), {**group, "params": [small]}


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind for one small parameter, without state and the user's hooks."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    made.__dict__.update({name: OrderedDict() for name in _HOOKS})
    made.state = defaultdict(dict)
    made.param_groups = [{**group, "params": [p.detach().clone().requires_grad_() for p in group["params"]]}]
    return made


def _try_out(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Train a small parameter twice, with a state from torch and with one from here; return its tensors' names.

    Raises:
        ConfigError: The two differ.
    """
    natural, ours = _trial(optimizer, group), _trial(optimizer, group)
    (theirs,), (mine,) = natural.param_groups[0]["params"], ours.param_groups[0]["params"]
    # Adagrad makes its state when it is constructed, which a trial skips: both begin with what it made then.
    eager = _eager(optimizer, group)
    for trial, param in ((natural, theirs), (ours, mine)):
        trial.state[param].update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in eager.items()})
    try:
        for seed in range(TRIAL_STEPS):
            drawn = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(seed + 1))
            grad = drawn.to(device=theirs.device, dtype=theirs.dtype)
            theirs.grad, mine.grad = grad.clone(), None
            natural.step()
            if seed == 0:
                kept = natural.state[theirs]
                strange = [k for k, v in kept.items() if not isinstance(v, torch.Tensor) and v is not None]
                if strange:
                    raise _refused(optimizer, f"its state holds {', '.join(strange)}, which is no tensor")
                keys = {k for k, v in kept.items() if v is not None}
                _create(ours)
                _fill(mine, ours.state[mine], sorted(keys))
            mine.grad = grad.clone()
            ours.step()
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(optimizer, f"a trial step fails: {type(error).__name__}: {error}") from error
    after, here = natural.state[theirs], ours.state[mine]
    if {k for k, v in after.items() if v is not None} != keys or set(here) - set(after):
        raise _refused(optimizer, "its state gets other tensors after its first step")
    if not torch.equal(theirs, mine) or any(not torch.equal(after[k], here[k]) for k in keys):
        raise _refused(optimizer, "it trains differently when its state exists before its first step")
    return keys


def _eager(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what the optimizer's constructor puts into a small parameter's state; {} if it cannot be tried."""
    if not hasattr(optimizer, "_init_group"):
        return {}
    arguments = {k: v for k, v in group.items() if k in optimizer.defaults and k != "params"}
    try:
        made = type(optimizer)([p.detach().clone().requires_grad_() for p in group["params"]], **arguments)
    except (TypeError, ValueError):
        return {}
    return dict(made.state[made.param_groups[0]["params"][0]])


def _fill(param: torch.Tensor, state: dict[str, Any], keys: list[str]) -> None:
    """Add what the first step would make beside what exists: zeros, as the trial has shown them to be right."""
    for key in keys:
        if state.get(key) is None:
            state[key] = torch.zeros_like(param, requires_grad=False)


def _create(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state without an update."""
    with _undisturbed(optimizer):
        if hasattr(optimizer, "_init_group"):
            _stop_after_creation(optimizer)
        else:
            _step_without_effect(optimizer)


@contextlib.contextmanager
def _undisturbed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give every parameter a gradient of zero and take the user's hooks away, within a ``with`` block."""
    hooks = {name: optimizer.__dict__[name] for name in _HOOKS if name in optimizer.__dict__}
    optimizer.__dict__.update({name: OrderedDict() for name in hooks})
    for param in _parameters(optimizer):
        param.grad = torch.zeros_like(param)
    try:
        yield
    finally:
        optimizer.__dict__.update(hooks)
        for param in _parameters(optimizer):
            param.grad = None


def _stop_after_creation(optimizer: torch.optim.Optimizer) -> None:
    """Stop each group's step after `_init_group`, in which torch's own optimizers make its state."""
    original: Any = optimizer._init_group  # type: ignore[attr-defined]

    def create_only(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise _Created

    groups = optimizer.param_groups
    optimizer.__dict__["_init_group"] = create_only
    try:
        for group in groups:
            optimizer.param_groups = [group]
            with contextlib.suppress(_Created):
                optimizer.step()
    finally:
        optimizer.param_groups = groups
        del optimizer.__dict__["_init_group"]


def _step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Make one step of another optimizer with a learning rate of zero; then set its state to zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for param in _parameters(optimizer):
        for value in optimizer.state[param].values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def _refused(optimizer: torch.optim.Optimizer, why: str) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        "job.optimizer", name, f"an optimizer whose state can be made before its first step ({why})"
    )


Schedule = Callable[[int], float]
CLIP_EPS = 1e-6


def finish(record: CommitRecord, reduced: Sequence[torch.Tensor], clip: float | None, accumulate: int) -> None:
    """Turn the sums into the gradient, in place: divide by the contributors' weights, then clip by the norm.

    The norm in the record was summed in rank order over the replica, so that every replica clips alike.

    Args:
        record: The commit.
        reduced: A flat fp32 sum for each bucket.
        clip: Largest norm; None does not clip.
        accumulate: Micro-batches whose gradients were added up.
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
        """Check that only the schedule sets learning rates: a replica that returns would not have any others.

        Raises:
            ConfigError: A torch scheduler is attached to the optimizer, or a group's learning rate was changed.
        """
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError("job.optimizer", "an optimizer with a torch learning rate scheduler", _SCHEDULE)
        rates = [float(g["lr"]) for g in self.optimizer.param_groups]
        if rates != self._base:
            raise ConfigError("job.optimizer", f"learning rates {rates} instead of {self._base}", _SCHEDULE)

    def rates(self, record: CommitRecord) -> list[float]:
        """Return the learning rate that ``record`` gives each group."""
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
        """Return the hyper-parameters of each group before lr_scale, as JSON."""
        return tuple({k: _json(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups)

    def adopt(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Take the hyper-parameters of a fetched state.

        Raises:
            ValueError: They are of another optimizer.
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
    """Return the optimizer's tensors by "parameter.key"; ``names`` maps id(parameter) to its name."""
    found: dict[str, torch.Tensor | DTensor] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in sorted(optimizer.state[param].items()):
                if isinstance(value, torch.Tensor):
                    found[f"{names[id(param)]}.{key}"] = value
    return found
