import asyncio
import atexit
import functools
import gc
import inspect
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

from ft_hsdp.lifetime import NOTICES
from tests.support.programs import INAPPLICABLE

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# Two cores, many processes: a slow example is not a failure, and every run draws the same ones.
settings.register_profile("ft_hsdp", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ft_hsdp")

# torch asks for the names of its peers; where no name server answers, each question takes that long, not 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

if "XDG_STATE_HOME" not in os.environ:  # checkpoints of tests are signed with a key of their own
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="ft_hsdp-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Whoever runs the tests in the background, or with nohup, has SIGINT or SIGHUP ignored, and what they start would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# In continuous integration everything but a GPU is there: a test that is skipped for want of something has failed.
SKIP_NOTHING = os.environ.get("FT_HSDP_SKIP_NOTHING") == "1"

WITHOUT_A_GPU = ("CUDA is not available", "Not enough GPUs")  # torchft's own tests say so

MARKS = ("multiproc", "proof", "soak", "integration")
RANKS = {"scenarios"}  # folders of which every test trains with real ranks
FIRST = ("model", "ftar_kernels")  # folders with few and long tests: at the end they would keep one worker alone
LAST = ("scenarios",)  # with real ranks: what fails soon fails first


ASYNC_S = 80.0  # longest time for an async test; `pytest.mark.timeout` allows another


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


def _bounded(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    """The test with a time limit. What a task or a callback raised and nothing took fails it, too."""

    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        async with asyncio.timeout(seconds):
            await test(*args, **kwargs)
        assert not failed, failed

    return bounded


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file none of whose tests can be selected by -m: importing all of them takes 20 s of each worker.

    A test has no mark whose name its file does not mention, but that of its folder.
    """
    if collection_path.suffix != ".py" or not config.option.markexpr:
        return None
    always = {"multiproc"} if RANKS & set(collection_path.parts) else set()
    text = collection_path.read_text()
    return None if selectable(config.option.markexpr, always, {m for m in MARKS if m in text} - always) else True


def selectable(expression: str, always: set[str], perhaps: set[str]) -> bool:
    """Whether ``-m expression`` selects a test that has the marks ``always`` and any of ``perhaps``."""
    chosen = (always.union(some) for n in range(len(perhaps) + 1) for some in itertools.combinations(perhaps, n))
    return any(_selects(Expression.compile(expression), marks) for marks in chosen)


def _selects(expression: Expression, marks: set[str]) -> bool:
    """Whether tests with these of `MARKS` are selected; each may have any other mark, such as anyio's."""

    def has(name: str, /, **_: str | int | bool | None) -> bool:
        return name in marks or name not in MARKS

    return expression.evaluate(has)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole folders, order them by how long they take, and bound async tests."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            limit = item.get_closest_marker("timeout")
            item.obj = _bounded(item.obj, limit.args[0] if limit else ASYNC_S)
        if RANKS & set(item.path.parts):
            item.add_marker(pytest.mark.multiproc)
    items.sort(key=lambda item: (item.path.parent.name in LAST) - (item.path.parent.name in FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped where nothing may be has failed."""
    return unskipped((yield), SKIP_NOTHING)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return unskipped((yield), SKIP_NOTHING)


def unskipped(report: Report, strict: bool) -> Report:
    """The report of a test; if ``strict``, of one that failed if it was skipped where it should have run."""
    if strict and report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if INAPPLICABLE not in why and not any(reason in why for reason in WITHOUT_A_GPU):
            report.outcome = "failed"
            report.longrepr = f"FT_HSDP_SKIP_NOTHING=1, but: {why}"
    return report


def pytest_collection_finish() -> None:
    """Everything that is imported stays: a test that collects garbage does not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _notices() -> Generator[None, None, None]:
    """A command that a test has run in this process had it ignore them, and what later tests start would, too."""
    yield
    for number in NOTICES:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread per process, as the ranks have it; inherited by what tests start."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
