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

from ft_hsdp import fault_injection
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.donor_connection import DonorBusy, DonorConnection, path
from ft_hsdp.state.transfer.parts import Scattered
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, ShardManifest
from ft_hsdp.state.transfer.striping import ChunkQueue, ManifestVotes

PATIENCE_S = 1.0  # to wait for the vote of every donor; a later vote still counts
CHUNK_S = 5.0  # after which a donor that sends no chunk has failed
COPY_CHUNK_S = 60.0  # the same for a copy, which waits for idle spans of the network
RETRY_S = 0.02  # between two questions to a donor that does not have the state yet
MAX_REGRET = 64 << 10  # bytes in the body of an answer that is no success
MAX_WORDS = 160  # characters of it that are told
TICK_S = 0.05  # the precision of deadlines and of cancel


class Cancelled(Exception):
    """The caller set ``cancel``."""


class NotFetched(Exception):
    """No donor could serve the state. The message says what each one did."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A replica that has the state, or will have it soon."""

    replica: int
    address: str  # "host:port" at which it serves this rank's shard


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The shard to fetch, and the memory for it."""

    state: StateId
    rank: int
    # Raises DataCorruption if a donor's manifest is not of the wanted shard. Called on the donors' threads.
    check: Callable[[ShardManifest], None]
    # Returns memory for the manifest that the donors agreed on: uint8 [nbytes], best pre-faulted, used by nothing
    # else until `fetch` ends; or several places. Called once, on the thread that calls `fetch`, while its lock is
    # held.
    memory: Callable[[ShardManifest], memoryview | Scattered]
    awaited: bool = True  # a donor that does not have the state yet is asked again; False: it has failed
    copy: bool = False  # it becomes a copy of another host's shard: donors send it while they are idle (`pacing`)
    ranks: int | None = None  # of the replica whose shard it is; None: any
    part: tuple[int, int] | None = None  # (rank, ranks) of whom only a part of the shard is for (`parts`)

    @staticmethod
    def exactly(
        expected: ExpectedShard, into: memoryview | Scattered, *, awaited: bool = True, copy: bool = False
    ) -> FetchRequest:
        """Return a request for the shard ``expected``, which is known from this rank's own model.

        It fills the memory ``into``, ``expected.nbytes`` bytes in one place or in several. If it is ``awaited``,
        donors may get the state later; a ``copy`` is of another host's shard.
        """
        return FetchRequest(
            expected.state,
            expected.rank,
            lambda m: shard_manifest.expect(m, expected),
            lambda _: into,
            awaited,
            copy,
            expected.ranks,
            expected.part,
        )


@dataclass(frozen=True, slots=True)
class FetchedShard:
    """A shard whose bytes are all verified."""

    manifest: ShardManifest
    seconds: float  # from the call to the last verified chunk
    given: dict[int, int]  # verified bytes by donor (replica id)
    encoded: bytes  # the manifest as it was received


def fetch(
    donors: Sequence[Donor],
    request: FetchRequest,
    token: str,
    deadline_s: float,
    cancel: threading.Event,
    rejected: Callable[[Donor, str], None],
) -> FetchedShard:
    """Fetch and verify one shard. Blocks.

    A donor that does not have the state yet is asked again until the deadline, if ``request.awaited``. When the
    function returns or raises, no thread writes into the memory any more.

    Args:
        donors: The replicas to ask; all are used at once.
        request: The shard, and the memory for it.
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
    return FetchedShard(work.manifest, time.monotonic() - began, work.given, work.encoded)


class _Fetch:
    """The state of one `fetch`: a thread for each donor, one that verifies, and the caller's, which supervises."""

    def __init__(
        self, donors: Sequence[Donor], request: FetchRequest, token: str, rejected: Callable[[Donor, str], None]
    ) -> None:
        self.manifest: ShardManifest | None = None
        self.encoded = b""
        self.given: dict[int, int] = {}
        self._request = request
        self._rejected = rejected
        self._donors = {d.replica: d for d in donors}
        self._connections = {d.replica: DonorConnection(d.address, token, request.copy) for d in donors}
        self._chunk_s = COPY_CHUNK_S if request.copy else CHUNK_S
        self._failures: dict[int, str] = {}
        self._refusing: set[int] = set()  # donors that hung up on the last call
        # When the next chunk of each donor has to be here. The size never changes, so it needs no lock.
        self._due = dict.fromkeys(self._donors, math.inf)
        self._votes = ManifestVotes(self._donors)
        self._manifests: dict[str, tuple[ShardManifest, bytes]] = {}
        self._digest = ""
        self._memory: memoryview | Scattered = memoryview(b"")
        self._chunks = ChunkQueue(0, 0)
        self._arrived: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
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
                    raise NotFetched(self._why() or "there are no donors")
                if now - began > deadline_s:
                    if len(self._manifests) > 1:
                        raise DataCorruption(self._votes.disagreement())
                    raise NotFetched(self._why() or self._late(deadline_s))
                for donor, due in self._due.items():
                    if now > due:
                        self._fail(donor, f"no chunk within {self._chunk_s:g} s")
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
            self._fail(donor, f"its manifest {str(self._votes.voted(donor))[:12]} is not that of the others")
        if self.manifest is None:
            manifest, self.encoded = self._manifests[digest]
            self._memory = self._request.memory(manifest)
            self._chunks = ChunkQueue(len(manifest.checksums), len(self._donors) - len(self._failures))
            self._digest, self.manifest = digest, manifest
            self._change.notify_all()
        return True

    def _fail(self, donor: int, why: str) -> None:
        """Give up a donor, and tell the caller why. Call it with the lock held."""
        if donor in self._failures or self._over:
            return
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
                self._fail(donor, str(error) or type(error).__name__)
        finally:
            connection.close()

    def _vote(self, donor: int, connection: DonorConnection) -> bool:
        """Ask the donor for its manifest until it has the state. Returns False if the fetch is over.

        Raises:
            DataCorruption: The answer is neither a valid manifest of the wanted shard nor "not found".
        """
        request = self._request
        while True:
            fault_injection.hold(donor, lambda: self._over)
            try:
                answer = connection.ask(self._path("manifest"))
                self._refusing.discard(donor)
            except DonorBusy:
                answer = None
                self._refusing.add(donor)
            if answer is not None and answer.status == 200:
                break
            if answer is not None and answer.status != 404:
                said = connection.read(answer.length, MAX_REGRET).decode("ascii", "replace")[:MAX_WORDS]
                raise DataCorruption(f"answered {answer.status}{said and f': {said}'}")
            if answer is not None:
                connection.read(answer.length, MAX_REGRET)
                if not request.awaited:
                    raise DataCorruption("does not have the state any more")
            with self._change:
                self._votes.absent(donor)
                self._change.notify_all()
                if self._change.wait_for(lambda: self._over, RETRY_S):
                    return False
        encoded = connection.read(answer.length, shard_manifest.MAX_MANIFEST)
        manifest = shard_manifest.decode(encoded)
        request.check(manifest)
        with self._change:
            digest = shard_manifest.digest(encoded)
            self._manifests.setdefault(digest, (manifest, encoded))
            self._votes.vote(donor, digest)
            self._change.notify_all()
        return True

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
        left = list(run)
        begin, end = (
            run.start * shard_manifest.CHUNK_BYTES,
            min(run.stop * shard_manifest.CHUNK_BYTES, len(self._memory)),
        )
        try:
            self._due[donor] = time.monotonic() + self._chunk_s
            fault_injection.hold(donor, lambda: self._over)
            answer = connection.ask(self._path("data"), (begin, end))
            said = (answer.status, answer.headers.get("content-range"), answer.headers.get("etag"), answer.length)
            if said != (206, f"bytes {begin}-{end - 1}/{len(self._memory)}", f'"{self._digest}"', end - begin):
                raise DataCorruption(f"answered {said[0]} with range {said[1]} of {str(said[2])[:14]}")
            for index in run:
                for piece in self._chunk(index):
                    connection.read_into(piece)
                fault_injection.reach("fetch", self._request.state.step)
                self._due[donor] = time.monotonic() + self._chunk_s
                left.pop(0)
                if self._request.copy:
                    self._compare(donor, index)
                else:
                    self._arrived.put((donor, index))
        finally:
            with self._change:
                self._due[donor] = math.inf
                if left:
                    self._chunks.put_back(left)
                    self._change.notify_all()

    def _path(self, what: str) -> str:
        wanted = self._request
        return path(wanted.state, wanted.rank, what, wanted.ranks, wanted.part)

    def _chunk(self, index: int) -> list[memoryview]:
        begin = index * shard_manifest.CHUNK_BYTES
        end = min(begin + shard_manifest.CHUNK_BYTES, len(self._memory))
        if isinstance(self._memory, Scattered):
            return self._memory.pieces(begin, end)
        return [self._memory[begin:end]]

    # The verifier's thread; of a copy, the donor's.

    def _verify(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            self._compare(*arrived)

    def _compare(self, donor: int, index: int) -> None:
        assert self.manifest is not None
        chunk = self._chunk(index)
        right = shard_manifest.checksum(*chunk) == self.manifest.checksums[index]
        with self._change:
            if right:
                self.given[donor] = self.given.get(donor, 0) + sum(map(len, chunk))
                self._chunks.verified()
            else:
                self._chunks.put_back([index])
                self._fail(donor, f"chunk {index} has a wrong checksum")
            if self._chunks.done or not right:
                self._change.notify_all()
