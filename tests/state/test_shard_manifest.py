import json
from dataclasses import replace
from typing import Any

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard, PackedTensor
from tests.support.state.state_helpers import STATE, chunks_of, sealed

SNAPSHOT, LAYOUT = sealed()
MANIFEST = SNAPSHOT.manifest
WANTED = ExpectedShard(STATE, 0, 2, LAYOUT.fingerprint, LAYOUT.nbytes)


def forged(document: Any) -> bytes:
    """What a liar sends: any document, with a digest that fits."""
    body = json.dumps(document).encode()
    return blake3.blake3(body).hexdigest().encode() + b"\n" + body


def test_a_manifest_survives_the_wire() -> None:
    assert shard_manifest.decode(shard_manifest.encode(MANIFEST)) == MANIFEST
    shard_manifest.expect(MANIFEST, WANTED)
    assert MANIFEST.layout == shard_manifest.fingerprint(MANIFEST.tensors)
    assert MANIFEST.ledger == Ledger((4, 5))


def test_the_ledger_is_whole() -> None:
    ledger = Ledger((4, 5), ((0, 1, 2), (1, 2, 1)), ((1, 2, 1, 1),))
    manifest = replace(MANIFEST, holes=ledger.holes, spoilt=ledger.spoilt)
    assert shard_manifest.decode(shard_manifest.encode(manifest)).ledger == ledger


@pytest.mark.parametrize("holes", [((0, 9, 1),), ((0, 2, 1), (0, 1, 1)), ((7, 0, 1),)])
def test_a_ledger_that_cannot_be_is_refused(holes: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(DataCorruption, match="not valid"):
        shard_manifest.decode(shard_manifest.encode(replace(MANIFEST, holes=holes)))


def test_a_digest_that_flipped_can_stand_in_a_header() -> None:
    assert shard_manifest.digest(b"\xe1" + b"0" * 63).isascii()


def test_equal_manifests_have_equal_digests_and_others_do_not() -> None:
    encoded = shard_manifest.encode(MANIFEST)
    assert shard_manifest.encode(replace(MANIFEST)) == encoded
    reordered = tuple(dict(reversed(h.items())) for h in MANIFEST.hyper)
    assert shard_manifest.encode(replace(MANIFEST, hyper=reordered)) == encoded
    assert shard_manifest.digest(encoded) == encoded[:64].decode()
    changes: list[dict[str, Any]] = [
        {"cursors": (4, 6)},
        {"hyper": ({"lr": 0.2, "betas": [0.9, 0.95], "foreach": None},)},
        {"checksums": ("0" * 16,)},
        {"state": replace(STATE, step=8)},
        {"rank": 1},
        {"nbytes": LAYOUT.nbytes + 1},
        {"tensors": MANIFEST.tensors[:-1]},
        {"holes": ((0, 1, 2),)},
    ]
    digests = {shard_manifest.digest(shard_manifest.encode(replace(MANIFEST, **change))) for change in changes}
    assert len(digests | {shard_manifest.digest(encoded)}) == len(changes) + 1


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("state", replace(STATE, commit_epoch=4)),
        ("state", replace(STATE, step=8)),
        ("state", StateId(3, 7, "f" * 32)),
        ("rank", 1),
        ("ranks", 1),
        ("layout", "0" * 32),
        ("nbytes", LAYOUT.nbytes + 64),
    ],
)
def test_a_manifest_of_something_else_is_refused(name: str, other: Any) -> None:
    wanted: dict[str, Any] = {name: other}
    with pytest.raises(DataCorruption, match=f"manifest is of {name} "):
        shard_manifest.expect(MANIFEST, replace(WANTED, **wanted))


@pytest.mark.parametrize("field", ["name", "kind", "dtype", "shape", "global_shape", "offset"])
def test_tensors_that_are_not_those_of_the_layout_are_refused(field: str) -> None:
    last = MANIFEST.tensors[-1]
    other: dict[str, Any] = {
        field: {"offset": 2 * last.offset, "shape": (9,), "global_shape": (9,)}.get(field, "x")
    }
    changed = replace(MANIFEST, tensors=(*MANIFEST.tensors[:-1], replace(last, **other)))
    with pytest.raises(DataCorruption, match="not those of layout"):
        shard_manifest.expect(changed, WANTED)


@pytest.mark.parametrize("sums", [(), MANIFEST.checksums * 2])
def test_a_manifest_without_a_checksum_for_each_chunk_is_refused(sums: tuple[str, ...]) -> None:
    encoded = shard_manifest.encode(replace(MANIFEST, checksums=sums))
    with pytest.raises(DataCorruption, match="checksums for"):
        shard_manifest.decode(encoded)
    assert shard_manifest.decode_header(encoded).checksums == sums


def test_a_header_is_sealed_with_the_checksums_of_its_bytes() -> None:
    header = shard_manifest.decode_header(shard_manifest.encode(replace(MANIFEST, checksums=())))
    assert shard_manifest.seal(header, SNAPSHOT.data) == MANIFEST


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 64), (2**62, 0), (LAYOUT.nbytes, 1)])
def test_a_tensor_outside_of_the_bytes_or_in_another_is_refused(offset: int, nbytes: int) -> None:
    odd = PackedTensor("odd", "param", "uint8", (nbytes,), (nbytes,), offset, nbytes)
    with pytest.raises(DataCorruption, match="where it cannot lie"):
        shard_manifest.decode(shard_manifest.encode(replace(MANIFEST, tensors=(*MANIFEST.tensors, odd))))


def test_what_is_too_long_is_not_served() -> None:
    with pytest.raises(ValueError, match="allowed"):
        shard_manifest.encode(replace(MANIFEST, hyper=({"x": "y" * shard_manifest.MAX_MANIFEST},)))


ENCODED = shard_manifest.encode(MANIFEST)


@given(st.integers(0, len(ENCODED) * 8 - 1))
def test_a_flipped_bit_is_seen_or_changes_nothing(bit: int) -> None:
    data = bytearray(ENCODED)
    data[bit // 8] ^= 1 << bit % 8
    try:
        got = shard_manifest.decode(bytes(data))
    except DataCorruption:
        return
    assert got == MANIFEST


def test_a_field_that_is_not_known_is_refused() -> None:
    document = json.loads(ENCODED[65:])
    with pytest.raises(DataCorruption, match="not valid"):
        shard_manifest.decode(forged({**document, "also": 1}))
    document["tensors"][0]["also"] = 1
    with pytest.raises(DataCorruption, match="not valid"):
        shard_manifest.decode(forged(document))


@pytest.mark.parametrize("deep", ["[" * 300 + "]" * 300, "9" * 5000, '"\\ud800"', "0"])
def test_odd_hyper_parameters(deep: str) -> None:
    body = ENCODED[65:].replace(b'"foreach":null', b'"foreach":' + deep.encode())
    assert body != ENCODED[65:]
    with pytest.raises(DataCorruption):
        shard_manifest.decode(body)
    encoded = blake3.blake3(body).hexdigest().encode() + b"\n" + body
    try:
        got = shard_manifest.decode(encoded)
    except DataCorruption:
        return
    assert deep == "0"
    assert got.hyper[0]["foreach"] == 0


def test_each_chunk_has_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 100)
    data = bytes(range(250))
    sums = shard_manifest.checksums(memoryview(data))
    assert len(sums) == 3
    changed = shard_manifest.checksums(memoryview(data[:150] + b"x" + data[151:]))
    assert [a == b for a, b in zip(sums, changed, strict=True)] == [True, False, True]
    assert shard_manifest.checksums(memoryview(b"")) == ()
