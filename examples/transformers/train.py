"""Train a small Llama with Hugging Face's Trainer on replicas that may be lost. plain.py is the script before."""

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed  # FT

import ft_hsdp  # FT
from ft_hsdp.integrations.transformers import FaultTolerantTrainer  # FT

VOCABULARY, LENGTH = 64, 32


def counting(rows: int) -> Dataset:
    """Return sequences that count up by a step of their own: a model can learn to continue them."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(VOCABULARY, (rows, 1), generator=draw)
    by = torch.randint(1, 8, (rows, 1), generator=draw)
    tokens = (first + by * torch.arange(LENGTH)) % VOCABULARY
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})


def build() -> LlamaForCausalLM:
    """Return a model with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,
        )
    )


def main() -> None:
    """Train, evaluate, and save the model."""
    job = ft_hsdp.join()  # FT
    set_seed(1)
    args = TrainingArguments(
        output_dir="runs/counting-model",
        max_steps=100,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=1.0,
        logging_steps=25,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="no",  # FT
        use_cpu=True,
    )
    trainer = FaultTolerantTrainer(  # FT
        job=job,  # FT
        model=build(),
        args=args,
        train_dataset=counting(4096),
        eval_dataset=counting(64),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
