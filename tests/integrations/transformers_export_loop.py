"""A Llama with tied weights, or with adapters of peft, in a loop of our own that saves it for `from_pretrained`.

The first argument is "tied" or "lora", the second one the folder of what is saved.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ft_hsdp

VOCABULARY, LENGTH = 32, 8


class Data:
    """Random tokens; each batch is a function of its place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> torch.Tensor:
        """[2, length]."""
        draw = torch.Generator().manual_seed(index * 64 + shard * 8 + rank)
        return torch.randint(VOCABULARY, (2, LENGTH), generator=draw)


def build(kind: str) -> Any:
    """Return the unsharded model, the same in each call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=kind == "tied", **sizes)
    model = LlamaForCausalLM(config)
    if kind == "lora":
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return model


def main() -> None:
    """Train, and save the model after each second step and at the end."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    job = ft_hsdp.join()
    model = build(kind)
    mesh = init_device_mesh("cpu", (job.ranks,))
    inner = model.base_model.model if kind == "lora" else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    job.adopt(model)
    optim = job.optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))

    def save(name: str) -> None:
        weights = job.full_state_dict()
        if job.rank == 0 and job.replica == 0:
            torch.save(weights, folder / f"{name}.pt")
            model.save_pretrained(folder / name, state_dict=weights)  # takes the tensors out of the dict

    for tokens in job.batches(Data()):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optim.step()
        if job.step == 2:
            save("inside")
    save("after")


if __name__ == "__main__":
    main()
