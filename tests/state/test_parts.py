"""A rank takes its shard from shards of another number of ranks, over real state servers."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from ft_hsdp.errors import DataCorruption
from ft_hsdp.memory import shape
from ft_hsdp.state.agent.shard import Owner
from ft_hsdp.state.agent.store import SnapshotStore
from ft_hsdp.state.shared_memory import SnapshotBuffer
from ft_hsdp.state.transfer import parts, shard_manifest
from ft_hsdp.state.transfer.fetch import Donor, NotFetched
from ft_hsdp.state.transfer.http import StateServer
from ft_hsdp.state.transfer.parts import Scattered, Uncuttable
from ft_hsdp.state.transfer.reshape import Assembled, WantedShard, fetch_shard
from tests.support.known import get
from tests.support.state import widths
from tests.support.state.state_helpers import no_thread
from tests.support.state.widths import STATE, TOKEN, Serving, content, layout, manifest

DEADLINE_S = 30.0
Make = Callable[..., Serving]


@pytest.fixture
def serving() -> Iterator[Make]:
    made: list[Serving] = []

    def make(width: int, *ranks: int, lr: float = 0.1) -> Serving:
        made.append(Serving(width, *ranks, lr=lr))
        return made[-1]

    yield make
    for each in made:
        each.close()


def take(
    width: int,
    donors: Mapping[int, Sequence[Donor]],
    ranks: int,
    rank: int,
    rejected: Callable[[int, Donor, str], None] = lambda *_: None,
    cancel: threading.Event | None = None,
    deadline_s: float = DEADLINE_S,
    token: str = TOKEN,
) -> tuple[Assembled, bytes]:
    """Fetch the shard of rank ``rank`` of ``ranks``, into memory that was used before."""
    place = layout(ranks, rank)
    into = memoryview(bytearray(b"\xff" * place.nbytes))
    shard = WantedShard(STATE, rank, ranks, place)
    cancel = cancel or threading.Event()
    got = fetch_shard(shard, width, donors, into, token, deadline_s, cancel, rejected, awaited=False)
    return got, bytes(into)


def at(*served: Serving) -> dict[int, list[Donor]]:
    """Replica n has all its ranks at ``served[n]``."""
    ranks = {rank for each in served for rank in each.rooms}
    return {k: [Donor(n, each.address) for n, each in enumerate(served) if k in each.rooms] for k in ranks}


@pytest.mark.parametrize(("width", "ranks"), [(4, 3), (3, 4), (1, 3), (3, 1), (2, 5), (9, 2), (3, 3)])
def test_every_rank_of_another_width_gets_its_shard(serving: Make, width: int, ranks: int) -> None:
    """The bytes, the padding and the manifest are those of a replica that was always of that width."""
    donors = at(serving(width, *range(width)))
    for rank in range(ranks):
        got, data = take(width, donors, ranks, rank)
        assert data == content(ranks, rank).tobytes()
        assert shard_manifest.encode(got.manifest) == shard_manifest.encode(manifest(ranks, rank))
        wanted = layout(ranks, rank)
        least = wanted.nbytes if width == ranks else sum(tensor.nbytes for tensor in wanted.tensors)
        assert sum(got.given.values()) == least, "no byte more than the shard has"


def test_a_donor_with_another_state_of_the_optimizer_is_left_out(serving: Make) -> None:
    donors = at(serving(4, *range(4)), serving(4, *range(4), lr=0.2), serving(4, *range(4)))
    rejected: list[int] = []
    _, data = take(4, donors, 3, 0, lambda _, donor, __: rejected.append(donor.replica))
    assert data == content(3, 0).tobytes()
    assert set(rejected) == {1}


def test_parts_of_two_states_are_never_combined(serving: Make) -> None:
    """Each part is right for itself; they say different things about the state."""
    donors = {1: at(serving(4, 1))[1], 2: at(serving(4, 2, lr=0.2))[2]}
    with pytest.raises(DataCorruption, match=r"ranks . and . of 4 have another hyper"):
        take(4, donors, 3, 1)


def test_a_flipped_byte_costs_the_donor_alone(serving: Make) -> None:
    """The checksums of a part are sealed when it is asked for; a bit that flips after that is found."""
    bad, good = serving(4, *range(4)), serving(4, *range(4))
    first, data = take(4, at(bad), 3, 1)  # sealed from now on
    bad.rooms[2].bytes[layout(4, 2).tensors[0].offset] ^= 1
    with pytest.raises(NotFetched, match="wrong checksum"):
        take(4, at(bad), 3, 1)
    rejected: list[str] = []
    again, data = take(4, at(bad, good), 3, 1, lambda _, __, why: rejected.append(why))
    assert data == content(3, 1).tobytes()
    assert first.manifest == again.manifest


def test_a_byte_that_flipped_at_rest_is_not_sealed_into_a_part(serving: Make) -> None:
    """The snapshot's own checksums tell; the donor drops it, also for those who ask for all of it."""
    bad, good = serving(4, *range(4)), serving(4, *range(4))
    for flipped in (bad, good):  # of the second donor a rank that is not needed
        flipped.rooms[2 if flipped is bad else 0].bytes[layout(4, 2).tensors[0].offset] ^= 1
    rejected: list[tuple[int, int]] = []
    _, data = take(4, at(bad, good), 3, 1, lambda rank, donor, _: rejected.append((rank, donor.replica)))
    assert data == content(3, 1).tobytes()
    assert rejected == [(2, 0)]
    assert get(bad.address, f"{PATH}/2.4/manifest", TOKEN)[0] == 404
    with pytest.raises(NotFetched, match="does not have it any more"):
        take(4, at(bad), 3, 1)


def test_an_agent_drops_a_copy_that_flipped_before_its_part_was_sealed() -> None:
    """It has compared the copy when it was asked for the whole of it, and does not answer from that any more."""
    store = SnapshotStore(1, "r1h1")
    key = store.admit_copy(1, Owner(2, 4, layout(4, 2).nbytes), 1, None)
    server = StateServer("127.0.0.1", 0, store, TOKEN)
    try:
        number = store.allocate(key, STATE)
        assert number is not None
        store.writable(key, number)[:] = content(4, 2)
        store.staged(key, STATE, shard_manifest.encode(manifest(4, 2)))
        assert get(server.address, f"{PATH}/2.4/manifest", TOKEN)[0] == 200
        store.writable(key, number)[100] ^= 1
        assert get(server.address, f"{PATH}/2.4/manifest?for=1.3", TOKEN)[0] == 404
        assert store.held() == ()
        assert get(server.address, f"{PATH}/2.4/manifest", TOKEN)[0] == 404
    finally:
        server.close()
        store.close()


def test_without_one_part_there_is_no_shard(serving: Make) -> None:
    donors = at(serving(4, 0, 1, 3))
    with pytest.raises(NotFetched, match=r"does not have it any more|there are no donors"):
        take(4, {**donors, 2: [Donor(0, donors[1][0].address)]}, 3, 1)
    with pytest.raises(NotFetched, match="there are no donors"):
        take(4, donors, 3, 1)


def test_parts_for_which_no_thread_is_left_are_not_fetched(serving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    donors = at(serving(4, *range(4)))
    no_thread(monkeypatch, "fetch-part_1")
    with pytest.raises(NotFetched, match="no thread is left for it"):
        take(4, donors, 3, 1)


def test_who_serves_other_rows_is_not_believed(serving: Make) -> None:
    """Rank 3 of 4 has fewer rows than rank 2: its shard is not cut as it says."""
    rejected: list[str] = []
    liar = serving(4, 2)
    liar.put(replace(manifest(4, 2), rank=3), liar.rooms[2])
    donors = {**at(serving(4, 0, 1, 2)), 3: [Donor(5, liar.address)]}
    with pytest.raises(NotFetched):
        take(4, donors, 3, 2, lambda _, __, why: rejected.append(why))
    assert any("answered 400: param embed" in why for why in rejected), rejected


PATH = f"/v1/state/1/7/{STATE.lineage}"


def test_a_part_is_a_stream_with_its_own_manifest(serving: Make) -> None:
    served = serving(4, *range(4))
    status, encoded, headers = get(served.address, f"{PATH}/1.4/manifest?for=1.3", TOKEN)
    assert status == 200
    found = shard_manifest.decode(encoded)
    assert (found.rank, found.ranks, found.part, headers["ETag"]) == (1, 4, (1, 3), f'"{encoded[:64].decode()}"')
    status, data, headers = get(served.address, f"{PATH}/1.4/data?for=1.3", TOKEN)
    assert (status, headers["ETag"]) == (200, f'"{encoded[:64].decode()}"')
    assert found.checksums == shard_manifest.checksums(memoryview(data))
    extents = parts.cut(widths.tensors(), (4, 1), (3, 1)).extents
    source = content(4, 1).tobytes()
    assert data == b"".join(source[e.source : e.source + e.nbytes] for e in extents)
    for begin, end in ((0, 1), (5, 700), (100, len(data)), (len(data) - 1, len(data))):
        status, piece, headers = get(served.address, f"{PATH}/1.4/data?for=1.3", TOKEN, f"bytes={begin}-{end - 1}")
        assert (status, headers["Content-Range"]) == (206, f"bytes {begin}-{end - 1}/{len(data)}")
        assert piece == data[begin:end]


@pytest.mark.parametrize(
    "query",
    [
        *("for=3.3", "for=0.0", "for=1", "for=1.", "for=-1.3", "for=1.3&for=2.3", "for=1.3x", "for="),
        *("for=0.4097", f"for={'9' * 30}.{'9' * 31}", "for=%31.3"),
    ],
)
def test_a_part_that_cannot_be_is_refused(serving: Make, query: str) -> None:
    served = serving(4, 1)
    for what in ("manifest", "data"):
        status, body, _ = get(served.address, f"{PATH}/1.4/{what}?{query}", TOKEN)
        assert status == 400
        assert b"allowed: for=RANK.RANKS" in body
        assert len(body) < 120


def test_a_shard_of_another_width_is_not_that_shard(serving: Make) -> None:
    served = serving(4, 1)
    assert get(served.address, f"{PATH}/1.3/manifest", TOKEN)[0] == 404
    assert (
        get(served.address, f"{PATH}/1.4/manifest", TOKEN)[:2]
        == get(served.address, f"{PATH}/1/manifest", TOKEN)[:2]
    )
    assert get(served.address, f"{PATH}/2.4/data?for=0.3", TOKEN)[0] == 404


def test_what_is_cut_otherwise_has_no_parts(serving: Make) -> None:
    place = layout(4, 1)
    odd = replace(place.tensors[1], cut="other")
    made = replace(manifest(4, 1), tensors=(place.tensors[0], odd, *place.tensors[2:]))
    served, room = serving(4), SnapshotBuffer(made.nbytes)
    served.put(shard_manifest.seal(made, room.memory[: made.nbytes]), room)
    status, body, _ = get(served.address, f"{PATH}/1.4/manifest?for=0.3", TOKEN)
    assert status == 400
    assert body.startswith(b"param norm ")
    with pytest.raises(Uncuttable, match="elements of type int4"):
        parts.whole([replace(odd, cut="rows", dtype="int4")])


def test_the_parts_that_are_kept_are_few(serving: Make) -> None:
    """A part is sealed once, and again when others took its place: then a byte that has flipped is found."""
    served = serving(4, 0)

    def status(ranks: int) -> int:
        return get(served.address, f"{PATH}/0.4/manifest?for=0.{ranks}", TOKEN)[0]

    asked = range(5, 5 + parts.MAX_KEPT + 1)
    assert {status(ranks) for ranks in asked} == {200}
    served.rooms[0].bytes[layout(4, 0).tensors[0].offset] ^= 1
    assert [status(asked[-1]), status(asked[1])] == [200, 200]
    assert status(asked[0]) == 404


def test_parts_are_sealed_at_the_same_time_and_what_is_sealed_is_served_meanwhile(serving: Make) -> None:
    where, path = serving(4, 1).address, f"{PATH}/1.4/{{}}?for={{}}"
    get(where, path.format("manifest", "1.3"), TOKEN)
    begun, go_on, real = threading.Semaphore(0), threading.Event(), shard_manifest.checksums

    def slow(*pieces: memoryview, chunk: int = 0) -> tuple[str, ...]:
        begun.release()
        assert go_on.wait(5)
        return real(*pieces, chunk=chunk)

    with mock.patch.object(shard_manifest, "checksums", slow), ThreadPoolExecutor(2) as threads:
        others = [threads.submit(get, where, path.format("manifest", each), TOKEN) for each in ("0.3", "1.5")]
        assert [begun.acquire(timeout=4) for _ in others] == [True, True]
        assert get(where, path.format("data", "1.3"), TOKEN)[0] == 200
        go_on.set()
        assert [each.result()[0] for each in others] == [200, 200]


def test_scattered_memory_is_filled_as_one_stream() -> None:
    """Bytes that have no place in it are read, and go nowhere."""
    memory = memoryview(bytearray(40))
    into = Scattered(memory, [shape.Extent(8, 2, 3), shape.Extent(0, 30, 5), shape.Extent(11, 10, 7)])
    data = bytes(range(1, 21))
    for begin, end in ((0, 4), (4, 9), (9, 15), (15, 20)):
        pieces = into.pieces(begin, end)
        assert sum(map(len, pieces)) == end - begin
        for piece in pieces:
            piece[:] = data[begin : begin + len(piece)]
            begin += len(piece)
    assert (bytes(memory[30:35]), bytes(memory[2:5]), bytes(memory[10:17])) == (data[:5], data[8:11], data[11:18])
    assert sum(map(bool, memory)) == 15
    assert into.pieces(3, 3) == []
    assert parts.touched(into.extents, 4) == [0, 1, 2, 3, 4]
    assert parts.touched([shape.Extent(9, 0, 4), shape.Extent(40, 0, 0), shape.Extent(30, 0, 1)], 10) == [0, 1, 3]


def test_a_manifest_with_a_part_is_not_that_of_the_shard(serving: Make) -> None:
    """Who fetches a shard does not take a part of it, whatever the donor says."""
    served = serving(4, 1)
    _, encoded, _ = get(served.address, f"{PATH}/1.4/manifest?for=1.4", TOKEN)
    found = shard_manifest.decode(encoded)
    assert json.loads(encoded[65:])["part"] == [1, 4]
    expected = shard_manifest.ExpectedShard(STATE, 1, 4, found.layout, found.nbytes)
    with pytest.raises(DataCorruption, match="part"):
        shard_manifest.expect(found, expected)
    assert np.array_equal(content(4, 1), served.rooms[1].bytes[: layout(4, 1).nbytes])
