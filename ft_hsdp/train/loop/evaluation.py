"""The evaluation inside the job: the loss of committed states on data of its own.

Each replica evaluates a state by itself, so none waits for another, and none has to do it again for one that is
lost. All get the same bits: the loss of a batch depends on the state and the batch alone, each batch is computed
by one rank of the replica, and the mean does not depend on which.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ft_hsdp import fault_injection
from ft_hsdp.config import Config
from ft_hsdp.core.randomness import stream
from ft_hsdp.train.data.prefetch import Source, move
from ft_hsdp.train.device import seed_torch
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.loop.user_loop import number

Batch = TypeVar("Batch")


@dataclass(eq=False)
class Evaluation(Generic[Batch]):
    """Evaluates the model of one replica; all of its ranks have one. For the main thread."""

    _config: Config
    _loss_of: Callable[[Batch], object]  # returns the mean loss of a batch
    _source: Source[Batch]
    _model: nn.Module  # under FSDP2
    _rank: int  # of this replica
    _ranks: int
    _device: torch.device
    _pause: Callable[[str], AbstractContextManager[None]]  # announces what is no hang
    weight: int | None = None  # of the batch that is evaluated now

    def at(self, step: int) -> float | None:
        """Return the mean loss of the state of ``step``, which the model holds; None: `eval.every` passes over it.

        NaN: no batch counts. Modes and random generators are as before. A collective of the replica. Blocks.
        """
        every, last = self._config.eval.every, self._config.train.steps
        if not every or (step % every and step != last):
            return None
        with self._pause(f"evaluation of step {step}"), self._undisturbed():
            found = self._of_this_rank(step)
            dist.all_reduce(found)  # exact: of each batch all ranks but one add zero
        rows = [(loss, weight) for loss, weight in found.tolist() if weight]
        weights = math.fsum(weight for _, weight in rows)
        return math.fsum(loss * weight for loss, weight in rows) / weights if rows else math.nan

    def _of_this_rank(self, step: int) -> torch.Tensor:
        """Return loss and weight of each batch, float64 [batches, 2]; zeros for those of other ranks."""
        count, unit = self._config.eval.batches, self._config.ranks_per_unit
        place, places = self._rank // unit, self._ranks // unit
        found = torch.zeros(count, 2, dtype=torch.float64, device=self._device)
        for begin in range(0, count, places):
            at = min(begin + place, count - 1)  # each rank runs as often: FSDP2 calls collectives
            seed_torch(stream(self._config.train.seed, "evaluate", at))
            batch = move(self._source.batch(0, at, 0, 0), self._device)
            self.weight = 1
            loss = number("job.evaluate(loss_of)", self._loss_of(batch))
            if at == begin + place and self._rank % unit == 0:
                told = (math.nan if loss is None else loss, self.weight)
                found[at] = torch.tensor(told, dtype=torch.float64)
            fault_injection.reach("evaluation", step)
        return found

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        model, modes = self._model, [(module, module.training) for module in self._model.modules()]
        devices = [self._device] if self._device.type == "cuda" else []
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                yield
        finally:
            self.weight = None
            model.train(modes[0][1])
            for module, training in modes:
                module.training = training
            param_groups.reshard(param_groups.raw_groups(model))  # or the loop would meet whole parameters
