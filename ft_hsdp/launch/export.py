"""`export`: the parameters of a checkpoint in safetensors.

A file gets them under the names that the user's model gives them, so that ``model.load_state_dict`` of the
unsharded model takes it, whoever wrote that model. What training does not change is in no checkpoint: `--base`
gives it, or it is said to be missing.

A folder gets the built-in model as a Hugging Face Llama. Only the names change: both models rotate queries and
keys in the same pairs (i, i + head_dim / 2).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ft_hsdp import secret
from ft_hsdp.config import Config, load, parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import RunDir, find_run
from ft_hsdp.state.checkpoint import catalog, dcp
from ft_hsdp.state.checkpoint.catalog import Checkpoint, Found, SkippedCheckpoint
from ft_hsdp.state.checkpoint.checkpoint_manifest import (
    PUBLISHED,
    CheckpointManifest,
    Stored,
    Unauthentic,
    Unusable,
)
from ft_hsdp.state.replica_group import Failed
from ft_hsdp.train.fsdp.frozen import content_digest
from ft_hsdp.train.fsdp.moving_buffers import STATES
from ft_hsdp.train.tokens import SEPARATOR

WEIGHTS, SHAPE = "model.safetensors", "config.json"
SUFFIX = ".safetensors"
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
    out: str  # folder or file
    skipped: tuple[SkippedCheckpoint, ...]  # newer checkpoints that are not valid
    missing: tuple[str, ...] = ()  # frozen parameters and buffers of the model that were not written

    def lines(self) -> list[str]:
        told = [f"passed over {each.name}: {each.reason}" for each in self.skipped]
        told.append(f"step {self.step}: {self.parameters} parameters in {self.out}")
        if self.missing:
            more = f" and {len(self.missing) - 1} more" if self.missing[1:] else ""
            told.append(
                f"missing in it: {self.missing[0]}{more}, which training does not change (--base adds them)"
            )
        return told


def export(source: Path, out: Path, step: int | None, key: bytes | None, base: Path | None = None) -> Exported:
    """Write the model of a checkpoint into a new folder or file.

    Args:
        source: The folder of checkpoints, or one of them.
        out: A new file ``*.safetensors``, for any model; or, for the built-in model, a new or empty folder.
        step: The step of the checkpoint; None: the newest valid one.
        key: The key with which it must be signed; None: any checkpoint is trusted.
        base: A safetensors file, or a folder of them, with the frozen parameters and buffers, for a file.

    Raises:
        ConfigError: There is no such checkpoint, the model is another one, ``base`` lacks something or has
            other weights, or ``out`` cannot be written.
    """
    found = _find(source, key, step)
    checkpoint = found.checkpoint
    if checkpoint is None:
        raise _nothing(source, step, found.skipped)
    state, of_user = checkpoint.manifest.state.step, out.suffix == SUFFIX
    if of_user and out.exists():
        raise ConfigError("OUT", str(out), "a file that does not exist yet")
    if not of_user and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "a folder that does not exist yet, or is empty")
    if of_user:
        weights, missing = _state_dict(checkpoint, base)
        _write(out, out.parent, weights)
        return Exported(state, _count(weights), str(out), found.skipped, missing)
    if base is not None:
        raise ConfigError("--base", str(base), f"OUT as FILE{SUFFIX}: the built-in model has no frozen weights")
    parameters, config = _llama(checkpoint)
    weights = _read(checkpoint, parameters)
    _write(out / WEIGHTS, out, weights, json.dumps(config, indent=2) + "\n")
    return Exported(state, _count(weights), str(out), found.skipped)


def source_of(runs_dir: Path, name: str) -> tuple[Path, bytes | None]:
    """Return the checkpoints that ``name`` stands for, and the key with which they are signed, if it is a run.

    Args:
        runs_dir: Where runs are looked for by name.
        name: The path of a folder of checkpoints or of one of them, or a run's name or folder.

    Raises:
        ConfigError: The run's configuration cannot be used.
    """
    path = Path(name)
    if path.exists() and not RunDir(path).config.is_file():
        return path, None
    try:
        run = find_run(runs_dir, name)
    except ConfigError:
        return path, None
    config = load(run.config)
    folder = Path(config.checkpoint.dir) if config.checkpoint.dir else run.path / "checkpoints"
    try:
        return folder, secret.run_key(run.path, config.checkpoint.key)
    except ConfigError:  # the caller may have another one, or trust the folder
        return folder, None


def _find(source: Path, key: bytes | None, step: int | None) -> Found:
    """Return the checkpoint that is meant, verified. Raises ConfigError."""
    try:
        if not PUBLISHED.fullmatch(source.name):
            return catalog.newest(source, key, step)
        if step is not None:
            raise ConfigError("--step", step, f"nothing beside one checkpoint, {source.name}")
        try:
            return Found(catalog.verify(source, key), ())
        except Unusable as error:
            return Found(None, (SkippedCheckpoint(source.name, str(error)),))
    except Unauthentic as error:
        allowed = "a checkpoint that was signed with the key of --key (or yours), or --trust"
        raise ConfigError("CHECKPOINT_DIR", str(source / str(error)), allowed) from None


def _read(checkpoint: Checkpoint, tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Return whole tensors, each under its name in ``tensors``. Raises ConfigError: the checkpoint has changed."""
    weights = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in tensors.items()}
    live = {dcp.key(tensor.kind, tensor.name): weights[name] for name, tensor in tensors.items()}
    try:
        dcp.load(checkpoint.path, live, checkpoint.manifest)
    except Failed as failed:
        allowed = f"one that does not change now ({failed})"
        raise ConfigError("CHECKPOINT_DIR", str(checkpoint.path), allowed) from failed
    return weights


def _state_dict(checkpoint: Checkpoint, base: Path | None) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the state dict of the user's unsharded model, and the names in it that nothing gives."""
    manifest = checkpoint.manifest
    parts = [(t, *t.name.partition("/")) for t in manifest.tensors]
    ours = {name: t for t, state, _, name in parts if state in STATES}  # the model's buffers that the state has
    weights = _read(checkpoint, {**ours, **{t.name: t for t in manifest.tensors if t.kind == "param"}})
    if base is not None:
        weights |= _frozen_of(base, manifest)
    for name, first in manifest.aliases.items():
        if first in weights:
            weights[name] = weights[first].clone()  # a file has no two names for the same bytes
    named = [*(each.name for each in manifest.frozen), *manifest.aliases]
    return weights, tuple(name for name in named if name not in weights)


def _frozen_of(base: Path, manifest: CheckpointManifest) -> dict[str, torch.Tensor]:
    """Return what training does not change, from ``base``; raise ConfigError where it is not what the job had."""
    files = sorted(base.glob(f"*{SUFFIX}")) if base.is_dir() else [base]
    frozen = {each.name: each for each in manifest.frozen}
    others = {first: name for name, first in manifest.aliases.items()}
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                for name in frozen:
                    if (there := name if name in names else others.get(name)) in names:
                        found[name] = opened.get_tensor(there)
    except (OSError, SafetensorError) as error:
        raise ConfigError("--base", str(base), f"a safetensors file, or a folder of them ({error})") from None
    absent = sorted(set(frozen) - set(found))
    if absent:
        more = f" and {len(absent) - 1} more are" if absent[1:] else " is"
        raise ConfigError("--base", str(base), f"all that training does not change ({absent[0]}{more} not in it)")
    for name, tensor in found.items():
        what = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content_digest(tensor)
        wanted = frozen[name]
        if what != (wanted.dtype, wanted.shape, wanted.digest):
            allowed = f"the weights of the job, {wanted.dtype} {list(wanted.shape)} and so on ({name} differs)"
            raise ConfigError("--base", str(base), allowed)
    return found


def _write(file: Path, made: Path, weights: dict[str, torch.Tensor], config: str | None = None) -> None:
    """Write a file of weights, and config.json beside it; nothing has their names before it is whole."""
    part = file.with_name(f"{file.name}.part")
    try:
        made.mkdir(parents=True, exist_ok=True)
        save_file(weights, part, metadata={"format": "pt"})
        if config is not None:
            file.with_name(SHAPE).write_text(config, encoding="utf-8")
        part.rename(file)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError("OUT", str(file.parent), f"a folder that can be written ({error})") from error


def _count(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in weights.values())


def _nothing(source: Path, step: int | None, skipped: tuple[SkippedCheckpoint, ...]) -> ConfigError:
    reasons = "; ".join(f"{each.name}: {each.reason}" for each in skipped)
    steps = sorted({int(path.name.split("-")[1]) for path in catalog.published(source)})
    if step is not None and step not in steps and steps:
        return ConfigError("--step", step, ", ".join(map(str, steps)))
    return ConfigError(
        "CHECKPOINT_DIR", str(source), f"a folder with a valid checkpoint ({reasons or 'it has none'})"
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
        allowed = f"checkpoints of ft_hsdp's own model ({min(strange)} is not in both); or OUT as FILE{SUFFIX}"
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
