"""A case, trained by torch alone: the whole model in one process, on all units of each step."""

import torch
from torch import Tensor
from torch.func import functional_call

from ft_hsdp.core.randomness import stream
from tests.compatibility.cases import STEPS, Average, Case, Source, listed, units


def train(case: Case, replicas: int, ranks: int) -> dict[str, Tensor]:
    """Return the weights after the last step."""
    torch.manual_seed(0)
    model = case.model()
    if case.weights is not None:
        model.load_state_dict(case.weights())
    average = Average(model) if case.average else None
    made = case.optimizers(model)
    schedulers = [] if case.schedule is None else listed(case.schedule(made))
    source = Source(case, replicas, ranks)
    for step in range(1, STEPS + 1):
        places = units(step, case, replicas, ranks)
        batches = [source.batch(*place) for place in places]
        statistics = _Statistics(model)
        weights = [1 if case.weigh is None else case.weigh(batch) for batch in batches]
        for (shard, index, rank, micro), batch, weight in zip(places, batches, weights, strict=True):
            torch.manual_seed(stream(0, "batch", index * replicas + shard, rank, micro))
            if weight:  # else the loss may be 0/0
                (case.loss(_computing(model, case), batch) * weight / sum(weights)).backward()
            statistics.next()
        statistics.mean()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for optimizer in listed(made):
            for group in optimizer.param_groups:
                if "clip" in group:
                    torch.nn.utils.clip_grad_norm_(group["params"], group["clip"])
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if average is not None:
            average.update()
    averages = {} if average is None else {f"average.{name}": value for name, value in average.mean.items()}
    return {name: value.detach().clone() for name, value in {**model.state_dict(), **averages}.items()}


class _Statistics:
    """The buffers of a model: each unit of a step begins with the same ones, and the step has the mean of all."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._seen: list[list[Tensor]] = []

    def next(self) -> None:
        self._seen.append([buffer.clone() for buffer in self._buffers])
        self._set(self._before)

    def mean(self) -> None:
        self._set([torch.stack(seen).double().mean(0) for seen in zip(*self._seen, strict=True)])

    def _set(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


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
