"""Models that `fully_shard` has sharded in the ways of their users: each is adopted or refused in one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, parts_of
from ft_hsdp.train.fsdp.frozen import content_digest
from ft_hsdp.train.fsdp.frozen import tensors as beside_the_state
from ft_hsdp.train.fsdp.param_groups import plain_name
from tests.compatibility.cases import tail_as_a_list
from tests.compatibility.models import Block, Decoder
from tests.support.forked import of_kinds
from tests.support.refused import refused
from tests.support.state.shapes import KINDS, Kind, once, twice
from tests.support.train.meter import Meter

RANKS = 2


def built(kind: Kind) -> Any:
    torch.manual_seed(0)
    return kind.make()


def wanted(kind: Kind, seeds: list[int]) -> dict[str, torch.Tensor]:
    """The mean over the ranks of the gradients of the model that is not sharded."""
    model = built(kind)
    trained = {plain_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(param, dtype=kind.reduced) for name, param in trained.items()}
    for rank in range(RANKS):
        grads = {name: torch.zeros_like(total) for name, total in totals.items()}
        for seed in seeds:
            kind.loss(model, seed + 100 * rank).backward()
            for name, param in trained.items():
                grads[name] += 0 if param.grad is None else param.grad
            model.zero_grad()
        totals = {name: totals[name] + grad for name, grad in grads.items()}
    return {name: (total / RANKS).float() for name, total in totals.items()}


def adopt_kind(name: str) -> dict[str, Any]:
    kind = KINDS[name]
    model = built(kind)
    kind.shard(model, init_device_mesh("cpu", (RANKS,)))
    seen: list[tuple[int, torch.Tensor]] = []
    adopted = AdoptedModel(model, RANKS, lambda i, flat: seen.append((i, flat)), find_unused=kind.unused)
    meter: Any = Meter()
    worst, early = 0.0, 0
    for step in range(3):
        adopted.watch(meter if step == 1 else None)
        seeds = [step] if step < 2 else [2, 3]
        seen.clear()
        for seed in seeds:
            adopted.sync(seed == seeds[-1])
            kind.loss(model, seed + 100 * dist.get_rank()).backward()
        early = len(seen)
        adopted.finish()
        assert sorted(i for i, _ in seen) == list(range(len(adopted.sizes))), [i for i, _ in seen]
        flats = [flat for _, flat in sorted(seen, key=lambda each: each[0])]
        assert tuple(flat.numel() for flat in flats) == adopted.sizes
        assert all(flat.dtype == torch.float32 for flat in flats)
        adopted.assign(flats)
        right = wanted(kind, seeds)
        assert right.keys() == adopted.params.keys(), right.keys() ^ adopted.params.keys()
        for key, param in adopted.params.items():
            if kind.unused and param.grad is None:
                assert not right[key].any(), f"{key} was used"
                continue
            assert param.grad is not None
            assert param.grad.dtype == param.dtype
            got = param.grad.full_tensor().float()  # type: ignore[attr-defined]
            worst = max(worst, float((got - right[key].to(param.dtype).float()).abs().max()))
        adopted.clear()
    names = {id(p): n for n, p in adopted.params.items()}
    return {
        "worst": worst,
        "sizes": adopted.sizes,
        "early": early,
        "communications": [meter.told.count(what) for what in ("begin", "end")],
        "buckets": [[names[id(p)] for p in b.params] for b in adopted.buckets],
    }


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return of_kinds(RANKS, adopt_kind, KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_model_that_is_not_sharded(found, kind) -> None:
    """Of two steps of one micro-batch and one of two; each bucket is handed on once a step."""
    ranks = found.get(kind, [])
    assert len(ranks) == RANKS, "a kind before it failed"
    for row in ranks:
        assert "error" not in row, row["error"]
        assert row["worst"] <= KINDS[kind].tolerance
        assert (row["sizes"], row["buckets"]) == (ranks[0]["sizes"], ranks[0]["buckets"])
        assert len(row["sizes"]) == KINDS[kind].buckets


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "unused"])
def test_buckets_are_handed_on_while_backward_runs(found: dict[str, list[dict[str, Any]]], kind: str) -> None:
    for row in found[kind]:
        assert row["early"] == KINDS[kind].buckets


@pytest.mark.parametrize("kind", KINDS)
def test_what_fsdp_sends_is_watched_until_it_is_over(found: dict[str, list[dict[str, Any]]], kind: str) -> None:
    """In one step of three: of each bucket at least the reduce-scatter begins and ends."""
    for row in found[kind]:
        begun, ended = row["communications"]
        assert begun == ended >= KINDS[kind].buckets


def test_buckets_are_in_the_order_in_which_backward_ends_with_modules(found) -> None:
    first = {kind: [bucket[0] for bucket in rows[0]["buckets"]] for kind, rows in found.items()}
    assert first["list"] == ["norm.weight", "layers.1.norm.weight", "layers.0.norm.weight", "embed.weight"]
    assert first["tied_list"] == ["layers.1.norm.weight", "layers.0.norm.weight", "embed.weight"]
    experts = [[f"layers.{n}.ffn.experts.{i}.0.weight" for i in (2, 1, 0)] for n in (1, 0)]
    nested = [*experts[0], "layers.1.norm.weight", *experts[1], "layers.0.norm.weight", "embed.weight"]
    assert first["moe"] == first["checkpoint, nested"] == nested, "inner groups come first"
    if "two groups" in first:
        assert first["two groups"][1:3] == ["layers.1.ffn.router.weight", "layers.1.norm.weight"]


def adopt(model: nn.Module) -> AdoptedModel:
    return AdoptedModel(model, 1, lambda *_: None)


def sharded(mesh: DeviceMesh, **options: Any) -> Decoder:
    model = Decoder()
    fully_shard(model, mesh=mesh, **options)
    return model


def ignoring(mesh: DeviceMesh) -> Decoder:
    model = Decoder()
    left_out: Any = {model.head.weight, model.norm.bias}
    fully_shard(model, mesh=mesh, ignored_params=left_out)
    return model


def without_root(mesh: DeviceMesh) -> Decoder:
    model = Decoder()
    fully_shard(model.embed, mesh=mesh)
    return model


def hooked(mesh: DeviceMesh) -> Decoder:
    model = sharded(mesh)
    model.head.weight.register_post_accumulate_grad_hook(lambda param: None)
    return model


def adopted(mesh: DeviceMesh) -> Decoder:
    model = sharded(mesh)
    adopt(model)
    return model


def of_type(*types: torch.dtype) -> Callable[[DeviceMesh], Decoder]:
    def make(mesh: DeviceMesh) -> Decoder:
        model = Decoder()
        for module, dtype in zip((model, model.head), types, strict=False):
            module.to(dtype)
        fully_shard(model, mesh=mesh)
        return model

    return make


class Normed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(4)


def with_statistics(mesh: DeviceMesh) -> Decoder:
    model = Normed()
    fully_shard(model, mesh=mesh)
    return model


def frozen(mesh: DeviceMesh) -> Decoder:
    model = sharded(mesh)
    model.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (ignoring, "norm.bias and 1 more"),
        (without_root, "layers.0.norm.weight and"),
        (hooked, "hooks on gradients"),
        (adopted, "an all-reduce hook"),
        (of_type(torch.float64), "of float64"),
        (of_type(torch.float32, torch.bfloat16), "of bfloat16 and float32"),
        (frozen, "FSDPDecoder without"),
    ],
)
def test_what_cannot_be_adopted_is_refused_in_one_line(mesh, make, named) -> None:
    """What users try most is in tests/compatibility/refused.py, word for word."""
    refused(lambda: adopt(make(mesh)), named, "job.adopt")


def test_a_mesh_of_other_ranks_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ConfigError, match=r"job\.adopt: .*allowed: a mesh over the 2 ranks of this replica, or ranks_per_unit: 2"
    ):
        AdoptedModel(sharded(mesh), 2, lambda *_: None)


@pytest.mark.parametrize("loss", [once, twice])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_the_gradient_is_a_mean_whatever_fsdp_divides_by(mesh, loss, factor) -> None:
    torch.manual_seed(0)
    plain = Decoder()
    torch.manual_seed(0)
    model = Decoder()
    tail_as_a_list(model, mesh)
    if factor is not None:
        for module in param_groups.fsdp_modules(model):
            module.set_gradient_divide_factor(factor)
    flats: dict[int, torch.Tensor] = {}
    taken = AdoptedModel(model, 1, flats.__setitem__)
    loss(model, 0).backward()
    taken.finish()
    taken.assign([flats[index] for index in sorted(flats)])
    loss(plain, 0).backward()
    for name, param in plain.named_parameters():
        grad: Any = taken.params[name].grad
        torch.testing.assert_close(grad.full_tensor(), param.grad, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_changed_after_backward_is_refused(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    taken = adopt(model)
    once(model, 0).backward()
    taken.finish()
    taken.check_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    refused(taken.check_gradients, r"gradients: .*optim.clip")


def test_a_second_backward_for_one_batch_is_refused(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    adopt(model)
    once(model, 0).backward()
    refused(once(model, 1).backward, r"gradients: got 'the model in a second backward for the same batch'")


def test_a_step_without_a_backward_is_refused(mesh: DeviceMesh) -> None:
    taken = adopt(sharded(mesh))
    refused(taken.finish, r"optim.step: got 'no gradient'")
    assert not taken.trained()


@pytest.mark.parametrize("last", [True, False])
def test_a_micro_batch_is_trained_once_its_backward_ran(mesh: DeviceMesh, last: bool) -> None:
    model = sharded(mesh)
    taken = adopt(model)
    taken.sync(last)
    loss = once(model, 0)
    assert not taken.trained()
    loss.backward()
    assert taken.trained()
    taken.sync(True)
    assert not taken.trained()


def test_a_parameter_that_is_unfrozen_later_is_refused(mesh: DeviceMesh) -> None:
    model = Decoder()
    model.head.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    adopt(model)
    model.head.requires_grad_(True)
    refused(once(model, 0).backward, r"gradients: .*the parameters that were trainable at job.adopt")


def test_a_model_may_run_before_it_is_adopted(mesh: DeviceMesh) -> None:
    """The root keeps its whole parameters after a forward."""
    model = sharded(mesh)
    loss = once(model, 0)
    taken = adopt(model)
    assert set(taken.params) == {n for n, _ in Decoder().named_parameters()}
    assert torch.equal(once(model, 0), loss)


def test_statistics_that_do_not_change_are_adopted(mesh: DeviceMesh) -> None:
    model = with_statistics(mesh)
    model.get_submodule("batch_norm").eval()
    taken = adopt(model)
    assert {n for n in beside_the_state(taken.model) if n.startswith("batch_norm")} == {
        f"batch_norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_weights_may_be_loaded_in_place_after_adoption(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    taken = adopt(model)
    torch.manual_seed(7)
    weights: dict[str, Any] = dict(Decoder().state_dict())
    set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    once(model, 0).backward()
    taken.finish()
    assert all(torch.equal(p.full_tensor(), weights[n]) for n, p in taken.params.items())


def replace(model: Decoder) -> None:
    model.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()}, assign=True)


@pytest.mark.parametrize(
    "change", [replace, lambda model: model.head.requires_grad_(False)], ids=["replaced", "frozen"]
)
def test_parameters_that_are_replaced_or_frozen_later_are_refused(mesh, change) -> None:
    model = sharded(mesh)
    taken = adopt(model)
    taken.check()
    once(model, 0)
    taken.check()
    taken.reshard()
    change(model)
    refused(taken.check, r"job.adopt: got 'other trainable parameters in the model'; allowed: ")


class Both(nn.Module):
    """Layers in a list of lists, modules of several classes in a dict, and a list inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.others = nn.ModuleDict({"embed": nn.Embedding(2, 2), "norm": nn.LayerNorm(2)})
        self.stages[0][0].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))  # type: ignore[index]


def test_the_parts_of_a_model_are_what_its_outermost_lists_hold() -> None:
    model = Both()
    layers = [layer for stage in model.stages for layer in stage.children()]
    assert parts_of(model) == layers
    net = Decoder(named_layers=True)
    assert parts_of(net) == list(net.layers.values())


def test_the_digest_of_a_lazy_view_is_that_of_its_values() -> None:
    pairs = torch.arange(6.0).view(3, 2)
    for lazy in (torch.view_as_complex(pairs).conj(), torch.view_as_complex(pairs).conj().imag):
        assert content_digest(lazy) == content_digest(lazy.resolve_conj().resolve_neg().clone())
