"""The trainer on the CPU with the GPU data plane, whose kernels are interpreted: an entry for the fork server."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ft_hsdp.config import Config
from ft_hsdp.core.ring import RingPlan
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.train import runtime, trainer
from ft_hsdp.train.identity import IncarnationSource


def main(config: Config, replica: IncarnationSource, run: Path) -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane

    def plane(device: torch.device, arena: Arena, settings: Settings, largest: int) -> GpuPlane:
        made = GpuPlane(device, arena, settings.timeout_s)
        made.reserve(RingPlan.cut(largest, 4, 1, settings.slots, settings.chunk_bytes), torch.float32)
        print("staged")
        return made

    runtime.device_plane = plane
    return trainer.main(config, replica, run)
