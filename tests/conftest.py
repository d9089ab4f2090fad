"""Shared by all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Two cores, many processes: a slow example is not a failure, and every run draws the same ones.
settings.register_profile("ft_hsdp", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ft_hsdp")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread per process, as the ranks have it; inherited by what tests start."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
