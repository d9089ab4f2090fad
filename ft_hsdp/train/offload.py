"""Offload: optimizer tensors live in host memory and visit the device for the update only (FT-HSDP §5).

The tensors stay the same objects; between updates their storage on the device is empty, and the bytes are in
pinned host memory, from where snapshots are copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ft_hsdp.state.layout import local


@dataclass(slots=True)
class Moved:
    """Bytes moved between host and device, and the seconds that it took."""

    nbytes: int = 0
    seconds: float = 0.0


class Offload:
    """The host copies of ``tensors`` (DTensors or plain), which leave the device at once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = [local(t) for t in tensors]
        self.host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in self._device]
        self._nbytes = sum(t.numel() * t.element_size() for t in self._device)
        self.moved = Moved()
        self._reported = 0.0
        self.leave()

    def leave(self) -> None:
        """From the device to the host; the device's memory is free when it has been copied."""
        since = time.monotonic()
        for device, host in zip(self._device, self.host, strict=True):
            host.copy_(device, non_blocking=True)
        self._wait()
        for device in self._device:
            device.untyped_storage().resize_(0)
        self._count(since)

    def visit(self) -> None:
        """From the host to the device, for an update."""
        since = time.monotonic()
        for device, host in zip(self._device, self.host, strict=True):
            device.untyped_storage().resize_(device.numel() * device.element_size())
            device.copy_(host, non_blocking=True)
        self._wait()
        self._count(since)

    def lap(self) -> float:
        """Seconds spent on moving since the last call."""
        since, self._reported = self._reported, self.moved.seconds
        return self._reported - since

    def _wait(self) -> None:
        if any(t.is_cuda for t in self._device):
            torch.cuda.current_stream().synchronize()

    def _count(self, since: float) -> None:
        self.moved = Moved(self.moved.nbytes + self._nbytes, self.moved.seconds + time.monotonic() - since)
