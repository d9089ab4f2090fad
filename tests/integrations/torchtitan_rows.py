"""The configuration of examples/torchtitan with a dataset that has an index, and with tokens that do not count."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchtitan"))

import train  # type: ignore[import-not-found]
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX


class Rows(Dataset[Any]):
    """Rows of numbers; each number follows from the one before by the rule of its row."""

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens = (index + (1 + index % 5) * torch.arange(65)) % train.VOCABULARY
        labels = tokens[1:].clone()
        labels[: index % 60] = IGNORE_INDEX
        return {"input": tokens[:-1], "positions": torch.arange(64)}, labels


class RowsDataLoader(ParallelAwareDataloader):
    """Each rank reads a part of the rows, as torchtitan's dataloaders do."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Has no settings of its own."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        rows = Subset(Rows(), range(dp_rank, len(Rows()), dp_world_size))
        super().__init__(rows, dp_rank, dp_world_size, batch_size=local_batch_size)


def llama3_rows() -> Any:
    config = train.llama3_tiny()
    config.dataloader = RowsDataLoader.Config()
    return config
