from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.errors import ProtocolViolation, StaleEpoch
from ft_hsdp.ftar import frame
from ft_hsdp.ftar.frame import Entry, Key

KEY = Key(epoch=3, step=7, attempt=1, bucket=2, prev="ab" * 16)


def test_an_entry_survives_the_wire() -> None:
    entries = [
        Entry(0, 1, 0, 2**40, 1.25, poisoned=True),
        Entry(65535, 0, 7, 0, float("-inf")),
        Entry(1, 65535, 65535, 2**64 - 1, 0.1),
    ]
    assert frame.unpack_entries(b"".join(e.pack() for e in entries)) == tuple(entries)
    assert len(entries[0].pack()) == frame.ENTRY.size == 24


@pytest.mark.parametrize("empty", [False, True])
def test_a_header_that_is_as_planned(empty: bool) -> None:
    head = frame.header(KEY, 4, 5, 0 if empty else 64, 2, empty)
    assert frame.check(head, KEY, 4, 5, 64, 2, may_be_empty=True) is empty


@pytest.mark.parametrize(
    "key",
    [
        replace(KEY, epoch=2),
        replace(KEY, epoch=4),
        replace(KEY, step=8),
        replace(KEY, attempt=0),
        replace(KEY, prev="cd" * 16),
    ],
)
def test_another_epoch_step_attempt_or_lineage_is_stale(key: Key) -> None:
    with pytest.raises(StaleEpoch):
        frame.check(frame.header(key, 4, 5, 64, 2, False), KEY, 4, 5, 64, 2, may_be_empty=True)


PLAN: dict[str, Any] = {"key": KEY, "round_": 4, "chunk": 5, "nbytes": 64, "entries": 2, "empty": False}


@pytest.mark.parametrize(
    "other",
    [
        {"key": replace(KEY, bucket=3)},
        {"round_": 3},
        {"chunk": 6},
        {"nbytes": 63},
        {"nbytes": 65},
        {"nbytes": 2**32 - 1},
        {"entries": 1},
        {"empty": True},  # with its payload announced
        {"empty": True, "nbytes": 0},  # where a final chunk is due
    ],
)
def test_what_the_plan_does_not_say_is_a_violation(other: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation):
        frame.check(frame.header(**(PLAN | other)), KEY, 4, 5, 64, 2, may_be_empty=False)


@given(st.binary(min_size=frame.HEADER.size, max_size=frame.HEADER.size))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises((ProtocolViolation, StaleEpoch)):
        frame.check(noise, KEY, 4, 5, 64, 2, may_be_empty=True)


@given(st.integers(0, frame.HEADER.size * 8 - 1))
def test_no_flipped_bit_goes_unseen(bit: int) -> None:
    head = bytearray(frame.header(KEY, 4, 5, 64, 2, False))
    head[bit // 8] ^= 1 << bit % 8
    padding = range((frame.HEADER.size - 18) * 8, (frame.HEADER.size - 16) * 8)
    if bit in padding:
        assert frame.check(bytes(head), KEY, 4, 5, 64, 2, may_be_empty=True) is False
        return
    with pytest.raises((ProtocolViolation, StaleEpoch)):
        frame.check(bytes(head), KEY, 4, 5, 64, 2, may_be_empty=True)
