"""The reports of a supervisor to the lighthouse: which incarnations run and which have exited.

The answers tell it how far the job is, which replicas it may start, and which incarnations it must evict. The
supervisor's events go to the lighthouse on the same connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import replace

import httpx

from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.run.directory import Row
from ft_hsdp.protocol import ProcessReport

PERIOD_S = 0.25  # between two reports without a change
REPLY_S = 2.0  # longest wait for an answer

OnEvict = Callable[[int, str, str], None]
"""Called with (replica, incarnation, reason)."""


class LighthouseLink:
    """Reports all replicas of this supervisor, at once after each change and else every `PERIOD_S` seconds.

    Each report is complete, so an outage of the lighthouse needs no repair afterwards. Each report also renews the
    leases of the supervisor. While a lease lasts, the lighthouse lets no other supervisor start the replica; it
    begins, for this supervisor, before the report was sent.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        progress: Progress,
        on_evict: OnEvict,
        tls: ssl.SSLContext | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Make the link; `run` connects it.

        Args:
            urls: The addresses of the lighthouses.
            token: The secret that the job's processes share.
            progress: Takes the lighthouse's news of the job.
            on_evict: Called with each order to evict.
            tls: For HTTPS; None: HTTP.
            http: As in `LighthouseClient`.
        """
        self.problem: str | None = None  # why the last report failed
        self._progress = progress
        self._on_evict = on_evict
        self._running: dict[int, str | None] = {}  # incarnation by replica; None: the replica rests
        self._exited: dict[int, str] = {}  # newest exited incarnation by replica; it stands for earlier ones
        self._lost: set[int] = set()  # replicas for which others need not wait
        self._ended: set[int] = set()  # replicas that are done
        self.owner = secrets.token_hex(4)  # the name of this supervisor
        self._leases: dict[int, int] = {}  # number of the newest lease by claimed replica
        self._until: dict[int, float] = {}  # monotonic end of each lease
        self._rivals: dict[int, str] = {}  # the other supervisor that has a lease, by replica
        self._delivered: ProcessReport | None = None  # the newest report that was answered
        self._changed = asyncio.Event()
        self._client = LighthouseClient(urls, token, tls, None, REPLY_S, http)
        self._reporter = Reporter("supervisor", self._client.tell)

    def started(self, replica: int, incarnation: str) -> None:
        """Report that an incarnation has been started; a replica that was given up counts again."""
        self._running[replica] = incarnation
        self._lost.discard(replica)
        self._ended.discard(replica)
        self._changed.set()

    def rests(self, replica: int) -> None:
        """Report that no process of a replica runs, and that none will be started before it is wanted."""
        self._running.setdefault(replica, None)
        self._changed.set()

    def exited(self, replica: int, incarnation: str) -> None:
        """Report that all ranks of an incarnation are gone."""
        if self._running.get(replica) == incarnation:
            del self._running[replica]
        self._exited[replica] = incarnation
        self._changed.set()

    def lost(self, replica: int) -> None:
        """Report that others need not wait for a replica: it may not start again for a long time, or at all."""
        self._lost.add(replica)
        self._changed.set()

    def ended(self, replica: int) -> None:
        """Report that a replica is done. When all members of the job's epoch are, the job has ended."""
        self._ended.add(replica)
        self._changed.set()

    def claims(self, replica: int) -> None:
        """Ask for the lease of a replica: this supervisor alone will start it."""
        self._leases.setdefault(replica, 0)
        self._changed.set()

    def releases(self, replica: int) -> None:
        """Give the lease of a replica back: another supervisor may start it."""
        for known in (self._leases, self._until, self._rivals):
            known.pop(replica, None)
        self._changed.set()

    def holds(self, replica: int) -> bool:
        """Return whether this supervisor has the lease of a replica for certain."""
        return time.monotonic() < self._until.get(replica, 0.0)

    def rival(self, replica: int) -> str:
        """Return the other supervisor that has the lease by the lighthouse's last answer; "" if there is none."""
        return self._rivals.get(replica, "")

    def note(self, event: Row) -> None:
        """Send an event of this supervisor, or of an injected failure, to the lighthouse's journal."""
        self._reporter.event(event)

    @property
    def settled(self) -> bool:
        """Return whether the lighthouse has answered the current report."""
        delivered, now = self._delivered, self.current_report
        return delivered is not None and replace(delivered, leases=dict.fromkeys(delivered.leases, 0)) == now

    @property
    def current_report(self) -> ProcessReport:
        """Return the report as it is now, without the numbers of the leases."""
        return ProcessReport(
            dict(self._running),
            tuple(name for _, name in sorted(self._exited.items())),
            tuple(sorted(self._lost)),
            tuple(sorted(self._ended)),
            self.owner,
            dict.fromkeys(self._leases, 0),
        )

    async def run(self) -> None:
        """Send reports until cancelled. Without an answer `problem` has the reason."""
        self._reporter.start()
        try:
            while True:
                self._changed.clear()
                await self.report()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._changed.wait()
                if self.problem is not None and self._changed.is_set():
                    await asyncio.sleep(PERIOD_S / 5)  # many changes must not flood an absent lighthouse
        finally:
            await self._reporter.close()
            await self._client.close()

    async def report(self) -> None:
        """Send the current report once and act on the answer."""
        report, began = replace(self.current_report, leases=dict(self._leases)), time.monotonic()
        try:
            answer = await self._client.report(report)
        except LighthouseUnreachable as error:
            self.problem = f"{self._client.url}: {error}"
            return
        self.problem = None
        self._delivered = report
        self._rivals = {r: owner for r, owner in answer.rivals.items() if r in self._leases}
        for replica, number in answer.leases.items():
            if replica in self._leases:
                self._leases[replica] = number
                self._until[replica] = began + answer.lease_s
        evictions = [(each.replica, each.incarnation, each.reason) for each in answer.evict]
        for replica, owner in self._rivals.items():
            self._until.pop(replica, None)
            running = self._running.get(replica)
            if running is not None:
                evictions.append((replica, running, f"supervisor {owner} has taken replica {replica} over"))
        drained = frozenset(answer.drained)
        self._progress.saw(answer.step, answer.epoch, answer.finished, answer.halted, drained)
        self._progress.wake()
        for replica, incarnation, reason in evictions:
            self._on_evict(replica, incarnation, reason)
