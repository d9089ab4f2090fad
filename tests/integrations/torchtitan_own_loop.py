"""The model, the data and the seeds of examples/torchtitan, in a loop of our own: no Trainer, no checkpointing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "torchtitan"))

import on_cpu  # type: ignore[import-not-found] # noqa: F401 # before torchtitan
import plain  # type: ignore[import-not-found]
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import ft_hsdp


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()
    config = plain.llama3_tiny()
    rows = "rows" in sys.argv[1:]
    training, spec = config.training, config.model_spec.model
    spec.update_from_config(config=config)
    torch.manual_seed(config.debug.seed)
    with torch.device("meta"):
        model = spec.build()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (job.ranks,))
    for part in (model.tok_embeddings, [model.norm, model.lm_head], *model.layers.values(), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)  # as torchtitan cuts it
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    job.adopt(model)
    kinds = {"fused": True, "foreach": False}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **kinds)
    schedule = config.lr_scheduler.build(optimizers=[adam], training_steps=training.steps)
    optim = job.optimizer(adam, schedule.schedulers)
    optim.clip = 1.0

    def read(shard: int, shards: int) -> object:
        """The part of the data of one rank of one replica."""
        tokenizer = config.tokenizer.build(tokenizer_path="")
        return config.dataloader.build(
            dp_world_size=shards,
            dp_rank=shard,
            tokenizer=tokenizer,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
        )

    if rows:
        from tests.integrations.torchtitan_rows import Rows

        source = job.loader(Rows(), batch_size=training.local_batch_size, shuffle=False, drop_last=False)
    else:
        source = job.stream(read)
    for inputs, labels in job.batches(source):
        valid = (labels != -100).sum()
        job.weigh(int(valid))
        masks = model.get_attention_masks(positions=inputs["positions"])
        logits = model(inputs["input"], positions=inputs["positions"], attention_masks=masks)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / valid
        loss.backward()
        optim.step(loss=loss)


if __name__ == "__main__":
    main()
