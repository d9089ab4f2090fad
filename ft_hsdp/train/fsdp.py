"""FSDP2 inside a replica, and the buckets in which its gradient shards go to FTAR (FT-HSDP §4.1).

FSDP2's all-reduce hook gives one flat, padded, reduced shard for each sharded module. The hook only keeps it: the
bucket is ready when the last of its parameters has its gradient, which is after FSDP2's own division. Order and
sizes of the buckets are static, because a replica that is behind takes part in every all-reduce without running
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ft_hsdp.errors import InvalidArgument

FP32 = MixedPrecisionPolicy()


@dataclass(slots=True)
class Bucket:
    """The gradient of one sharded module: what is all-reduced at once."""

    index: int
    params: list[DTensor]
    places: list[int]  # where each parameter's shard begins in the flat one
    numel: int  # of the flat gradient shard, with padding
    flat: torch.Tensor | None = None  # this step's, once FSDP2 has reduced it inside the replica
    missing: int = field(default=0)  # parameters whose gradient is not divided yet


def padded(param: DTensor, ranks: int) -> int:
    """Return a shard's elements in FSDP2's flat gradient: dimension 0 is padded to a multiple of ``ranks``."""
    rows = param.shape[0] if param.dim() else 1
    return -(-rows // ranks) * (param.numel() // rows if rows else 0)


class Sharded:
    """A model under FSDP2 that hands its gradient shards on, bucket by bucket, as backward makes them."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        mesh: DeviceMesh,
        ready: Callable[[int, torch.Tensor], None],
        policy: MixedPrecisionPolicy = FP32,
    ) -> None:
        """Shard ``model`` in place. A collective of the ranks of ``mesh``.

        Args:
            model: Its parameters are fp32, and stay so; so are sums of gradients.
            parts: Modules that are sharded each for itself, in forward order; what is left is one more bucket.
            mesh: One-dimensional, over the ranks of the replica.
            ready: Takes a bucket's index and flat gradient shard, fp32 [numel]; called inside backward.
            policy: Types of forward and backward.

        Raises:
            InvalidArgument: Gradients would not be reduced in fp32, or a parameter is not fp32.
        """
        if policy.param_dtype is not None and policy.reduce_dtype != torch.float32:
            raise InvalidArgument(f"gradients are reduced in {policy.reduce_dtype}; allowed: torch.float32")
        self.model = model
        self._ready = ready
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.params: dict[str, DTensor] = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
        self.buckets = self._buckets(mesh.size())
        self.sizes = tuple(b.numel for b in self.buckets)

    def _buckets(self, ranks: int) -> list[Bucket]:
        """One bucket for each module that owns parameters, in the order in which backward ends with them."""
        owners: list[tuple[Any, list[DTensor]]] = []
        seen: set[int] = set()
        root, *parts = (m for m in self.model.modules() if isinstance(m, FSDPModule))
        for module in [*parts, root]:  # the root comes last: it owns what no part owns
            mine: list[DTensor] = [p for p in module.parameters() if isinstance(p, DTensor) and id(p) not in seen]
            seen.update(id(p) for p in mine)
            if mine:
                owners.append((module, mine))
        rest = [owners.pop()] if owners and owners[-1][0] is root else []
        buckets = []
        for index, (module, params) in enumerate([*reversed(owners), *rest]):
            sizes = [padded(p, ranks) for p in params]
            places = [sum(sizes[:i]) for i in range(len(sizes))]
            bucket = Bucket(index, params, places, sum(sizes))
            module.set_all_reduce_hook(self._hook(bucket))
            module.set_reduce_scatter_unused_params(True)
            for param in params:
                if param.dtype != torch.float32:
                    raise InvalidArgument(f"a parameter is {param.dtype}; allowed: torch.float32")
            for param, place in zip(params, places, strict=True):
                param.register_post_accumulate_grad_hook(self._arrived(bucket, place))
            buckets.append(bucket)
        return buckets

    def _hook(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def keep(flat: torch.Tensor) -> None:
            bucket.flat = flat
            bucket.missing = len(bucket.params)

        return keep

    def _arrived(self, bucket: Bucket, place: int) -> Callable[[torch.Tensor], None]:
        def count(param: torch.Tensor) -> None:
            assert bucket.flat is not None
            assert isinstance(param.grad, DTensor)
            shard = param.grad._local_tensor
            if shard.numel() and shard.data_ptr() != bucket.flat.data_ptr() + place * shard.element_size():
                raise InvalidArgument("this FSDP2 lays gradients out in another order than ft_hsdp expects")
            bucket.missing -= 1
            if bucket.missing == 0:
                self._ready(bucket.index, bucket.flat)

        return count

    def assign(self, reduced: Sequence[torch.Tensor]) -> None:
        """Make each parameter's gradient a view into the reduced flat shards, one for each bucket."""
        for bucket, flat in zip(self.buckets, reduced, strict=True):
            for param, place in zip(bucket.params, bucket.places, strict=True):
                shard = param._local_tensor
                view = flat[place : place + shard.numel()].view(shard.shape)
                param.grad = DTensor.from_local(
                    view,
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )

    def clear(self) -> None:
        """Drop all gradients and flat shards."""
        for bucket in self.buckets:
            bucket.flat = None
            for param in bucket.params:
                param.grad = None

    def sync(self, last: bool) -> None:
        """Have FSDP2 reduce gradients inside the replica in the ``last`` micro-batch of a step only."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
