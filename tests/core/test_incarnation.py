"""The names of incarnations are built and read in one way."""

from __future__ import annotations

import pytest

from ft_hsdp.core.incarnation import IncarnationId


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0-abc-2", IncarnationId(0, "abc", 2)),
        ("12-ab-cd-0", IncarnationId(12, "ab-cd", 0)),
        ("999-run_1.x-10", IncarnationId(999, "run_1.x", 10)),
        ("7--1", IncarnationId(7, "", 1)),
    ],
)
def test_a_name_is_read_as_it_was_built(text: str, parsed: IncarnationId) -> None:
    assert IncarnationId.parse(text) == parsed
    assert str(parsed) == text


def test_a_name_without_a_number_of_restarts_is_the_first_life() -> None:
    assert IncarnationId.parse("0-abc") == IncarnationId(0, "abc", 0)
    assert IncarnationId.parse("0-ab-cd") == IncarnationId(0, "ab-cd", 0)
    assert IncarnationId.parse("1-0") == IncarnationId(1, "", 0)


@pytest.mark.parametrize(
    "text", ["", "0", "0-", "-abc-1", "x-abc-1", "1000-abc-1", "0-a b-1", "0-run-²", "0-abc-1\n", "0-" + "x" * 201]
)
def test_another_text_is_no_name(text: str) -> None:
    assert IncarnationId.parse(text) is None


def test_the_lives_before_are_those_of_the_same_run() -> None:
    third = IncarnationId(3, "abc", 2)
    assert third.predecessors == (IncarnationId(3, "abc", 0), IncarnationId(3, "abc", 1))
    assert third.previous == third.predecessors[-1]
    first = IncarnationId(3, "abc", 0)
    assert first.predecessors == ()
    assert first.previous is None
