"""Running statistics of BatchNorm as part of the committed state: `Job.adopt` with ``batch_norm="mean"``.

Each rank of each replica sees other batches, so what its forwards make of the statistics differs. All begin a
micro-batch with the committed statistics. A step moves these once, by the mean over its units of how far one
forward moved them, so the result does not depend on who trained which unit. The sums travel in a bucket of their
own behind the gradients: what a committed step does to the statistics is decided with it, and a replica that
catches up has it, too.

`torch.nn.BatchNorm*`, `SyncBatchNorm`, `InstanceNorm*` with ``track_running_stats``, and any module that has a
``running_mean``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ft_hsdp.train.fsdp.param_groups import plain_name

STATE = "ft_hsdp.batch_norm"  # the name of the registered state that holds the statistics
_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def with_statistics(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose forward changes running statistics in train mode, by name."""
    found = {n: m for n, m in model.named_modules() if getattr(m, "running_mean", None) is not None}
    return {plain_name(name): module for name, module in found.items()}


class RunningStatistics:
    """The running statistics of a model: those of the committed state, and what forwards make of them here."""

    def __init__(self, model: nn.Module) -> None:
        """Find the statistics of ``model``."""
        self.buffers: dict[str, torch.Tensor] = {}
        for path, module in with_statistics(model).items():
            named = [(name, getattr(module, name, None)) for name in _NAMES]
            for name, buffer in named:
                if buffer is not None:
                    self.buffers[f"{path}.{name}" if path else name] = buffer
        self._committed: dict[str, torch.Tensor] = {}
        self._settled = False  # the job asks for batches: only committed steps and loads change them now
        self._moved: torch.Tensor | None = None  # how far the units since `take` moved them, in all
        self._units = 0
        self._running = False  # a micro-batch is under way

    @property
    def numel(self) -> int:
        """The number of elements of what `take` returns."""
        return sum(buffer.numel() for buffer in self.buffers.values()) + 1

    def settle(self) -> None:
        """Take the statistics as they are now for those of the initial state."""
        self._committed = {name: buffer.detach().clone() for name, buffer in self.buffers.items()}

    def begin(self) -> None:
        """Begin a micro-batch with the committed statistics; the one before has ended."""
        self._end()
        self._restore()
        self._running = True

    def take(self) -> torch.Tensor:
        """Return how far the units since the last call moved the statistics, in all, and their number.

        Returns:
            fp32 [numel].
        """
        self._end()
        moved, self._moved = self._moved, None
        units, self._units = self._units, 0
        assert moved is not None, "no micro-batch was begun"
        return torch.cat([moved, moved.new_tensor([float(units)])])

    def drop(self) -> None:
        """Forget the micro-batches that were not committed."""
        self._moved, self._units, self._running = None, 0, False
        self._restore()

    def _end(self) -> None:
        """Add up what the micro-batch that is under way has done."""
        if not self._running:
            return
        self._running = False
        both = zip(self.buffers.values(), self._committed.values(), strict=True)
        # In double, as fp32 does not hold the number of batches beyond 2^24.
        moved = torch.cat([(now.detach().double() - before.double()).float().view(-1) for now, before in both])
        self._moved = moved if self._moved is None else self._moved + moved
        self._units += 1

    def _restore(self) -> None:
        with torch.no_grad():
            for name, committed in self._committed.items():
                self.buffers[name].copy_(committed)

    def apply(self, reduced: torch.Tensor) -> None:
        """Move the committed statistics by the mean over the units of a step. A collective of the replica.

        The ranks' sums are added up in the order of the ranks, so all replicas get the same bits.

        Args:
            reduced: Of this rank's contributions, the sum over the replicas; fp32 [numel].
        """
        parts = [torch.empty_like(reduced) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, reduced.contiguous())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        mean, place = total[:-1] / total[-1], 0
        for before in self._committed.values():
            step = mean[place : place + before.numel()].view(before.shape)
            place += before.numel()
            # The number of batches is an integer; a forward that did not run in each unit makes a fraction.
            before += step if before.is_floating_point() else step.round().to(before.dtype)
        self.drop()

    # The registered state.

    def state_dict(self) -> dict[str, Any]:
        """Return the committed statistics by name. The first call is a collective of the replica.

        It takes those of rank 0 for the initial state, as DistributedDataParallel does: forwards before the first
        batch may have seen other data on each rank.
        """
        if not self._settled:
            self._settled = True
            for buffer in self.buffers.values():
                dist.broadcast(buffer, 0)
            self.settle()
        return dict(self._committed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the statistics of another state."""
        for name, tensor in self._committed.items():
            tensor.copy_(state[name])
        self.drop()
