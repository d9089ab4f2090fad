"""A case, trained by torch alone: the whole model in one process, on all units of each step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from ft_hsdp.train.data.randomness import stream
from tests.compatibility.cases import STEPS, Case, Source, listed, units


def train(case: Case, replicas: int, ranks: int) -> dict[str, Tensor]:
    """Return the weights after the last step."""
    torch.manual_seed(0)
    model = case.model()
    made = case.optimizers(model)
    schedulers = [] if case.schedule is None else listed(case.schedule(made))
    source = Source(case, replicas, ranks)
    for step in range(1, STEPS + 1):
        places = units(step, case, replicas, ranks)
        batches = [source.batch(*place) for place in places]
        weights = [1 if case.weigh is None else case.weigh(batch) for batch in batches]
        for (shard, index, rank, micro), batch, weight in zip(places, batches, weights, strict=True):
            torch.manual_seed(stream(0, "batch", index * replicas + shard, rank, micro))
            if weight:  # else the loss may be 0/0
                (case.loss(_computing(model, case), batch) * weight / sum(weights)).backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for optimizer in listed(made):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class _Cast(torch.nn.Module):
    """A model that computes with its parameters in another type, as FSDP2 gathers them."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = model, dtype

    def forward(self, batch: Tensor) -> Tensor:
        cast = {name: param.to(self.dtype) for name, param in self.inner.named_parameters()}
        result: Tensor = functional_call(self.inner, cast, (batch,))
        return result


def _computing(model: torch.nn.Module, case: Case) -> torch.nn.Module:
    return model if case.compute is None else _Cast(model, case.compute)
