"""Tells the lighthouse which incarnations run and which have exited, and takes its orders to evict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx

from ft_hsdp.launch.progress import Progress

PERIOD_S = 0.25  # between two reports when nothing changes
REPLY_S = 2.0  # longest wait for one answer

OnEvict = Callable[[int, str, str], None]
"""Called with (replica, incarnation, reason)."""


class LighthouseLink:
    """The full picture of the replicas that this supervisor owns, sent at once on every change.

    An outage of the lighthouse is survived: the next report that arrives says everything.
    """

    def __init__(self, url: str, token: str, progress: Progress, on_evict: OnEvict) -> None:
        self.url = url
        self.problem: str | None = None  # why the last report failed
        self.answered_at: float | None = None  # monotonic time of the last answer
        self._token = token
        self._progress = progress
        self._on_evict = on_evict
        self._running: dict[int, str] = {}
        self._exited: list[str] = []
        self._lost: set[int] = set()
        self._delivered: dict[str, Any] = {}
        self._changed = asyncio.Event()

    def started(self, replica: int, incarnation: str) -> None:
        """An incarnation has been started."""
        self._running[replica] = incarnation
        self._changed.set()

    def exited(self, replica: int, incarnation: str) -> None:
        """All ranks of an incarnation are gone."""
        if self._running.get(replica) == incarnation:
            del self._running[replica]
        self._exited.append(incarnation)
        self._changed.set()

    def lost(self, replica: int) -> None:
        """A replica will not be started again."""
        self._lost.add(replica)
        self._changed.set()

    @property
    def settled(self) -> bool:
        """Whether the lighthouse knows the whole picture."""
        return self._delivered == self.picture

    @property
    def picture(self) -> dict[str, Any]:
        """What is reported."""
        return {
            "running": {str(replica): name for replica, name in sorted(self._running.items())},
            "exited": list(self._exited),
            "lost": sorted(self._lost),
        }

    async def run(self) -> None:
        """Report until cancelled. Raises nothing for a lighthouse that is away."""
        headers = {"Authorization": f"Bearer {self._token}"}
        async with httpx.AsyncClient(headers=headers, timeout=REPLY_S, trust_env=False) as client:
            while True:
                self._changed.clear()
                await self.report(client)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._changed.wait()
                if self.problem is not None and self._changed.is_set():
                    await asyncio.sleep(PERIOD_S / 5)  # a change does not make an absent lighthouse answer

    async def report(self, client: httpx.AsyncClient) -> None:
        """Send the picture once and act on the answer."""
        picture = self.picture
        try:
            response = await client.post(f"{self.url}/v1/processes", json=picture)
            if response.status_code != httpx.codes.OK:
                self.problem = f"{self.url} answers {response.status_code}: {response.text[:200]}"
                return
            answer = response.json()
            evictions = [(e["replica"], e["incarnation"], e["reason"]) for e in answer["evict"]]
            step, epoch, finished = int(answer["step"]), int(answer["epoch"]), bool(answer["finished"])
            halted = str(answer["halted"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            self.problem = f"{self.url}: {type(error).__name__}: {error}"
            return
        self.problem = None
        self.answered_at = time.monotonic()
        self._delivered = picture
        self._progress.saw(step, epoch, finished, halted)
        self._progress.wake()
        for replica, incarnation, reason in evictions:
            self._on_evict(replica, incarnation, reason)
