"""Leaves out tests whose module needs a trainer that this environment does not have; a group of one process."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("pandas") else ["test_ray_train.py"]  # ray.train cannot be imported without it


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
