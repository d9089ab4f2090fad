from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_helpers import STATE, sealed

from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.state import wire

SNAPSHOT, LAYOUT = sealed()
MANIFEST = SNAPSHOT.manifest
WANTED: tuple[Any, ...] = (STATE, 0, 2, LAYOUT.fingerprint, LAYOUT.nbytes)


def test_a_manifest_survives_the_wire() -> None:
    assert wire.decode(wire.encode(MANIFEST)) == MANIFEST
    wire.expect(MANIFEST, *WANTED)


@pytest.mark.parametrize(
    ("place", "other", "named"),
    [
        (0, replace(STATE, commit_epoch=4), "state"),
        (0, replace(STATE, step=8), "state"),
        (0, StateId(3, 7, "f" * 32), "state"),
        (1, 1, "rank"),
        (2, 1, "ranks"),
        (3, "0" * 32, "layout"),
        (4, LAYOUT.nbytes + 64, "nbytes"),
    ],
)
def test_a_manifest_of_something_else_is_refused(place: int, other: Any, named: str) -> None:
    wanted = [*WANTED]
    wanted[place] = other
    with pytest.raises(DataCorruption, match=f"manifest is of {named} "):
        wire.expect(MANIFEST, *wanted)


@pytest.mark.parametrize("sums", [(), MANIFEST.checksums * 2])
def test_a_manifest_without_a_checksum_for_each_chunk_is_refused(sums: tuple[str, ...]) -> None:
    with pytest.raises(DataCorruption, match="checksums for"):
        wire.expect(replace(MANIFEST, checksums=sums), *WANTED)


@pytest.mark.parametrize(
    "change",
    [
        {"cursors": (4, 6)},
        {"hyper": ({"lr": 0.2, "betas": [0.9, 0.95], "foreach": None},)},
        {"checksums": ("0" * 16,)},
        {"state": replace(STATE, step=8)},
        {"rank": 1},
        {"nbytes": 1},
        {"digest": "0" * 64},
    ],
)
def test_the_digest_covers_the_whole_manifest(change: dict[str, Any]) -> None:
    with pytest.raises(DataCorruption, match="digest does not fit"):
        wire.decode(wire.encode(replace(MANIFEST, **change)))


ENCODED = wire.encode(MANIFEST)


@given(st.integers(0, len(ENCODED) * 8 - 1))
def test_a_flipped_bit_is_seen_or_changes_nothing(bit: int) -> None:
    data = bytearray(ENCODED)
    data[bit // 8] ^= 1 << bit % 8
    try:
        got = wire.decode(bytes(data))
    except DataCorruption:
        return
    assert got == MANIFEST


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*MANIFEST.__slots__]), inner),
    max_leaves=12,
)


@given(st.binary() | JSON.map(lambda v: json.dumps(v).encode()))
def test_junk_is_only_ever_data_corruption(junk: bytes) -> None:
    with pytest.raises(DataCorruption):
        wire.decode(junk)


@given(st.sampled_from(sorted(MANIFEST.__slots__)), JSON)
def test_junk_in_one_field_is_only_ever_data_corruption(field: str, junk: Any) -> None:
    document = json.loads(ENCODED)
    document[field] = junk
    try:
        got = wire.decode(json.dumps(document).encode())
    except DataCorruption:
        return
    assert got == MANIFEST


@pytest.mark.parametrize(
    "junk", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b" " * (wire.MAX_MANIFEST + 1)]
)
def test_deep_and_large_junk(junk: bytes) -> None:
    with pytest.raises(DataCorruption):
        wire.decode(junk)


@pytest.mark.parametrize("deep", ["[" * 300 + "]" * 300, "9" * 5000, '"\\ud800"', "0"])
def test_odd_hyper_parameters(deep: str) -> None:
    document = ENCODED.replace(b'"foreach":null', b'"foreach":' + deep.encode())
    assert document != ENCODED
    with pytest.raises(DataCorruption):
        wire.decode(document)


def test_each_chunk_has_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK_BYTES", 100)
    data = bytes(range(250))
    sums = wire.checksums(memoryview(data))
    assert len(sums) == 3
    changed = wire.checksums(memoryview(data[:150] + b"x" + data[151:]))
    assert [a == b for a, b in zip(sums, changed, strict=True)] == [True, False, True]
    assert wire.checksums(memoryview(b"")) == ()
