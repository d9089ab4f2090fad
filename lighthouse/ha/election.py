"""Election: which of several lighthouses leads. One key in etcd, put under an etcd lease, says so.

The revision in which the key was made is the fence of its holder: a later holder has a larger one. The holder
counts its lease from before it asked for it, so it stops before another candidate can begin. `EtcdStore` keeps the
durable state of a job in etcd, for the lighthouse that leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable

from ft_hsdp.core import state_id
from lighthouse.ha.etcd import Etcd, EtcdEntry, EtcdRefused, EtcdUnreachable
from lighthouse.quorum.state import LighthouseState
from lighthouse.store import FORMAT, Rows, Store, StoreFailed

POLL_S = 0.25  # between two looks at who leads
RETRY_S = 0.1  # after a call that was not answered
KEEPS = 4  # calls within one lease
MARGIN = 0.9  # part of a lease that its holder counts on


def boot_time() -> float:
    """Return the seconds since this machine started, those included in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Election:
    """One candidate for the lead of a job.

    Args:
        key: The key that names the leader.
        lease_s: Length of the leader's lease, whole seconds.
        clock: Seconds that never jump and do not stop while the machine is suspended.
    """

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
        """Whether this candidate leads for certain: no other one can lead now."""
        return self.revision > 0 and self._clock() < self._until

    async def win(self) -> None:
        while True:
            if await self._try():
                return
            await asyncio.sleep(POLL_S)

    async def keep(self) -> str:
        """Renew the lease for as long as possible; return why the lead is lost."""
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
        """Give up the lead, so that another candidate can lead at once. Blocks for a call to etcd."""
        self.revision = 0
        if self._lease:
            with contextlib.suppress(EtcdUnreachable, EtcdRefused):
                self._etcd.revoke(self._lease)
            self._lease = 0

    async def _try(self) -> bool:
        """Look up who leads, and campaign if no candidate does; return whether this one leads now."""
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
        """Put the key under a lease, unless another candidate was faster; return whether this one leads now."""
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


def _url(entry: EtcdEntry) -> str | None:
    try:
        url = json.loads(entry.value)["url"]
    except (ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


_FORMAT = "format"


class Deposed(StoreFailed):
    """This lighthouse does not lead any more, or cannot be certain that it does."""


class EtcdStore(Store):
    """Rows below ``prefix``, each "DIGEST JSON"; each write is one transaction that only the leader's key lets in.

    A write also compares how many there were before, so one that etcd does late undoes no newer one.
    If etcd does not answer a write, the write may have happened. Then this lighthouse does not know what is
    durable, and stays deposed. Raises Deposed also if nothing would be written: only the leader may decide.
    """

    def __init__(self, etcd: Etcd, prefix: str, election: Election) -> None:
        self._etcd = etcd
        self._prefix = f"{prefix}/durable/"
        self._election = election
        self._writes = 0  # to the row that each write puts
        self.deposed = ""  # why nothing can be written any more
        super().__init__(f"etcd {self._prefix}")

    def unsaved(self, state: LighthouseState) -> frozenset[str]:
        if self.deposed or not self._election.holds:
            raise Deposed(f"this lighthouse does not lead any more{self.deposed and f': {self.deposed}'}")
        return super().unsaved(state)

    def close(self) -> None: ...

    def _read(self) -> tuple[int, Rows]:
        try:
            found = self._etcd.below(self._prefix)
        except EtcdUnreachable as error:
            raise Deposed(str(error)) from error
        except EtcdRefused as error:
            raise self._unusable(str(error)) from None
        known = found.get(self._prefix + _FORMAT)
        self._writes = known.version if known is not None else 0
        texts = {key.removeprefix(self._prefix): entry.value for key, entry in found.items()}
        rows: Rows = {}
        for name, text in texts.items():
            digest, _, rows[name] = text.partition(" ")
            if digest != state_id.digest(name, rows[name]):
                raise self._unusable(f"{name} is damaged")
        kept = rows.pop(_FORMAT, "0")
        return (int(kept) if kept.isdecimal() else 0), rows

    def _write(self, rows: Rows) -> None:
        key, revision = self._election.key, self._election.revision
        texts = {**rows, _FORMAT: str(FORMAT)}
        values = {self._prefix + n: f"{state_id.digest(n, text)} {text}" for n, text in texts.items()}
        try:
            found = self._etcd.put_if(key, revision, values, {self._prefix + _FORMAT: self._writes})
        except EtcdUnreachable as error:
            self.deposed = f"a write may be lost or not ({error})"
            raise Deposed(f"lighthouse store {self._name}: {self.deposed}") from error
        except EtcdRefused as error:
            raise StoreFailed(f"lighthouse store {self._name}: {error}") from error
        if found is not None:
            if key not in found or found[key].create_revision != revision:
                self.deposed = "another one does"
                raise Deposed(f"lighthouse store {self._name}: another lighthouse leads")
            if any(k not in found or found[k].value != value for k, value in values.items()):
                self.deposed = "its rows are not as this lighthouse wrote them"
                raise Deposed(f"lighthouse store {self._name}: {self.deposed}")
            # Else a member of etcd did this before another one was asked, and did not answer.
        self._writes += 1

    @property
    def _least_term(self) -> int:
        return self._election.revision
