"""The parameter groups of a model that `fully_shard` has sharded, by whoever called it.

FSDP2 reduces the gradients of one parameter group at once. A group belongs to one module, to several
(`fully_shard([norm, head])`), or to a part of the parameters of one (experts that have a mesh of their own).
Everything of FSDP2 that is not public and that ft_hsdp uses is used here; what another torch does not have is
asked for first.

`find` refuses in one line what cannot be adopted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from ft_hsdp.errors import ConfigError
from ft_hsdp.state.pacing import SpanMeter

TRAINABLE = (torch.float32, torch.bfloat16)  # types of parameters whose gradients can be summed in fp32

# What wrappers put into the names of parameters. Checkpoints of torch leave it out, too.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without what `torch.compile` and checkpoint wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True, eq=False)
class ParamGroup:
    name: str  # of its modules, for messages
    params: tuple[DTensor, ...]  # the trainable ones, in the order in which their gradients lie in the flat one
    sizes: tuple[int, ...]  # elements of each in the flat gradient shard, with padding
    # Of each parameter: whether the norm counts this rank's shard. Of the ranks that hold the same, one counts.
    counted: tuple[bool, ...]
    ranks: int  # over which FSDP2 shards its parameters, and averages their gradients
    raw: Any  # torch's FSDPParamGroup
    raw_params: tuple[Any, ...]  # torch's FSDPParam of each of ``params``

    def divisor(self) -> float:
        """Return by what FSDP2 divides the sum of its ranks' gradients (`set_gradient_divide_factor`)."""
        factor: float | None = getattr(self.raw, "gradient_divide_factor", None)
        return float(self.ranks) if factor is None else factor

    def changed(self) -> bool:
        now = [
            getattr(p._module_info.module, p._module_info.param_name) if self.raw.is_sharded else p.sharded_param
            for p in self.raw.fsdp_params
        ]
        trainable = [p for p in now if p.requires_grad]
        return len(trainable) != len(self.params) or any(
            a is not b for a, b in zip(trainable, self.params, strict=True)
        )

    def gradients(self, shards: Sequence[torch.Tensor]) -> list[DTensor]:
        """Return the gradients of ``params``, made of this rank's shards, as FSDP2 makes them after backward.

        `DTensor.from_local` takes several times as long: it works out anew what FSDP2 knows.
        """
        return [p.to_sharded_dtensor(shard) for p, shard in zip(self.raw_params, shards, strict=True)]

    def pending(self) -> bool:
        return any(getattr(p, "unsharded_accumulated_grad", None) is not None for p in self.raw.fsdp_params)

    @property
    def reduces_unused(self) -> bool:
        """Return whether FSDP2 can send zeros for a parameter that backward has left out: torch 2.12 and newer."""
        return hasattr(self.raw, "reduce_scatter_unused_params")

    def on_reduced(self, reduced: Callable[[torch.Tensor], None]) -> None:
        """Have ``reduced`` called with each flat gradient shard, before the parameters get their gradients."""
        self.raw._all_reduce_hook = reduced
        if self.reduces_unused:  # or the shard would have another size whenever one is unused
            self.raw.reduce_scatter_unused_params = True

    def _watch(self, used: Callable[[int], None]) -> None:
        """Have ``used`` called with the index of each parameter to which backward gives a gradient.

        FSDP2 makes the tensors that get the gradients when it gathers the parameters for the first time.
        """
        for index, fsdp_param in enumerate(self.raw_params):
            gathered = fsdp_param._unsharded_param
            if not getattr(gathered, "_post_accumulate_grad_hooks", None):
                gathered.register_post_accumulate_grad_hook(partial(_first, used, index))

    def on_forward(self, ran: Callable[[], None], used: Callable[[int], None]) -> None:
        """Watch each forward of the group's modules, and what backward makes of it.

        Args:
            ran: Called for each forward that will have FSDP2 reduce the group's gradients once. A module that is
                run twice has its gradients reduced twice, in one backward.
            used: Called in backward with the index of each parameter that gets a gradient.
        """
        register = getattr(self.raw, "_register_post_backward_hook", None)
        if register is None:
            return

        def counted(args: Any, kwargs: Any) -> Any:
            # In backward, recomputation registers again, without effect.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self._watch(used)
                given = register(args, kwargs)
                if given[0] is not args or given[1] is not kwargs:
                    ran()
                return given
            return register(args, kwargs)

        self.raw._register_post_backward_hook = counted


def _first(called: Callable[[int], None], value: int, _: torch.Tensor) -> None:
    called(value)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


class _Watched:
    """A communication of FSDP2 inside the replica: all-gather or reduce-scatter, with a meter around it.

    It has the methods of torch's `AllGather` and `ReduceScatter`. On a CPU the call returns when the communication
    has ended, or it returns a work that ends later. Work that is queued for a GPU counts until it is queued only.
    """

    def __init__(self, communication: Any, meter: SpanMeter) -> None:
        self.communication = communication
        self._meter = meter

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self.communication.allocate(*args, **kwargs)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._meter.begin()
        work = None
        try:
            work = self.communication(*args, **kwargs)
        finally:
            if work is None or not hasattr(work, "get_future"):
                self._meter.end()
            else:
                work.get_future().add_done_callback(lambda _: self._meter.end())
        return work


COMMUNICATIONS: tuple[str, ...] = ("_all_gather_comm", "_reduce_scatter_comm")


def watch(model: nn.Module, meter: SpanMeter) -> None:
    """Have ``meter`` told of each all-gather and reduce-scatter of ``model``, until `unwatch`."""
    unwatch(model)
    for raw in raw_groups(model):
        for name in COMMUNICATIONS:
            communication = getattr(raw, name, None)
            if communication is not None:  # some torch has no communications that can be replaced
                setattr(raw, name, _Watched(communication, meter))


def unwatch(model: nn.Module) -> None:
    for raw in raw_groups(model):
        for name in COMMUNICATIONS:
            watched = getattr(raw, name, None)
            if isinstance(watched, _Watched):
                setattr(raw, name, watched.communication)


def reshard(groups: Iterable[Any]) -> None:
    """Put the sharded parameters of torch's ``groups`` into the model: a forward alone leaves whole ones there."""
    for raw in groups:
        if not raw.is_sharded:
            raw.reshard()


def find(
    model: nn.Module, ranks: int, ranks_per_unit: int = 1, declared: Collection[str] = ()
) -> list[ParamGroup]:
    """Return the groups of ``model`` that have trainable parameters, in the order of their buckets.

    It is the order in which backward usually ends with them: the last module first, an inner one before the outer
    one, the root last. It depends on the structure of the model alone.

    Args:
        ranks_per_unit: So many ranks that follow each other train the same micro-batches (tensor parallelism).
    """
    reshard(raw_groups(model))
    names = {id(m): plain_name(n) or "the model" for n, m in model.named_modules(remove_duplicate=False)}
    found: list[ParamGroup] = []
    widths: dict[str, int] = {}  # by name of a group, also a frozen one: ranks over which it is sharded
    for raw in raw_groups(model):
        name = ", ".join(dict.fromkeys(names.get(id(m), type(m).__name__) for m in raw.modules))
        trainable = [p for p in raw.fsdp_params if p.sharded_param.requires_grad]
        _check(name, raw, (p.sharded_param for p in raw.fsdp_params))
        widths[name] = max(widths.get(name, 0), raw.mesh_info.shard_mesh_size)
        if not trainable:
            continue
        params = tuple(p.sharded_param for p in trainable)
        _check_trainable(name, raw, params)
        _check_mesh(name, raw, params, ranks, ranks_per_unit)
        sizes = tuple(math.prod(p.padded_sharded_param_size) for p in trainable)
        counted = tuple(_counts(p, ranks, ranks_per_unit) for p in params)
        shard_ranks = raw.mesh_info.shard_mesh_size
        found.append(ParamGroup(name, params, sizes, counted, shard_ranks, raw, tuple(trainable)))
    _check_all(model, found)
    _check_data_ranks(widths, ranks // ranks_per_unit)
    _check_buffers(model, declared)
    return found[::-1]


def raw_groups(model: nn.Module) -> Iterator[Any]:
    """Yield each of torch's groups once, those of outer modules first. Modules of one list share their state."""
    seen: set[int] = set()
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12 has one
            groups = [state._fsdp_param_group]
        for raw in groups:
            if raw is not None and id(raw) not in seen:
                seen.add(id(raw))
                yield raw


def _refused(name: str, what: str, allowed: str) -> ConfigError:
    return ConfigError("job.adopt", f"{name} {what}", allowed)


def _check(name: str, raw: Any, params: Iterable[torch.Tensor]) -> None:
    if any(p.is_meta for p in params):
        allowed = "parameters that exist: call to_empty(device=...) and load or initialise the weights first"
        raise _refused(name, "on the meta device", allowed)
    info = raw.mesh_info
    if not hasattr(info, "shard_mesh_size") or hasattr(info, "replicate_process_group"):
        allowed = "a mesh of one replica, fully_shard(mesh=init_device_mesh(device, (ranks,))): the job replicates"
        raise _refused(name, "on a mesh with a dimension that replicates", allowed)
    if getattr(raw.offload_policy, "pin_memory", None) is not None:
        allowed = "no offload_policy (`optim.offload` keeps the optimizer's state in host memory)"
        raise _refused(name, "with CPUOffloadPolicy", allowed)


def _check_trainable(name: str, raw: Any, params: tuple[DTensor, ...]) -> None:
    if raw._all_reduce_hook is not None:
        raise _refused(name, "with an all-reduce hook", "a model that is adopted once, and has no hook of its own")
    types = {p.dtype for p in params}
    if len(types) > 1 or not types <= set(TRAINABLE):
        words = " and ".join(sorted(str(t).removeprefix("torch.") for t in types))
        allowed = "trainable parameters of one type in each group, float32 or bfloat16"
        raise _refused(name, f"with trainable parameters of {words}", allowed)
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params):
        allowed = "no register_post_accumulate_grad_hook: a gradient is local to the replica until optim.step"
        raise _refused(name, "with hooks on gradients", allowed)


def _check_mesh(name: str, raw: Any, params: tuple[DTensor, ...], ranks: int, ranks_per_unit: int) -> None:
    """Check that the sum over FSDP2's ranks is one over all data ranks, and that this is known of each shard.

    That is so in two cases. With tensor parallelism FSDP2's ranks are one of each data rank. With expert
    parallelism the other ranks have sent their tokens to those that hold an expert.
    """
    fsdp_ranks = dist.get_process_group_ranks(raw.mesh_info.shard_process_group)
    on = f"over ranks {fsdp_ranks}"
    if ranks_per_unit > 1:
        first = params[0].device_mesh.get_rank() % ranks_per_unit
        here = sorted({p.device_mesh.size() for p in params} - {len(fsdp_ranks), ranks})
        if fsdp_ranks != list(range(first, ranks, ranks_per_unit)) or here:
            shape = f"({ranks // ranks_per_unit}, {ranks_per_unit})"
            mesh = f'init_device_mesh(device, {shape}, mesh_dim_names=("dp", "tp"))'
            allowed = f'fully_shard(mesh=mesh["dp"]) of {mesh}: ranks_per_unit is {ranks_per_unit}'
            raise _refused(name, on, allowed)
        return
    if any(p.device_mesh.size() != ranks for p in params):
        allowed = f"a mesh over the {ranks} ranks of this replica{_or_tensor_parallel(ranks, len(fsdp_ranks))}"
        raise _refused(name, on, allowed)
    if any(isinstance(placed, Replicate) for p in params for placed in p.placements):
        allowed = "parameters of which each rank has a part"
        out = _or_tensor_parallel(ranks, len(fsdp_ranks))
        raise _refused(name, f"{on}, with a parameter that others have, too", f"{allowed}{out}")


def _check_data_ranks(widths: dict[str, int], data_ranks: int) -> None:
    """Check that some group is sharded over all data ranks, as all of a model are but its experts."""
    name, widest = max(widths.items(), key=lambda each: each[1])
    if widest < data_ranks:
        allowed = (
            f"some parameters that are sharded over all {data_ranks}{_or_tensor_parallel(data_ranks, widest)}"
        )
        raise _refused(name, f"over {widest} of {data_ranks} ranks", allowed)


def _or_tensor_parallel(ranks: int, fsdp_ranks: int) -> str:
    if fsdp_ranks >= ranks or ranks % fsdp_ranks:
        return ""
    return f", or ranks_per_unit: {ranks // fsdp_ranks} if ranks train one micro-batch together"


def _counts(param: DTensor, ranks: int, ranks_per_unit: int) -> bool:
    """Return whether this rank is the first of those that hold the same shard of a parameter."""
    mesh = param.device_mesh
    if mesh.size() < ranks and mesh.get_rank() % ranks_per_unit:  # tensor parallelism has left it alone
        return False
    at = mesh.get_coordinate()
    assert at is not None  # this rank holds a shard
    return not any(place for place, how in zip(at, param.placements, strict=True) if isinstance(how, Replicate))


def _check_all(model: nn.Module, groups: list[ParamGroup]) -> None:
    known = {id(p) for group in groups for p in group.params}
    outside = [plain_name(n) for n, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        allowed = "fully_shard(model) as the last call and without ignored_params for it, or requires_grad_(False)"
        raise _refused(outside[0] + more, "trainable, but not sharded", allowed)
    if not groups:
        raise _refused(
            type(model).__name__, "without a trainable parameter", "a model that fully_shard has sharded"
        )


def _check_buffers(model: nn.Module, declared: Collection[str]) -> None:
    """Check that forward changes no statistics: each rank would have others, and no state would have them."""
    for name, module in model.named_modules():
        statistics = plain_name(f"{name}.running_mean" if name else "running_mean")
        if module.training and getattr(module, "running_mean", None) is not None and statistics not in declared:
            ways = "its eval() before job.adopt (the statistics stay), track_running_stats=False, or GroupNorm"
            allowed = f'job.adopt(model, batch_norm="mean"); else {ways}'
            raise _refused(plain_name(name) or "the model", "with statistics that forward changes", allowed)
