"""What a state dict of an adopted model has beside the trainable parameters: the state does not hold it.

That are frozen parameters, persistent buffers, and further names of tied parameters. Training changes none of
them, and every replica brings them along by itself. So their digests are compared: when replicas check in, when a
job resumes from a checkpoint, and when a checkpoint is exported.

`BufferWatch` finds what training changes all the same, of buffers and frozen parameters that nobody declared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from ft_hsdp.core import state_id
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.checkpoint.checkpoint_manifest import Frozen
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.fsdp.moving_buffers import Place, places
from ft_hsdp.train.state.packing import as_bytes

BLOCK = 64 << 10  # bytes that have a digest of their own
NAMED = 4  # tensors that a message names
MOST = 64 << 20  # bytes of buffers that a look at all compares, beside the first block of each tensor


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


class BufferWatch:
    """The tensors that training must leave alone, with the digests of what they were.

    A digest of each block of 64 KiB is kept, because `Tensor._version` does not count writes through ``.data``,
    the usual form of a moving average. A look at all compares every buffer, up to a limit, and the first block of
    each frozen parameter, which an average changes everywhere. `look_on` compares two blocks, so it costs a step
    nothing that can be measured, and comes round to all of them.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._all = tuple(places)
        self._places = list(places)  # that were not found to change
        self._known: dict[tuple[str, int], int] = {}
        self._turns: list[Iterator[tuple[Place, int] | None]] = []

    def begin(self) -> None:
        self._places = list(self._all)
        self._known.clear()
        kinds: tuple[Callable[[Place], bool], ...] = (lambda p: p.kind == "frozen", lambda p: p.kind != "frozen")
        self._turns = [self._round(of_kind) for of_kind in kinds]
        self.look()

    def look(self) -> list[Place]:
        """Compare all buffers, and a part of each frozen parameter; return which differ, each once."""
        left, found = MOST, []
        for place in list(self._places):
            for block in range(_blocks(place) if place.kind != "frozen" and left > 0 else 1):
                left -= BLOCK
                if self._differs(place, block):
                    found.append(place)
                    break
        return found

    def look_on(self) -> list[Place]:
        """Compare the next block of the buffers and of the frozen parameters; return which differ, each once."""
        due = [next(turn) for turn in self._turns]
        return [each[0] for each in due if each is not None and self._differs(*each)]

    def refuse(self, found: Sequence[Place]) -> None:
        """Refuse that training changes tensors; let buffers pass that are not persistent.

        Raises:
            ConfigError: One of them is persistent.
        """
        wrong = [place for place in found if place.kind != "scratch"]
        if wrong:
            others = f" and {len(wrong) - 1} more" if wrong[1:] else ""
            raise ConfigError("job.adopt", f"{wrong[0].name}{others}, which training changes", ways(*wrong))

    def _round(self, of_kind: Callable[[Place], bool]) -> Iterator[tuple[Place, int] | None]:
        while True:
            mine = [place for place in self._places if of_kind(place)]
            if not mine:
                yield None
            for place in mine:
                for block in range(_blocks(place)):
                    if place in self._places:
                        yield place, block

    def _differs(self, place: Place, block: int) -> bool:
        """Return whether a block is not what it was when it was seen first; its tensor is then watched no more."""
        now = _digest(place, block)
        if self._known.setdefault((place.name, block), now) == now:
            return False
        self._places.remove(place)
        return True


def ways(*found: Place) -> str:
    """Return how tensors that training changes are declared, in words."""
    named = ", ".join([f'"{each.name}": MODE' for each in found[:NAMED]] + ["..."] * (len(found) > NAMED))
    mean = ' or "mean"' if all(each.averages for each in found) else ""
    modes = f'"state"{mean} (the state has it), or "local" (it is of no consequence)'
    return f"job.adopt(model, buffers={{{named}}}) with {modes}"


def _blocks(place: Place) -> int:
    tensor = place.tensor
    return 1 if tensor is None else max(1, -(-tensor.numel() * tensor.element_size() // BLOCK))


def _digest(place: Place, block: int) -> int:
    """Return a digest of the form of a tensor and of one of its blocks, for this process alone."""
    tensor = place.tensor
    if tensor is None or tensor.is_meta:
        return 0
    array: Any = as_bytes(tensor)[block * BLOCK : (block + 1) * BLOCK].cpu().numpy()
    return hash((tensor.dtype, tensor.shape, xxhash.xxh3_64_intdigest(memoryview(array))))
