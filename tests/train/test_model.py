from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ft_hsdp.config import Config, ModelConfig
from ft_hsdp.train.identity import FromEnvironment, RankPlace
from ft_hsdp.train.job import Job
from ft_hsdp.train.model import ModelArgs, Transformer, rotate, rotations

ARGS = ModelArgs(vocabulary=257, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, seq_len=16)


def draw(rows: int = 2, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(257, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_shapes() -> None:
    model = Transformer(ARGS)
    assert model.logits(draw(3, 10)).shape == (3, 10, 257)
    loss = model((draw(), draw(seed=1)))
    assert loss.shape == ()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.get_parameter("layers.0.attention.key.weight").shape == (16, 32)
    with pytest.raises(ValueError, match="17 tokens; the model takes at most 16"):
        model.logits(draw(1, 17))


def test_the_shape_follows_from_the_configuration() -> None:
    args = ModelArgs.of(ModelConfig(dim=48, heads=4, layers=1), vocabulary=257, seq_len=8)
    assert (args.kv_heads, args.ffn_dim) == (4, 128)
    assert ModelArgs.of(ModelConfig(dim=48, heads=4, kv_heads=2, ffn_dim=7), 257, 8).ffn_dim == 7
    assert ModelConfig(dim=192).hidden_dim == 512


def test_weights_depend_on_seed_and_name_alone() -> None:
    def weights(args: ModelArgs, seed: int) -> dict[str, torch.Tensor]:
        return dict(Transformer(args, seed).state_dict())

    torch.manual_seed(1)
    first = weights(ARGS, 5)
    torch.manual_seed(2)
    again, other = weights(ARGS, 5), weights(ARGS, 6)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == ("norm" in name) for name in first)
    # More layers: what both have is the same, but for the scale of what is added to the stream.
    deeper = weights(replace(ARGS, layers=3), 5)
    kept = [name for name in first if not name.endswith(("attention.out.weight", "ffn.down.weight"))]
    assert all(torch.equal(first[name], deeper[name]) for name in kept)
    drawn = [w for name, w in first.items() if "norm" not in name]
    assert len({w.flatten()[0].item() for w in drawn}) == len(drawn)


class Memory(TorchDispatchMode):
    """Measures the most bytes that lie in tensors at once; those on the meta device have none."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does to its shard is seen
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._held = {at: each for at, each in self._held.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._held.values()))
        return out


def test_a_sharded_model_has_the_weights_of_a_whole_one_and_no_rank_ever_holds_it(tmp_path: Path) -> None:
    args, config = replace(ARGS, layers=8), Config(ranks_per_replica=4)
    whole = Transformer(args, 5)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        job = Job(config, RankPlace(1, 4, tmp_path, (), "t", "", 0), FromEnvironment(0), None, torch.device("cpu"))
        with Memory() as memory:
            with torch.device("meta"):
                model = Transformer(args)
            job.shard(model, init=partial(model.reset, 5))
    finally:
        dist.destroy_process_group()
    assert 0 < memory.peak < sum(p.nbytes for p in whole.parameters()) / 2
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert torch.equal(param.to_local(), whole.get_parameter(name).chunk(4)[1])
    assert torch.equal(model.cos, whole.cos)


def test_initialising_leaves_the_global_generator_alone() -> None:
    model = Transformer(ARGS)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model.reset(0)
    assert torch.equal(torch.rand(3), expected)


@torch.no_grad()
def test_a_token_sees_only_what_came_before() -> None:
    model = Transformer(ARGS)
    tokens = draw(1)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 257
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert all(not torch.allclose(before[:, i], after[:, i], atol=1e-6) for i in range(9, 16))


def test_rotary_products_depend_on_distance_alone() -> None:
    cos, sin = rotations(12, 8, 10000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    at = [rotate(v.expand(1, 1, 12, 8), cos, sin)[0, 0] for v in (q, k)]
    products = at[0] @ at[1].T
    for distance in range(1, 12):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(products[1, 0], products[2, 0], atol=1e-3)
    assert torch.allclose(at[0].norm(dim=1), q.norm().expand(12), atol=1e-5)


def test_the_shards_hold_every_parameter_once_in_forward_order() -> None:
    model = Transformer(ARGS)
    shards = model.shards()
    held = [p for shard in shards for p in shard.parameters()]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    seen: list[nn.Module] = []
    for shard in shards:
        shard.register_forward_hook(lambda module, *_: seen.append(module))
    model((draw(), draw()))
    assert seen == shards


def test_recomputing_changes_no_bit() -> None:
    inputs = draw()
    grads = []
    for recompute in (False, True):
        model = Transformer(replace(ARGS, recompute=recompute))
        model((inputs, inputs)).backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        assert plain is not None
        assert torch.equal(plain, again)
