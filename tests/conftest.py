"""Shared by all tests."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Two cores, many processes: a slow example is not a failure, and every run draws the same ones.
settings.register_profile("ft_hsdp", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ft_hsdp")

# torch asks for the names of its peers; where no name server answers, each question takes that long, not 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Whoever runs the tests in the background has SIGINT ignored, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ALONE = {"dashboard", "scenarios"}  # folders of which every test starts processes
LAST = ["sim", "scenarios"]  # folders with long tests: what fails soon fails first


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole folders, and put the long ones at the end."""
    for item in items:
        if ALONE & set(item.path.parts):
            item.add_marker(pytest.mark.multiproc)
    items.sort(key=lambda item: LAST.index(name) if (name := item.path.parent.name) in LAST else -1)


def pytest_collection_finish() -> None:
    """Everything that is imported stays: a test that collects garbage does not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread per process, as the ranks have it; inherited by what tests start."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
