"""The tensors of the user's optimizers, made before their first step.

A state can be fetched, copied and compared only if all its tensors exist, and torch makes most of them in the
first step. `create_state` gives them the values that torch would have given them. Whether an optimizer allows this
is not looked up in a list: it is tried out on small tensors, and an optimizer that would train differently is
refused by name.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.state.packing import local

TRIAL_STEPS = 3
TRIAL_ROWS = 4  # of each dimension of a trial parameter
TRIAL_COPIES = 4  # of a parameter in a trial: itself, its gradient, and mostly two in its state
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _Created(Exception):
    """The state of a parameter group exists now; its update must not run."""


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make all tensors of ``optimizer`` now, as its first step would; what was loaded into it stays.

    No parameter and no learning rate changes. Needs as much memory as the gradients, for a moment.

    Raises:
        ConfigError: It would train differently with a state from here, or its state are not tensors alone.
    """
    tried: dict[Any, list[str]] = {}
    plan = []
    for group, dims in ((g, d) for g in optimizer.param_groups for d in sorted({p.dim() for p in _trainable(g)})):
        like = next(p for p in _trainable(group) if p.dim() == dims)
        kind = dims, like.dtype, like.device, getattr(like, "placements", None), _kind(group)
        if kind not in tried:
            drawn = _drawn(like, 0) if _is_of_torch(optimizer) else _small(like, 0)
            tried[kind] = sorted(_try_out(optimizer, {**group, "params": [drawn.requires_grad_()]}))
        plan.append((group, dims, tried[kind]))
    loaded = {id(p) for p, state in optimizer.state.items() if state}
    for group, dims, keys in plan:
        for param in (p for p in _trainable(group) if p.dim() == dims and id(p) in loaded):
            _check_loaded(optimizer, optimizer.state[param], keys)
    if hasattr(optimizer, "_init_group") or not loaded:
        _create(optimizer)
    elif loaded != {id(p) for p in _parameters(optimizer)}:
        raise _refused(optimizer, "a state was loaded for some of its parameters only")
    for group, dims, keys in plan:
        for param in (p for p in _trainable(group) if p.dim() == dims):
            _fill(param, optimizer.state[param], keys)
    _warm_up(optimizer)


def updates_rows_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the update of each row of a parameter depends on the gradient of that row alone.

    Does not block. Only then does it have the same bits however many ranks share the rows. So small parameters
    are trained twice, with other gradients of the last row.
    """
    kinds = {}
    for group in optimizer.param_groups:
        for param in _trainable(group):
            kinds[param.dim(), param.dtype, _kind(group)] = group, param
    return all(_first_rows_alike(optimizer, group, param) for group, param in kinds.values())


def _first_rows_alike(optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor) -> bool:
    """Return whether all rows but the last get the same bits, whatever the gradient of the last one is."""
    found = []
    for last in (1.0, 2.0):
        one = {**group, "params": [_drawn(like, 0)]}
        if isinstance(group["lr"], float):
            one["lr"] = 1.0  # so that what differs in the update is not lost in the sum
        trial = _trial(optimizer, one)
        (param,) = trial.param_groups[0]["params"]
        trial.state[param].update(_eager(optimizer, one))
        for seed in range(TRIAL_STEPS):
            param.grad = _drawn(like, seed + 1)
            param.grad[-1:] *= last
            trial.step()
        found.append(param.detach()[:-1])
    return torch.equal(*found)


def _warm_up(optimizer: torch.optim.Optimizer) -> None:
    """Step a copy of one parameter of each shape, so that the first step is as fast as the later ones.

    In the first one torch finds out how each operation is sharded, for each shape: 0.2 s for a small transformer,
    for which all would wait when a replica returns. Takes no more memory than the gradients do: for those that are
    a quarter of the model a small one stands, alike on all ranks. An update that no DTensor has is found here.
    """
    total = sum(p.numel() for p in _parameters(optimizer))
    for group in optimizer.param_groups:
        for like in {(p.shape, p.dtype): p for p in _trainable(group) if isinstance(p, DTensor)}.values():
            failed = None
            try:
                if TRIAL_COPIES * like.numel() <= total:
                    _step_copy(optimizer, group, like, optimizer.state[like])
                    continue
            except Exception as error:
                failed = error  # of the optimizer, if a small one fails, too; else this process lacks memory
            with _refusing(optimizer):
                _step_copy(optimizer, group, _small(like, 0), {})
            if failed is not None:
                raise failed


def _step_copy(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor, state: dict[str, Any]
) -> None:
    """Step a copy of a parameter with a state of zeros like its own, and a gradient of zeros."""
    trial = _trial(optimizer, {**group, "params": [like]})
    (param,) = trial.param_groups[0]["params"]
    trial.state[param].update({k: v if v is None else torch.zeros_like(v) for k, v in state.items()})
    param.grad = torch.zeros_like(param)
    trial.step()


def _check_loaded(optimizer: torch.optim.Optimizer, state: dict[str, Any], keys: list[str]) -> None:
    """Check that a loaded state has the tensors that a step makes; None stands for one that was not made yet."""
    if sorted(k for k in state if isinstance(state[k], torch.Tensor) or (k in keys and state[k] is None)) != keys:
        found = ", ".join(sorted(state))
        raise _refused(
            optimizer, f"a state was loaded that holds {found} instead of {', '.join(keys) or 'nothing'}"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what the optimizer trains: a frozen parameter never has a gradient, and so no state."""
    return [p for group in optimizer.param_groups for p in _trainable(group)]


def _trainable(group: dict[str, Any]) -> list[torch.Tensor]:
    return [p for p in group["params"] if p.requires_grad]


def _kind(value: Any) -> Any:
    """Return what groups have in common of which one trial is enough; numbers count by their sign."""
    if isinstance(value, dict):
        return tuple(sorted((k, _kind(v)) for k, v in value.items() if k not in ("params", "param_names")))
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value).__name__, "" if isinstance(value, torch.Tensor) else repr(value)
    return "number", repr((value > 0) - (value < 0))


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer treats a DTensor as any tensor: a trial with whole ones is ten times as fast.

    One of a user's own may ask a DTensor for its shards.
    """
    return type(optimizer).__module__.partition(".")[0] == "torch"


def _small(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a small tensor of the kind and the sharding of ``like``, with random numbers alike on all ranks."""
    drawn = _drawn(like, seed)
    if not isinstance(like, DTensor):
        return drawn
    return distribute_tensor(drawn, like.device_mesh, like.placements, src_data_rank=None)


def _drawn(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a small tensor of the kind of ``like``, whole, with random numbers alike on all ranks."""
    drawn = torch.randn([TRIAL_ROWS] * like.dim(), generator=torch.Generator().manual_seed(seed))
    return drawn.to(device=like.device, dtype=like.dtype)


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind for one small parameter, without state and the user's hooks."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    made.__dict__.update({name: OrderedDict() for name in _HOOKS})
    made.state = defaultdict(dict)
    made.param_groups = [{**group, "params": [p.detach().clone().requires_grad_() for p in group["params"]]}]
    return made


def _try_out(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """Train a small parameter twice, with a state from torch and with one from here; return its tensors' names."""
    natural, ours = _trial(optimizer, group), _trial(optimizer, group)
    (theirs,), (mine,) = natural.param_groups[0]["params"], ours.param_groups[0]["params"]
    # Adagrad makes its state when it is constructed, which a trial skips: both begin with what it made then.
    eager = _eager(optimizer, group)
    for trial, param in ((natural, theirs), (ours, mine)):
        trial.state[param].update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in eager.items()})
    with _refusing(optimizer):
        for seed in range(TRIAL_STEPS):
            grad = _small(theirs, seed + 1)
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
    after, here = natural.state[theirs], ours.state[mine]
    if {k for k, v in after.items() if v is not None} != keys or set(here) - set(after):
        raise _refused(optimizer, "its state gets other tensors after its first step")
    pairs = [(theirs, mine), *((after[k], here[k]) for k in keys)]
    if not all(torch.equal(local(a), local(b)) for a, b in pairs):
        raise _refused(optimizer, "it trains differently when its state exists before its first step")
    return keys


@contextlib.contextmanager
def _refusing(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Refuse an optimizer whose trial step fails within a ``with`` block."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(optimizer, f"a trial step fails: {type(error).__name__}: {error}") from error


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
