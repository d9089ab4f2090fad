"""A job of one rank, as a trainer's accelerator, strategy and loader see it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class Stub(SimpleNamespace):
    """It commits a step for each batch; as a loader, it gives the number of each."""

    steps_per_epoch = 3
    left = False

    def __init__(self, ranks: int = 1, steps: int = 6) -> None:
        config = SimpleNamespace(train=SimpleNamespace(steps=steps, accumulate=1))
        cpu = torch.device("cpu")
        super().__init__(ranks=ranks, data_ranks=ranks, device=cpu, step=0, config=config, committed=[], logged=[])
        self.paused: list[str] = []
        self.logged_names: set[str] = set()

    def adopt(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    @contextmanager
    def announced(self, what: str) -> Iterator[None]:
        yield
        self.paused.append(what)

    def optimizer(self, optimizers: list[Any], schedule: object) -> Any:
        self.given = (list(optimizers), schedule)
        self.wrapped = SimpleNamespace(step=lambda loss: self.committed.append(loss))
        return self.wrapped

    def __iter__(self) -> Iterator[int]:
        while self.step < self.config.train.steps:
            yield self.step
            self.step += 1
