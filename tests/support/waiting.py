"""Waiting in tests: always for a condition, always with a deadline."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

DEADLINE_S = 30.0
LOOK_S = 0.002  # between two looks

T = TypeVar("T")


def until(
    ready: Callable[[], T],
    what: str = "it happens",
    deadline_s: float = DEADLINE_S,
    said: Callable[[], str] = str,
) -> T:
    """The first true answer of ``ready``; at the deadline the failure tells ``what`` and what was ``said``."""
    for _ in _looks(what, deadline_s, said):
        if found := ready():
            break
        time.sleep(LOOK_S)
    return found


async def async_until(
    ready: Callable[[], T],
    what: str = "it happens",
    deadline_s: float = DEADLINE_S,
    said: Callable[[], str] = str,
) -> T:
    for _ in _looks(what, deadline_s, said):
        if found := ready():
            break
        await asyncio.sleep(LOOK_S)
    return found


def _looks(what: str, deadline_s: float, said: Callable[[], str]) -> Iterator[None]:
    end = time.monotonic() + deadline_s
    while True:
        yield
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}\n{said()}"
