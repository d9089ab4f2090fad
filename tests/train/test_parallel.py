"""Models that are parallel inside a replica of four ranks, beside the same models in one process."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.errors import ConfigError
from ft_hsdp.memory.parameters import unfolded
from ft_hsdp.state.checkpoint import dcp
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, weighed
from ft_hsdp.train.optimizer.clipping import clip_groups, square_sum
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.packing import pack
from ft_hsdp.train.step_driver import scalar
from ft_hsdp.train.votes import checksum
from tests.support.forked import of_kinds
from tests.support.state.parallel_models import (
    VOCABULARY,
    Llama,
    expert_parallel,
    mesh_of,
    sharded,
    tensor_parallel,
)


@dataclass(frozen=True)
class Kind:
    shard: Callable[[Any, DeviceMesh], None]
    names: tuple[str, str]
    experts: bool = False
    ranks_per_unit: int = 2
    loss_parallel: bool = False


def experts_by_rank(model: Llama, mesh: DeviceMesh) -> None:
    """Each rank of ep has experts of its own that are no DTensors there."""
    for layer in model.layers:
        fully_shard(layer.get_submodule("ffn.weights"), mesh=mesh["efsdp"])
    sharded(model, mesh._flatten("fsdp"))


def frozen_norms(model: Llama, mesh: DeviceMesh) -> None:
    """All that is trained is in parts."""
    tensor_parallel(model, mesh)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" not in name)


def experts_alone(model: Llama, mesh: DeviceMesh) -> None:
    """A fine-tune of the experts."""
    expert_parallel(model, mesh)
    for name, param in model.named_parameters():
        param.requires_grad_("weights" in name)


TP, EP = ("dp", "tp"), ("efsdp", "ep")
PLAIN = partial(tensor_parallel, sequence=False)
KINDS = {
    "tensor parallel": Kind(tensor_parallel, TP),
    "tensor parallel, plain norms": Kind(PLAIN, TP),
    "tensor parallel, loss parallel": Kind(partial(tensor_parallel, loss=True), TP, loss_parallel=True),
    "expert parallel": Kind(expert_parallel, EP, experts=True, ranks_per_unit=1),
    "expert parallel, experts alone": Kind(experts_alone, EP, experts=True, ranks_per_unit=1),
}
REFUSED = {
    "tensor parallel, ranks_per_unit: 1": Kind(tensor_parallel, TP, ranks_per_unit=1),
    "tensor parallel, plain norms, ranks_per_unit: 1": Kind(PLAIN, TP, ranks_per_unit=1),
    "tensor parallel, frozen norms, ranks_per_unit: 1": Kind(frozen_norms, TP, ranks_per_unit=1),
    "tensor parallel outside": Kind(tensor_parallel, ("tp", "dp")),
    "expert parallel, ranks_per_unit: 2": Kind(expert_parallel, EP, experts=True),
    "experts that differ by rank": Kind(experts_by_rank, EP, experts=True, ranks_per_unit=1),
}
CLIP, RANKS = 0.1, 4


def loss(model: nn.Module, unit: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(unit))
    logits = model(tokens).flatten(0, 1)
    targets = tokens.roll(-1, 1).flatten()
    return functional.cross_entropy(logits, targets)


def built(kind: Kind) -> Llama:
    torch.manual_seed(0)
    return Llama(kind.experts)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def train(kind: Kind) -> dict[str, Any]:
    """Train two steps beside the model that is not sharded; return the largest differences."""
    plain, model, data_ranks = built(kind), built(kind), RANKS // kind.ranks_per_unit
    kind.shard(model, mesh_of(RANKS, 2, kind.names))
    seen: dict[int, Tensor] = {}
    adopted = AdoptedModel(model, RANKS, seen.__setitem__, False, kind.ranks_per_unit)
    for name, param in plain.named_parameters():
        param.requires_grad_(name in adopted.params)
    theirs, mine = (optimizer([p for p in m.parameters() if p.requires_grad]) for m in (plain, model))
    create_state(mine)
    groups = Groups(mine)
    live = LiveState(adopted, groups, Ledger.empty(1), dist.get_rank(), RANKS)
    worst = {"gradient": 0.0, "norm": 0.0, "clip": 0.0, "weights": 0.0, "loss": 0.0}
    for step in range(2):
        seen.clear()
        adopted.sync(last=True)
        unit = step * data_ranks + dist.get_rank() // kind.ranks_per_unit
        model.register_forward_hook(lambda *args: weighed(args[2], lambda: 1))
        with loss_parallel() if kind.loss_parallel else contextlib.nullcontext():
            got = loss(model, unit)
            got.backward()
        assert all(len(bucket.used) == len(bucket.params) for bucket in adopted.buckets)
        adopted.finish()
        flats = [seen[i] for i in range(len(adopted.sizes))]
        for each in range(data_ranks):
            wanted = loss(plain, step * data_ranks + each)
            if each == dist.get_rank() // kind.ranks_per_unit:
                worst["loss"] = max(worst["loss"], abs(float(scalar(got)) - float(scalar(wanted))))
            (wanted / data_ranks).backward()
        right = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        squares: list[float] = [0.0] * RANKS
        parts = [flat[a:b] for flat, spans in zip(flats, live.counted, strict=False) for a, b in spans]
        dist.all_gather_object(squares, sum(float(square_sum(part)) for part in parts))
        worst["norm"] = max(worst["norm"], abs(sum(squares) ** 0.5 - float(right)))
        adopted.assign(flats)
        wanted_grads = {n: p.grad for n, p in plain.named_parameters()}
        for name, param in adopted.params.items():
            gradient: Any = param.grad
            other = wanted_grads[name]
            assert other is not None
            worst["gradient"] = max(worst["gradient"], float((gradient.full_tensor() - other).abs().max()))
        assert float(right) > CLIP
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        groups.groups[0]["clip"] = CLIP
        clip_groups(groups.groups, ())
        clipped: Any = param.grad  # of the last one
        worst["clip"] = max(worst["clip"], float((clipped.full_tensor() - other).abs().max()))
        theirs.step()
        mine.step()
        plain.zero_grad()
        adopted.clear()
    trained = dict(plain.named_parameters())
    for name, found in adopted.params.items():
        other = trained[name]
        worst["weights"] = max(worst["weights"], float((found.full_tensor() - other).detach().abs().max()))
    replicated = [
        p for p in adopted.params.values() if p.device_mesh.size() < RANKS or Replicate() in p.placements
    ]
    alike = "".join(checksum(p.to_local().detach().contiguous()) for p in replicated)
    worst["saved"] = saved(live, adopted)
    layout = unfolded(adopted.layout)
    assert layout.keys() == adopted.params.keys()
    for name, found in adopted.params.items():
        part = found.full_tensor()[tuple(slice(*ends) for ends in layout[name].block(dist.get_rank()))]
        assert torch.equal(part, found.to_local()), f"{name} lies elsewhere"
    return {**worst, "replicated": alike, "digest": live.digest(), "weights_digest": live.weights_digest()}


def saved(live: LiveState, adopted: AdoptedModel) -> float:
    """Write the shards as a checkpoint does; return the largest difference of a weight that is read from it."""
    ranks = ReplicaGroup()
    folder = Path(ranks.broadcast(tempfile.mkdtemp().encode()).decode())
    buffer = torch.zeros(live.layout.nbytes, dtype=torch.uint8)
    pack(live.layout, [*live.params.values(), *live.optim.values()], buffer)
    views = dcp.views(live.layout, [*live.params.values(), *live.optim.values()], buffer, ranks)
    dcp.save(folder, views, dcp.stored(live.layout), ranks)
    whole = {dcp.key("param", n): torch.empty(p.shape) for n, p in adopted.params.items()}
    checkpoint.load(whole, checkpoint_id=folder, no_dist=True)
    ranks.gather(b"")  # all have read it
    if ranks.rank == 0:
        shutil.rmtree(folder)
    found = 0.0
    for name, param in adopted.params.items():
        full: Any = param
        found = max(found, float((full.full_tensor() - whole[dcp.key("param", name)]).detach().abs().max()))
    return found


def refusal(kind: Kind) -> dict[str, Any]:
    """Return why a model cannot be adopted."""
    model = built(kind)
    kind.shard(model, mesh_of(RANKS, 2, kind.names))
    try:
        AdoptedModel(model, RANKS, lambda *_: None, False, kind.ranks_per_unit)
    except ConfigError as error:
        return {"refused": str(error)}
    return {"error": "it is adopted"}


def of_kind(name: str) -> dict[str, Any]:
    return train(KINDS[name]) if name in KINDS else refusal(REFUSED[name])


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return of_kinds(RANKS, of_kind, [*KINDS, *REFUSED])


@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradient_norm_and_weights_are_those_of_the_model_in_one_process(found, kind) -> None:
    ranks = found.get(kind, [])
    assert len(ranks) == RANKS, "a kind before it failed"
    for row in ranks:
        assert "error" not in row, row["error"]
        assert max(row[what] for what in ("loss", "gradient", "norm", "clip", "weights", "saved")) <= 1e-6, row
    assert len({row["digest"] for row in ranks}) == 1, "of the whole state"
    assert len({row["weights_digest"] for row in ranks}) == RANKS, "each rank has a shard of its own"


@pytest.mark.parametrize("kind", [kind for kind, each in KINDS.items() if each.ranks_per_unit > 1])
def test_ranks_that_train_together_hold_alike_what_both_hold(found, kind) -> None:
    replicated = [row["replicated"] for row in found[kind]]
    assert replicated[0] == replicated[1] != ""
    assert replicated[2] == replicated[3] != replicated[0]


def test_a_mesh_that_does_not_fit_is_refused_in_one_line(found: dict[str, list[dict[str, Any]]]) -> None:
    refused = {kind: rows[0]["refused"] for kind, rows in found.items() if kind in REFUSED}
    wanted = {
        "tensor parallel, ranks_per_unit: 1": "ranks_per_unit: 2 if ranks train one micro-batch together",
        "tensor parallel, plain norms, ranks_per_unit: 1": "ranks_per_unit: 2 if ranks train one micro-batch",
        "tensor parallel, frozen norms, ranks_per_unit: 1": "sharded over all 4, or ranks_per_unit: 2 if",
        "tensor parallel outside": 'fully_shard(mesh=mesh["dp"]) of init_device_mesh(device, (2, 2), mesh_dim',
        "expert parallel, ranks_per_unit: 2": 'fully_shard(mesh=mesh["dp"]) of init_device_mesh(device, (2, 2)',
        "experts that differ by rank": "a mesh over the 4 ranks of this replica",
    }
    assert refused.keys() == wanted.keys()
    for kind, message in refused.items():
        assert message.startswith("job.adopt: got ")
        assert wanted[kind] in message, message
        assert "\n" not in message
