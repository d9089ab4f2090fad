"""`export`: the parameters of a checkpoint as a Hugging Face Llama, in safetensors.

Only the names change: both models rotate queries and keys in the same pairs (i, i + head_dim / 2).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ft_hsdp.config import Config, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.checkpoint import catalog, dcp
from ft_hsdp.state.checkpoint.catalog import Checkpoint
from ft_hsdp.state.checkpoint.checkpoint_manifest import Stored, Unauthentic
from ft_hsdp.state.replica_group import Failed
from ft_hsdp.train.tokens import SEPARATOR

WEIGHTS, SHAPE = "model.safetensors", "config.json"
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """The model that was written, and from what."""

    step: int
    parameters: int  # number of scalars
    out: str  # folder
    skipped: tuple[catalog.SkippedCheckpoint, ...]  # newer checkpoints that are not valid


def export(folder: Path, out: Path, step: int | None, key: bytes | None) -> Exported:
    """Write the model of a checkpoint into a new folder.

    Args:
        folder: The folder of checkpoints.
        out: The new folder, or an empty one.
        step: The step of the checkpoint; None: the newest valid one.
        key: The key with which it must be signed; None: any checkpoint is trusted.

    Raises:
        ConfigError: There is no such checkpoint, it is of another model, or ``out`` cannot be written.
    """
    try:
        found = catalog.newest(folder, key, step)
    except Unauthentic as error:
        allowed = "a checkpoint that was signed with the key of --key (or yours), or --trust"
        raise ConfigError("CHECKPOINT_DIR", str(folder / str(error)), allowed) from None
    if found.checkpoint is None:
        raise _nothing(folder, step, found.skipped)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "a folder that does not exist yet, or is empty")
    parameters, config = _llama(found.checkpoint)
    weights = {
        hf: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for hf, tensor in parameters.items()
    }
    live = {dcp.key(tensor.kind, tensor.name): weights[hf] for hf, tensor in parameters.items()}
    try:
        dcp.load(found.checkpoint.path, live, found.checkpoint.manifest)
    except Failed as failed:
        raise ConfigError("CHECKPOINT_DIR", str(folder), f"one that does not change now ({failed})") from failed
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_file(weights, out / f"{WEIGHTS}.part", metadata={"format": "pt"})
        (out / SHAPE).write_text(json.dumps(config, indent=2) + "\n")
        (out / f"{WEIGHTS}.part").rename(out / WEIGHTS)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            (out / f"{WEIGHTS}.part").unlink()
        raise ConfigError("OUT", str(out), f"a folder that can be written ({error})") from error
    count = sum(tensor.numel() for tensor in weights.values())
    return Exported(found.checkpoint.manifest.state.step, count, str(out), found.skipped)


def _nothing(folder: Path, step: int | None, skipped: tuple[catalog.SkippedCheckpoint, ...]) -> ConfigError:
    """Return the error that tells why there is nothing to export."""
    reasons = "; ".join(f"{each.name}: {each.reason}" for each in skipped)
    steps = sorted({int(path.name.split("-")[1]) for path in catalog.published(folder)})
    if step is not None and step not in steps and steps:
        return ConfigError("--step", step, ", ".join(map(str, steps)))
    return ConfigError(
        "CHECKPOINT_DIR", str(folder), f"a folder with a valid checkpoint ({reasons or 'it has none'})"
    )


def _llama(checkpoint: Checkpoint) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the parameters by their Hugging Face names, and the model's config.json."""
    manifest = checkpoint.manifest
    params = {tensor.name: tensor for tensor in manifest.tensors if tensor.kind == "param"}
    names = {"embed": "model.embed_tokens", "output.norm": "model.norm", "output.head": "lm_head"}
    config = _config(checkpoint)
    for layer in range(config.model.layers):
        names |= {f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in _BLOCK.items()}
    strange = {f"{name}.weight" for name in names} ^ set(params)
    if strange:
        allowed = f"checkpoints of ft_hsdp's own model ({min(strange)} is not in both)"
        raise ConfigError("CHECKPOINT_DIR", str(checkpoint.path), allowed)
    model, vocabulary = config.model, params["embed.weight"].shape[0]
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": params["embed.weight"].dtype,
        "vocab_size": vocabulary,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.dim // model.heads,
        "max_position_embeddings": config.train.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": SEPARATOR,
        "eos_token_id": SEPARATOR,
    }
    return {f"{theirs}.weight": params[f"{ours}.weight"] for ours, theirs in names.items()}, about


def _config(checkpoint: Checkpoint) -> Config:
    try:
        return parse(checkpoint.manifest.config)
    except ConfigError as error:
        raise ConfigError("CHECKPOINT_DIR", str(checkpoint.path), f"one of this version ({error})") from error
