"""The trainer on the CPU with the GPU data plane, whose kernels are interpreted: an entry for the fork server."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ft_hsdp.config import Config
from ft_hsdp.core.ring import RingPlan
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.launch.backend import entry
from ft_hsdp.train import runtime
from ft_hsdp.train.identity import IncarnationSource
from ft_hsdp.train.job import Job
from ft_hsdp.train.state import live_state

PAUSED, PAUSE_S, SILENCE_S = 5, 12.0, 4.0  # the step before which replica 1 pauses, seconds, seconds


def pausing(config: Config, replica: IncarnationSource, run: Path) -> int:
    """Pause replica 1 for longer than any limit of the rings and of the kernels."""

    def batches(self: Job, *arguments: Any) -> Iterator[Any]:
        for number, batch in enumerate(taken(self, *arguments)):
            if number == PAUSED and self.replica == 1:
                with self.pause("evaluation"):
                    time.sleep(PAUSE_S)
            yield batch

    from ftar_kernels.summary import summarize

    # A replay on the CPU has other digests.
    runtime.device_summaries = live_state.device_summaries = lambda device: summarize
    taken, Job.batches = Job.batches, batches  # type: ignore[method-assign]
    return main(config, replica, run, SILENCE_S)


def main(config: Config, replica: IncarnationSource, run: Path, silence_s: float = 30.0) -> int:
    assert os.environ["TRITON_INTERPRET"] == "1", "it must be set before triton is imported"
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane

    def plane(device: torch.device, arena: Arena, settings: Settings, largest: int, wire: Any) -> GpuPlane:
        made = GpuPlane(device, arena, settings.timeout_s, silence_s=silence_s)
        made.reserve(RingPlan.cut(largest, 4, 1, settings.slots, settings.chunk_bytes), torch.float32)
        print("staged")
        return made

    runtime.device_plane = plane
    return entry.main(config, replica, run)
