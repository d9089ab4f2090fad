"""One owner for a folder that several jobs could use: the folder of a run, and the folder of checkpoints.

The owner is a job: its name, and a fingerprint of its token. Processes of one job share the claim, also on several
hosts and in several pid namespaces. Each of them renews `owner.json` every `RENEW_S`, and holds a shared lock on
`.owner.lock`. A job that wants the folder of another one looks whether the claim lives:

- On the same kernel the lock decides: who can have it alone is the only one, and takes the folder at once.
- Elsewhere it watches `owner.json`. A change means that the owner lives; no change for `LEASE_S` means that it is
  dead, and a claim that was given up needs a few seconds only. No clock of another host counts.

A process that was frozen and has lost its claim meanwhile finds another owner in the file, and writes no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp import protocol
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.jsonl import clear_way, here, read_object
from ft_hsdp.mounts import link_new

FILE, LOCK = "owner.json", ".owner.lock"
RENEW_S = 2.0  # between two renewals
LEASE_S = 30.0  # without a renewal for so long, the owner is dead
GIVEN_UP_S = 2.5 * RENEW_S  # the same for a claim that one process of the owner has given up: others may renew it
LOOK_S = 0.1

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FolderOwner:
    """A job, as others know it."""

    job: str
    fingerprint: str  # of its token

    @staticmethod
    def of(job: str, token: str) -> FolderOwner:
        """Return the owner that a job is; the fingerprint does not tell the token."""
        return FolderOwner(job, protocol.mac(token, "owner", job)[:16])

    def wrote(self, record: Record) -> bool:
        return (record.get("job"), record.get("fingerprint")) == (self.job, self.fingerprint)

    def has(self, folder: Path) -> bool:
        return self.wrote(read(folder))


class Claim:
    """This process's part in its job's claim on a folder; `lost` names the other job that has the folder now."""

    def __init__(self, folder: Path, owner: FolderOwner) -> None:
        """Take no claim yet: `take` does."""
        self.folder = folder
        self.lost = ""
        self._owner = owner
        self._lock: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="claim", daemon=True)
        _claims.add(self)

    def take(self, key: str, value: str, allowed: str) -> Claim:
        """Take the claim and keep it until `release`; blocks while it is not clear whether another owner lives.

        Args:
            key: The configuration key that a refusal names.
            allowed: What may stand there.

        Raises:
            ConfigError: Another job has the folder.
            OSError: The folder cannot be written.
        """
        clear_way(self.folder / FILE)
        while True:
            who, judged = judge(self.folder, self._owner)
            with turn(self.folder):
                found = {} if who else read(self.folder)
                if not who:
                    self._hold()  # before there is a record: who has it must not seem dead
                if not who and found == judged and not self._owner.wrote(found) and _clear(self.folder, found):
                    with contextlib.suppress(FileExistsError):  # of two that want it, one has it
                        _put(self.folder, self._record({}), new=True)
                if self._owner.has(self.folder):
                    break
                self.drop()
            if who:
                what = "end that job, or wait for its end; or choose another one"
                raise ConfigError(key, value, f"{allowed} ({who}; {what})")
        self.begin()
        return self

    def begin(self) -> None:
        """Keep a claim that `take` took, or that was made with the folder."""
        if self._lock is None:
            self._hold()
        self._renew()
        if not self._thread.is_alive():
            self._thread.start()

    def _hold(self) -> None:
        """Take this process's share of the lock; one that looks has it for a moment."""
        self._lock = _open(self.folder)
        for _ in range(int(RENEW_S / LOOK_S)):
            if self._lock is None or try_lock(self._lock, fcntl.LOCK_SH) is not False:
                break
            time.sleep(LOOK_S)

    def made(self) -> None:
        """Write the first record into a folder that no other process knows."""
        self._hold()
        _put(self.folder, self._record({}))

    def check(self) -> None:
        """Raise Retryable if another job has the folder now."""
        found = read(self.folder)
        if found and not self._owner.wrote(found):
            self.lost = _who(found)
        if self.lost:
            why = "this process was frozen for too long"
            raise Retryable(f"{self.folder} is of another job now: {self.lost}; {why}")

    def release(self) -> None:
        """Give this part up. The claim ends if no other process of the job renews it."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(RENEW_S)
        with contextlib.suppress(OSError):
            found = read(self.folder)
            if self._owner.wrote(found):
                _put(self.folder, {**found, "count": self._record(found)["count"], "given_up": True})
        self.drop()

    def drop(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a disk that fails now may take the next one
                self._renew()
            if self.lost:
                return

    def _renew(self) -> None:
        with turn(self.folder):  # a process that is frozen here must not write over the next owner's record
            found = read(self.folder)
            if found and not self._owner.wrote(found):
                self.lost = _who(found)
            elif self.folder.is_dir():
                if not (self.folder / LOCK).exists():  # the folder was removed, and made again
                    self.drop()
                    self._hold()
                _put(self.folder, self._record(found))

    def _record(self, before: Record) -> dict[str, Any]:
        since = before.get("since") or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        own, count = here(), before.get("count")
        boots = sorted({*filter(None, _boots(before)), own["boot"]})
        facts = {"job": self._owner.job, "fingerprint": self._owner.fingerprint, "since": since}
        counted = (count if isinstance(count, int) else 0) + 1
        return {**facts, "pid": os.getpid(), "host": own["host"], "boots": boots, "count": counted}


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _drop_all() -> None:
    for claim in _claims:
        claim.drop()


os.register_at_fork(after_in_child=_drop_all)  # a child that outlives its parent must not keep the lock


def judge(folder: Path, owner: FolderOwner) -> tuple[str, Record]:
    """Return which other job has a folder and lives, and the record that says so.

    It is "" if none does. Blocks until that is clear: `LEASE_S`.
    """
    found, lock, own_boot = read(folder), None, here()["boot"]
    if owner.wrote(found) or not folder.is_dir():
        return "", found
    lock = _open(folder) if (folder / LOCK).exists() else None
    until = time.monotonic() + (GIVEN_UP_S if found.get("given_up") else LEASE_S)
    try:
        while True:
            free = None if lock is None else try_lock(lock, fcntl.LOCK_EX)
            if free:
                fcntl.flock(lock or 0, fcntl.LOCK_UN)
            if not found and free is not False:
                return "", found  # nobody has claimed it, or what stands there is no claim
            if free and _boots(found) == {own_boot}:
                return "", found
            now = read(folder)
            if now != found:
                if not now or owner.wrote(now):
                    return "", now
                if not now.get("given_up"):
                    return _who(now), now
                found, until = now, time.monotonic() + GIVEN_UP_S
            if time.monotonic() > until:
                held = free is False and own_boot in (_boots(found) or {own_boot})
                return _who(found) if held else "", found
            time.sleep(LOOK_S)
    finally:
        if lock is not None:
            os.close(lock)


def _who(record: Record) -> str:
    if not record:
        return "another process has it"
    said = {name: str(record.get(name, "?"))[:64] for name in ("job", "since", "pid", "host")}
    return "job {job} has it since {since}, pid {pid} on {host}".format(**said)


def _boots(record: Record) -> set[str]:
    boots = record.get("boots")
    return {str(each) for each in boots} if isinstance(boots, list) else set()


def read(folder: Path) -> dict[str, Any]:
    """Return the record in a folder; an empty one if there is none that can be read."""
    return read_object(folder / FILE)


def _put(folder: Path, record: Record, *, new: bool = False) -> None:
    """Write the record; with `new` only where there is none, else FileExistsError. Raises OSError."""
    part = folder / f".{FILE}.{secrets.token_hex(6)}"
    try:
        part.write_text(json.dumps(record) + "\n", encoding="utf-8")
        if new:
            link_new(part, folder / FILE)
        else:
            part.replace(folder / FILE)
    finally:
        part.unlink(missing_ok=True)


def _clear(folder: Path, judged: Record) -> bool:
    """Remove the record of a dead owner, unless another one stands there now; return whether there is none."""
    aside = folder / f".{FILE}.{secrets.token_hex(6)}"
    try:
        (folder / FILE).rename(aside)
    except FileNotFoundError:
        return True
    same = read_object(aside) == judged
    if not same:
        with contextlib.suppress(OSError):
            link_new(aside, folder / FILE)
    aside.unlink(missing_ok=True)
    return same


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Let one process at a time change the owner of a folder, or rename it, where the file system has locks."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        for _ in range(int(LEASE_S / LOOK_S)):
            if try_lock(handle, fcntl.LOCK_EX) is not False:
                break
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(handle)


def _open(folder: Path) -> int | None:
    try:
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None


def try_lock(handle: int, kind: int) -> bool | None:
    """Return whether the lock was free; None: the file system has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
