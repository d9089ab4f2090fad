from __future__ import annotations

import pytest

from ft_hsdp.core.checkpoint import designated, successor


@pytest.mark.parametrize(
    ("step", "every", "last", "equal", "unwritable", "writer"),
    [
        (10, 0, 10, (0, 1), (), None),
        (9, 10, 99, (0, 1), (), None),
        (9, 10, 9, (0, 1), (), 0),
        (10, 10, 99, (2, 1), (), 1),
        (10, 10, 99, (0, 1, 2), (0,), 1),
        (10, 10, 99, (0, 1), (0, 1), 0),  # nobody could: the lowest tries again
        (10, 10, 99, (), (), None),
    ],
)
def test_who_writes(
    step: int, every: int, last: int, equal: tuple[int, ...], unwritable: tuple[int, ...], writer: int | None
) -> None:
    assert designated(step, every, last, equal, unwritable) == writer


@pytest.mark.parametrize(
    ("every", "known", "unwritable", "writer"),
    [
        (10, (), (0,), 1),
        (10, (0,), (0,), None),  # no news
        (10, (0,), (0, 1), 2),
        (10, (0,), (), None),
        (10, (0, 1), (0, 1, 2), None),  # nobody is left
        (0, (), (0,), None),
    ],
)
def test_who_takes_over_at_once(
    every: int, known: tuple[int, ...], unwritable: tuple[int, ...], writer: int | None
) -> None:
    assert successor(every, (0, 1, 2), known, unwritable) == writer
