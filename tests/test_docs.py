"""What docs/protocol.md refers to is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ft_hsdp.failpoints import PLACES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/protocol.md").read_text()
TESTS = sorted(set(re.findall(r"`T/([^`:]+)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[f"{f}-{n}" for f, n in TESTS])
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    source = (ROOT / "tests" / file).read_text()
    tests = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
    assert not name or name in tests


def test_every_window_has_its_row() -> None:
    rows = re.findall(r"^\| (W\d+) \|", PAGE, re.MULTILINE)
    assert rows[:50] == [f"W{n}" for n in range(1, 51)]
    assert len(set(rows)) == len(rows), "a number stands there twice"


def test_the_places_and_transcripts_that_are_named_exist() -> None:
    for named in re.findall(r"\(place: ([^)]*)\)", PAGE):
        assert set(named.split(", ")) <= set(PLACES)
    for named in re.findall(r"test_transcript` \(([^)]*)\)", PAGE):
        for transcript in named.split(", "):
            assert (ROOT / f"tests/core/transcripts/{transcript}.txt").exists()
