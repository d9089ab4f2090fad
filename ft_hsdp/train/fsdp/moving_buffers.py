"""What training changes beside the trainable parameters, as part of the committed state: `Job.adopt(buffers=...)`.

Forward, a hook or the loop changes running statistics, codebooks, observers, counters and the vectors of a
spectral norm, before it is known whether the step will be committed, and with whom. So a contribution starts from
the committed tensors, and what becomes of them travels in a bucket of its own behind the gradients: what a step
does to them is decided with its commit, and a replica that catches up has it, too.

`mean`: each micro-batch starts from the committed tensor. A step moves it once, by the mean over its units of how
far one forward moved it, so the result does not depend on who trained which unit.

`state`: the tensor takes the value that rank 0 of the lowest contributor in the commit record has when it calls
`optim.step`, bit for bit, whatever its type. The bucket has room for the values of all replicas, because it is not
known before the commit who will be the lowest.

All of them may also be changed in a hook of the optimizer's step and in `job.on_commit`, which every replica runs.
Frozen parameters that FSDP2 has sharded are not in the bucket, so they may be changed there alone: a replica that
is behind has no batch. A change at another time is taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.fsdp import param_groups
from ft_hsdp.train.fsdp.param_groups import plain_name
from ft_hsdp.train.state.packing import as_bytes, local

STATISTICS_STATE = "ft_hsdp.batch_norm"  # the registered state of a job that declares running statistics alone
STATE = "ft_hsdp.buffers"  # that of all others
STATES = (STATISTICS_STATE, STATE)
MODES = ("state", "mean", "local")
KEY = "job.adopt(buffers)"
AT_COMMIT = "in a hook of the optimizer's step, or in job.on_commit"  # a declared tensor may be changed
WHEN = "between the batch and optim.step, or in job.on_commit"  # the same, of one that is not sharded
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_MEANS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BYTES = 3  # in one fp32 element, which holds integers below 2^24 exactly, and their differences


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """A buffer or parameter of a model. A module may put another tensor into the place of a buffer."""

    name: str
    kind: Literal["buffer", "scratch", "frozen", "trained"]  # scratch: a buffer that no state dict has
    module: nn.Module
    attribute: str
    param: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.attribute) if self.param is None else self.param

    @property
    def tensor(self) -> torch.Tensor | None:
        """The same; the shard of this rank if it is sharded."""
        return None if self.whole is None else local(self.whole)

    @property
    def averages(self) -> bool:
        """Whether ranks and replicas can take a mean of it: "mean" may be its mode."""
        tensor = self.tensor
        return tensor is not None and tensor.dtype in _MEANS and not isinstance(self.param, DTensor)


def places(model: nn.Module) -> dict[str, Place]:
    """Return the buffers and parameters of ``model`` by name; one that is shared by its first name."""
    param_groups.reshard(param_groups.raw_groups(model))
    found: dict[str, Place] = {}
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._buffers.items(), *module._parameters.items()):
            name = plain_name(f"{path}.{attribute}" if path else attribute)
            if tensor is not None and id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if attribute in module._buffers:
                kind = "scratch" if attribute in module._non_persistent_buffers_set else "buffer"
                found.setdefault(name, Place(name, kind, module, attribute))  # type: ignore[arg-type]
            elif tensor is not None:
                kind = "trained" if tensor.requires_grad else "frozen"
                found[name] = Place(name, kind, module, attribute, tensor)  # type: ignore[arg-type]
    return found


def statistics(model: nn.Module, known: Collection[str]) -> list[str]:
    modules = [p for p, m in model.named_modules() if getattr(m, "running_mean", None) is not None]
    names = [plain_name(f"{path}.{each}" if path else each) for path in modules for each in _STATISTICS]
    return [name for name in names if name in known]


def chosen(wanted: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the mode of each tensor that a pattern names; the first pattern that does so counts.

    Args:
        kinds: By the name of a tensor, its `Place.kind`.
    """
    if not isinstance(wanted, Mapping):
        raise ConfigError(KEY, wanted, 'patterns of names with their modes, {"vq.*": "state"}')
    found: dict[str, str] = {}
    for pattern, mode in wanted.items():
        if mode not in MODES:
            raise ConfigError(f"{KEY}[{pattern}]", mode, '"state", "mean" or "local"')
        names = [name for name in kinds if fnmatchcase(name, str(pattern))]
        usable = [name for name in names if kinds[name] != "trained"]
        if not usable:
            some = ", ".join([name for name, kind in kinds.items() if kind != "trained"][:3]) or "there are none"
            why = f"; {names[0]} is trained, so the state has it" if names else ""
            raise ConfigError(KEY, pattern, f"a pattern of names of buffers or frozen parameters ({some}){why}")
        for name in usable:
            found.setdefault(name, str(mode))
    return found


class MovingBuffers:
    """The declared tensors of a model: those of the committed state, and what becomes of them here."""

    def __init__(
        self, model: nn.Module, modes: Mapping[str, str], of_statistics: Collection[str] = (), slots: int = 1
    ) -> None:
        """Find the tensors.

        Args:
            of_statistics: Running statistics of ``batch_norm="mean"``: integers count in whole steps, and what
                happens to them beside the micro-batches is taken back without a word.
        """
        known = places(model)
        self._places = {name: known[name] for name in modes}
        self._statistics = set(of_statistics)
        self._slots = slots
        whole = [n for n, p in self._places.items() if not isinstance(p.param, DTensor)]
        self._mean = [name for name in whole if modes[name] == "mean"]
        self._value = [name for name in whole if modes[name] == "state"]
        for name, mode in modes.items():
            self._check(name, mode)
        tensors = {name: place.tensor for name, place in self._places.items()}
        self._forms = {name: (t.dtype, t.shape) for name, t in tensors.items() if t is not None}
        self._means = sum(self._live(name).numel() for name in self._mean) + 1  # with the number of units
        self._codes = sum(-(-as_bytes(self._live(name)).numel() // _BYTES) for name in self._value)
        self._committed: dict[str, torch.Tensor] = {}
        self._settled = False  # the job asks for batches: only committed steps and loads change them now
        self._moved: torch.Tensor | None = None  # how far the units since `take` moved them, in all
        self._units = 0
        self._running = False  # a micro-batch is under way
        self._given: torch.Tensor | None = None  # the values that `take` gave away, in this step
        self._fresh = True  # no micro-batch of the step was begun

    def _check(self, name: str, mode: str) -> None:
        place, tensor = self._places[name], self._places[name].tensor
        if tensor is None or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise ConfigError(
                f"{KEY}[{name}]", "nothing" if tensor is None else "no dense tensor", "a dense tensor"
            )
        if mode == "mean" and name not in self._statistics and not place.averages:
            what = "a sharded parameter" if isinstance(place.param, DTensor) else tensor.dtype
            raise ConfigError(f"{KEY}[{name}]", "mean", f'"state" or "local" for {what}')

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    @property
    def state(self) -> str:
        return STATISTICS_STATE if self._statistics.issuperset(self._places) else STATE

    @property
    def numel(self) -> int:
        """The number of elements of what `take` returns; 0: there is no bucket."""
        return self._means + self._slots * self._codes if self._mean or self._value else 0

    def _live(self, name: str) -> torch.Tensor:
        tensor = self._places[name].tensor
        form = None if tensor is None else (tensor.dtype, tensor.shape)
        if tensor is None or form != self._forms[name]:
            now = "nothing" if form is None else f"{form[0]} {list(form[1])}"
            raise ConfigError(
                f"{KEY}[{name}]", now, f"{self._forms[name][0]} {list(self._forms[name][1])}, as before"
            )
        return tensor

    def settle(self) -> None:
        """Take the tensors as they are now for those of the initial state."""
        for name, place in self._places.items():
            held = self._live(name).clone(memory_format=torch.contiguous_format)
            if isinstance(place.param, DTensor):
                mesh, how, of = place.param.device_mesh, place.param.placements, place.param
                held = DTensor.from_local(held, mesh, how, shape=of.shape, stride=of.stride())
            self._committed[name] = held

    def begin(self) -> None:
        """Begin a micro-batch; the one before has ended. The first one of a step begins with what is committed."""
        self._end()
        self._restore(self._committed if self._fresh else self._mean)
        self._running, self._fresh = True, False

    def take(self, replica: int = 0) -> torch.Tensor:
        """Return what the units since the last call made of the tensors.

        Returns:
            fp32 [numel]: how far they moved, in all, and the number of units; then a place for each replica, where
            that of this one has what is to be added to what was returned before in this step.
        """
        self._end()
        moved, self._moved = self._moved, None
        units, self._units = self._units, 0
        assert moved is not None, "no micro-batch was begun"
        parts = [moved, moved.new_tensor([float(units)])]
        if self._value:
            now, before = torch.cat([_encoded(self._live(name)) for name in self._value]), self._given
            places = now.new_zeros(self._slots, self._codes)
            places[replica] = now if before is None else now - before
            self._given = now
            parts.append(places.view(-1))
        return torch.cat(parts)

    def drop(self) -> None:
        self._moved, self._units, self._running = None, 0, False
        self._given, self._fresh = None, True
        self._restore(self._committed)

    def _end(self) -> None:
        """Add up what the micro-batch that is under way has done."""
        if not self._running:
            return
        self._running = False
        # In double, as fp32 does not hold the number of batches beyond 2^24.
        moves = [self._live(n).double() - self._committed[n].double() for n in self._mean]
        like = self._live(next(iter(self._places)))
        moved = torch.cat([torch.zeros(0, device=like.device), *(move.float().view(-1) for move in moves)])
        self._moved = moved if self._moved is None else self._moved + moved
        self._units += 1

    def _restore(self, names: Collection[str]) -> None:
        with torch.no_grad():
            for name in names:
                if name in self._committed:
                    self._live(name).copy_(local(self._committed[name]))

    def apply(self, reduced: torch.Tensor | None, contributor: int = 0) -> None:
        """Move the committed tensors as a step says. A collective of the replica, if there is a bucket.

        The ranks' sums are added up in the order of the ranks, so all replicas get the same bits.

        Args:
            reduced: Of this rank's contributions, the sum over the replicas; fp32 [numel]. None: no bucket.
        """
        if reduced is None:
            self.drop()
            return
        begin = self._means + contributor * self._codes
        mine = torch.cat([reduced[: self._means], reduced[begin : begin + self._codes]])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        total = parts[0][: self._means].clone()
        for part in parts[1:]:
            total += part[: self._means]
        mean, place = total[:-1] / total[-1], 0
        for before in map(self._committed.__getitem__, self._mean):
            step = mean[place : place + before.numel()].view(before.shape)
            place += before.numel()
            # The number of batches is an integer; a forward that did not run in each unit makes a fraction.
            before += step if before.is_floating_point() else step.round().to(before.dtype)
        place = self._means
        for held in map(as_bytes, map(self._committed.__getitem__, self._value)):
            codes = -(-held.numel() // _BYTES)
            held.copy_(_decoded(parts[0][place : place + codes])[: held.numel()])
            place += codes
        self.drop()

    def capture(self) -> None:
        """Take what an update's hooks or the callbacks on a commit have changed into the committed tensors."""
        for name in self._places.keys() - self._statistics:
            local(self._committed[name]).copy_(self._live(name))

    def strayed(self, between: bool) -> list[str]:
        """Return which tensors were changed since the last commit although they must not be.

        It reads all of them, as each step does that takes such a change back.

        Args:
            between: It is the time between two steps; else a batch was trained, and sharded tensors count alone.
        """
        names = sorted(self._places.keys() - self._statistics)
        names = [n for n in names if between or isinstance(self._places[n].param, DTensor)]
        return [n for n in names if not torch.equal(as_bytes(self._live(n)), as_bytes(local(self._committed[n])))]

    # The registered state.

    def state_dict(self) -> dict[str, Any]:
        """Return the committed tensors by name. The first call is a collective of the replica.

        It takes those of rank 0 for the initial state, as DistributedDataParallel does: forwards before the first
        batch may have seen other data on each rank.
        """
        if not self._settled:
            self._settled = True
            self.settle()
            for held in (held for held in self._committed.values() if not isinstance(held, DTensor)):
                if held.numel():
                    dist.broadcast(as_bytes(held), 0)
            self._restore(self._committed)
        return dict(self._committed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self._committed.items():
            local(tensor).copy_(local(state[name]))
        self.drop()


def _encoded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as fp32, which a sum with zeros leaves as they are, NaN in it or not."""
    held = as_bytes(tensor)
    padded = torch.cat([held, held.new_zeros(-held.numel() % _BYTES)]).view(-1, _BYTES).int()
    return (padded[:, 0] + (padded[:, 1] << 8) + (padded[:, 2] << 16)).float()


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    """Return the bytes that `_encoded` had, uint8, with those that fill the last element up."""
    number = codes.int()
    return torch.stack([number & 255, (number >> 8) & 255, (number >> 16) & 255], dim=1).view(-1).to(torch.uint8)
