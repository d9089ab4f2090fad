"""One rank of RANKS, with RANK and STORE in the environment: adopts each kind of model; a JSON line for each."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.fsdp.param_groups import plain_name
from tests.support.state.shapes import KINDS, Kind
from tests.support.state.started_ranks import say_of_each
from tests.support.train.meter import Meter

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["RANKS"])


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


def adopt(kind: Kind) -> dict[str, Any]:
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
            kind.loss(model, seed + 100 * RANK).backward()
        early = len(seen)
        adopted.finish()
        assert sorted(i for i, _ in seen) == list(range(len(adopted.sizes))), [i for i, _ in seen]
        flats = [flat for _, flat in sorted(seen, key=lambda each: each[0])]
        assert tuple(flat.numel() for flat in flats) == adopted.sizes
        assert all(flat.dtype == torch.float32 for flat in flats)
        adopted.assign(flats)
        right = wanted(kind, seeds)
        assert right.keys() == adopted.params.keys(), right.keys() ^ adopted.params.keys()
        for name, param in adopted.params.items():
            if kind.unused and param.grad is None:
                assert not right[name].any(), f"{name} was used"
                continue
            assert param.grad is not None
            assert param.grad.dtype == param.dtype
            got = param.grad.full_tensor().float()  # type: ignore[attr-defined]
            worst = max(worst, float((got - right[name].to(param.dtype).float()).abs().max()))
        adopted.clear()
    names = {id(p): n for n, p in adopted.params.items()}
    return {
        "worst": worst,
        "sizes": adopted.sizes,
        "early": early,
        "communications": [meter.told.count(what) for what in ("begin", "end")],
        "buckets": [[names[id(p)] for p in b.params] for b in adopted.buckets],
    }


dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=RANKS)
say_of_each(sys.argv[1:] or KINDS, lambda name: adopt(KINDS[name]))
dist.destroy_process_group()
os._exit(0)  # what torch takes down at the end of an interpreter is not what is tested
