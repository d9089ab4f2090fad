import math
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.core.commit import MAX_ROWS, Contribution
from ft_hsdp.core.ring import RingPlan, operations
from ft_hsdp.errors import ProtocolViolation, StaleEpoch
from ft_hsdp.ftar import frame
from ft_hsdp.ftar.frame import ENTRY_BYTES, Entry, FrameOrder, Framing, Key

KEY = Key(epoch=3, step=7, attempt=1, bucket=2, prev="ab" * 16)
PLAN = RingPlan(100, 3, 4, 2)
MINE = Framing(KEY, PLAN, operations(1, 3), 4, 0)
LEFT = Framing(KEY, PLAN, operations(0, 3), 4, 0)


def test_an_entry_survives_the_wire() -> None:
    entries = [
        Entry(0, (Contribution(0, 1, 0, 2**40, 1.25),), math.inf),
        Entry(65535),
        Entry(
            1, tuple(Contribution(1, 2**52, 65535, 2**61 + n * 2**32, 0.1, 2**31, n // 4) for n in range(MAX_ROWS))
        ),
    ]
    assert frame.unpack_entries(b"".join(e.pack() for e in entries)) == tuple(entries)
    assert {len(e.pack()) for e in entries} == {ENTRY_BYTES}
    assert [e.weight for e in entries] == [1, 0, MAX_ROWS * 2**52]
    assert not any(Entry(0, (), square).poisoned for square in (0.0, 3.4e38))
    assert all(Entry(0, (), square).poisoned for square in (3.5e38, math.nan, -1.0))


def test_an_entry_with_too_many_contributions_is_refused() -> None:
    data = bytearray(Entry(1, (Contribution(1, 1, 0, 0),)).pack())
    data[14:16] = (MAX_ROWS + 1).to_bytes(2, "big")
    with pytest.raises(ProtocolViolation, match=f"says {MAX_ROWS + 1} contributions; at most {MAX_ROWS} are"):
        frame.unpack_entries(bytes(data))
    with pytest.raises(ValueError, match=f"{MAX_ROWS + 1} contributions do not fit into an entry of {MAX_ROWS}"):
        Entry(1, tuple(Contribution(1, 1, 0, n) for n in range(MAX_ROWS + 1))).pack()


def test_an_entry_says_only_what_can_be_trained() -> None:
    """Of a stranger's numbers none becomes part of a record."""
    data = Entry(3, (Contribution(3, 2, 0, 5, units=2), Contribution(3, 2, 0, 6, units=2))).pack()
    with pytest.raises(ProtocolViolation, match="replica 3 says one unit twice"):
        frame.unpack_entries(data)


def test_an_empty_chunk_has_no_payload_and_only_stands_for_a_partial_sum() -> None:
    got = MINE.check(LEFT.header(LEFT.operations[1], 1, True))
    assert (got.empty, got.nbytes) == (True, 0)
    with pytest.raises(ProtocolViolation):
        MINE.check(LEFT.header(LEFT.operations[2], 1, True))


@pytest.mark.parametrize(
    "other", [{"epoch": 2}, {"epoch": 4}, {"step": 8}, {"attempt": 0}, {"prev": "cd" * 16}], ids=str
)
def test_another_epoch_step_attempt_or_lineage_is_stale(other: dict[str, Any]) -> None:
    stale = replace(LEFT, key=replace(KEY, **other))
    with pytest.raises(StaleEpoch):
        MINE.check(stale.header(LEFT.operations[0], 0, False))


@pytest.mark.parametrize(
    "other",
    [
        {"key": replace(KEY, bucket=3)},
        {"dtype": 1},
        {"itemsize": 2},
        {"plan": RingPlan(100, 3, 3, 2)},
        {"plan": RingPlan(104, 3, 4, 2)},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_the_plan_does_not_say_is_a_violation(other: dict[str, Any]) -> None:
    wrong = replace(LEFT, **other)
    with pytest.raises(ProtocolViolation):
        MINE.check(wrong.header(LEFT.operations[1], PLAN.rounds - 1, False))


@pytest.mark.parametrize(("number", "round_"), [(-1, 0), (4, 0), (2**16 - 2, 0), (0, PLAN.rounds)])
def test_an_operation_or_round_that_there_is_not(number: int, round_: int) -> None:
    larger = replace(LEFT, plan=RingPlan(1000, 3, 4, 2))
    with pytest.raises(ProtocolViolation, match="which the plan does not have"):
        MINE.check(larger.header(replace(LEFT.operations[0], number=number), round_, False))


@pytest.mark.parametrize("bit", range(frame.HEADER.size * 8))
def test_no_flipped_bit_goes_unseen(bit: int) -> None:
    """Not even one that makes it the frame of another chunk: that one is not the next."""
    head = bytearray(LEFT.header(LEFT.operations[0], 0, False))
    head[bit // 8] ^= 1 << bit % 8
    try:
        got = MINE.check(bytes(head))
    except (ProtocolViolation, StaleEpoch):
        return
    assert (got.operation.number, got.round) != (1, 0)


def test_the_chunks_of_an_operation_come_in_order() -> None:
    frames = [MINE.check(LEFT.header(LEFT.operations[0], r, False)) for r in range(4)]
    other = MINE.check(LEFT.header(LEFT.operations[1], 0, False))
    course = FrameOrder()
    for next_ in (frames[0], other, frames[1]):
        course.check(next_)
    for wrong in (frames[0], frames[1], frames[3], other):
        with pytest.raises(ProtocolViolation, match="next is"):
            course.check(wrong)
    course.check(frames[2])


def test_one_of_several_connections_sees_a_part_of_the_chunks() -> None:
    frames = [MINE.check(LEFT.header(LEFT.operations[0], r, False)) for r in range(4)]
    course = FrameOrder(alone=False)
    course.check(frames[1])
    course.check(frames[3])
    with pytest.raises(ProtocolViolation, match="next is 4"):
        course.check(frames[2])
