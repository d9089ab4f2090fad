"""Fetches a rank's shard of a committed state from healthy replicas (FT-HSDP §4.3, §4.4).

Donors that hold the same state hold the same bits, so their manifests have the same digest. Each donor sends its
manifest; the digest of a strict majority decides what is fetched, and a donor with another digest is broken. The
chunks are striped over the donors of the majority. What a donor does not deliver, because it is slow, wrong or
gone, the others deliver.

Everything is written into memory that nothing uses yet, and verified there. The live state is not touched.

`fetch` is the entry point. One thread per donor receives chunks, one verifies them, and the calling thread keeps
the deadlines. What they share is in `striping`. Copies of other hosts' shards have time, and take no time from
training: there the donor's thread verifies, which needs less of the processors.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ft_hsdp import fault_injection
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.donor_connection import Answer, DonorBusy, DonorConnection, path
from ft_hsdp.state.transfer.parts import Scattered, touched
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, Manifest, ShardManifest
from ft_hsdp.state.transfer.striping import ChunkQueue, ManifestVotes

PATIENCE_S = 1.0  # to wait for the vote of every donor; a later vote still counts
PART_BYTES = 1 << 20  # which are received, and verified, together; a longer chunk in several parts
MOST_BYTES = 64 << 20  # of one request
CHUNK_S = 5.0  # after which a donor that sends no part has failed
COPY_CHUNK_S = 60.0  # the same for a copy, which waits for idle spans of the network
RETRY_S = 0.02  # between two questions to a donor that does not have the state yet
MAX_REGRET = 64 << 10  # bytes in the body of an answer that is no success
MAX_WORDS = 160  # characters of it that are told
TICK_S = 0.05  # the precision of deadlines and of cancel


class Cancelled(Exception):
    """The caller set ``cancel``."""


class NotFetched(Exception):
    """No donor could serve what was wanted. The message says what each one did.

    Args:
        why: The message.
        wrong: Each of them has answered something that is wrong; otherwise one may be gone.
    """

    def __init__(self, why: str, wrong: bool = False) -> None:
        super().__init__(why)
        self.wrong = wrong


M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True, slots=True)
class Donor:
    """A replica that has the state, or will have it soon."""

    replica: int
    address: str  # "host:port" at which it serves this rank's shard


@dataclass(frozen=True, slots=True)
class FetchRequest(Generic[M]):
    """The shard, part or slice to fetch, and the memory for it."""

    path: str  # at a donor's server, with {} for "manifest" or "data"
    # Returns the manifest that a donor sent; raises DataCorruption if it is not of what is wanted. Called on the
    # donors' threads.
    opened: Callable[[bytes], M]
    # Returns memory for the manifest that the donors agreed on, best pre-faulted, used by nothing else until
    # `fetch` ends; what it has no place for is not fetched. Called once, on the thread that calls `fetch`, while
    # its lock is held.
    memory: Callable[[M], Scattered]
    step: int = 0  # of the state
    awaited: bool = True  # a donor that does not have it yet is asked again; False: it has failed
    copy: bool = False  # it becomes a copy of another host's shard: donors send it while they are idle (`pacing`)
    answer_s: float = math.inf  # for a donor's manifest, from when it has a place for a reader
    known: bytes = b""  # the manifest, if this rank has it already

    @staticmethod
    def exactly(
        expected: ExpectedShard, into: memoryview | Scattered, *, awaited: bool = True, copy: bool = False
    ) -> FetchRequest[ShardManifest]:
        """Return a request for the shard ``expected``, which is known from this rank's own model.

        It fills the memory ``into``, ``expected.nbytes`` bytes in one place or in several. If it is ``awaited``,
        donors may get the state later; a ``copy`` is of another host's shard.
        """
        return FetchRequest(
            path(expected.state, expected.rank, expected.ranks, expected.part),
            lambda encoded: shard_manifest.expect(shard_manifest.decode(encoded), expected),
            lambda _: into if isinstance(into, Scattered) else Scattered(into),
            expected.state.step,
            awaited,
            copy,
        )


@dataclass(frozen=True, slots=True)
class FetchedBlob(Generic[M]):
    """What was fetched; all of its bytes are verified."""

    manifest: M
    seconds: float  # from the call to the last verified chunk
    given: dict[int, int]  # verified bytes by donor (replica id)
    encoded: bytes  # the manifest as it was received


def fetch(
    donors: Sequence[Donor],
    request: FetchRequest[M],
    token: str,
    deadline_s: float,
    cancel: threading.Event,
    rejected: Callable[[Donor, str], None],
) -> FetchedBlob[M]:
    """Fetch and verify one shard, a part of one, or parts of a slice. Blocks.

    A donor that does not have the state yet is asked again until the deadline, if ``request.awaited``. When the
    function returns or raises, no thread writes into the memory any more.

    Args:
        donors: The replicas to ask; all are used at once.
        request: What is wanted, and the memory for it.
        token: The job's token, which the donors check.
        deadline_s: Seconds from the call until it gives up.
        cancel: Set by another thread to end the fetch early.
        rejected: Called once for each donor that failed, with the reason, on any thread.

    Raises:
        Cancelled: ``cancel`` was set.
        DataCorruption: The donors have different bits of that state, and there is no majority.
        NotFetched: The deadline passed, every donor failed, or no thread was left.
    """
    began = time.monotonic()
    work = _Fetch(donors, request, token, rejected)
    with work.threads():
        work.supervise(began, deadline_s, cancel)
    assert work.manifest is not None
    return FetchedBlob(work.manifest, time.monotonic() - began, work.given, work.encoded)


class _Fetch(Generic[M]):
    """The state of one `fetch`: a thread for each donor, one that verifies, and the caller's, which supervises."""

    def __init__(
        self, donors: Sequence[Donor], request: FetchRequest[M], token: str, rejected: Callable[[Donor, str], None]
    ) -> None:
        self.manifest: M | None = None
        self.encoded = b""
        self.given: dict[int, int] = {}
        self._request = request
        self._rejected = rejected
        self._donors = {d.replica: d for d in donors}
        self._connections = {d.replica: DonorConnection(d.address, token, request.copy) for d in donors}
        self._chunk_s = COPY_CHUNK_S if request.copy else CHUNK_S
        self._failures: dict[int, str] = {}
        self._wrong: set[int] = set()  # donors that have answered something that is wrong
        self._refusing: set[int] = set()  # donors that hung up on the last call
        # When something of each donor has to be here. The size never changes, so it needs no lock.
        self._due = dict.fromkeys(self._donors, math.inf)
        self._votes = ManifestVotes(self._donors)
        self._manifests: dict[str, tuple[M, bytes]] = {}
        self._digest = ""
        self._memory = Scattered(memoryview(b""))
        self._chunks = ChunkQueue((), 0)
        self._arrived: queue.SimpleQueue[tuple[int, range, list[memoryview]] | None] = queue.SimpleQueue()
        # Its lock guards what the threads share, but ``_due`` and ``_refusing``.
        self._change = threading.Condition()
        self._over = False

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Run the threads. All of them have ended when the context ends.

        Raises:
            NotFetched: One of them could not start.
        """
        serve = [threading.Thread(target=self._serve, args=(d,), name="fetch-donor") for d in self._donors]
        verify = threading.Thread(target=self._verify, name="fetch-verify")
        started: list[threading.Thread] = []
        try:
            for thread in serve if self._request.copy else (*serve, verify):
                thread.daemon = True
                try:
                    thread.start()
                except RuntimeError:
                    raise NotFetched("no thread is left for it") from None
                started.append(thread)
            yield
        finally:
            with self._change:
                self._over = True
                self._change.notify_all()
            for connection in self._connections.values():
                connection.hang_up()
            self._arrived.put(None)
            for thread in started:
                thread.join()

    def supervise(self, began: float, deadline_s: float, cancel: threading.Event) -> None:
        """Wait until everything is verified.

        Raises:
            Cancelled: ``cancel`` was set.
            DataCorruption: The donors have different bits of that state, and there is no majority.
            NotFetched: The deadline passed, or every donor failed.
        """
        with self._change:
            while not (self._decide(patient=time.monotonic() - began < PATIENCE_S) and self._chunks.done):
                now = time.monotonic()
                if cancel.is_set():
                    raise Cancelled
                if len(self._failures) == len(self._donors):
                    raise NotFetched(self._why() or "there are no donors", self._wrong == self._donors.keys())
                if now - began > deadline_s:
                    if len(self._manifests) > 1:
                        raise DataCorruption(self._votes.disagreement())
                    raise NotFetched(self._why() or self._late(deadline_s))
                for donor, due in self._due.items():
                    if now > due:
                        silent_s = self._chunk_s if self.manifest is not None else self._request.answer_s
                        self._fail(donor, f"nothing within {silent_s:g} s")
                self._change.wait(TICK_S)
            for donor in self._votes.unheard:
                self._fail(donor, f"no answer within {time.monotonic() - began:.1f} s")

    def _why(self) -> str:
        return "; ".join(f"replica {donor}: {why}" for donor, why in self._failures.items())

    def _late(self, deadline_s: float) -> str:
        refusing = ", ".join(str(donor) for donor in self._refusing)
        why = f": replica {refusing} refuses connections from here with this token" if refusing else ""
        return f"no donor had it within {deadline_s:g} s{why}"

    def _decide(self, *, patient: bool) -> bool:
        """Return whether the donors agree on what is fetched; on first agreement, queue the chunks.

        Call it with the lock held.

        Raises:
            DataCorruption: There is no majority and there can be none, or it is another one than before.
        """
        digest = self._votes.verdict(patient=patient and self.manifest is None)
        if digest is None:
            return False
        if self.manifest is not None and digest != self._digest:  # donors that voted later are the majority now
            raise DataCorruption(self._votes.disagreement())
        for donor in self._votes.minority(digest):
            told = f"its manifest {str(self._votes.voted(donor))[:12]} is not that of the others"
            self._fail(donor, told, wrong=True)
        if self.manifest is None:
            manifest, self.encoded = self._manifests[digest]
            self._memory = self._request.memory(manifest)
            wanted = touched(self._memory.extents, manifest.chunk)
            most = max(1, MOST_BYTES // manifest.chunk)
            self._chunks = ChunkQueue(wanted, len(self._donors) - len(self._failures), most)
            self._digest, self.manifest = digest, manifest
            self._change.notify_all()
        return True

    def _fail(self, donor: int, why: str, *, wrong: bool = False) -> None:
        """Give up a donor, and tell the caller why. Call it with the lock held."""
        if donor in self._failures or self._over:
            return
        if wrong:
            self._wrong.add(donor)
        self._failures[donor] = why
        self._votes.failed(donor)
        self._connections[donor].hang_up()
        self._change.notify_all()
        self._rejected(self._donors[donor], why)

    # A donor's thread.

    def _serve(self, donor: int) -> None:
        connection = self._connections[donor]
        try:
            if self._vote(donor, connection) and self._agreed(donor):
                while run := self._next():
                    self._receive(donor, connection, run)
        except (OSError, ValueError, DataCorruption) as error:
            with self._change:
                self._fail(donor, str(error) or type(error).__name__, wrong=isinstance(error, DataCorruption))
        finally:
            connection.close()

    def _vote(self, donor: int, connection: DonorConnection) -> bool:
        """Ask the donor for its manifest until it has the state. Returns False if the fetch is over.

        Raises:
            DataCorruption: The answer is neither a valid manifest of what is wanted nor "not found".
        """
        request, encoded = self._request, self._request.known
        while not encoded:
            answer = self._ask(donor, connection, "manifest")
            if answer is None:
                return False
            if answer.status == 200:
                encoded = connection.read(answer.length, shard_manifest.MAX_MANIFEST)
            elif answer.status != 404:
                said = connection.read(answer.length, MAX_REGRET).decode("ascii", "replace")[:MAX_WORDS]
                raise DataCorruption(f"answered {answer.status}{said and f': {said}'}")
            else:
                connection.read(answer.length, MAX_REGRET)
                if not request.awaited:
                    raise DataCorruption("does not have it any more")
                if self._absent(donor):
                    return False
        manifest = request.opened(encoded)
        with self._change:
            digest = shard_manifest.digest(encoded)
            self._due[donor] = math.inf
            self._manifests.setdefault(digest, (manifest, encoded))
            self._votes.vote(donor, digest)
            self._change.notify_all()
        return True

    def _ask(
        self, donor: int, connection: DonorConnection, what: str, span: tuple[int, int] | None = None
    ) -> Answer | None:
        """Ask the donor, again and again while it has no place for another reader; None: the fetch is over."""
        within_s = self._chunk_s if span else self._request.answer_s
        while True:
            fault_injection.hold(donor, lambda: self._over)
            self._due[donor] = time.monotonic() + within_s
            try:
                answer = connection.ask(self._request.path.format(what), span)
            except DonorBusy:
                self._due[donor] = math.inf
                self._refusing.add(donor)
                if self._absent(donor):
                    return None
            else:
                self._refusing.discard(donor)
                return answer

    def _absent(self, donor: int) -> bool:
        """Note that the donor has not served anything; wait, and return whether the fetch is over."""
        with self._change:
            self._votes.absent(donor)
            self._change.notify_all()
            return self._change.wait_for(lambda: self._over, RETRY_S)

    def _agreed(self, donor: int) -> bool:
        """Wait until the donors agree, and return whether this donor is one of the majority."""
        with self._change:
            self._change.wait_for(lambda: self._over or donor in self._failures or self.manifest is not None)
            return self._votes.voted(donor) == self._digest

    def _next(self) -> range:
        """Wait for the next run of chunks. Empty: the fetch is over."""
        with self._change:
            while not self._over:
                if run := self._chunks.take():
                    return run
                self._change.wait()
            return range(0)

    def _receive(self, donor: int, connection: DonorConnection, run: range) -> None:
        """Request this run of chunks and fill them. Those that do not arrive are put back.

        Raises:
            DataCorruption: The answer is not this run of the chosen manifest.
        """
        manifest, left = self._chosen, run
        total, chunk = manifest.nbytes, manifest.chunk
        begin, end = run.start * chunk, min(run.stop * chunk, total)
        try:
            answer = self._ask(donor, connection, "data", (begin, end))
            if answer is None:
                return
            said = (answer.status, answer.headers.get("content-range"), answer.headers.get("etag"), answer.length)
            if said != (206, f"bytes {begin}-{end - 1}/{total}", f'"{self._digest}"', end - begin):
                raise DataCorruption(f"answered {said[0]} with range {said[1]} of {str(said[2])[:14]}")
            while left:
                some = left[: max(1, PART_BYTES // chunk)]
                pieces = self._memory.pieces(some.start * chunk, min(some.stop * chunk, total))
                for piece in pieces:
                    for at in range(0, len(piece), PART_BYTES):
                        connection.read_into(piece[at : at + PART_BYTES])
                        self._due[donor] = time.monotonic() + self._chunk_s
                fault_injection.reach("fetch", self._request.step)
                left = left[len(some) :]
                if self._request.copy:
                    self._compare(donor, some, pieces)
                else:
                    self._arrived.put((donor, some, pieces))
        finally:
            with self._change:
                self._due[donor] = math.inf
                if left:
                    self._chunks.put_back(left)
                    self._change.notify_all()

    @property
    def _chosen(self) -> M:
        assert self.manifest is not None
        return self.manifest

    # The verifier's thread; of a copy, the donor's.

    def _verify(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            self._compare(*arrived)

    def _compare(self, donor: int, chunks: range, pieces: Sequence[memoryview]) -> None:
        manifest = self._chosen
        sums = shard_manifest.checksums(*pieces, chunk=manifest.chunk)
        wrong = [n for n, found in zip(chunks, sums, strict=True) if found != manifest.checksums[n]]
        with self._change:
            if wrong:
                self._chunks.put_back(chunks)
                self._fail(donor, f"chunk {wrong[0]} has a wrong checksum", wrong=True)
            else:
                self.given[donor] = self.given.get(donor, 0) + sum(map(len, pieces))
                self._chunks.verified(len(chunks))
            if self._chunks.done or wrong:
                self._change.notify_all()
