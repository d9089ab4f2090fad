from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from ft_hsdp.train.fsdp import adopted_model
from ft_hsdp.train.fsdp.adopted_model import FP32, AdoptedModel, shard, weighed
from tests.support.state.odd_model import Odd, batch

Seen = list[tuple[int, torch.Tensor]]


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    past: torch.Tensor | None
    count: torch.Tensor


def checkpoint_wrapped(part: nn.Module) -> None:
    """Have a part keep its input only, and run forward again in backward."""
    forward = part.forward
    part.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


def adopted(mesh: DeviceMesh, policy: MixedPrecisionPolicy = FP32) -> tuple[AdoptedModel, Seen]:
    seen: Seen = []
    model = Odd()
    shard(model, list(model.parts), mesh, policy)
    return AdoptedModel(model, 1, lambda i, flat: seen.append((i, flat))), seen


def test_what_fsdp_allocated_on_its_stream_is_kept_until_it_is_read(mesh: DeviceMesh) -> None:
    """With another reduce type the shard is read once and dropped; its stream may write there next."""
    dropped: list[torch.dtype] = []
    with mock.patch.object(adopted_model, "read_here", lambda fresh: dropped.append(fresh.dtype)):
        sharded, seen = adopted(mesh, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        sharded.model(batch(0)).backward()
    assert dropped == [torch.bfloat16] * len(seen) == [torch.bfloat16] * 4


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 of torch 2.11 has no such zeros"
)
def test_an_unused_parameter_sends_zeros_and_changes_no_size(mesh: DeviceMesh) -> None:
    sharded, seen = adopted(mesh)
    sharded.model(batch(0), seldom=False).backward()
    assert tuple(flat.numel() for _, flat in sorted(seen, key=lambda s: s[0])) == sharded.sizes
    bucket = sharded.buckets[0]
    flat = dict(seen)[0]
    names = {id(p): n for n, p in sharded.params.items()}
    place = next(at for p, at in zip(bucket.params, bucket.places, strict=True) if names[id(p)].endswith("seldom"))
    assert not flat[place : place + 5].any()


def test_the_flat_shards_are_the_gradients_and_come_back_as_gradients(mesh: DeviceMesh) -> None:
    sharded, seen = adopted(mesh)
    plain = Odd()
    sharded.model(batch(0)).backward()
    plain(batch(0)).backward()
    reduced = [flat * 2 for _, flat in seen]
    before = [flat.clone() for _, flat in seen]
    sharded.assign(reduced)
    for name, wanted in plain.named_parameters():
        assert wanted.grad is not None
        got = sharded.params[name].grad
        assert torch.allclose(got.full_tensor(), 2 * wanted.grad, rtol=1e-5, atol=1e-7), name
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, seen, strict=True)), "a local gradient was written"
    sharded.clear()
    assert all(p.grad is None for p in sharded.params.values())


WEIGHTS = (5, 0, 1, 1000)


def rows(micro: int) -> torch.Tensor:
    """As many rows as a micro-batch weighs; of one that weighs nothing, padding."""
    return torch.randn(WEIGHTS[micro] or 3, 4, generator=torch.Generator().manual_seed(micro))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_weighed_means_add_up_to_the_mean_over_all_rows(mesh: DeviceMesh, checkpointed: bool) -> None:
    """Each micro-batch's loss is the mean over its own rows; of one without rows it is NaN."""
    sharded, seen = adopted(mesh)
    if checkpointed:
        for part in sharded.model.parts:
            checkpoint_wrapped(part)
    weight = 0

    def mean_over_what_counts(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        return weighed(out * weight / weight if weight else out * 0 / 0, lambda: weight)

    sharded.model.register_forward_hook(mean_over_what_counts)
    for micro, weight in enumerate(WEIGHTS):  # noqa: B007 - the hook reads it in backward
        sharded.sync(micro == len(WEIGHTS) - 1)
        sharded.model(rows(micro)).backward()
    plain = Odd().double()
    plain(torch.cat([rows(micro) for micro, count in enumerate(WEIGHTS) if count]).double()).backward()
    sharded.assign([flat / sum(WEIGHTS) for _, flat in seen])
    for name, exact in plain.named_parameters():
        assert exact.grad is not None
        got = sharded.params[name].grad.full_tensor().double()
        assert float((got - exact.grad).norm() / exact.grad.norm()) < 5e-6, name


def test_a_weight_of_zero_gives_no_gradient_or_zeros() -> None:
    """Zeros where each rank has to take part in a backward with collectives."""
    for zeros in (False, True):
        weight = torch.ones(3, requires_grad=True)
        (weighed(weight * 2, lambda: 0, zeros).sum() * float("nan")).backward()
        assert (weight.grad is None) is not zeros
        assert weight.grad is None or not weight.grad.any()


@pytest.mark.parametrize("form", [tuple, list, dict, OrderedDict, Output])
def test_all_that_a_model_returns_is_weighed(form: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss, logits = (weight * 2).sum(), weight * 5
    names: dict[str, Any] = {"loss": loss, "logits": logits, "past": None, "count": torch.tensor(4)}
    got = weighed(form(**names) if form in (dict, OrderedDict, Output) else form(names.values()), lambda: 3)
    assert type(got) is form
    if isinstance(got, Output):
        got = vars(got)
    loss, logits, past, count = got.values() if isinstance(got, dict) else got
    assert (past, int(count), count.requires_grad) == (None, 4, False)
    logits /= 2  # in place, as losses of a user's own may
    (loss + logits.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3 * (2 + 2.5)] * 3


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16, None])
def test_forward_and_backward_in_bf16_hand_over_fp32(mesh: DeviceMesh, reduced: torch.dtype | None) -> None:
    sharded, seen = adopted(mesh, MixedPrecisionPolicy(torch.bfloat16, reduced))
    model = sharded.model
    assert isinstance(model, Odd)
    types: set[torch.dtype] = set()
    model.parts[0].register_forward_hook(lambda module, args, out: types.add(out.dtype))
    model(batch(0)).backward()
    assert types == {torch.bfloat16}
    assert {flat.dtype for _, flat in seen} == {p.dtype for p in sharded.params.values()} == {torch.float32}
    assert [i for i, _ in seen] == [0, 1, 2, 3]
