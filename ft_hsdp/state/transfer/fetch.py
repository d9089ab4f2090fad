"""ChunkQueue: the queue of what is still to be fetched, and what is verified. Not thread-safe.

ManifestVotes: which manifest the donors of one state agree on. Pure.

Donors that hold the same state hold the same bits (FT-HSDP §4.4), so their manifests have one digest. A donor
whose digest is another one is broken, and a vote tells which one, as long as there is a strict majority.

Fetch: a rank that is behind takes its shard of a committed state from healthy replicas (FT-HSDP §4.3, §4.4).

Every donor says what its manifest is; only what they agree on is fetched, striped over all who have it. Everything
goes into memory that nothing uses yet and is verified there; the live state is not touched. What a donor leaves
undone, because it is slow, wrong or gone, the others do.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ft_hsdp import fault_injection
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.http import DonorBusy, DonorConnection, path
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, ShardManifest

MAX_RUN = 16  # chunks of one request


class ChunkQueue:
    """``count`` chunks, handed out in runs that get shorter towards the end, so that all donors end together."""

    def __init__(self, count: int, takers: int) -> None:
        self._left = list(range(count - 1, -1, -1))  # the next one at the end
        self._takers = max(1, takers)
        self._unverified = count

    @property
    def done(self) -> bool:
        """Whether all are verified."""
        return self._unverified == 0

    def take(self) -> range:
        """The next run of consecutive chunks; empty if there is none now."""
        if not self._left:
            return range(0)
        most = max(1, min(MAX_RUN, len(self._left) // (2 * self._takers)))
        first = end = self._left[-1]
        while self._left and self._left[-1] == end and end - first < most:
            self._left.pop()
            end += 1
        return range(first, end)

    def put_back(self, chunks: Iterable[int]) -> None:
        """These have to be fetched again: next of all."""
        self._left += sorted(chunks, reverse=True)

    def verified(self) -> None:
        """One more is here and right."""
        self._unverified -= 1


class ManifestVotes:
    """The votes of ``donors`` (replica ids). One that does not have the state (yet) does not vote."""

    def __init__(self, donors: Iterable[int]) -> None:
        self._unheard = set(donors)
        self._absent: set[int] = set()
        self._votes: dict[int, str] = {}

    def vote(self, donor: int, digest: str) -> None:
        """``donor`` has the state, with this digest."""
        self._forget(donor)
        self._votes[donor] = digest

    def absent(self, donor: int) -> None:
        """``donor`` does not have it now; it may vote later."""
        self._forget(donor)
        self._absent.add(donor)

    def failed(self, donor: int) -> None:
        """``donor`` is out of it. What it has voted stands: it was one of those that were asked."""
        self._unheard.discard(donor)
        self._absent.discard(donor)

    @property
    def unheard(self) -> frozenset[int]:
        """Those that have not said anything."""
        return frozenset(self._unheard)

    def verdict(self, *, patient: bool) -> str | None:
        """The digest of a strict majority of the votes; None: there is none, or ``patient`` and some are unheard.

        Raises:
            DataCorruption: the donors disagree and nobody is left who could decide.
        """
        if not self._votes or (patient and self._unheard):
            return None
        digest, count = Counter(self._votes.values()).most_common(1)[0]
        if 2 * count > len(self._votes):
            return digest
        if self._unheard or self._absent:
            return None
        raise DataCorruption(self.disagreement())

    def voted(self, donor: int) -> str | None:
        """The digest that ``donor`` has, if it has said so."""
        return self._votes.get(donor)

    def minority(self, digest: str) -> list[int]:
        """Who voted for something else than ``digest``."""
        return sorted(donor for donor, voted in self._votes.items() if voted != digest)

    def disagreement(self) -> str:
        """Who voted for what, in one line."""
        said = ", ".join(f"replica {donor} has {voted[:12]}" for donor, voted in sorted(self._votes.items()))
        return f"the donors' manifests differ and there is no majority: {said}"

    def _forget(self, donor: int) -> None:
        self._unheard.discard(donor)
        self._absent.discard(donor)


PATIENCE_S = 1.0  # for the first word of every donor; a donor that is later still objects, or joins
CHUNK_S = 5.0  # in which the next chunk has to come
RETRY_S = 0.02
MAX_REGRET = 64 << 10  # bytes of an answer that says no
TICK_S = 0.05  # how closely deadlines and cancel are kept


class Cancelled(Exception):
    """The fetch is of no more use."""


class NotFetched(Exception):
    """No donor could serve the state; the message says what each one did."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A replica that holds the state, and where this rank's shard is served ("host:port")."""

    replica: int
    address: str


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What is fetched: the shard of ``rank`` of ``state``.

    ``check`` raises DataCorruption if a donor's manifest is not of what is wanted; ``memory`` gives the memory for
    the manifest that the donors agreed on: uint8 [nbytes], best pre-faulted, and not used by anyone else.
    """

    state: StateId
    rank: int
    check: Callable[[ShardManifest], None]
    memory: Callable[[ShardManifest], memoryview]

    @staticmethod
    def exactly(expected: ExpectedShard, into: memoryview) -> FetchRequest:
        """A shard that is known from the own model, into memory of its size."""
        return FetchRequest(
            expected.state, expected.rank, lambda m: shard_manifest.expect(m, expected), lambda _: into
        )


@dataclass(frozen=True, slots=True)
class FetchedShard:
    """A verified shard: its manifest, what it took in seconds, and the bytes that each donor (replica id) gave."""

    manifest: ShardManifest
    seconds: float
    given: dict[int, int]


def fetch(
    donors: Sequence[Donor],
    request: FetchRequest,
    token: str,
    deadline_s: float,
    cancel: threading.Event,
    rejected: Callable[[Donor, str], None],
) -> FetchedShard:
    """Fetch and verify one shard; donors that do not have it yet are asked again until the deadline.

    When it returns or raises, nobody writes into the memory any more. ``rejected`` is told, on any thread, about
    each donor that failed.

    Raises:
        Cancelled: ``cancel`` was set.
        DataCorruption: the donors hold different bits of that state, and there is no majority.
        NotFetched: the deadline passed, or every donor failed.
    """
    began = time.monotonic()
    job = _Job(donors, request, token, rejected)
    with job.running():
        job.supervise(began, deadline_s, cancel)
    assert job.manifest is not None
    return FetchedShard(job.manifest, time.monotonic() - began, job.given)


class _Job:
    """One fetch: a thread for each donor, one that verifies, and the caller's, which supervises."""

    def __init__(
        self, donors: Sequence[Donor], request: FetchRequest, token: str, rejected: Callable[[Donor, str], None]
    ) -> None:
        self.manifest: ShardManifest | None = None
        self.given: dict[int, int] = {}
        self._request = request
        self._rejected = rejected
        self._donors = {d.replica: d for d in donors}
        self._lines = {d.replica: DonorConnection(d.address, token) for d in donors}
        self._failures: dict[int, str] = {}
        self._shut: set[int] = set()  # donors that hang up on every call
        self._due = dict.fromkeys(self._donors, math.inf)  # its size never changes, so it needs no lock
        self._tally = ManifestVotes(self._donors)
        self._manifests: dict[str, ShardManifest] = {}
        self._digest = ""
        self._memory = memoryview(b"")
        self._chunks = ChunkQueue(0, 0)
        self._arrived: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The threads, all of which have ended afterwards."""
        threads = [threading.Thread(target=self._serve, args=(d,), name="fetch-donor") for d in self._donors]
        verifier = threading.Thread(target=self._verify, name="fetch-verify")
        for thread in (*threads, verifier):
            thread.daemon = True
            thread.start()
        try:
            yield
        finally:
            with self._change:
                self._over = True
                self._change.notify_all()
            for line in self._lines.values():
                line.hang_up()
            for thread in threads:
                thread.join()
            self._arrived.put(None)
            verifier.join()

    def supervise(self, began: float, deadline_s: float, cancel: threading.Event) -> None:
        """Return when everything is verified; raise as `fetch` does."""
        with self._change:
            while not (self._decide(patient=time.monotonic() - began < PATIENCE_S) and self._chunks.done):
                now = time.monotonic()
                if cancel.is_set():
                    raise Cancelled
                if len(self._failures) == len(self._donors):
                    raise NotFetched(self._why() or "nobody to ask")
                if now - began > deadline_s:
                    if len(self._manifests) > 1:
                        raise DataCorruption(self._tally.disagreement())
                    raise NotFetched(self._why() or self._late(deadline_s))
                for donor, due in self._due.items():
                    if now > due:
                        self._fail(donor, f"no chunk within {CHUNK_S:g} s")
                self._change.wait(TICK_S)
            for donor in self._tally.unheard:
                self._fail(donor, f"no answer within {time.monotonic() - began:.1f} s")

    def _why(self) -> str:
        return "; ".join(f"replica {donor}: {why}" for donor, why in self._failures.items())

    def _late(self, deadline_s: float) -> str:
        shut = ", ".join(str(donor) for donor in self._shut)
        why = f": replica {shut} lets nobody in who calls from here with this token" if shut else ""
        return f"no donor had it within {deadline_s:g} s{why}"

    def _decide(self, *, patient: bool) -> bool:
        """Whether the donors agree on what is fetched; the first time that they agree, begin."""
        digest = self._tally.verdict(patient=patient and self.manifest is None)
        if digest is None:
            return False
        if self.manifest is not None and digest != self._digest:  # those that came late are more
            raise DataCorruption(self._tally.disagreement())
        for donor in self._tally.minority(digest):
            self._fail(donor, f"its manifest {str(self._tally.voted(donor))[:12]} is not that of the others")
        if self.manifest is None:
            manifest = self._manifests[digest]
            self._memory = self._request.memory(manifest)
            self._chunks = ChunkQueue(len(manifest.checksums), len(self._donors) - len(self._failures))
            self._digest, self.manifest = digest, manifest
            self._change.notify_all()
        return True

    def _fail(self, donor: int, why: str) -> None:
        """A donor is out of it. With the lock held."""
        if donor in self._failures or self._over:
            return
        self._failures[donor] = why
        self._tally.failed(donor)
        self._lines[donor].hang_up()
        self._change.notify_all()
        self._rejected(self._donors[donor], why)

    # A donor's thread.

    def _serve(self, donor: int) -> None:
        line = self._lines[donor]
        try:
            if self._vote(donor, line) and self._agreed(donor):
                while run := self._next():
                    self._receive(donor, line, run)
        except (OSError, ValueError, DataCorruption) as error:
            with self._change:
                self._fail(donor, str(error) or type(error).__name__)
        finally:
            line.close()

    def _vote(self, donor: int, line: DonorConnection) -> bool:
        """Ask until it has the state; False: it is over."""
        request = self._request
        while True:
            fault_injection.hold(donor, lambda: self._over)
            try:
                answer = line.ask(path(request.state, request.rank, "manifest"))
                self._shut.discard(donor)
            except DonorBusy:
                answer = None
                self._shut.add(donor)
            if answer is not None and answer.status == 200:
                break
            if answer is not None and answer.status != 404:
                raise DataCorruption(f"answered {answer.status}")
            if answer is not None:
                line.read(answer.length, MAX_REGRET)
            with self._change:
                self._tally.absent(donor)
                self._change.notify_all()
                if self._change.wait_for(lambda: self._over, RETRY_S):
                    return False
        encoded = line.read(answer.length, shard_manifest.MAX_MANIFEST)
        manifest = shard_manifest.decode(encoded)
        request.check(manifest)
        with self._change:
            digest = shard_manifest.digest(encoded)
            self._manifests.setdefault(digest, manifest)
            self._tally.vote(donor, digest)
            self._change.notify_all()
        return True

    def _agreed(self, donor: int) -> bool:
        """Wait for the verdict; whether this donor is part of it."""
        with self._change:
            self._change.wait_for(lambda: self._over or donor in self._failures or self.manifest is not None)
            return self._tally.voted(donor) == self._digest

    def _next(self) -> range:
        """The next run of chunks; empty when it is over."""
        with self._change:
            while not self._over:
                if run := self._chunks.take():
                    return run
                self._change.wait()
            return range(0)

    def _receive(self, donor: int, line: DonorConnection, run: range) -> None:
        """Fill these chunks from one request; what is not received is put back."""
        left = list(run)
        begin, end = (
            run.start * shard_manifest.CHUNK_BYTES,
            min(run.stop * shard_manifest.CHUNK_BYTES, len(self._memory)),
        )
        try:
            self._due[donor] = time.monotonic() + CHUNK_S
            fault_injection.hold(donor, lambda: self._over)
            answer = line.ask(path(self._request.state, self._request.rank, "data"), (begin, end))
            said = (answer.status, answer.headers.get("content-range"), answer.headers.get("etag"), answer.length)
            if said != (206, f"bytes {begin}-{end - 1}/{len(self._memory)}", f'"{self._digest}"', end - begin):
                raise DataCorruption(f"answered {said[0]} with range {said[1]} of {str(said[2])[:14]}")
            for index in run:
                line.read_into(self._chunk(index))
                fault_injection.reach("fetch", self._request.state.step)
                self._due[donor] = time.monotonic() + CHUNK_S
                self._arrived.put((donor, index))
                left.pop(0)
        finally:
            with self._change:
                self._due[donor] = math.inf
                if left:
                    self._chunks.put_back(left)
                    self._change.notify_all()

    def _chunk(self, index: int) -> memoryview:
        return self._memory[index * shard_manifest.CHUNK_BYTES : (index + 1) * shard_manifest.CHUNK_BYTES]

    # The verifier's thread.

    def _verify(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            donor, index = arrived
            assert self.manifest is not None
            chunk = self._chunk(index)
            right = shard_manifest.checksum(chunk) == self.manifest.checksums[index]
            with self._change:
                if right:
                    self.given[donor] = self.given.get(donor, 0) + len(chunk)
                    self._chunks.verified()
                else:
                    self._chunks.put_back([index])
                    self._fail(donor, f"chunk {index} has a wrong checksum")
                if self._chunks.done or not right:
                    self._change.notify_all()
