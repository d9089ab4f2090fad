"""The adapters, the data and the seeds of sft_train.py in a loop of our own: what SFTTrainer has to end with."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import get_linear_schedule_with_warmup, set_seed
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

import ft_hsdp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "transformers"))
from sft_plain import build, sums, tokenizer  # type: ignore[import-not-found]

IGNORED = -100


def tokenized() -> list[dict[str, list[int]]]:
    """Return the samples as SFTTrainer makes them: only the completion and its end are targets."""
    words, samples = tokenizer(), []
    for row in sums():
        prompt = words(row["prompt"])["input_ids"]
        completion = [*words(row["prompt"] + row["completion"])["input_ids"][len(prompt) :], words.eos_token_id]
        samples.append({"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion})
    return samples


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()
    set_seed(1)
    base = build()
    set_seed(42)  # SFTTrainer draws the adapters with its own seed
    lora = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
    job.shard(model)
    model.train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": each, "weight_decay": 0.0} for each in (adapters, [])]  # as the Trainer makes them
    adam = torch.optim.AdamW(groups, lr=5e-3, fused=True)
    optim = job.optimizer(adam, get_linear_schedule_with_warmup(adam, 10, job.config.train.steps))
    optim.clip = 1.0
    collator = DataCollatorForLanguageModeling(pad_token_id=tokenizer().pad_token_id)
    for batch in job.loader(tokenized(), batch_size=4, collate_fn=collator, shuffle=True):
        tokens = (batch["labels"][:, 1:] != IGNORED).sum()
        job.weigh(int(tokens))
        output = model(**batch, use_cache=False, fused_lm_head=True)
        loss = -output.log_probs.sum() / tokens
        loss.backward()
        optim.step(loss=loss)


if __name__ == "__main__":
    main()
