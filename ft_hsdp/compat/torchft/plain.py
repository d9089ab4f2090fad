"""Plain: the process group beside the ring, for all that is not a sum: torch's own gloo over the same store."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store


def gloo(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Connect ``size`` ranks; waits for all of them.

    Raises:
        RuntimeError: they were not there in time.
    """
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    backend._set_sequence_number_for_group()
    for device in {"cpu", *([acc.type] if (acc := torch.accelerator.current_accelerator()) else [])}:
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    return group
