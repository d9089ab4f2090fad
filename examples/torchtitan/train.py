"""A small Llama 3 under torchtitan, on replicas of two ranks that may be lost and come back.

    python launcher.py up examples/torchtitan/config.yaml

plain.py beside it is the same configuration for one replica, without ft_hsdp. Lines that differ end with a mark.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import Dataset
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import model_registry

from ft_hsdp.integrations.torchtitan import FtHsdpTrainer  # FT

VOCABULARY = 31


def counts(path: str) -> Dataset:
    """Return lines of numbers; each number follows from the one before by the rule of its line."""
    rules = [(index % VOCABULARY, 1 + index % 5) for index in range(960)]
    lines = [" ".join(str((first + step * n) % VOCABULARY) for n in range(50)) for first, step in rules]
    return Dataset.from_dict({"text": lines})


DATASETS["counts"] = DatasetConfig(path="", loader=counts, sample_processor=lambda sample: sample["text"])


class Numbers(BaseTokenizer):
    """A token for each number, one for the beginning, one for the end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Has no settings."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.bos_id, self.eos_id = VOCABULARY, VOCABULARY + 1

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Text to tokens."""
        return [self.bos_id] * add_bos + [int(word) for word in text.split()] + [self.eos_id] * add_eos

    def decode(self, tokens: list[int]) -> str:
        """Tokens to text."""
        return " ".join(str(token) for token in tokens if token < VOCABULARY)

    def get_vocab_size(self) -> int:
        """Return how many tokens there are."""
        return VOCABULARY + 2


def llama3_tiny() -> FtHsdpTrainer.Config:  # FT
    """Two layers of torchtitan's debug model."""
    model_spec = model_registry("debugmodel")
    del model_spec.model.layers[2:]
    return FtHsdpTrainer.Config(  # FT
        model_spec=model_spec,
        tokenizer=Numbers.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="counts"),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(local_batch_size=4, seq_len=64, steps=60, disable_cuda_graphs=True),
        validator=Validator.Config(
            enable=True, freq=30, steps=2, dataloader=HuggingFaceTextDataLoader.Config(dataset="counts")
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the default needs torch 2.14
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        metrics=MetricsProcessor.Config(log_freq=10, disable_color_printing=True),
    )
