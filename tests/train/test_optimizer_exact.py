"""Each optimizer of torch, over a rejoin, gives the bits of plain FSDP2 that is fed the same reduced gradients."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LinearLR, LRScheduler, StepLR

from ft_hsdp.config import parse
from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, shard
from ft_hsdp.train.lanes import check_update
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups, finish
from ft_hsdp.train.state.live_state import LiveState
from tests.support.forked import of_ranks

CLIPPED = "a clip of a group"
ROWS = "optimizers that update each row alone"
EXACT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
RANKS, STEPS, REJOIN, CLIP = 2, 5, 2, 0.7
FLAGS = (
    "amsgrad",
    "nesterov",
    "maximize",
    "centered",
    "decoupled_weight_decay",
    "fused",
    "capturable",
    "differentiable",
)
VALUES = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.5, "adjust_lr_fn": "match_rms_adamw"}

Params = list[nn.Parameter]
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]
Schedule = Callable[[list[torch.optim.Optimizer]], Iterable[LRScheduler]]


class Small(nn.Module):
    """Parameters of 3, 4, 5 and 1 rows: two ranks have uneven shards, and one of them an empty one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.odd = nn.Parameter(torch.randn(3, 4, generator=g))
        self.even = nn.Parameter(torch.randn(4, 2, generator=g))
        self.bias = nn.Parameter(torch.randn(5, generator=g))
        self.one = nn.Parameter(torch.randn(1, generator=g))


def matrices(model: nn.Module) -> Params:
    return [p for p in model.parameters() if p.dim() == 2]


def others(model: nn.Module) -> Params:
    return [p for p in model.parameters() if p.dim() != 2]


def every() -> Iterator[tuple[str, Make]]:
    kinds = [k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)]
    for kind in kinds:
        if kind is torch.optim.Optimizer:
            continue
        known = set(inspect.signature(kind).parameters)
        options: list[dict[str, Any]] = [{}]
        options += [{flag: True} for flag in FLAGS if flag in known]
        options += [{key: value} for key, value in VALUES.items() if key in known]
        options += [{"foreach": each} for each in (True, False) if "foreach" in known]
        options += [{"lr": torch.tensor(0.05)}]
        for chosen in options:
            momentum = {"momentum": 0.9} if "momentum" in known and {"nesterov", "dampening"} & set(chosen) else {}
            given = {"lr": 0.05, **momentum, **chosen}
            yield f"{kind.__name__} {', '.join(chosen) or 'plain'}", one(kind, given)


def one(kind: type[torch.optim.Optimizer], given: dict[str, Any]) -> Make:
    """The optimizer for all parameters, or, with AdamW for the rest, for those that it takes."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        rate = given["lr"].clone() if isinstance(given["lr"], torch.Tensor) else given["lr"]
        options: dict[str, Any] = {**given, "lr": rate}
        if kind is torch.optim.Muon:
            return [kind(matrices(model), **options), torch.optim.AdamW(others(model), lr=0.02)]
        return [kind(model.parameters(), **options)]

    return make


def grouped(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(
            [
                {"params": [model.odd], "lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2},
                {"params": [model.even, model.one], "eps": 1e-6},
                {"params": [model.bias], "lr": 0.01, "amsgrad": True},
            ],
            lr=0.05,
        )
    ]


def pair(model: Any) -> list[torch.optim.Optimizer]:
    """As for a generator and a discriminator."""
    adam = torch.optim.Adam([model.odd, model.bias], lr=0.02, betas=(0.5, 0.999))
    return [adam, torch.optim.Adam([model.even, model.one], lr=0.05)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(others(model), lr=0.05)]


def schedules(optimizers: list[torch.optim.Optimizer]) -> Iterable[LRScheduler]:
    """In an order of their own, and no list, as torchtitan has them."""
    made = [LinearLR(optimizers[0], 0.1, 1.0, 4), *(StepLR(o, 2, 0.5) for o in optimizers[1:])]
    return dict.fromkeys(reversed(made))


CASES: dict[str, tuple[Make, Schedule]] = {name: (make, lambda _: []) for name, make in every()} | {
    "several groups": (grouped, lambda _: []),
    "several groups and a scheduler": (grouped, schedules),
    "a pair": (pair, lambda _: []),
    "Muon, AdamW and schedulers": (muon, schedules),
}


def sums(sharded: AdoptedModel, step: int) -> list[torch.Tensor]:
    """What the ring leaves on this rank after a step."""
    g = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(n, generator=g) for n in sharded.sizes]


def record(prev: StateId) -> CommitRecord:
    made = tuple(Contribution(r, RANKS, r, prev.step) for r in (0, 1))
    return CommitRecord(1, 0, prev.step + 1, prev.lineage, (0, 1), 2, made, "d", norm=2.0)


def adopted(mesh: DeviceMesh, seed: int) -> AdoptedModel:
    model = Small(seed)
    shard(model, [], mesh)
    return AdoptedModel(model, RANKS, lambda *_: None)


def plain(mesh: DeviceMesh, make: Make, schedule: Schedule) -> dict[str, torch.Tensor]:
    """The state after training in torch's own loop, on sums that were divided and clipped."""
    sharded = adopted(mesh, 0)
    optimizers = make(sharded.model)
    schedulers = schedule(optimizers)
    state = StateId(0, 0, "0" * 32)
    for step in range(STEPS):
        made, reduced = record(state), sums(sharded, step)
        finish(made, reduced, CLIP, RANKS)
        sharded.assign(reduced)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        state = made.state_id
    return whole(sharded, Groups(optimizers).tensors({id(p): n for n, p in sharded.params.items()}))


def whole(sharded: AdoptedModel, optim: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's part of all tensors."""
    return {n: getattr(t, "_local_tensor", t).detach().clone() for n, t in {**sharded.params, **optim}.items()}


def hold(mesh: DeviceMesh, seed: int, make: Make, schedule: Schedule) -> tuple[LiveState, AdoptedModel]:
    sharded = adopted(mesh, seed)
    optimizers = make(sharded.model)
    groups = Groups(optimizers, schedule(optimizers) or None)
    groups.check_parameters(sharded.params)
    for optimizer in optimizers:
        create_state(optimizer)
    live = LiveState(sharded, groups, Ledger.empty(2), dist.get_rank(), RANKS)
    live.state = StateId(0, 0, "0" * 32)
    return live, sharded


def committed(mesh: DeviceMesh, make: Make, schedule: Schedule) -> dict[str, torch.Tensor]:
    """The state after training by commits, over a rejoin of a process that begins with other weights."""
    live, sharded = hold(mesh, 0, make, schedule)
    for step in range(STEPS):
        assert live.state is not None
        live.apply(record(live.state), sums(sharded, step), CLIP)
        if step == REJOIN:
            packed = np.empty(live.layout.nbytes, dtype=np.uint8)
            manifest = live.pack(live.state, packed)
            assert manifest is not None
            served = shard_manifest.decode(shard_manifest.encode(manifest))
            live, sharded = hold(mesh, 9, make, schedule)
            live.load(served, packed)
    return whole(sharded, dict(live.optim))


def verdict(mesh: DeviceMesh, make: Make, schedule: Schedule) -> str:
    try:
        wanted = plain(mesh, make, schedule)
    except Exception as error:
        wanted = {}
        torch_says = f"{type(error).__name__}: {error}"
    try:
        got = committed(mesh, make, schedule)
    except ConfigError as error:
        return f"refused: {error}" if wanted else f"refused as by torch: {error}"
    if not wanted:
        return f"trains, but torch says {torch_says}"
    different = [n for n in wanted if n not in got or not torch.equal(wanted[n], got[n])]
    return f"differs: {different}" if different or len(got) != len(wanted) else "equal"


def clipped(mesh: DeviceMesh) -> str:
    """Whether a group with a clip of its own is clipped as `clip_grad_norm_` does, on the ranks together."""
    unclipped, ours, natural = adopted(mesh, 0), adopted(mesh, 0), adopted(mesh, 0)
    made = record(StateId(0, 0, "0" * 32))
    for each in (unclipped, ours, natural):
        each.assign(sums(each, 0))
    torch.nn.utils.clip_grad_norm_(matrices(natural.model), 0.01)
    for each in (unclipped, natural):
        torch.optim.SGD(each.model.parameters(), lr=0.1).step()
    parts = [{"params": matrices(ours.model), "clip": 0.01}, {"params": others(ours.model), "clip": 1e9}]
    Groups(torch.optim.SGD(parts, lr=0.1)).step(made)
    pairs = [(ours.params[n].to_local(), natural.params[n].to_local()) for n in ours.params]
    if not all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in pairs):
        return "differs from clip_grad_norm_"
    moved = any(not torch.equal(ours.params[n].to_local(), unclipped.params[n].to_local()) for n in ours.params)
    return "clipped" if moved else "not clipped"


def of_rows(mesh: DeviceMesh) -> str:
    """The optimizers, without options, that replicas of unequal width may have."""
    config = parse(
        {"replicas": 2, "ranks_per_replica": 2, "hosts": {"per_replica": 2}, "memory": {"shrink_to": 1}}
    )
    found = set()
    for make, _ in (CASES[f"{name} plain"] for name in EXACT):
        for optimizer in make(adopted(mesh, 0).model):
            create_state(optimizer)
            with contextlib.suppress(ConfigError):
                check_update(config, optimizer)
                found.add(type(optimizer).__name__)
    return " ".join(sorted(found))


def verdicts_of_rank() -> dict[str, str]:
    """What this rank says of each case."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (RANKS,))
    said = {name: verdict(mesh, *case) for name, case in CASES.items()}
    return {**said, CLIPPED: clipped(mesh), ROWS: of_rows(mesh)}


TORCH_CANNOT = ("LBFGS", "SparseAdam", "Adafactor", "Rprop")  # with the dense DTensors of FSDP2
TORCH_CANNOT_WITH = ("capturable", "differentiable", "Adagrad fused", "SGD fused")  # on a CPU or on DTensors
WE_CANNOT = ("SGD dampening",)


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, str]]:
    return of_ranks(RANKS, verdicts_of_rank, timeout_s=170.0)


@pytest.mark.parametrize("case", CASES)
def test_it_is_exact_or_refused(verdicts: list[dict[str, str]], case: str) -> None:
    said = {each[case] for each in verdicts}
    assert len(said) == 1, "the ranks disagree"
    if case.startswith(TORCH_CANNOT) or case.endswith(TORCH_CANNOT_WITH):
        assert said.pop().startswith(f"refused as by torch: job.optimizer: got '{case.split()[0]}'")
    elif case in WE_CANNOT:
        assert said.pop().startswith(f"refused: job.optimizer: got '{case.split()[0]}'")
    else:
        assert said == {"equal"}


def test_a_group_is_clipped_by_its_norm_over_all_ranks(verdicts: list[dict[str, str]]) -> None:
    assert [each[CLIPPED] for each in verdicts] == ["clipped"] * RANKS


def test_an_optimizer_that_computes_with_several_rows_is_found(verdicts: list[dict[str, str]]) -> None:
    """Replicas of unequal width would have other bits after its update."""
    alone = sorted(name for name in EXACT if name != "Muon")
    assert [each[ROWS].split() for each in verdicts] == [alone] * RANKS


def test_every_optimizer_of_torch_is_tried() -> None:
    found = {name.split()[0] for name in CASES}
    assert {"Adam", "AdamW", "SGD", "Muon", "NAdam", "ASGD", "Adagrad", "RMSprop"} <= found
    assert len(CASES) > 100
