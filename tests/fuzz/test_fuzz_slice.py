"""A slice of what `make fuzz` does: the same inputs each time."""

from __future__ import annotations

import pytest

from tests.support.fuzz.fuzz_engine import Mutator, Parser, fuzz
from tests.support.fuzz.fuzz_targets import targets


@pytest.mark.parametrize("name", sorted(targets()))
def test_made_up_bytes_are_refused_as_they_should_be(name: str) -> None:
    assert fuzz(targets()[name](), 300, seed=7)["runs"] == 300


def test_the_fuzzer_finds_what_is_wrong() -> None:
    def parse(data: bytes) -> None:
        if b"[[" in data:
            raise IndexError(data)

    with pytest.raises(IndexError):
        fuzz(Parser(parse, [b"[]"], (ValueError,)), 20_000, seed=1)


def test_inputs_follow_from_the_seed() -> None:
    one, two, other = (Mutator([b"seed"], seed) for seed in (1, 1, 2))
    made = [[each.next() for _ in range(50)] for each in (one, two, other)]
    assert made[0] == made[1] != made[2]
