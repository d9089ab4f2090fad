"""Reads slices of a block store from the state agents that hold them (ReStore §IV-A).

A slice is a part of static data in the memory of an agent, and does not change once it is complete. Its manifest
has a checksum for each piece, so that any part of it can be read and verified alone. An encoded manifest is its
digest, a newline, canonical JSON, a newline and the checksums. The digest is blake3 over what follows it; readers
know it before they ask, so a holder cannot serve anything else.

`read_slices` reads parts of many slices from many holders at once, each holder on a thread of its own. What a
holder does not deliver, because it is slow, wrong or gone, is returned to the caller, who asks another one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import blake3
import xxhash
from pydantic import ConfigDict, Field, StringConstraints, ValidationError, with_config

from ft_hsdp import bounded
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer.donor_connection import Answer, DonorBusy, DonorConnection

SUM_BYTES = 8  # of an xxh3-64
DIGEST_HEX = 64  # characters
MAX_MANIFEST = 64 << 20  # bytes
MAX_HEAD = 1024  # bytes of its JSON
MAX_SLICES = 1 << 16  # of one store
MAX_NBYTES = 1 << 50
READ_BYTES = 4 << 20  # of one request, if pieces are no longer
PART_BYTES = 1 << 20  # that have to arrive within
SILENT_S = 5.0  # or the holder has failed
MAX_REGRET = 64 << 10  # bytes in the body of an answer that is no success
RETRY_S = 0.02  # before a holder that has no place for a reader is asked again
TICK_S = 0.05  # the precision of deadlines


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class SliceName:
    """Which slice of which store, and its size."""

    store: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]  # digest of what the store is
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]  # that the user gave it
    slice: Annotated[int, Field(strict=True, ge=0, lt=MAX_SLICES)]
    slices: Annotated[int, Field(strict=True, gt=0, le=MAX_SLICES)]  # of the store
    nbytes: Annotated[int, Field(strict=True, gt=0, le=MAX_NBYTES)]
    piece: Annotated[int, Field(strict=True, gt=0, le=1 << 30)]  # bytes that have a checksum of their own
    parts: Annotated[int, Field(strict=True, gt=0, le=MAX_SLICES)] = 1  # slices of a share, as in `BlockLayout`


_CHECKER = bounded.checker(SliceName)


@dataclass(frozen=True, slots=True)
class SliceManifest:
    """Describes the bytes of a slice."""

    about: SliceName
    sums: bytes  # xxh3-64 of each piece, one after the other

    def damaged(self, data: memoryview, begin: int = 0) -> bool:
        """Return whether ``data``, the bytes from ``begin`` on, differ. Both ends lie at ends of pieces."""
        piece, first = self.about.piece, begin // self.about.piece
        sums = sums_of(data, piece)
        return sums != self.sums[first * SUM_BYTES : first * SUM_BYTES + len(sums)]


def sums_of(data: memoryview, piece: int) -> bytes:
    """Return the checksums of the pieces of ``data``, of ``piece`` bytes each; large ones release the GIL."""
    return b"".join(xxhash.xxh3_64_digest(data[i : i + piece]) for i in range(0, len(data), piece))


def encode(manifest: SliceManifest) -> bytes:
    """Return a manifest as it travels: digest, newline, JSON, newline, checksums."""
    head = json.dumps(asdict(manifest.about), separators=(",", ":"), sort_keys=True).encode()
    body = head + b"\n" + manifest.sums
    return blake3.blake3(body).hexdigest().encode() + b"\n" + body


def digest_of(encoded: bytes) -> str:
    """Return the digest of an encoded manifest."""
    return encoded[:DIGEST_HEX].decode("ascii", "replace")


def decode(encoded: bytes) -> SliceManifest:
    """Return the manifest in ``encoded``, anything that a holder sent, validated.

    Raises:
        DataCorruption: It is too long, its digest does not fit, or it is not valid.
    """
    if len(encoded) > MAX_MANIFEST:
        raise DataCorruption(f"manifest of {len(encoded)} bytes; allowed: {MAX_MANIFEST}")
    body = encoded[DIGEST_HEX + 1 :]
    if encoded[: DIGEST_HEX + 1] != blake3.blake3(body).hexdigest().encode() + b"\n":
        raise DataCorruption("manifest's digest does not fit the rest of it")
    head, newline, sums = body.partition(b"\n")
    if not newline or len(head) > MAX_HEAD:
        raise DataCorruption("manifest is not valid")
    try:
        about: SliceName = _CHECKER.validate_json(head)
    except ValidationError as error:
        raise DataCorruption(f"manifest is not valid: {bounded.complaint(error)}") from None
    if len(sums) != -(-about.nbytes // about.piece) * SUM_BYTES:
        raise DataCorruption(f"manifest has {len(sums)} bytes of checksums for {about.nbytes} bytes")
    return SliceManifest(about, sums)


def path(about: SliceName, what: str) -> str:
    """Return the path at which a state server has a slice ``about``; ``what`` is "manifest" or "data"."""
    return f"/v1/blocks/{about.store}/{about.slice}/{what}"


@dataclass(frozen=True, slots=True)
class SliceRead:
    """Parts of one slice that are read from one holder."""

    about: SliceName
    digest: str  # of its manifest
    address: str  # "host:port" of the holder's state server
    spans: tuple[tuple[int, int, int], ...]  # (first byte in the slice, bytes, first byte in the target)


@dataclass(slots=True)
class SlicesRead:
    """What came of it."""

    failed: list[tuple[SliceRead, str]] = field(default_factory=list)  # what was not read, and why
    nbytes: int = 0  # that were received, verified or not
    requests: int = 0  # that were answered with bytes of slices


@dataclass(eq=False, slots=True)
class _Talk:
    """What is read from one holder, on a thread of its own."""

    connection: DonorConnection
    left: list[SliceRead]  # the first one is being read
    due: float  # when something has to have arrived, on the monotonic clock
    nbytes: int = 0
    requests: int = 0
    failed: list[tuple[SliceRead, str]] = field(default_factory=list)  # what came was wrong
    why: str = ""  # the reads that are left have failed
    done: bool = False


def read_slices(
    reads: Sequence[SliceRead],
    into: memoryview,
    token: str,
    deadline_s: float,
    known: dict[str, tuple[SliceManifest, bytes]],
    cancel: threading.Event | None = None,
) -> SlicesRead:
    """Read and verify parts of slices. Blocks; when it returns, no thread writes into the memory any more.

    A read that fails may have left bytes in ``into``, also wrong ones: all of it has to be read again.

    Args:
        reads: What is read from whom.
        into: Writable memory that ``spans`` refer to.
        token: The job's token, which the holders check.
        deadline_s: Seconds from the call until it gives up.
        known: Manifests by digest, each with its encoded form; what is asked for is added.
        cancel: Set by another thread to end it early.
    """
    until = time.monotonic() + deadline_s
    by_holder: dict[str, list[SliceRead]] = defaultdict(list)
    for read in reads:
        by_holder[read.address].append(read)
    talks = [
        _Talk(DonorConnection(address, token), mine, time.monotonic() + SILENT_S)
        for address, mine in by_holder.items()
    ]
    change = threading.Condition()
    threads = [
        threading.Thread(target=_read, args=(talk, into, known, change), name="blocks", daemon=True)
        for talk in talks
    ]
    for thread in threads:
        thread.start()
    with change:
        while not all(talk.done for talk in talks):
            now = time.monotonic()
            over = now > until or (cancel is not None and cancel.is_set())
            for talk in talks:
                if not talk.done and not talk.why and (over or now > talk.due):
                    talk.why = f"not here within {deadline_s:.3g} s" if over else f"nothing within {SILENT_S:g} s"
                    talk.connection.hang_up()
            change.wait(TICK_S)
    for thread in threads:
        thread.join()
    return SlicesRead(
        [each for talk in talks for each in (*talk.failed, *((read, talk.why) for read in talk.left))],
        sum(talk.nbytes for talk in talks),
        sum(talk.requests for talk in talks),
    )


# On the thread of a holder.


def _read(
    talk: _Talk,
    into: memoryview,
    known: dict[str, tuple[SliceManifest, bytes]],
    change: threading.Condition,
) -> None:
    try:
        while talk.left and not talk.why:
            read = talk.left[0]
            try:
                manifest = _manifest(talk, read, known)
                for begin, nbytes, target in read.spans:
                    _span(talk, read, manifest, begin, into[target : target + nbytes])
            except DataCorruption as error:  # of this slice: the holder's other ones may be right
                talk.failed.append((read, str(error)))
                talk.connection.close()
            talk.left.pop(0)
    except (OSError, ValueError) as error:
        talk.why = talk.why or str(error) or type(error).__name__
    finally:
        talk.connection.close()
        with change:
            talk.done = True
            change.notify_all()


def _asked(talk: _Talk, what: str, span: tuple[int, int] | None) -> Answer:
    """Ask the holder, again and again while it has no place for another reader and `read_slices` waits.

    Raises:
        DataCorruption: What answers does not know the token, or speaks no HTTP.
        DonorBusy: It had no place until `read_slices` gave it up.
        OSError: The connection broke, or `read_slices` gave the holder up.
    """
    while True:
        try:
            return talk.connection.ask(what, span)
        except DonorBusy:
            if talk.why:
                raise
            talk.due = time.monotonic() + SILENT_S  # it waits for a place, so it is not silent
            time.sleep(RETRY_S)


def _manifest(talk: _Talk, read: SliceRead, known: dict[str, tuple[SliceManifest, bytes]]) -> SliceManifest:
    """Return the manifest with the digest that is expected, from memory or from the holder.

    Raises:
        DataCorruption: The holder has another one, or none.
        OSError: The connection broke, or `read_slices` gave the holder up.
    """
    if read.digest in known:
        return known[read.digest][0]
    answer = _asked(talk, path(read.about, "manifest"), None)
    if answer.status != 200:
        talk.connection.read(answer.length, MAX_REGRET)
        raise DataCorruption(f"does not have slice {read.about.slice} (answered {answer.status})")
    encoded = talk.connection.read(answer.length, MAX_MANIFEST)
    manifest = decode(encoded)
    if digest_of(encoded) != read.digest or manifest.about != read.about:
        raise DataCorruption(f"has another slice {read.about.slice} than the one that is wanted")
    talk.due = time.monotonic() + SILENT_S
    known[read.digest] = manifest, encoded
    return manifest


def _span(talk: _Talk, read: SliceRead, manifest: SliceManifest, begin: int, target: memoryview) -> None:
    """Read some bytes of a slice: whole pieces, because only they can be verified.

    Raises:
        DataCorruption: The holder answers something else, or a checksum differs.
        OSError: The connection broke, or `read_slices` gave the holder up.
    """
    piece, total = manifest.about.piece, manifest.about.nbytes
    most = max(piece, READ_BYTES // piece * piece)
    low, end = begin - begin % piece, begin + len(target)
    while low < end:
        high = min(total, low + most, -(-end // piece) * piece)
        answer = _asked(talk, path(read.about, "data"), (low, high))
        said = answer.status, answer.headers.get("etag"), answer.length
        if said != (206, f'"{read.digest}"', high - low):
            talk.connection.read(answer.length, MAX_REGRET)
            raise DataCorruption(f"answered {answer.status} for bytes of slice {read.about.slice}")
        # A long piece goes to where it belongs, without a copy; short ones may have more than what is wanted.
        exact = begin <= low and high <= end
        got = target[low - begin : high - begin] if exact else memoryview(bytearray(high - low))
        talk.requests += 1
        for at in range(0, len(got), PART_BYTES):
            part = got[at : at + PART_BYTES]
            talk.connection.read_into(part)
            talk.due = time.monotonic() + SILENT_S
            talk.nbytes += len(part)
        if manifest.damaged(got, low):
            raise DataCorruption(f"bytes of slice {read.about.slice} have a wrong checksum")
        if not exact:
            first, last = max(low, begin), min(high, end)
            target[first - begin : last - begin] = got[first - low : last - low]
        low = high
