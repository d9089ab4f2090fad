"""The model, data and seeds of examples/transformers in a loop of our own: what the Trainer has to end with."""

import sys
from pathlib import Path

import torch
from transformers import default_data_collator, get_cosine_schedule_with_warmup, set_seed

import ft_hsdp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "transformers"))
from plain import build, counting  # type: ignore[import-not-found]


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()
    set_seed(1)
    model = job.shard(build())
    model.train()
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": each, "weight_decay": 0.0} for each in (others, norms)]  # as the Trainer makes them
    adam = torch.optim.AdamW(groups, lr=3e-3, fused=True)
    optim = job.optimizer(adam, get_cosine_schedule_with_warmup(adam, 10, job.config.train.steps))
    optim.clip = 1.0
    for batch in job.loader(counting(4096), batch_size=8, collate_fn=default_data_collator, shuffle=True):
        loss = model(**batch).loss
        loss.backward()
        optim.step()


if __name__ == "__main__":
    main()
