from __future__ import annotations

import pytest

from ft_hsdp.core.checkpoint import designated, due, newest_due, successor


@pytest.mark.parametrize(
    ("step", "every", "last", "is_due"),
    [(10, 0, 10, False), (9, 10, 99, False), (9, 10, 9, True), (10, 10, 99, True), (20, 10, 99, True)],
)
def test_when_one_is_due(step: int, every: int, last: int, is_due: bool) -> None:
    assert due(step, every, last) is is_due


@pytest.mark.parametrize(
    ("step", "every", "newest"),
    [(0, 5, 0), (4, 5, 0), (5, 5, 5), (14, 5, 10), (99, 5, 99), (98, 0, 0), (99, 0, 0)],
)
def test_the_newest_that_was_due(step: int, every: int, newest: int) -> None:
    assert newest_due(step, every, 99) == newest
    assert newest == 0 or due(newest, every, 99)


@pytest.mark.parametrize(
    ("equal", "unwritable", "writer"),
    [
        ((0, 1), (), 0),
        ((2, 1), (), 1),
        ((0, 1, 2), (0,), 1),
        ((0, 1), (0, 1), 0),  # nobody could: the lowest tries again
        ((), (), None),
    ],
)
def test_who_writes(equal: tuple[int, ...], unwritable: tuple[int, ...], writer: int | None) -> None:
    assert designated(equal, unwritable) == writer


@pytest.mark.parametrize(
    ("known", "unwritable", "writer"),
    [
        ((), (0,), 1),
        ((0,), (0,), None),  # no news
        ((0,), (0, 1), 2),
        ((0,), (), None),
        ((0, 1), (0, 1, 2), None),  # nobody is left
    ],
)
def test_who_takes_over_at_once(known: tuple[int, ...], unwritable: tuple[int, ...], writer: int | None) -> None:
    assert successor((0, 1, 2), known, unwritable) == writer
