import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ft_hsdp import record_layer
from ft_hsdp.errors import DataCorruption
from ft_hsdp.handshake import Purpose
from ft_hsdp.state.shared_memory import InMemorySnapshots
from ft_hsdp.state.transfer import fetch as fetching
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.fetch import (
    Cancelled,
    ChunkQueue,
    Donor,
    FetchedBlob,
    FetchRequest,
    ManifestVotes,
    NotFetched,
    fetch,
)
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard
from tests.support import answering
from tests.support.answering import Answering
from tests.support.forked import Forked
from tests.support.known import admit
from tests.support.state.state_helpers import STATE, TOKEN, Snapshot, chunks_of, no_thread, sealed
from tests.support.tcp_proxy import Proxies

SNAPSHOT, LAYOUT = sealed(size=5000)
Answer = Callable[[BaseHTTPRequestHandler, bytes, bytes], None]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 4096)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors have a moment for an answer, and for a chunk."""
    for name, seconds in (("PATIENCE_S", 0.2), ("CHUNK_S", 0.3)):
        monkeypatch.setattr(fetching, name, seconds)


def snapshot(seed: int = 0) -> Snapshot:
    """Sealed with small chunks."""
    return sealed(size=5000, seed=seed)[0]


def source_of(*held: Snapshot) -> InMemorySnapshots:
    source = InMemorySnapshots()
    for each in held:
        source.put(each.manifest, each.room)
    return source


@contextmanager
def good(*held: Snapshot) -> Iterator[tuple[str, InMemorySnapshots]]:
    source = source_of(*held)
    with closing(StateServer("127.0.0.1", 0, source, TOKEN)) as server:
        yield server.address, source


@contextmanager
def evil(answer: Answer) -> Iterator[str]:
    """A donor that answers as it likes: ``answer(handler, manifest, data)``."""
    honest = snapshot()

    class Handler(Answering):
        def handle(self) -> None:
            if admit(self.connection, TOKEN, Purpose.STATE):
                super().handle()

        def do_GET(self) -> None:
            answer(self, shard_manifest.encode(honest.manifest), bytes(honest.data))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    with answering.serving(server) as url:
        yield url.removeprefix("http://")


def say(h: BaseHTTPRequestHandler, body: bytes, length: int | None = None, status: int = 200) -> None:
    h.send_response_only(status)
    h.send_header("Content-Length", str(len(body) if length is None else length))
    h.end_headers()
    h.wfile.write(body)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def part(
    h: BaseHTTPRequestHandler, m: bytes, d: bytes, headers: Mapping[str, str] | None = None, status: int = 206
) -> None:
    """What an honest server answers with, but for the bytes ``d``, ``headers`` and ``status``."""
    first, last = (int(n) for n in h.headers["Range"].removeprefix("bytes=").split("-"))
    honest = {
        "ETag": f'"{shard_manifest.digest(m)}"',
        "Content-Range": f"bytes {first}-{last}/{shard_manifest.decode(m).nbytes}",
        "Content-Length": str(last + 1 - first),
    }
    h.send_response_only(status)
    for name, value in (honest | dict(headers or {})).items():
        h.send_header(name, value)
    h.end_headers()
    h.wfile.write(d[first : last + 1])


def serving(
    manifest: Callable[[bytes], bytes] = bytes,
    data: Callable[[bytes], bytes] = bytes,
    headers: Mapping[str, str] | None = None,
    status: int = 206,
) -> Answer:
    """As an honest server answers, but for what is given."""

    def answer(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        return say(h, manifest(m)) if h.path.endswith("manifest") else part(h, m, data(d), headers, status)

    return answer


def resealed(**changes: Any) -> bytes:
    """A manifest that is true to itself, but not what was asked for."""
    return shard_manifest.encode(replace(snapshot().manifest, **changes))


def _short(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    """Dies midway."""
    serving(data=lambda d: d[: len(d) // 2])(h, m, d)
    if h.path.endswith("data"):
        h.close_connection = True
        h.connection.shutdown(socket.SHUT_RDWR)


def _status(status: int) -> Answer:
    def answer(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        say(h, b"", status=status)

    return answer


def _dropped_meanwhile(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    say(h, m) if h.path.endswith("manifest") else say(h, b"", status=404)


def _no_http(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    h.wfile.write(b"220 ready\r\n")
    h.close_connection = True


def _endless_header(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    h.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n")
    h.close_connection = True


def _redirect(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
    h.send_response_only(302)
    h.send_header("Location", "http://127.0.0.1:1/")
    h.send_header("Content-Length", "0")
    h.end_headers()


EVIL: dict[str, Answer] = {
    "a flipped bit in the first chunk": serving(data=lambda d: flipped(d, 5)),
    "a flipped bit in the last chunk": serving(data=lambda d: flipped(d, len(d) * 8 - 1)),
    "a flipped bit in the manifest": serving(manifest=lambda m: flipped(m, 9 * len(m) // 2)),
    "bytes of another state": serving(data=lambda d: bytes(sealed(seed=1, size=5000)[0].data)),
    "the manifest of another state": serving(manifest=lambda m: resealed(state=replace(STATE, step=8))),
    "junk as a manifest": serving(manifest=lambda m: b"\0\xff" * 50),
    "less than announced": _short,
    "another ETag": serving(headers={"ETag": f'"{"0" * 64}"'}),
    "another range": serving(headers={"Content-Range": f"bytes 0-1/{LAYOUT.nbytes}"}),
    "another size": serving(headers={"Content-Range": f"bytes 0-{LAYOUT.nbytes - 1}/{LAYOUT.nbytes + 1}"}),
    "one byte too few": serving(headers={"Content-Length": "4095"}),
    "one byte too many": serving(headers={"Content-Length": str(LAYOUT.nbytes + 1)}),
    "a length that is none": serving(headers={"Content-Length": "-1"}),
    "200 for a range": serving(status=200),
    "500": _status(500),
    "401": _status(401),
    "404 for the data only": _dropped_meanwhile,
    "no HTTP": _no_http,
    "an endless header": _endless_header,
    "a redirect": _redirect,
}


def expected(shot: Snapshot) -> ExpectedShard:
    m = shot.manifest
    return ExpectedShard(m.state, m.rank, m.ranks, m.layout, m.nbytes)


class Told(list[tuple[int, str]]):
    def __call__(self, donor: Donor, why: str) -> None:
        self.append((donor.replica, why))

    @property
    def who(self) -> list[int]:
        return sorted(replica for replica, _ in self)


def run(
    addresses: list[str],
    deadline_s: float = 10.0,
    cancel: threading.Event | None = None,
    wanted: ExpectedShard | None = None,
    token: str = TOKEN,
) -> tuple[FetchedBlob | NotFetched, bytes, Told]:
    """What it returned or why not, what was written, who was rejected."""
    wanted = wanted or expected(SNAPSHOT)
    told, into = Told(), bytearray(wanted.nbytes)
    donors = [Donor(i, a) for i, a in enumerate(addresses)]
    before = threading.active_count()
    try:
        got = fetch(
            donors,
            FetchRequest.exactly(wanted, memoryview(into)),
            token,
            deadline_s,
            cancel or threading.Event(),
            told,
        )
    except NotFetched as error:
        return error, bytes(into), told
    finally:
        names = [t.name for t in threading.enumerate() if t.name.startswith("fetch-")]
        assert names == [], f"threads are left, {before} before"
    return got, bytes(into), told


@pytest.mark.parametrize(("count", "tls", "size"), [(1, "auto", 5000), (3, "auto", 5000), (2, "on", 700_000)])
def test_what_donors_have_is_fetched_bit_by_bit(count: int, tls: record_layer.Mode, size: int) -> None:
    honest, _ = sealed(size=size)
    record_layer.use(tls)
    try:
        with ExitStack() as stack:
            addresses = [stack.enter_context(good(honest))[0] for _ in range(count)]
            got, data, told = run(addresses, wanted=expected(honest))
    finally:
        record_layer.use("auto")
    assert isinstance(got, FetchedBlob)
    assert (got.manifest, data) == (honest.manifest, bytes(honest.data))
    assert len(honest.manifest.checksums) > 3
    assert sum(got.given.values()) == honest.manifest.nbytes
    assert told == []
    assert 0 < got.seconds < 60


def test_an_empty_shard_and_one_below_a_chunk() -> None:
    for size in (0, 3):
        shot = sealed(size=size)[0]
        if size == 0:
            shot = replace(shot, manifest=replace(shot.manifest, nbytes=0, tensors=(), checksums=()))
            shot = replace(shot, manifest=replace(shot.manifest, layout=shard_manifest.fingerprint(())))
        with good(shot) as (address, _):
            got, data, told = run([address], wanted=expected(shot))
        assert isinstance(got, FetchedBlob), got
        assert data == bytes(shot.data)[: shot.manifest.nbytes]
        assert told == []


@pytest.mark.parametrize("kind", EVIL)
def test_a_wrong_donor_is_passed_over_and_reported(kind: str) -> None:
    honest = snapshot()
    with evil(EVIL[kind]) as bad, good(honest) as (address, _):
        got, data, told = run([bad, address])
        error, _, alone = run([bad, "127.0.0.1:9"], deadline_s=60)
    assert alone.who == [0, 1], "nobody else has it"
    assert re.search("replica 0: .+; replica 1: |replica 1: .+; replica 0: ", str(error)), error
    assert isinstance(got, FetchedBlob)
    assert data == bytes(honest.data)
    assert told.who in ([0], []), told
    if got.given.get(0, 0) == 0 and told.who == []:
        assert got.given == {1: LAYOUT.nbytes}, "the honest one was faster"


def test_who_reads_a_fetch_on_the_wire_does_not_get_the_token() -> None:
    """Nothing is encrypted within a host, so the state passes as it is; the token does not pass at all."""
    honest = snapshot()
    with good(honest) as (address, _), Proxies() as proxies:
        wire_tap = proxies.add(address, keep=True)
        got, data, _ = run([wire_tap.address])
    assert isinstance(got, FetchedBlob)
    assert data[:100] in wire_tap.tapped
    assert TOKEN.encode() not in wire_tap.tapped
    assert bytes.fromhex(TOKEN) not in wire_tap.tapped


def test_a_donor_that_does_not_have_it_yet_is_asked_again() -> None:
    honest = snapshot()
    with good() as (address, source):
        threading.Timer(0.6, source.put, (honest.manifest, honest.room)).start()
        got, data, told = run([address])
    assert data == bytes(honest.data)
    assert isinstance(got, FetchedBlob)
    assert got.seconds > 0.3
    assert not told


def test_a_donor_without_a_place_is_asked_again() -> None:
    honest, answered = snapshot(), [0]

    def full(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        answered[0] += 1
        if answered[0] == 1:
            h.close_connection = True  # without a word
            return None
        return say(h, m) if h.path.endswith("manifest") else part(h, m, d)

    with evil(full) as address:
        _, data, told = run([address])
    assert data == bytes(honest.data)
    assert not told


@pytest.mark.parametrize("left", range(3))
def test_threads_that_have_started_end_if_another_one_cannot(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    with good(snapshot()) as (one, _), good(snapshot()) as (two, _):
        starts = no_thread(monkeypatch, "fetch-donor", "fetch-verify", left=left)
        error, _, told = run([one, two])
    assert "no thread" in str(error)
    assert told == []
    assert [thread.is_alive() for thread in starts] == [False] * (left + 1)


def stalling(begun: threading.Event) -> Answer:
    """Gives a manifest and one byte, then drips."""

    def answer(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        if h.path.endswith("manifest"):
            return say(h, m)
        begun.set()
        part(h, m, d[:0])
        for i in range(600):
            h.wfile.write(d[i : i + 1])
            time.sleep(0.02)
        return None

    return answer


@pytest.mark.usefixtures("impatient")
def test_a_donor_that_stalls_loses_its_range_to_the_other() -> None:
    honest, begun = snapshot(), threading.Event()

    waiting = serving(data=lambda d: (begun.wait(5), d)[1])
    with evil(stalling(begun)) as bad, evil(waiting) as address:
        got, data, told = run([bad, address])
    assert isinstance(got, FetchedBlob)
    assert data == bytes(honest.data)
    assert told == [(0, "nothing within 0.3 s")]
    assert got.given == {1: LAYOUT.nbytes}


@pytest.mark.usefixtures("impatient")
def test_a_silent_donor_does_not_hold_up_the_others() -> None:
    honest = snapshot()
    with socket.create_server(("127.0.0.1", 0)) as silent, good(honest) as (address, _):
        _, data, told = run([f"127.0.0.1:{silent.getsockname()[1]}", address])
    assert data == bytes(honest.data)
    assert told.who == [0]
    assert "no answer within" in told[0][1]


@pytest.mark.parametrize("where", ["no state", "silent", "stalled"])
def test_cancel_and_the_deadline_while_a_donor_says_nothing(where: str) -> None:
    with ExitStack() as stack:
        if where == "no state":
            address = stack.enter_context(good())[0]
        elif where == "stalled":
            address = stack.enter_context(evil(stalling(threading.Event())))
        else:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = f"127.0.0.1:{silent.getsockname()[1]}"
        cancel = threading.Event()
        timer = threading.Timer(0.2, cancel.set)
        timer.start()
        began = time.monotonic()
        with pytest.raises(Cancelled):
            run([address], deadline_s=60, cancel=cancel)
        error, _, _ = run([address], deadline_s=0.2)
        assert isinstance(error, NotFetched)
        assert time.monotonic() - began < 20
        timer.join()


def test_two_that_disagree_end_it_and_nothing_is_taken() -> None:
    said = pytest.raises(DataCorruption, match=r"no majority: replica 0 has \w{12}, replica 1 has \w{12}")
    with good(snapshot()) as (one, _), good(snapshot(seed=1)) as (two, _), said:
        run([one, two])


def test_the_majority_of_three_wins_and_the_minority_is_reported() -> None:
    honest = snapshot()
    with good(snapshot(seed=1)) as (odd, _), good(honest) as (one, _), good(honest) as (two, _):
        got, data, told = run([odd, one, two])
    assert isinstance(got, FetchedBlob)
    assert data == bytes(honest.data)
    assert told.who == [0]
    assert 0 not in got.given


@pytest.mark.usefixtures("impatient")
def test_a_donor_that_is_late_still_objects() -> None:
    other, begun = snapshot(seed=1), threading.Event()

    def late(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
        begun.wait(5)
        say(h, shard_manifest.encode(other.manifest))

    with evil(stalling(begun)) as one, evil(late) as two, pytest.raises(DataCorruption, match="no majority"):
        run([one, two])


def test_a_tie_waits_for_the_one_that_does_not_have_it_yet() -> None:
    honest = snapshot()
    with good(snapshot(seed=1)) as (odd, _), good(honest) as (one, _), good() as (two, source):
        threading.Timer(0.3, source.put, (honest.manifest, honest.room)).start()
        _, data, told = run([odd, one, two])
        assert data == bytes(honest.data)
        assert told.who == [0]
        source.drop(STATE, 0)
        with pytest.raises(DataCorruption, match="no majority"):
            run([odd, one, two], deadline_s=0.3)


def test_a_tally() -> None:
    tally = ManifestVotes([1, 2, 3, 4])
    assert tally.verdict(patient=False) is None
    tally.vote(1, "a")
    assert (tally.verdict(patient=True), tally.verdict(patient=False)) == (None, "a")
    tally.absent(2)
    tally.failed(3)
    assert tally.verdict(patient=True) is None
    tally.vote(4, "b")
    assert tally.verdict(patient=True) is None, "the absent one may decide"
    tally.vote(2, "b")
    assert tally.verdict(patient=True) == "b"
    assert tally.minority("b") == [1]
    tally.failed(4)
    assert tally.verdict(patient=True) == "b", "a vote stands"


def test_runs_get_shorter_and_nothing_is_lost() -> None:
    chunks, runs = ChunkQueue(range(100), 2), []
    while run_ := chunks.take():
        runs.append(run_)
        if len(runs) == 3:
            chunks.put_back(run_[1:])
            runs[-1] = run_[:1]
    assert sorted(i for r in runs for i in r) == list(range(100))
    assert len(runs[0]) == 16
    assert len(runs[-1]) == 1
    for _ in range(100):
        assert not chunks.done
        chunks.verified(1)
    assert chunks.done


def donor_process(pipe: Connection, size: int, chunk: int, kill_at: int) -> None:
    """A donor that kills itself, without a word, once it has sent that many bytes of data."""
    sent, sendfile = 0, os.sendfile
    shard_manifest.CHUNK_BYTES = chunk

    def counted(out: int, fd: int, offset: int, count: int) -> int:
        nonlocal sent
        sent += (n := sendfile(out, fd, offset, min(count, kill_at - sent)))
        if sent >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    os.sendfile = counted
    pipe.send(StateServer("127.0.0.1", 0, source_of(sealed(size=size)[0]), TOKEN).address)
    pipe.recv()


def test_a_donor_that_is_killed_in_the_middle_is_resumed_from_not_restarted(monkeypatch) -> None:
    size, chunk = 1 << 20, 1 << 16
    chunks_of(monkeypatch, chunk)
    honest, _ = sealed(size=size)
    with closing(Forked(donor_process, size, chunk, chunk * 5 + 100)) as donor:
        address = donor.hear()
        killed = threading.Event()

        def after(h: BaseHTTPRequestHandler, m: bytes, d: bytes) -> None:
            """Has no data before the other one is dead."""
            assert h.path.endswith("manifest") or killed.wait(20)
            serving()(h, shard_manifest.encode(honest.manifest), bytes(honest.data))

        waiter = threading.Thread(target=lambda: (donor.wait(20), killed.set()))
        waiter.start()
        with evil(after) as other:
            got, data, told = run([address, other], deadline_s=20, wanted=expected(honest))
        waiter.join()
        assert donor.wait(20) == -signal.SIGKILL
    assert isinstance(got, FetchedBlob)
    assert data == bytes(honest.data)
    assert told.who == [0]
    assert got.given == {0: 5 * chunk, 1: honest.manifest.nbytes - 5 * chunk}, "what was there was fetched again"


def test_a_donor_that_has_lost_the_state_is_not_waited_for_if_none_is_awaited() -> None:
    held = snapshot()
    memory = bytearray(len(held.data))
    with good() as (empty, _), good(held) as (address, _):
        request = FetchRequest.exactly(expected(held), memoryview(memory), awaited=False)
        told: list[str] = []
        donors = [Donor(1, empty), Donor(2, address)]
        got = fetch(donors, request, TOKEN, 60.0, threading.Event(), lambda _, why: told.append(why))
        assert set(got.given) == {2}
        assert len(told) == 1
        assert "any more" in told[0]
        with pytest.raises(NotFetched, match="any more"):
            fetch(donors[:1], request, TOKEN, 60.0, threading.Event(), lambda *_: None)
