"""What a state dict of an adopted model has beside the trainable parameters: the state does not hold it.

That are frozen parameters, persistent buffers, and further names of tied parameters. Training changes none of
them, and every replica brings them along by itself. So their digests are compared: when replicas check in, when a
job resumes from a checkpoint, and when a checkpoint is exported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from ft_hsdp.core import state_id
from ft_hsdp.state.checkpoint.checkpoint_manifest import Frozen
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.fsdp.moving_buffers import places
from ft_hsdp.train.state.packing import as_bytes


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the frozen parameters and the persistent buffers of ``model`` by name, each once."""
    beside = {n: place.whole for n, place in places(model).items() if place.kind in ("frozen", "buffer")}
    return {name: tensor for name, tensor in beside.items() if tensor is not None}


def aliases(model: nn.Module, known: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names of tied parameters and shared buffers, each with the name in ``known``."""
    first = {id(t): n for n, t in known.items()}
    named = [*model.named_parameters(remove_duplicate=False), *_buffers(model)]
    named = [(param_groups.plain_name(n), t) for n, t in named if id(t) in first]
    return {n: first[id(t)] for n, t in named if n != first[id(t)]}


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a state dict has; one that is shared under each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def described(named: Mapping[str, torch.Tensor], ranks: ReplicaGroup) -> tuple[Frozen, ...]:
    """Return ``named`` with digests that do not depend on the sharding. A collective of the replica. Blocks.

    Each sharded tensor is gathered once, one after the other, and hashed by one of the ranks.
    """
    mine: dict[str, str] = {}
    for index, (name, tensor) in enumerate(sorted(named.items())):
        if not isinstance(tensor, DTensor):
            mine[name] = content_digest(tensor)
            continue
        sharded: DTensor = tensor.detach()  # type: ignore[assignment] # detach keeps the class
        whole = sharded.full_tensor()
        if index % ranks.size == ranks.rank:
            mine[name] = content_digest(whole)
    told = [json.loads(each) for each in ranks.gather(json.dumps(mine).encode())]
    found: list[Frozen] = []
    for name, tensor in sorted(named.items()):
        digests = [each[name] for each in told if name in each]
        digest = digests[0] if len(set(digests)) == 1 else state_id.digest(digests)  # a buffer may differ by rank
        found.append(Frozen(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest))
    return tuple(found)


def content_digest(tensor: torch.Tensor) -> str:
    array: Any = as_bytes(tensor.detach()).cpu().numpy()
    return xxhash.xxh3_128_hexdigest(memoryview(array))
