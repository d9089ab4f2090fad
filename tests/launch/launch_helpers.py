"""Waiting in tests: always for a condition, always with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

DEADLINE_S = 20.0

Plan = Callable[[dict[str, Any]], None]


def run_async(body: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; it has to end."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await body

    asyncio.run(bounded())


async def until(ready: Callable[[], Any], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        await asyncio.sleep(0.005)
