"""Waiting in tests: always for a condition, always with a deadline."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

DEADLINE_S = 30.0
FIRST_S, LONGEST_S, GROWTH = 0.001, 0.02, 1.3  # between two looks: some of them read files, or ask a server

T = TypeVar("T")


def until(
    ready: Callable[[], T], what: str = "it happens", deadline_s: float = DEADLINE_S, said: Callable[[], str] = str
) -> T:
    """The first true answer of ``ready``; at the deadline the failure tells ``what`` and what was ``said``."""
    for pause_s in _pauses(what, deadline_s, said):
        if found := ready():
            break
        time.sleep(pause_s)
    return found


async def async_until(
    ready: Callable[[], T], what: str = "it happens", deadline_s: float = DEADLINE_S, said: Callable[[], str] = str
) -> T:
    for pause_s in _pauses(what, deadline_s, said):
        if found := ready():
            break
        await asyncio.sleep(pause_s)
    return found


def _pauses(what: str, deadline_s: float, said: Callable[[], str]) -> Iterator[float]:
    end, pause_s = time.monotonic() + deadline_s, FIRST_S
    while True:
        yield pause_s
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}\n{said()}"
        pause_s = min(LONGEST_S, pause_s * GROWTH)
