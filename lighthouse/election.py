"""Election: which of several lighthouses leads. One key in etcd, put under a lease, says so.

The revision in which the key was made is the fence of its holder: whoever comes later has a larger one. The holder
counts its lease from before it asked for it, so it stops before anybody else can begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable

from lighthouse.etcd import Entry, Etcd, EtcdRefused, EtcdUnreachable

POLL_S = 0.25  # between two looks at who leads
RETRY_S = 0.1  # after a call that nobody answered
KEEPS = 4  # calls within one lease
MARGIN = 0.9  # part of a lease that its holder counts on


def boot_time() -> float:
    """Seconds since this machine started, those included in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election:
    """One candidate for the lead of a job. ``key`` is the leader's, ``lease_s`` whole seconds."""

    def __init__(
        self, etcd: Etcd, key: str, url: str, lease_s: int, clock: Callable[[], float] = boot_time
    ) -> None:
        self.key = key
        self.leader: str | None = None  # the URL of the newest leader that was seen
        self.revision = 0
        self._etcd = etcd
        self._lease_s = lease_s
        self._clock = clock
        self._url = url
        self._lease = 0
        self._until = 0.0

    @property
    def holds(self) -> bool:
        """Whether this candidate leads for certain: nobody else can, by now."""
        return self.revision > 0 and self._clock() < self._until

    async def win(self) -> None:
        """Wait until this candidate leads."""
        while True:
            if await self._try():
                return
            await asyncio.sleep(POLL_S)

    async def keep(self) -> str:
        """Go on leading for as long as possible; why it is over."""
        pause = self._lease_s / KEEPS
        while True:
            await asyncio.sleep(pause)
            sent = self._clock()
            try:
                left = await asyncio.to_thread(self._etcd.keep_alive, self._lease)
            except EtcdUnreachable as error:
                if not self.holds:
                    return f"its lease may have run out: {error}"
                pause = RETRY_S
                continue
            except EtcdRefused as error:
                left, why = 0.0, str(error)
            else:
                why = "etcd has ended its lease"
            if left <= 0:
                self.revision = 0
                return why
            if not self.holds:
                return "its lease may have run out while it did not run"
            self._until = sent + MARGIN * left
            pause = self._lease_s / KEEPS

    def resign(self) -> None:
        """Let another candidate lead at once."""
        self.revision = 0
        if self._lease:
            with contextlib.suppress(EtcdUnreachable, EtcdRefused):
                self._etcd.revoke(self._lease)
            self._lease = 0

    async def _try(self) -> bool:
        """Look who leads; if nobody does, try to."""
        try:
            found = await asyncio.to_thread(self._etcd.get, self.key)
            if found is None:
                return await self._campaign()
        except (EtcdUnreachable, EtcdRefused):
            self.leader = None
        else:
            self.leader = _url(found)
        return False

    async def _campaign(self) -> bool:
        """Put the key under a lease, unless somebody else was faster."""
        me = json.dumps({"url": self._url, "campaign": secrets.token_hex(8)})
        asked = self._clock()
        self._lease, holds_s = await asyncio.to_thread(self._etcd.grant, self._lease_s)
        found = await asyncio.to_thread(self._etcd.create, self.key, me, self._lease)
        self.leader = _url(found)
        if found.value != me:
            await asyncio.to_thread(self.resign)
            return False
        self._until = asked + MARGIN * holds_s
        self.revision = found.create_revision
        return True


def _url(entry: Entry) -> str | None:
    try:
        url = json.loads(entry.value)["url"]
    except (ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None
