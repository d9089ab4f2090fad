"""An adopted model: the buckets in which its gradient shards go to FTAR (FT-HSDP §4.1).

FSDP2's all-reduce hook gives one flat, padded, reduced shard for each parameter group (`param_groups`).
The hook only keeps it: the bucket is ready when the last of its parameters has its gradient, which is after
FSDP2's own division. Order and sizes of the buckets are static, because a replica that is behind takes part in
every all-reduce without running backward. The order in which backward makes them may be any.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ft_hsdp.errors import ConfigError, InvalidArgument
from ft_hsdp.memory.parameters import CutParameter, folded
from ft_hsdp.state.pacing import SpanMeter
from ft_hsdp.train.device import read_here
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.fsdp.frozen import BufferWatch
from ft_hsdp.train.fsdp.moving_buffers import MovingBuffers, chosen, places, statistics
from ft_hsdp.train.fsdp.param_groups import ParamGroup

FP32 = MixedPrecisionPolicy()
SAMPLE = 8  # elements of each gradient, by which a change after backward shows: versions do not count foreach ops


class Bucket:
    """The gradient of one parameter group: what is all-reduced at once."""

    def __init__(
        self, index: int, group: ParamGroup, mean_over: int, ready: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Take the group's gradients from now on.

        Args:
            mean_over: The gradient that is handed on is the sum over data ranks, divided by their number.
            ready: Takes the index and the flat gradient shard; called inside backward.
        """
        self.index = index
        self.name = group.name
        self.params = group.params
        self.changed = group.changed
        self.places = [sum(group.sizes[:i]) for i in range(len(group.sizes))]  # where each shard begins
        self.numel = sum(group.sizes)  # of the flat gradient shard, with padding
        self.counted = _spans(group.sizes, group.counted)  # the parts that this rank adds to the gradient's norm
        self._group = group
        self._mean_over = mean_over
        self._ready = ready
        self._fresh: torch.Tensor | None = None  # reduced, but not divided yet
        self._expected = 0  # how often backward will reduce it
        self._reduced = 0  # how often it has
        self._flat: torch.Tensor | None = None  # the sum of what was reduced, until it is handed on
        self._handed: torch.Tensor | None = None  # a sample of the gradients then
        self.used: set[int] = set()  # parameters to which backward gave a gradient, in this part of a step
        self.touched = False  # backward gave one to a parameter, in this micro-batch
        group.on_forward(self._ran, self._use)
        group.on_reduced(self._keep)
        self.params[-1].register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        self._fresh = self._flat = self._handed = None
        self._expected = self._reduced = 0
        self.touched = False

    def finish(self) -> bool:
        """Hand on what is left after backward; return whether there was a gradient.

        Raises:
            InvalidArgument: It was accumulated, and never reduced.
        """
        if self._handed is not None:
            return True
        if self._reduced == 0 and self._group.pending():
            raise InvalidArgument(f"{self.name} has gradients that backward did not reduce inside the replica")
        if self._reduced == 0:  # not used by this batch
            like = self.params[0]._local_tensor
            self._flat = torch.zeros(self.numel, dtype=torch.float32, device=like.device)
        self._hand_on()
        return self._reduced > 0

    def samples(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return samples of the gradients: those that were handed on, and those that are there now, if any are."""
        now = self._sample()
        return None if now is None or self._handed is None else (self._handed, now)

    def _ran(self) -> None:
        self._expected += 1

    def _use(self, index: int) -> None:
        self.touched = True
        self.used.add(index)

    def _keep(self, flat: torch.Tensor) -> None:
        if self._handed is not None:
            again = f"{self.name} in a second backward for the same batch"
            raise ConfigError(
                "gradients", again, "one backward for each batch of job.batches; add losses up before"
            )
        if flat.numel() < self.numel and not self._group.reduces_unused:
            allowed = "a loss that uses all of them; find_unused_parameters needs torch 2.12"
            raise ConfigError("backward", f"no gradient of some parameters of {self.name}", allowed)
        if flat.numel() != self.numel:
            raise ConfigError(
                "gradients",
                f"{flat.numel()} elements of {self.name} instead of {self.numel}",
                "the parameters that were trainable at job.adopt",
            )
        self._fresh = flat

    def _arrived(self, _: torch.Tensor) -> None:
        fresh, self._fresh = self._fresh, None
        assert fresh is not None
        self._reduced += 1
        self._flat = fresh.float() if self._flat is None else self._flat + fresh
        read_here(fresh)  # FSDP's reduce-scatter stream has allocated it, and it goes here
        if self._expected > 1:  # or the next gradient would be added in place to what is kept here
            self.drop()
        if self._reduced >= self._expected:
            self._hand_on()

    def _hand_on(self) -> None:
        flat, self._flat = self._flat, None
        assert flat is not None
        scale = self._group.divisor() / self._mean_over
        if scale != 1:
            flat.mul_(scale)
        sample = self._sample()
        self._handed = flat[:0] if sample is None else sample
        self._ready(self.index, flat)

    def _sample(self) -> torch.Tensor | None:
        """Return a few elements of each gradient, as bytes; None if there are no gradients."""
        grads = [p.grad._local_tensor.view(-1) for p in self.params if isinstance(p.grad, DTensor)]
        if not grads:
            return None
        return torch.cat([grad[:: grad.numel() // SAMPLE + 1] for grad in grads]).view(torch.uint8)

    def assign(self, flat: torch.Tensor) -> None:
        """Make each parameter's gradient a view into ``flat``, or a copy if it has another type."""
        views = []
        for param, place in zip(self.params, self.places, strict=True):
            shard = param._local_tensor
            views.append(flat[place : place + shard.numel()].view(shard.shape).to(shard.dtype))
        for param, gradient in zip(self.params, self._group.gradients(views), strict=True):
            param.grad = gradient

    def drop(self) -> None:
        for param in self.params:
            param.grad = None


def _spans(sizes: Sequence[int], counted: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    end = 0
    for size, counts in zip(sizes, counted, strict=True):
        begin, end = end, end + size
        if counts and spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], end)
        elif counts:
            spans.append((begin, end))
    return tuple(spans)


class _Weigh(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by a number that is asked for then."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: Callable[[], int], zeros: bool) -> torch.Tensor:
        ctx.weight, ctx.zeros = weight, zeros
        return tensor.detach()  # not a view for autograd, so that the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weight = ctx.weight()
        # No gradient instead of zeros: torch's operations hand it on, while zeros would become NaN in a 0/0.
        nothing = torch.zeros_like(grads[0]) if ctx.zeros else None
        return (grads[0] * weight if weight else nothing), None, None


def weighed(output: Any, weight: Callable[[], int], zeros: bool = False) -> Any:
    """Return a model's output; every gradient that goes back through it is multiplied by a weight.

    Args:
        output: A tensor, or tuples, lists, mappings and dataclasses of them.
        weight: Returns the weight, an integer; called in each backward. With 0 the output has no gradient. So a
            loss that is 0/0 gives no NaN to a parameter, as long as what it is computed from is finite.
        zeros: Whether the gradient is zero instead with 0, for a backward with collectives in which each rank has
            to take part. A loss that the model itself computes must then be finite.
    """
    return _mapped(lambda t: _Weigh.apply(t, weight, zeros) if t.requires_grad else t, output)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: Any = dataclasses.replace(value)
        for field in dataclasses.fields(value):
            setattr(made, field.name, _mapped(change, getattr(value, field.name)))
        return made
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _mapped(change, item)
        return made
    if isinstance(value, tuple | list):
        items = [_mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class AdoptedModel:
    """A model under FSDP2 that hands its gradient shards on, bucket by bucket, as backward makes them."""

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        ready: Callable[[int, torch.Tensor], None],
        find_unused: bool = False,
        ranks_per_unit: int = 1,
        batch_norm: str | None = None,
        buffers: Mapping[str, str] | None = None,
        slots: int = 1,
    ) -> None:
        """Take a model over that `fully_shard` has sharded; what is not said here is said of `Job.adopt`.

        With ``find_unused`` there is one bucket more: of each parameter, on how many ranks it was used. If buffers
        are part of the state there is another one, the last (`MovingBuffers`).

        Args:
            ready: Takes a bucket's index and flat gradient shard, the mean over the data ranks, fp32 [numel];
                called inside backward.

        Raises:
            ConfigError: The model cannot be adopted.
        """
        self.model = model
        self._fsdp_modules = param_groups.fsdp_modules(model)
        self._raw_groups = tuple(param_groups.raw_groups(model))
        self._ready = ready
        self._find_unused = find_unused
        self._ranks = ranks
        self.data_ranks = ranks // ranks_per_unit  # over which gradients are a mean
        if batch_norm not in (None, "mean"):
            raise ConfigError("job.adopt(batch_norm)", batch_norm, '"mean", or None')
        known = places(model)
        norms = statistics(model, known) if batch_norm is not None else []
        kinds = {name: place.kind for name, place in known.items() if place.tensor is not None}
        modes = chosen({} if buffers is None else buffers, kinds)
        norms = [name for name in norms if name not in modes]
        modes = dict.fromkeys(norms, "mean") | modes
        groups = param_groups.find(model, ranks, ranks_per_unit, modes)
        if find_unused and not all(group.reduces_unused for group in groups):
            raise ConfigError(
                "job.adopt(find_unused_parameters)", True, f"False with torch {torch.__version__}; 2.12 has it"
            )
        moving = {name: mode for name, mode in modes.items() if mode != "local"}
        self.moving = MovingBuffers(model, moving, norms, slots) if moving else None
        self.declared = frozenset(modes)
        # What training must leave alone: that is not trained, and was not declared.
        self.undeclared = BufferWatch([p for n, p in known.items() if p.kind != "trained" and n not in modes])
        trainable = {id(p) for group in groups for p in group.params}
        self.params: dict[str, DTensor] = {
            param_groups.plain_name(n): p
            for n, p in model.named_parameters()
            if id(p) in trainable and isinstance(p, DTensor)
        }
        self.buckets = [Bucket(i, group, self.data_ranks, ready) for i, group in enumerate(groups)]
        self.expert_parallel = any(group.ranks < self.data_ranks for group in groups)
        self.counted = tuple(bucket.counted for bucket in self.buckets)  # in the norm; of each gradient bucket
        gradients = [b.numel for b in self.buckets]
        self.gradients = len(gradients)  # how many buckets are gradients
        counts = [len(self.params)] if find_unused else []
        moves = self.moving.numel if self.moving is not None else 0
        self._moves = moves > 0  # whether there is a bucket of moving buffers
        self.sizes = (*gradients, *counts, *([moves] if moves else []))

    @property
    def rows(self) -> list[list[tuple[str, tuple[int, ...]]]] | None:
        """The parameters of each gradient bucket in order, with their whole shapes.

        None: replicas of unequal width cannot sum them, as a parameter is not cut along dimension 0 over all
        ranks, or there are moving buffers, whose sum over the ranks depends on their number in its last bits.
        """
        params = self.params.values()
        by_rows = all(p.placements == (Shard(0),) and p.device_mesh.size() == self._ranks for p in params)
        if not by_rows or self.moving is not None:
            return None
        names = {id(p): n for n, p in self.params.items()}
        return [[(names[id(p)], tuple(p.shape)) for p in bucket.params] for bucket in self.buckets]

    @property
    def layout(self) -> list[list[Any]]:
        """How the ranks share the parameters, for a log, as `parameters.folded` says it; [] if it cannot."""
        found = {}
        for name, param in self.params.items():
            mesh, dims = param.device_mesh, [getattr(how, "dim", -1) for how in param.placements]
            copies = self._ranks // mesh.size()  # tensor parallelism has left it alone
            strided = [type(how).__name__ == "_StridedShard" for how in param.placements]
            usual = strided == [dim >= 0 and dim in dims[at + 1 :] for at, dim in enumerate(dims)]
            ranks = mesh.mesh.flatten().tolist()
            if not usual or ranks != list(range(ranks[0] % copies, self._ranks, copies)):
                return []
            cuts = (*zip(mesh.shape, dims, strict=True), *([(copies, -1)] if copies > 1 else []))
            found[name] = CutParameter(tuple(param.shape), cuts)
        return folded(found)

    def trained(self) -> bool:
        """Return whether the backward of the newest micro-batch has given a parameter a gradient."""
        return any(bucket.touched for bucket in self.buckets)

    def settle(self) -> None:
        """Take the moving buffers as they are now: they may have been loaded after adoption."""
        if self.moving is not None:
            self.moving.settle()

    def check(self) -> None:
        """Check that the model still has the parameters that were taken over."""
        for bucket in self.buckets:
            if bucket.changed():
                allowed = "the parameters that job.adopt has seen: load_state_dict(assign=True) and"
                what = f"other trainable parameters in {bucket.name}"
                raise ConfigError("job.adopt", what, f"{allowed} requires_grad_ come before it")

    def sync(self, last: bool) -> None:
        """Prepare for a micro-batch: FSDP2 reduces gradients inside the replica in the ``last`` of a step only."""
        if not self._find_unused:
            self._check_used()
            for bucket in self.buckets:
                bucket.used.clear()
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_is_last_backward(last)
        for bucket in self.buckets:
            bucket.begin()
        if self.moving is not None:
            self.moving.begin()

    def finish(self, replica: int = 0) -> None:
        """After the last backward of a step, hand on the buckets that were not, with zeros for unused ones.

        Does not wait for a device.
        """
        self.check()
        reduced = [bucket.finish() for bucket in self.buckets]
        if not any(reduced):
            raise ConfigError("optim.step", "no gradient", "a call after the backward of each batch")
        if self._find_unused:
            used = [float(i in bucket.used) for bucket in self.buckets for i in range(len(bucket.params))]
            like = self.buckets[0].params[0]._local_tensor
            self._ready(self.gradients, torch.tensor(used, dtype=torch.float32, device=like.device))
        else:
            self._check_used()
        if self.moving is not None and self._moves:
            self._ready(len(self.sizes) - 1, self.moving.take(replica))
        for bucket in self.buckets:
            bucket.used.clear()

    def check_gradients(self) -> None:
        """Check that the gradients are those that were handed on. Waits for the device, once.

        Raises:
            ConfigError: They were changed since.
        """
        samples = [(bucket.name, both) for bucket in self.buckets if (both := bucket.samples()) is not None]
        if not samples or torch.equal(*(torch.cat(each) for each in zip(*(s for _, s in samples), strict=True))):
            return
        name = next(name for name, both in samples if not torch.equal(*both))
        allowed = "gradients as backward leaves them, until optim.step has reduced them (optim.clip clips them)"
        raise ConfigError("gradients", f"others in {name} after backward", allowed)

    def _check_used(self) -> None:
        """Check that a micro-batch used all parameters: torch would not update the others, and zeros would.

        Each micro-batch has to: how many of them a replica trains in a step may change with its quota.
        """
        used = [i in bucket.used for bucket in self.buckets for i in range(len(bucket.params))]
        if all(used) or not any(used):  # without any, the weight of the micro-batch is 0, or there was none yet
            return
        names = {id(param): name for name, param in self.params.items()}
        params = [param for bucket in self.buckets for param in bucket.params]
        first, *more = [names[id(param)] for param, count in zip(params, used, strict=True) if not count]
        which = f"no gradient of {first}" + (f" and {len(more)} more" if more else "")
        out = "freeze what is never used, or job.adopt(model, find_unused_parameters=True)"
        raise ConfigError("backward", which, f"a loss that uses all trainable parameters; else {out}")

    def assign(self, reduced: Sequence[torch.Tensor], contributor: int = 0) -> None:
        """Make each parameter's gradient one from the reduced flat shards, one for each bucket.

        A parameter that no contributor has used gets none. Moves the moving buffers, too. With these, or with
        ``find_unused``, a collective of the replica.
        """
        for bucket, flat in zip(self.buckets, reduced[: self.gradients], strict=True):
            bucket.assign(flat)
        if self._find_unused:
            counts = reduced[self.gradients].clone()
            dist.all_reduce(counts)
            params = [param for bucket in self.buckets for param in bucket.params]
            for param, count in zip(params, counts.tolist(), strict=True):
                if not count:
                    param.grad = None
        if self.moving is not None:
            self.moving.apply(reduced[-1] if self._moves else None, contributor)

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.begin()
            bucket.drop()
            bucket.used.clear()
        if self.moving is not None:
            self.moving.drop()

    def reshard(self) -> None:
        """Put the sharded parameters into the model: a forward without backward leaves others, which get old."""
        param_groups.reshard(self._raw_groups)

    def capture(self) -> None:
        """Take what others than forward have changed in the moving buffers into the state, within a commit."""
        if self.moving is not None:
            self.moving.capture()

    def watch(self, meter: SpanMeter | None) -> None:
        if meter is None:
            param_groups.unwatch(self.model)
        else:
            param_groups.watch(self.model, meter)

    def release(self) -> None:
        """Have the next backward make new gradients instead of adding to those that are here."""
        for bucket in self.buckets:
            bucket.drop()


def shard(
    model: nn.Module,
    parts: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy = FP32,
    init: Callable[[], None] | None = None,
) -> None:
    """Apply `fully_shard` to each of ``parts``, inner ones first, and to ``model``. A collective of ``mesh``.

    Then ``init`` fills a model on the meta device, whose shards get memory before.
    """
    inside = {id(m): place for place, m in enumerate(model.modules())}
    for part in sorted(parts, key=lambda part: -inside[id(part)]):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if init is not None:
        model.to_empty(device=mesh.device_type)
        init()


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of ``model``: ``model.shards()`` if there is one, else what its outermost lists hold.

    Lists are a ModuleList, and a ModuleDict of modules of one class.
    """
    shards = getattr(model, "shards", None)
    return list(shards()) if callable(shards) else _layers(model, listed=False)


def _layers(module: nn.Module, listed: bool) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        alike = isinstance(child, nn.ModuleDict) and len({type(layer) for layer in child.values()}) == 1
        if isinstance(child, nn.ModuleList) or alike:
            found += _layers(child, listed=True)
        elif listed and not isinstance(child, nn.ModuleDict):
            found.append(child)
        else:
            found += _layers(child, listed=False)
    return found
