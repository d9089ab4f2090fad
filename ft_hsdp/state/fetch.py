"""Fetch: a rank that is behind takes its shard of a committed state from a healthy replica (FT-HSDP §4.3, §4.4).

Everything goes into a staging buffer and is verified there; the live state is not touched. A donor that is slow,
wrong or gone is passed over for the next one.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import wire
from ft_hsdp.state.snapshot import Snapshot

SOCKET_TIMEOUT_S = 10.0
RETRY_S = 0.02


class Cancelled(Exception):
    """The fetch is of no more use."""


class NotFetched(Exception):
    """No donor could serve the state; the message says what each one did."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A replica that holds the state, and where this rank's shard is served."""

    replica: int
    address: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What the own model expects."""

    state: StateId
    rank: int
    ranks: int
    layout: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified shard, where it came from, and what it took in seconds."""

    snapshot: Snapshot
    donor: Donor
    seconds: float


def fetch(
    donors: Sequence[Donor],
    expected: Expected,
    token: str,
    deadline_s: float,
    cancel: threading.Event,
    rejected: Callable[[Donor, str], None],
) -> Fetched:
    """Fetch and verify one shard; donors that do not have it yet are asked again until the deadline.

    Raises:
        Cancelled: ``cancel`` was set.
        NotFetched: the deadline passed, or every donor failed for good.
    """
    began = time.monotonic()
    end = began + deadline_s
    failures: dict[Donor, str] = {}
    while time.monotonic() < end:
        for donor in donors:
            if donor in failures:
                continue
            if cancel.is_set():
                raise Cancelled
            try:
                snapshot = _from(donor, expected, token, cancel, end)
            except (OSError, http.client.HTTPException, DataCorruption) as error:
                failures[donor] = f"replica {donor.replica}: {error}"
                rejected(donor, str(error))
                continue
            if snapshot is not None:
                return Fetched(snapshot, donor, time.monotonic() - began)
        if len(failures) == len(donors):
            break
        if cancel.wait(RETRY_S):
            raise Cancelled
    raise NotFetched("; ".join(failures.values()) or f"no donor had it within {deadline_s} s")


def _from(donor: Donor, expected: Expected, token: str, cancel: threading.Event, end: float) -> Snapshot | None:
    """One donor's copy; None if it does not have that state (yet)."""
    host, _, port = donor.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SOCKET_TIMEOUT_S)
    try:
        state = expected.state
        path = f"/v1/state/{state.commit_epoch}/{state.step}/{state.lineage}"
        response = _get(connection, f"{path}/manifest", token)
        if response.status == 404:
            return None
        _ok(response)
        manifest = wire.decode(response.read(wire.MAX_MANIFEST + 1))
        wire.expect(manifest, state, expected.rank, expected.ranks, expected.layout, expected.nbytes)
        response = _get(connection, f"{path}/data", token)
        _ok(response)
        if response.length != expected.nbytes:
            raise DataCorruption(f"{response.length} bytes announced, wanted {expected.nbytes}")
        buffer = torch.empty(expected.nbytes, dtype=torch.uint8)
        snapshot = Snapshot(manifest, buffer)
        _receive(response, snapshot, cancel, end)
        return snapshot
    finally:
        connection.close()


def _get(connection: http.client.HTTPConnection, path: str, token: str) -> http.client.HTTPResponse:
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    return connection.getresponse()


def _ok(response: http.client.HTTPResponse) -> None:
    if response.status != 200:
        raise DataCorruption(f"answered {response.status}")


def _receive(response: http.client.HTTPResponse, snapshot: Snapshot, cancel: threading.Event, end: float) -> None:
    """Fill the staging buffer chunk by chunk, each verified as it arrives."""
    data = snapshot.data
    for index, wanted in enumerate(snapshot.manifest.checksums):
        chunk = data[index * wire.CHUNK_BYTES : (index + 1) * wire.CHUNK_BYTES]
        got = 0
        while got < len(chunk):
            if cancel.is_set():
                raise Cancelled
            if time.monotonic() > end:
                raise TimeoutError(f"at chunk {index} when the time was over")
            n = response.fp.readinto1(chunk[got:])  # what there is: filling the chunk could take for ever
            if n == 0:
                raise DataCorruption(f"ended in chunk {index}")
            got += n
        if wire.checksum(chunk) != wanted:
            raise DataCorruption(f"chunk {index} has a wrong checksum")
