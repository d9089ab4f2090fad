from __future__ import annotations

from dataclasses import replace

import pytest
from state_helpers import STATE, sealed

from ft_hsdp.state import wire
from ft_hsdp.state.snapshot import Snapshots


def test_a_sealed_snapshot_is_what_its_manifest_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK_BYTES", 256)
    snapshot, place = sealed(rank=1)
    manifest = wire.decode(wire.encode(snapshot.manifest))
    wire.expect(manifest, STATE, 1, 2, place.fingerprint, place.nbytes)
    assert wire.checksums(snapshot.data) == manifest.checksums
    assert len(manifest.checksums) > 1
    assert manifest.cursors == (4, 5)


def test_the_newest_are_kept() -> None:
    held = Snapshots(keep=2)
    states = [replace(STATE, step=s) for s in range(4)]
    for state in states:
        held.put(sealed(state)[0])
    assert [held.get(s) is not None for s in states] == [False, False, True, True]
    read = held.get(states[2])
    assert read is not None
    before = bytes(read.data)
    for step in range(10, 20):
        held.put(sealed(replace(STATE, step=step), seed=step)[0])
    assert bytes(read.data) == before, "a reader lost its snapshot"
    assert held.get(states[2]) is None


def test_the_same_state_again_takes_no_second_place() -> None:
    held = Snapshots(keep=2)
    first, second = replace(STATE, step=1), replace(STATE, step=2)
    for state in (first, second, second, second):
        held.put(sealed(state)[0])
    assert held.get(first) is not None
